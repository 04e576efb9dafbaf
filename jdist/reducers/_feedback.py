"""Error feedback: what a message left out is fed into the next one.

A feedback stands on both sides of a compressed mean:

    x --prepare--> wanted --[reducer]--> mean, own_share --finish--> output

`wanted` is what a worker would send if bits were free, `own_share` what it has
sent; the difference stays with the worker.  Feedbacks are frozen dataclasses
without arrays, and pure functions on trees.  Their state is float32 whatever
the parameters are, and each worker's own.

What is not finite becomes zero in a state (or the old value stays, where that
keeps workers together), and `nonfinite` counts the rounds in which that
happened, int32.
"""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jdist import checks, states

PyTree: TypeAlias = Any


class Feedback(abc.ABC):
  """The interface of feedback: the use of what a message leaves out.

  Attributes:
    keeps_rest: whether it remembers what of `wanted` is not in `own_share`, or
      what is; for reducers whose mean is made of the shares
      (`Reducer.averages`) and that leave out less than a tree is
      (`Reducer.contractive`) only.
  """

  keeps_rest: ClassVar[bool] = True

  @abc.abstractmethod
  def init(self, like: PyTree) -> PyTree:
    """The first state: a NamedTuple of arrays.

    Args:
      like: one worker's tree of floats, arrays or `jax.ShapeDtypeStruct`.
    """

  @abc.abstractmethod
  def prepare(self, x: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
    """Returns what a worker wants to send, float32 or wider, and the state."""

  @abc.abstractmethod
  def finish(
    self, mean: PyTree, own_share: PyTree, wanted: PyTree, state: PyTree
  ) -> tuple[PyTree, PyTree]:
    """Returns the result, equal on all workers, and the state.

    Args:
      mean: the workers' mean of `own_share`, as all of them know it.
      own_share: what this worker has sent of `wanted`.
      wanted: what `prepare` returned.
      state: that `prepare` returned.
    """

  def keep_cast(self, left: PyTree, state: PyTree) -> PyTree:
    """Takes over what the mean lost in the cast to narrower leaves.

    By default nothing.  `left` is the mean less what came out, finite, equal on
    all workers.
    """
    del left
    return state

  def absorb(self, held: PyTree, state: PyTree) -> PyTree | None:
    """Takes over what owners hold back (`Reducer.flush`) for a later mean.

    Returns the state; None where there is no place for it.
    """
    del held, state
    return None


def check_contractive(
  name: str, compressor: Any, feedback: Feedback | None
) -> None:
  """Raises a ValueError if what a feedback keeps of messages would grow.

  Args:
    name: of the argument.
    compressor: a codec or a reducer.
    feedback: of its messages.
  """
  if feedback is None or not feedback.keeps_rest or compressor.contractive:
    return
  raise ValueError(
    f"`{name}` must leave out less than there is with {feedback}, which adds "
    f"it to the next message and would diverge, got {compressor!r}. Take "
    "`codecs.RandomK(..., scaled=False)`, or no feedback."
  )


def wide(x: jax.Array) -> jax.Array:
  """At least float32."""
  return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def number(x: jax.typing.ArrayLike, like: jax.Array) -> jax.Array:
  """A hyper-parameter, in the dtype of what it multiplies."""
  # Injected hyper-parameters come in the parameters' dtype.
  return jnp.asarray(x).astype(like.dtype)


def zeros(like: PyTree) -> PyTree:
  """Float32 zeros, or wider."""
  return jax.tree.map(lambda x: wide(jnp.zeros(jnp.shape(x), x.dtype)), like)


def added(tree: PyTree, held: PyTree) -> PyTree:
  """Adds what is held to a tree."""
  return jax.tree.map(lambda x, h: x + h.astype(x.dtype), tree, held)


def any_nonfinite(tree: PyTree) -> jax.Array:
  """Returns whether a number of a tree is not finite."""
  found = jnp.zeros((), bool)
  for x in jax.tree.leaves(tree):
    found |= ~jnp.isfinite(x).all()
  return found


def cleaned(tree: PyTree) -> tuple[PyTree, jax.Array]:
  """Zero where a number is not finite, and whether there was one."""
  cleaned = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0.0), tree)
  return cleaned, any_nonfinite(tree)


def counted(count: jax.Array, found: jax.Array) -> jax.Array:
  """One more, if it was found."""
  return jnp.where(found, optax.safe_increment(count), count)


class Residual(Feedback):
  """A feedback whose state has a `residual` of what has not been sent yet."""

  def keep_cast(self, left: PyTree, state: Any) -> Any:
    """Every worker adds it to its residual: N times, as the mean lacks it."""
    return state._replace(residual=added(state.residual, left))


@states.declare()
class ErrorFeedbackState(NamedTuple):
  """State of `ErrorFeedback`.

  Attributes:
    residual: what has not been sent yet.
    nonfinite: rounds after which it was not finite.
  """

  residual: PyTree
  nonfinite: jax.Array

  def nonfinite_rounds(self) -> jax.Array:
    return self.nonfinite


@dataclasses.dataclass(frozen=True)
class ErrorFeedback(Residual):
  r"""Adds what was not sent to what is sent next.

  .. math:: p_i = x_i + \beta e_i, \qquad e_i \leftarrow p_i - s_i

  where :math:`s_i` is the share of :math:`p_i` that worker i has sent.  With
  :math:`\beta = 1` nothing is lost: over any number of rounds the sum of what
  went in is N times the sum of the means, and what the residuals hold.

  Attributes:
    decay: beta in [0, 1]; 1 is error feedback as it was published, 0.95
      SparseLoCo's, 0.999 DeMo's momentum.  0 is no feedback.

  Raises:
    ValueError: when `decay` is out of its range.

  >>> import jax.numpy as jnp
  >>> feedback = ErrorFeedback()
  >>> state = feedback.init(jnp.zeros(2))
  >>> wanted, state = feedback.prepare(jnp.array([3.0, 1.0]), state)
  >>> sent = jnp.array([3.0, 0.0])  # The larger one, and nobody else is there.
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

  decay: float = 1.0

  def __post_init__(self) -> None:
    checks.check_continuous("decay", self.decay, high=1.0)

  def init(self, like: PyTree) -> ErrorFeedbackState:
    return ErrorFeedbackState(zeros(like), jnp.zeros((), jnp.int32))

  def prepare(
    self, x: PyTree, state: ErrorFeedbackState
  ) -> tuple[PyTree, ErrorFeedbackState]:
    """The tree and the residual."""
    wanted = jax.tree.map(
      lambda x, e: wide(x) + number(self.decay, e) * e,
      x,
      state.residual,
    )
    return wanted, state

  def finish(
    self,
    mean: PyTree,
    own_share: PyTree,
    wanted: PyTree,
    state: ErrorFeedbackState,
  ) -> tuple[PyTree, ErrorFeedbackState]:
    residual, found = cleaned(jax.tree.map(jnp.subtract, wanted, own_share))
    nonfinite = counted(state.nonfinite, found)
    return mean, ErrorFeedbackState(residual, nonfinite)

  def absorb(self, held: PyTree, state: ErrorFeedbackState) -> PyTree | None:
    """Every worker adds it to its residual, before the decay."""
    if self.decay == 0:
      return None
    residual = jax.tree.map(
      lambda e, h: e + h.astype(e.dtype) / number(self.decay, e),
      state.residual,
      held,
    )
    return state._replace(residual=residual)


@states.declare(shared=("mean",))
class EF21State(NamedTuple):
  """State of `EF21`.

  Attributes:
    own: what the others know of this worker.
    mean: the mean of all workers' `own`, equal on all workers.
    nonfinite: rounds in which something was not finite.
  """

  own: PyTree
  mean: PyTree
  nonfinite: jax.Array

  def nonfinite_rounds(self) -> jax.Array:
    return self.nonfinite


@dataclasses.dataclass(frozen=True)
class EF21(Feedback):
  r"""Sends how far a worker is from what the others know of it.

  .. math:: p_i = x_i - h_i, \qquad h_i \leftarrow h_i + s_i, \qquad
            h \leftarrow h + \tfrac1N \sum_i s_i, \qquad \text{output } h

  What comes out is an estimate of the mean that gets better while the
  gradients change little.  An entry whose mean is not finite changes nothing on
  any worker: :math:`h` remains the mean of the :math:`h_i`.

  References:
    Richtarik et al., EF21: A New, Simpler, Theoretically Better, and
    Practically Faster Error Feedback (arXiv 2106.05203), algorithm 2.
    Departure: :math:`h_i` begins at zero and not at a compressed gradient,
    which is one round more.

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
    """The difference."""
    return jax.tree.map(lambda x, h: wide(x) - h, x, state.own), state

  def finish(
    self, mean: PyTree, own_share: PyTree, wanted: PyTree, state: EF21State
  ) -> tuple[PyTree, EF21State]:
    del wanted

    def added(h: jax.Array, change: jax.Array, mean: jax.Array) -> jax.Array:
      # All workers skip the same entries.
      usable = jnp.isfinite(mean) & jnp.isfinite(change)
      return h + jnp.where(usable, wide(change), 0.0)

    own = jax.tree.map(added, state.own, own_share, mean)
    known = jax.tree.map(added, state.mean, mean, mean)
    found = any_nonfinite((mean, own_share))
    nonfinite = counted(state.nonfinite, found)
    return known, EF21State(own, known, nonfinite)

  def absorb(self, held: PyTree, state: EF21State) -> PyTree | None:
    """Replaces the known part of a mean by the mean of known parts."""
    return state._replace(mean=added(state.mean, held))
