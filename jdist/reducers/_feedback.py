"""Error feedback: the part that a message left out is added to the next one.

A feedback acts before and after a compressed mean:

    x --prepare--> wanted --[reducer]--> mean, own_share --finish--> output

`wanted` is the tree that an exact mean would send, `own_share` the part of it
that was sent; the worker keeps the difference.  Feedbacks are frozen
dataclasses without arrays, and pure functions on trees.  Their state is
float32, or wider, whatever the dtype of the parameters, and each worker's own.

Numbers that are not finite become zero in a state (or the old value stays,
where that keeps workers equal), and `nonfinite` counts the rounds in which that
happened, int32.
"""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import signatures, states
from jdist.states import PyTree


class Feedback(signatures.Explained, abc.ABC):
  """The interface of feedback, which keeps the error of a message.

  Attributes:
    keeps_rest: Whether its state depends on `own_share`.  Such a feedback needs
      a reducer whose mean is that of the shares (`Reducer.averages`) and that
      leaves out less than the tree (`Reducer.contractive`).
  """

  keeps_rest: ClassVar[bool] = True

  @abc.abstractmethod
  def init(self, like: PyTree) -> PyTree:
    """Returns the first state for trees like `like`, a NamedTuple of arrays."""

  @abc.abstractmethod
  def prepare(self, x: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the tree that a worker should send, and the state."""

  @abc.abstractmethod
  def finish(
    self, mean: PyTree, own_share: PyTree, wanted: PyTree, state: PyTree
  ) -> tuple[PyTree, PyTree]:
    """Returns the result, equal on all workers, and the state.

    Args:
      mean: The workers' mean of `own_share`, equal on all workers.
      own_share: The part of `wanted` that this worker has sent.
      wanted: The tree that `prepare` returned.
      state: The state that `prepare` returned.
    """

  def keep_cast(self, left: PyTree, state: PyTree) -> PyTree:
    """Keeps the error of the mean's cast to narrower leaves, if it can.

    `left` is the mean minus the result, finite and equal on all workers.
    """
    del left
    return state

  def absorb(self, held: PyTree, state: PyTree) -> PyTree | None:
    """Keeps the owners' residuals (`Reducer.flush`) for a later mean.

    Returns the state; None if it cannot hold them.
    """
    del held, state
    return None

  def divergence_error(self, name: str, compressor: Any) -> ValueError:
    """Returns the error for a codec or reducer that is not contractive.

    Around it the residuals of a feedback that keeps the rest would grow.
    """
    return ValueError(
      f"`{name}` must leave out less than there is with {self}, which adds it "
      f"to the next message and would diverge, got {compressor!r}. Take "
      "`codecs.RandomK(..., scaled=False)`, or no feedback."
    )


def wide(x: jax.Array) -> jax.Array:
  """Returns at least float32."""
  return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def number(x: jax.typing.ArrayLike, like: jax.Array) -> jax.Array:
  """Returns a hyper-parameter in the dtype of its factor."""
  # Injected hyper-parameters have the parameters' dtype.
  return jnp.asarray(x).astype(like.dtype)


def zeros(like: PyTree) -> PyTree:
  """Returns zeros, at least float32."""
  return jax.tree.map(lambda x: wide(jnp.zeros(jnp.shape(x), x.dtype)), like)


def added(tree: PyTree, held: PyTree) -> PyTree:
  """Returns the sum of two trees, in the dtypes of the first."""
  return jax.tree.map(lambda x, h: x + h.astype(x.dtype), tree, held)


def any_nonfinite(tree: PyTree) -> jax.Array:
  """Returns whether a number of a tree is not finite."""
  found = jnp.zeros((), bool)
  for x in jax.tree.leaves(tree):
    found |= ~jnp.isfinite(x).all()
  return found


def cleaned(tree: PyTree) -> tuple[PyTree, jax.Array]:
  """Returns zeros where a number is not finite, and whether there was one."""
  cleaned = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0.0), tree)
  return cleaned, any_nonfinite(tree)


def counted(count: jax.Array, found: jax.Array) -> jax.Array:
  """Returns the count, one higher if something was found."""
  return jnp.where(found, optax.safe_increment(count), count)


class Residual(Feedback):
  """A feedback with a `residual` in its state, the part not sent yet."""

  def keep_cast(self, left: PyTree, state: Any) -> Any:
    """Adds it to the residual."""
    # The mean lacks it once, and so the sum N times: every worker adds it.
    return state._replace(residual=added(state.residual, left))

  def absorb(self, held: PyTree, state: Any) -> Any:
    """Adds it to the residual."""
    return state._replace(residual=added(state.residual, held))


@states.declare()
class ErrorFeedbackState(NamedTuple):
  """State of `ErrorFeedback`.

  Attributes:
    residual: The part that has not been sent yet.
    nonfinite: The number of rounds after which it was not finite.
  """

  residual: PyTree
  nonfinite: jax.Array


@signatures.checked
@dataclasses.dataclass(frozen=True)
class ErrorFeedback(Residual):
  r"""Adds the part that was not sent to the next message.

  .. math:: p_i = x_i + \beta e_i, \qquad e_i \leftarrow p_i - s_i

  where :math:`s_i` is the share of :math:`p_i` that worker i has sent.  With
  :math:`\beta = 1` nothing is lost: over any number of rounds the sum of the
  inputs is N times the sum of the means plus the residuals.

  Attributes:
    decay: beta in [0, 1]; 1 is error feedback as it was published, 0.95
      SparseLoCo's, 0.999 DeMo's momentum.  0 is no feedback.

  >>> import jax.numpy as jnp
  >>> feedback = ErrorFeedback()
  >>> state = feedback.init(jnp.zeros(2))
  >>> wanted, state = feedback.prepare(jnp.array([3.0, 1.0]), state)
  >>> sent = jnp.array([3.0, 0.0])  # One worker sends the larger entry.
  >>> output, state = feedback.finish(sent, sent, wanted, state)
  >>> feedback.prepare(jnp.array([0.5, 0.5]), state)[0].tolist()
  [0.5, 1.5]

  References:
    Karimireddy et al., Error Feedback Fixes SignSGD (arXiv 1901.09847),
    algorithm 2, after Seide et al., 1-Bit SGD (Interspeech 2014).  Departure:
    the gradient is not multiplied by the learning rate before it is compressed;
    under a rate that changes, that is another algorithm.  Sarfi et al.,
    SparseLoCo (arXiv 2508.15706), algorithm 1: the decay.
  """

  decay: signatures.UnitFloat = 1.0

  def init(self, like: PyTree) -> ErrorFeedbackState:
    return ErrorFeedbackState(zeros(like), jnp.zeros((), jnp.int32))

  def prepare(
    self, x: PyTree, state: ErrorFeedbackState
  ) -> tuple[PyTree, ErrorFeedbackState]:
    """Returns the sum of the tree and the residual."""
    wanted = jax.tree.map(
      lambda x, e: wide(x) + number(self.decay, e) * e, x, state.residual
    )
    return wanted, state

  def finish(
    self,
    mean: PyTree,
    own_share: PyTree,
    wanted: PyTree,
    state: ErrorFeedbackState,
  ) -> tuple[PyTree, ErrorFeedbackState]:
    # A NaN would otherwise stay in the residual, and in all later messages.
    residual, found = cleaned(jax.tree.map(jnp.subtract, wanted, own_share))
    nonfinite = counted(state.nonfinite, found)
    return mean, ErrorFeedbackState(residual, nonfinite)

  def absorb(self, held: PyTree, state: ErrorFeedbackState) -> PyTree | None:
    """Adds it to the residual, divided by the decay to come."""
    # `prepare` multiplies by the decay, which would shrink the owners' part.
    if self.decay == 0:
      return None
    held = jax.tree.map(
      lambda h, e: h.astype(e.dtype) / number(self.decay, e),
      held, state.residual,
    )  # fmt: skip
    return super().absorb(held, state)


@states.declare(shared=("mean",))
class EF21State(NamedTuple):
  """State of `EF21`.

  Attributes:
    own: The estimate of this worker's tree that the others have.
    mean: The mean of all workers' `own`, equal on all workers.
    nonfinite: The number of rounds in which something was not finite.
  """

  own: PyTree
  mean: PyTree
  nonfinite: jax.Array


@dataclasses.dataclass(frozen=True)
class EF21(Feedback):
  r"""Sends the difference from the estimate that the others have.

  .. math:: p_i = x_i - h_i, \qquad h_i \leftarrow h_i + s_i, \qquad
            h \leftarrow h + \tfrac1N \sum_i s_i, \qquad \text{output } h

  The result is an estimate of the mean that gets better while gradients change
  little.  An entry whose mean is not finite changes nothing on any worker, so
  that :math:`h` remains the mean of the :math:`h_i`.

  References:
    Richtarik et al., EF21: A New, Simpler, Theoretically Better, and
    Practically Faster Error Feedback (arXiv 2106.05203), algorithm 2.
    Departure: :math:`h_i` begins at zero and not at a compressed gradient,
    which takes one more round.

  >>> import jax.numpy as jnp
  >>> feedback = EF21()
  >>> state = feedback.init(jnp.zeros(2))
  >>> x = jnp.array([3.0, 1.0])
  >>> wanted, state = feedback.prepare(x, state)
  >>> sent = jnp.array([3.0, 0.0])
  >>> output, state = feedback.finish(sent, sent, wanted, state)
  >>> output.tolist(), feedback.prepare(x, state)[0].tolist()
  ([3.0, 0.0], [0.0, 1.0])
  """

  def init(self, like: PyTree) -> EF21State:
    return EF21State(zeros(like), zeros(like), jnp.zeros((), jnp.int32))

  def prepare(self, x: PyTree, state: EF21State) -> tuple[PyTree, EF21State]:
    """Returns the difference from the estimate."""
    return jax.tree.map(lambda x, h: wide(x) - h, x, state.own), state

  def finish(
    self, mean: PyTree, own_share: PyTree, wanted: PyTree, state: EF21State
  ) -> tuple[PyTree, EF21State]:
    del wanted

    def added(h: jax.Array, change: jax.Array, mean: jax.Array) -> jax.Array:
      # The mean is equal on all workers, and so all skip the same entries.
      usable = jnp.isfinite(mean) & jnp.isfinite(change)
      return h + jnp.where(usable, wide(change), 0.0)

    own = jax.tree.map(added, state.own, own_share, mean)
    known = jax.tree.map(added, state.mean, mean, mean)
    found = any_nonfinite((mean, own_share))
    nonfinite = counted(state.nonfinite, found)
    return known, EF21State(own, known, nonfinite)

  def absorb(self, held: PyTree, state: EF21State) -> PyTree | None:
    """Adds it to the mean of the estimates."""
    # The owners had left it out of that mean.
    return state._replace(mean=added(state.mean, held))
