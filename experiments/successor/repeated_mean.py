"""Feedback that predicts each mean to be the one before, and sends the rest."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist import reducers, states


@states.declare(shared=("mean",))
class RepeatedMeanState(NamedTuple):
  """State of `RepeatedMean`.

  Attributes:
    residual: The part that has not been sent yet.
    mean: The last output, equal on all workers.
  """

  residual: Any
  mean: Any


@dataclasses.dataclass(frozen=True)
class RepeatedMean(reducers.Feedback):
  r"""Sends what the last output does not foretell, and keeps the rest.

  .. math:: p_i = x_i + e_i - \beta m, \qquad e_i \leftarrow p_i - s_i, \qquad
            m \leftarrow \beta m + \tfrac1N \sum_i s_i, \qquad \text{output } m

  where :math:`s_i` is the share of :math:`p_i` that worker i has sent.  Over
  any number of rounds the sum of the inputs is N times the sum of the outputs
  plus the residuals, as with `ErrorFeedback`, which is this with
  :math:`\beta = 0`.  An entry that is not sent is repeated, as by a momentum
  without an end, and its error is in the residual.

  Attributes:
    share: beta in [0, 1].

  >>> feedback = RepeatedMean()
  >>> state = feedback.init(jnp.zeros(2))
  >>> x = jnp.array([3.0, 1.0])
  >>> wanted, state = feedback.prepare(x, state)
  >>> sent = jnp.array([3.0, 0.0])  # One worker sends the larger entry.
  >>> output, state = feedback.finish(sent, sent, wanted, state)
  >>> output.tolist(), feedback.prepare(x, state)[0].tolist()
  ([3.0, 0.0], [0.0, 2.0])
  """

  share: float = 1.0

  def init(self, like: Any) -> RepeatedMeanState:
    """Returns zeros."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)
    return RepeatedMeanState(zeros, zeros)

  def prepare(self, x: Any, state: RepeatedMeanState) -> tuple[Any, Any]:
    """Returns what the last output does not foretell, and the residual."""
    wanted = jax.tree.map(
      lambda x, e, m: x + e - self.share * m, x, state.residual, state.mean
    )
    return wanted, state

  def finish(
    self, mean: Any, own_share: Any, wanted: Any, state: RepeatedMeanState
  ) -> tuple[Any, Any]:
    """Returns the last output, corrected by the mean of what was sent."""
    found = jax.tree.map(lambda m, s: self.share * m + s, state.mean, mean)
    # A number that is not finite would stay in all later messages.
    residual = jax.tree.map(
      lambda p, s: jnp.where(jnp.isfinite(p - s), p - s, 0.0), wanted, own_share
    )
    kept = jax.tree.map(lambda m: jnp.where(jnp.isfinite(m), m, 0.0), found)
    return found, RepeatedMeanState(residual, kept)
