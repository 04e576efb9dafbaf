"""Feedbacks that send each worker's momentum instead of its gradient."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jdist import signatures, states
from jdist.reducers import _feedback
from jdist.states import PyTree


@states.declare()
class MomentumCorrectionState(NamedTuple):
  """State of `MomentumCorrection`.

  Attributes:
    momentum: The momentum u.
    residual: The part v that has not been sent yet.
    nonfinite: The number of rounds after which one of them was not finite.
  """

  momentum: PyTree
  residual: PyTree
  nonfinite: jax.Array


@signatures.checked
@dataclasses.dataclass(frozen=True)
class MomentumCorrection(_feedback.Residual):
  r"""Accumulates a momentum instead of gradients, until it is sent.

  .. math:: u_i \leftarrow m u_i + x_i, \qquad p_i = v_i + u_i, \qquad
            v_i \leftarrow p_i - s_i, \qquad
            u_i \leftarrow 0 \text{ where } s_i \ne 0

  and with Nesterov's momentum :math:`u_i \leftarrow m (u_i + x_i)` and
  :math:`p_i = v_i + u_i + x_i`.  Each worker has its own momentum, and the
  optimizer after it should have none.  A leaf that was sent whole keeps its
  momentum, as in momentum SGD.

  Attributes:
    momentum: m in [0, 1]; the paper uses 0.9.
    nesterov: Whether the momentum is Nesterov's.
    mask: Whether the momentum of sent entries is set to zero, the paper's
      momentum factor masking.

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
    appendix B; Nesterov's form, and whole leaves without masking, as in the
    authors' code.  Departure: there leaves of one dimension are sent whole;
    here the reducer decides, and a leaf whose entries were all sent exactly
    counts as whole, also by chance.
  """

  momentum: signatures.UnitFloat = 0.9
  nesterov: bool = False
  mask: bool = True

  def init(self, like: PyTree) -> MomentumCorrectionState:
    return MomentumCorrectionState(
      _feedback.zeros(like), _feedback.zeros(like), jnp.zeros((), jnp.int32)
    )

  def prepare(
    self, x: PyTree, state: MomentumCorrectionState
  ) -> tuple[PyTree, MomentumCorrectionState]:
    """Returns the sum of the residual and the momentum."""

    def moved(u: jax.Array, x: jax.Array) -> jax.Array:
      m, x = _feedback.number(self.momentum, u), _feedback.wide(x)
      return m * (u + x) if self.nesterov else m * u + x

    u = jax.tree.map(moved, state.momentum, x)
    wanted = jax.tree.map(jnp.add, state.residual, u)
    # Nesterov's momentum looks one step ahead: the gradient counts once more.
    if self.nesterov:
      wanted = jax.tree.map(lambda v, x: v + _feedback.wide(x), wanted, x)
    return wanted, state._replace(momentum=u)

  def finish(
    self,
    mean: PyTree,
    own_share: PyTree,
    wanted: PyTree,
    state: MomentumCorrectionState,
  ) -> tuple[PyTree, MomentumCorrectionState]:

    def masked(u: jax.Array, sent: jax.Array, wanted: jax.Array) -> jax.Array:
      # A sent entry moves the others' parameters now: its momentum would do so
      # again, out of date.  Codecs send float32 for float64: it is whole.
      partly = jnp.any(jnp.abs(sent - wanted) > jnp.abs(wanted) * 2.0**-24)
      return jnp.where(partly & (sent != 0), 0.0, u)

    momentum = state.momentum
    if self.mask:
      momentum = jax.tree.map(masked, momentum, own_share, wanted)
    residual = jax.tree.map(jnp.subtract, wanted, own_share)
    (momentum, residual), found = _feedback.cleaned((momentum, residual))
    nonfinite = _feedback.counted(state.nonfinite, found)
    return mean, MomentumCorrectionState(momentum, residual, nonfinite)


@states.declare()
class SmoothingState(NamedTuple):
  """State of `Smoothing`.

  Attributes:
    momentum: The momentum m.
    nonfinite: The number of rounds after which it was not finite.
  """

  momentum: PyTree
  nonfinite: jax.Array


@signatures.checked
@dataclasses.dataclass(frozen=True)
class Smoothing(_feedback.Feedback):
  r"""Sends each worker's momentum, and keeps no residual.

  .. math:: m_i \leftarrow \mu m_i + (1 - \mu) x_i, \qquad p_i = m_i

  It is for reducers whose error is not a number of the tree, such as a vote.

  Attributes:
    momentum: mu in [0, 1]; 0 sends the tree itself, in float32.

  References:
    Bernstein et al., signSGD (arXiv 1802.04434), algorithm 2, Signum.

  >>> import jax.numpy as jnp
  >>> feedback = Smoothing(0.75)
  >>> state = feedback.init(jnp.zeros(1))
  >>> feedback.prepare(jnp.array([4.0]), state)[0].tolist()
  [1.0]
  """

  momentum: signatures.UnitFloat = 0.9

  keeps_rest: ClassVar[bool] = False

  def init(self, like: PyTree) -> SmoothingState:
    return SmoothingState(_feedback.zeros(like), jnp.zeros((), jnp.int32))

  def prepare(
    self, x: PyTree, state: SmoothingState
  ) -> tuple[PyTree, SmoothingState]:

    def moved(m: jax.Array, x: jax.Array) -> jax.Array:
      mu = _feedback.number(self.momentum, m)
      return mu * m + (1 - mu) * _feedback.wide(x)

    return jax.tree.map(moved, state.momentum, x), state

  def finish(
    self, mean: PyTree, own_share: PyTree, wanted: PyTree, state: SmoothingState
  ) -> tuple[PyTree, SmoothingState]:
    # A vote's own share is a sign, which is no part of the momentum.
    del own_share
    momentum, found = _feedback.cleaned(wanted)
    nonfinite = _feedback.counted(state.nonfinite, found)
    return mean, SmoothingState(momentum, nonfinite)
