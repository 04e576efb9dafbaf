"""Error feedback: what a message left out is fed into the next one.

A compressed mean of the workers' trees is not the mean of what they wanted to
say.  A feedback stands on both sides of it:

    x --prepare--> wanted --[reducer]--> mean, own_share --finish--> output

`wanted` is what a worker would send if bits were free, `own_share` what it has
sent; the difference stays with the worker.  Feedbacks are frozen dataclasses
without arrays, like codecs and reducers, and pure functions on trees.  What
they remember is float32 whatever the parameters are.

No number that is not finite stays in a memory: it becomes zero there (or the
old value stays, where that is what keeps workers together), and the state's
`nonfinite` counts the rounds in which that happened.
"""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jdist.transforms import _checking

PyTree: TypeAlias = Any


class Feedback(abc.ABC):
  """What becomes of the part of a tree that a message leaves out.

  Attributes:
    keeps_rest: whether it remembers what of `wanted` is not in `own_share`, or
      what is; for reducers whose mean is made of the shares
      (`Reducer.averages`) only.
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
    """What this worker wants to send, at least float32, and the state.

    Args:
      x: this worker's tree of floats.
      state: this worker's.
    """

  @abc.abstractmethod
  def finish(
    self, mean: PyTree, own_share: PyTree, wanted: PyTree, state: PyTree
  ) -> tuple[PyTree, PyTree]:
    """What comes out, equal on all workers, and the state.

    Args:
      mean: the workers' mean of `own_share`, as all of them know it.
      own_share: what this worker has sent of `wanted`.
      wanted: what `prepare` returned.
      state: that `prepare` returned.
    """

  def absorb(self, held: PyTree, state: PyTree) -> PyTree | None:
    """Takes over what owners hold back, so that a later mean has it.

    Args:
      held: what the mean has lacked, from `Reducer.release`, equal on all
        workers.
      state: this worker's.

    Returns:
      The state; None where there is no place for it.
    """
    del held, state
    return None


class ErrorFeedbackState(NamedTuple):
  """State of `ErrorFeedback`.

  Attributes:
    residual: what has not been sent yet, float32, each worker its own.
    nonfinite: rounds after which a residual was not finite, int32 scalar, each
      worker its own.
  """

  residual: PyTree
  nonfinite: jax.Array


@dataclasses.dataclass(frozen=True)
class ErrorFeedback(Feedback):
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
    Seide et al., 1-Bit SGD (Interspeech 2014): the idea.  Karimireddy et al.,
    Error Feedback Fixes SignSGD (arXiv 1901.09847), algorithm 2.  Departure:
    the gradient is not multiplied by the learning rate before it is
    compressed, so a residual is in units of gradients; under a rate that
    changes, that is another algorithm.  Sarfi et al., SparseLoCo (arXiv
    2508.15706), algorithm 1: the decay.
  """

  decay: float = 1.0

  def __post_init__(self) -> None:
    _checking.check_continuous("decay", self.decay, high=1.0)

  def init(self, like: PyTree) -> ErrorFeedbackState:
    """No residual."""
    return ErrorFeedbackState(_zeros(like), jnp.zeros((), jnp.int32))

  def prepare(
    self, x: PyTree, state: ErrorFeedbackState
  ) -> tuple[PyTree, ErrorFeedbackState]:
    """The tree and the residual."""
    wanted = jax.tree.map(
      lambda x, e: _wide(x) + _number(self.decay, e) * e, x, state.residual
    )
    return wanted, state

  def finish(
    self,
    mean: PyTree,
    own_share: PyTree,
    wanted: PyTree,
    state: ErrorFeedbackState,
  ) -> tuple[PyTree, ErrorFeedbackState]:
    """The mean, and the new residual."""
    residual, found = _cleaned(jax.tree.map(jnp.subtract, wanted, own_share))
    nonfinite = _counted(state.nonfinite, found)
    return mean, ErrorFeedbackState(residual, nonfinite)

  def absorb(self, held: PyTree, state: ErrorFeedbackState) -> PyTree | None:
    """Every worker adds it to its residual, before the decay."""
    if self.decay == 0:
      return None
    residual = jax.tree.map(
      lambda e, h: e + h.astype(e.dtype) / _number(self.decay, e),
      state.residual,
      held,
    )
    return state._replace(residual=residual)


class EF21State(NamedTuple):
  """State of `EF21`.

  Attributes:
    own: what the others know of this worker, float32, each worker its own.
    mean: the mean of all workers' `own`, float32, equal on all workers.
    nonfinite: rounds in which something was not finite, int32 scalar, each
      worker its own.
  """

  own: PyTree
  mean: PyTree
  nonfinite: jax.Array


@dataclasses.dataclass(frozen=True)
class EF21(Feedback):
  r"""Sends how far a worker is from what the others know of it.

  .. math:: p_i = x_i - h_i, \qquad h_i \leftarrow h_i + s_i, \qquad
            h \leftarrow h + \tfrac1N \sum_i s_i, \qquad \text{output } h

  What comes out is an estimate of the mean that gets better while the
  gradients change little: it needs no bound on them, as `ErrorFeedback` does,
  and holds no sum of the past.

  An entry whose mean is not finite changes nothing on any worker, and so does
  not stay: :math:`h` remains the mean of the :math:`h_i`.

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
    """Nothing is known of anyone."""
    return EF21State(_zeros(like), _zeros(like), jnp.zeros((), jnp.int32))

  def prepare(self, x: PyTree, state: EF21State) -> tuple[PyTree, EF21State]:
    """The difference."""
    return jax.tree.map(lambda x, h: _wide(x) - h, x, state.own), state

  def finish(
    self, mean: PyTree, own_share: PyTree, wanted: PyTree, state: EF21State
  ) -> tuple[PyTree, EF21State]:
    """The estimate of the mean, and the new state."""
    del wanted

    def added(h: jax.Array, change: jax.Array, mean: jax.Array) -> jax.Array:
      # All workers skip the same entries.
      usable = jnp.isfinite(mean) & jnp.isfinite(change)
      return h + jnp.where(usable, _wide(change), 0.0)

    own = jax.tree.map(added, state.own, own_share, mean)
    known = jax.tree.map(added, state.mean, mean, mean)
    found = _any_nonfinite((mean, own_share))
    nonfinite = _counted(state.nonfinite, found)
    return known, EF21State(own, known, nonfinite)

  def absorb(self, held: PyTree, state: EF21State) -> PyTree | None:
    """What is known of the mean becomes the mean of what is known."""
    return state._replace(mean=_added(state.mean, held))


class MomentumCorrectionState(NamedTuple):
  """State of `MomentumCorrection`.

  Attributes:
    momentum: u, float32, each worker its own.
    residual: v, what has not been sent yet, float32, each worker its own.
    nonfinite: rounds after which one of them was not finite, int32 scalar,
      each worker its own.
  """

  momentum: PyTree
  residual: PyTree
  nonfinite: jax.Array


@dataclasses.dataclass(frozen=True)
class MomentumCorrection(Feedback):
  r"""Accumulates a momentum, and not gradients, until it is sent.

  .. math:: u_i \leftarrow m u_i + x_i, \qquad p_i = v_i + u_i, \qquad
            v_i \leftarrow p_i - s_i, \qquad
            u_i \leftarrow 0 \text{ where } s_i \ne 0

  and with Nesterov's momentum :math:`u_i \leftarrow m (u_i + x_i)` and
  :math:`p_i = v_i + u_i + x_i`.  The momentum is the workers' own: the
  optimizer behind it has none.

  Of a leaf that was sent whole nothing is late: it keeps its momentum, and
  this is momentum SGD.

  Attributes:
    momentum: m in [0, 1]; the paper's 0.9.
    nesterov: whether it is Nesterov's.
    mask: whether the momentum of what was sent is forgotten (the paper's
      momentum factor masking), so that it is not carried on twice in a
      direction that is old.

  Raises:
    ValueError: when `momentum` is out of its range.

  >>> import jax.numpy as jnp
  >>> feedback = MomentumCorrection(0.5)
  >>> state = feedback.init(jnp.zeros(2))
  >>> wanted, state = feedback.prepare(jnp.array([4.0, 2.0]), state)
  >>> sent = jnp.array([4.0, 0.0])
  >>> output, state = feedback.finish(sent, sent, wanted, state)
  >>> state.momentum.tolist(), state.residual.tolist()
  ([0.0, 2.0], [0.0, 2.0])
  >>> feedback.prepare(jnp.array([1.0, 1.0]), state)[0].tolist()
  [1.0, 4.0]

  References:
    Lin et al., Deep Gradient Compression (arXiv 1712.01887), section 3 and
    appendix B; Nesterov's form and leaves that go whole without masking as in
    the authors' code.  Departure: there leaves of one dimension go whole; here
    the reducer decides, and a leaf of which every entry was sent as it is
    counts as whole, also by chance.
  """

  momentum: float = 0.9
  nesterov: bool = False
  mask: bool = True

  def __post_init__(self) -> None:
    _checking.check_continuous("momentum", self.momentum, high=1.0)

  def init(self, like: PyTree) -> MomentumCorrectionState:
    """No momentum and no residual."""
    return MomentumCorrectionState(
      _zeros(like), _zeros(like), jnp.zeros((), jnp.int32)
    )

  def prepare(
    self, x: PyTree, state: MomentumCorrectionState
  ) -> tuple[PyTree, MomentumCorrectionState]:
    """The residual, and the momentum on top."""

    def moved(u: jax.Array, x: jax.Array) -> jax.Array:
      m, x = _number(self.momentum, u), _wide(x)
      return m * (u + x) if self.nesterov else m * u + x

    u = jax.tree.map(moved, state.momentum, x)
    wanted = jax.tree.map(jnp.add, state.residual, u)
    if self.nesterov:
      wanted = jax.tree.map(lambda v, x: v + _wide(x), wanted, x)
    return wanted, state._replace(momentum=u)

  def finish(
    self,
    mean: PyTree,
    own_share: PyTree,
    wanted: PyTree,
    state: MomentumCorrectionState,
  ) -> tuple[PyTree, MomentumCorrectionState]:
    """The mean, and the new state."""

    def masked(u: jax.Array, sent: jax.Array, wanted: jax.Array) -> jax.Array:
      partly = jnp.any(sent != wanted)
      return jnp.where(partly & (sent != 0), 0.0, u)

    momentum = state.momentum
    if self.mask:
      momentum = jax.tree.map(masked, momentum, own_share, wanted)
    residual = jax.tree.map(jnp.subtract, wanted, own_share)
    (momentum, residual), found = _cleaned((momentum, residual))
    nonfinite = _counted(state.nonfinite, found)
    return mean, MomentumCorrectionState(momentum, residual, nonfinite)

  def absorb(
    self, held: PyTree, state: MomentumCorrectionState
  ) -> PyTree | None:
    """Every worker adds it to its residual."""
    return state._replace(residual=_added(state.residual, held))


class SmoothingState(NamedTuple):
  """State of `Smoothing`.

  Attributes:
    momentum: m, float32, each worker its own.
    nonfinite: rounds after which it was not finite, int32 scalar, each worker
      its own.
  """

  momentum: PyTree
  nonfinite: jax.Array


@dataclasses.dataclass(frozen=True)
class Smoothing(Feedback):
  r"""Sends each worker's momentum; what is not sent of it is not remembered.

  .. math:: m_i \leftarrow \mu m_i + (1 - \mu) x_i, \qquad p_i = m_i

  For reducers whose error has no meaning as a number, such as a vote.

  Attributes:
    momentum: mu in [0, 1]; 0 sends the tree as it is, in float32.

  Raises:
    ValueError: when `momentum` is out of its range.

  References:
    Bernstein et al., signSGD (arXiv 1802.04434), algorithm 2, Signum.

  >>> import jax.numpy as jnp
  >>> feedback = Smoothing(0.75)
  >>> state = feedback.init(jnp.zeros(1))
  >>> feedback.prepare(jnp.array([4.0]), state)[0].tolist()
  [1.0]
  """

  momentum: float = 0.9

  keeps_rest: ClassVar[bool] = False

  def __post_init__(self) -> None:
    _checking.check_continuous("momentum", self.momentum, high=1.0)

  def init(self, like: PyTree) -> SmoothingState:
    """No momentum."""
    return SmoothingState(_zeros(like), jnp.zeros((), jnp.int32))

  def prepare(
    self, x: PyTree, state: SmoothingState
  ) -> tuple[PyTree, SmoothingState]:
    """The momentum."""

    def moved(m: jax.Array, x: jax.Array) -> jax.Array:
      mu = _number(self.momentum, m)
      return mu * m + (1 - mu) * _wide(x)

    wanted = jax.tree.map(moved, state.momentum, x)
    return wanted, state

  def finish(
    self,
    mean: PyTree,
    own_share: PyTree,
    wanted: PyTree,
    state: SmoothingState,
  ) -> tuple[PyTree, SmoothingState]:
    """The mean, and the momentum."""
    del own_share
    momentum, found = _cleaned(wanted)
    return mean, SmoothingState(momentum, _counted(state.nonfinite, found))


def check_feedback(name: str, value: Any) -> None:
  """Raises a ValueError unless `value` is a feedback or None."""
  if value is not None and not isinstance(value, Feedback):
    raise ValueError(
      f"`{name}` must be a feedback or None, for instance "
      f"`transforms.ErrorFeedback()`, got {value!r}."
    )


def _wide(x: jax.Array) -> jax.Array:
  """At least float32."""
  return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def _number(x: jax.typing.ArrayLike, like: jax.Array) -> jax.Array:
  # Injected hyper-parameters come in the parameters' dtype.
  return jnp.asarray(x).astype(like.dtype)


def _zeros(like: PyTree) -> PyTree:
  def one(x: Any) -> jax.Array:
    return _wide(jnp.zeros(jnp.shape(x), x.dtype))

  return jax.tree.map(one, like)


def _added(tree: PyTree, held: PyTree) -> PyTree:
  return jax.tree.map(lambda x, h: x + h.astype(x.dtype), tree, held)


def _any_nonfinite(tree: PyTree) -> jax.Array:
  found = jnp.zeros((), bool)
  for x in jax.tree.leaves(tree):
    found |= ~jnp.isfinite(x).all()
  return found


def _cleaned(tree: PyTree) -> tuple[PyTree, jax.Array]:
  """Zero where a number is not finite, and whether there was one."""
  cleaned = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0.0), tree)
  return cleaned, _any_nonfinite(tree)


def _counted(count: jax.Array, found: jax.Array) -> jax.Array:
  return jnp.where(found, optax.safe_increment(count), count)
