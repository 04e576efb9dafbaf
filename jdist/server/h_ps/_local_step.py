"""A worker's own step in front of the parameters that it was sent."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import signatures
from jdist.states import PyTree


class LocalStepState(NamedTuple):
  """State that a worker keeps for its local steps, each shaped as `params`.

  Attributes:
    gradient: The gradient of its last task.
    held: The parameters that it was sent for that task.
    velocity: The server's momentum buffer times the negative rate, as estimated
      from the moves of the parameters.
  """

  gradient: PyTree
  held: PyTree
  velocity: PyTree


@signatures.checked
@dataclasses.dataclass(frozen=True)
class LocalStep:
  r"""Predicts the update that is under way while a worker computes.

  In a pipeline a worker's last gradient g' is not yet in the parameters that
  it was sent.  It takes the next gradient where the server's SGD would be with
  it, :math:`\nabla L(\theta_{t-1} + \hat\Delta_t; B)`.  With
  :math:`\Delta_t = \theta_t - \theta_{t-1}` of the parameters that it was sent,

  .. math:: \hat\Delta_t = \mu \Delta_{t-1} - \eta g'

  for heavy-ball momentum, and for Nesterov's, whose moves are
  :math:`\Delta_t = (1 + \mu) v_t - \mu v_{t-1}` of the buffer
  :math:`v_t = \mu v_{t-1} - \eta g_t`,

  .. math:: v_{t-1} = \frac{\Delta_{t-1} + \mu v_{t-2}}{1 + \mu}, \qquad
            \hat\Delta_t = \mu^2 v_{t-1} - (1 + \mu) \eta g'.

  With one worker, exact messages and a rate that stays, this is the server's
  update itself, and the delay costs nothing: the largest stable rate times
  curvature with mu = 0.9 is SGD's own 1.36, and not the 0.49 of a heavy-ball
  step before Nesterov's momentum, or the 0.25 of none.

  Args:
    rate: eta > 0, the server's; a schedule counts the server's updates.
    momentum: mu in [0, 1), the server's.
    nesterov: Whether the server's momentum is Nesterov's.

  References:
    Xu et al., OD-SGD (arXiv 2005.06728): the local step.  Its momentum is a
    reconstruction, after the predicted weights of SpecTrain (Chen et al., arXiv
    1809.02839), by what a worker was sent in place of the server's buffer.
  """

  rate: signatures.PositiveFloat | optax.Schedule
  momentum: signatures.UnitFloat = 0.0
  nesterov: bool = False

  def init(self, params: PyTree) -> LocalStepState:
    """Returns the state of a worker that was sent its first parameters."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    return LocalStepState(zeros, params, zeros)

  def control(
    self, version: int, *, leads: bool, last: int | None
  ) -> np.ndarray:
    """Returns the input of `move` for a task, an array of four floats.

    The worker's last gradient `leads` if this version of parameters lacks it.
    `last` is the version of its task before; a restart forgets it (None).
    """
    # The rate of the update that is foreseen: the one after this version.
    rate = self.rate(version) if callable(self.rate) else self.rate
    flags = leads, last is not None, version != last
    return np.array([float(rate) * leads, *flags], np.float32)

  def move(
    self, held: PyTree, state: LocalStepState, control: jax.Array
  ) -> tuple[PyTree, PyTree]:
    """Returns where to take the gradient, and the server's velocity."""
    # An array, so that rates and flags can change without recompiling.
    rate, leads, remembers, moved = control
    mu = self.momentum
    of_gradient, of_velocity = (1 + mu, mu**2) if self.nesterov else (1.0, mu)

    def known(new: jax.Array, old: jax.Array, before: jax.Array) -> jax.Array:
      velocity = new - old
      if self.nesterov:
        velocity = (velocity + mu * before) / (1 + mu)
      # A second task on the same parameters shows no new move.
      velocity = jnp.where(moved > 0, velocity, before)
      return jnp.where(remembers > 0, velocity, jnp.zeros_like(velocity))

    velocity = jax.tree.map(known, held, state.held, state.velocity)
    found = jax.tree.map(
      lambda p, g, v: (
        p
        - (of_gradient * rate).astype(p.dtype) * g
        + (of_velocity * leads).astype(p.dtype) * v
      ),
      held, state.gradient, velocity,
    )  # fmt: skip
    return found, velocity
