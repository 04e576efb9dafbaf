"""Correcting gradients so that local parameters do not drift away."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks, states
from jdist.transforms.local import _anchor


@states.declare(shared=("step",))
class PullToAnchorState(NamedTuple):
  """State of `pull_to_anchor`.

  Attributes:
    step: local steps so far, int32 scalar, for the learning rate's schedule.
  """

  step: jax.Array


def pull_to_anchor(
  strength: jax.typing.ArrayLike, learning_rate: optax.ScalarOrSchedule
) -> optax.GradientTransformationExtraArgs:
  r"""Adds a pull towards the anchor to the gradient.

  .. math:: g \leftarrow g + \frac{\beta}{H \eta_t} (w - a)

  with the anchor a and the interval H of the present round.  Under plain SGD
  with the learning rate :math:`\eta_t` a worker loses beta/H of its distance
  in each of H steps, about :math:`1 - e^{-\beta}` of it in a round, whatever
  the rate and the interval.  A momentum m in front of it multiplies that by
  1/(1-m).

  Stands in the inner chain of `local_steps`, which gives it the anchor.

  Args:
    strength: beta >= 0; 0 is no pull.
    learning_rate: the inner optimizer's, a number or a schedule of the local
      step.

  Returns:
    A transformation; `update` takes `anchor=` and `interval_steps=`.

  Raises:
    ValueError: when an argument is out of its range; at trace time, when it
      does not stand inside `local_steps`.

  References:
    Ju et al., multi-step delayed parameter update (2025, doi
    10.11918/202407052) names a parameter correction against drift and gives
    no formula: this is a reconstruction after SSD-SGD (arXiv 2012.05396).

  >>> pull = pull_to_anchor(0.5, learning_rate=0.1)
  >>> w, anchor = jnp.array(3.0), jnp.array(1.0)
  >>> updates, _ = pull.update(
  ...   jnp.array(0.0), pull.init(w), w, anchor=anchor, interval_steps=4
  ... )
  >>> round(updates.item(), 6)  # 0.5 / (4 * 0.1) * (3 - 1)
  2.5
  """
  checks.check_continuous("strength", strength)
  checks.check_rate("learning_rate", learning_rate)

  def factor(
    state: PullToAnchorState, interval_steps: jax.typing.ArrayLike
  ) -> tuple[jax.Array, PullToAnchorState]:
    rate = learning_rate(state.step) if callable(learning_rate) else (
      learning_rate
    )  # fmt: skip
    distance = _anchor.scalar(interval_steps) * _anchor.scalar(rate)
    # A schedule may end at zero, where nothing moves and nothing is pulled.
    factor = jnp.where(distance > 0, _anchor.scalar(strength) / distance, 0.0)
    return factor, PullToAnchorState(optax.safe_increment(state.step))

  def first() -> PullToAnchorState:
    return PullToAnchorState(jnp.zeros((), jnp.int32))

  return _pull("pull_to_anchor", first, factor, needs_interval=True)


def proximal(
  strength: jax.typing.ArrayLike,
) -> optax.GradientTransformationExtraArgs:
  r"""Adds the gradient of a proximal term to the gradient.

  .. math:: g \leftarrow g + \mu (w - a), \qquad \text{that of }
            f(w) + \tfrac\mu2 \lVert w - a \rVert^2

  with the anchor a.  Unlike `pull_to_anchor` it is not scaled to the interval
  and the learning rate: under plain SGD with the rate :math:`\eta` a worker
  loses :math:`\eta \mu` of its distance in each step.

  Stands in the inner chain of `local_steps`, which gives it the anchor.

  Args:
    strength: mu >= 0; 0 is none.

  Returns:
    A transformation; `update` takes `anchor=`.

  Raises:
    ValueError: when `strength` is out of its range; at trace time, when it
      does not stand inside `local_steps`.

  References:
    Li et al., Federated Optimization in Heterogeneous Networks (FedProx,
    arXiv 1812.06127), equation 2.

  >>> term = proximal(0.5)
  >>> w, anchor = jnp.array(3.0), jnp.array(1.0)
  >>> term.update(jnp.array(0.0), term.init(w), w, anchor=anchor)[0].item()
  1.0
  """
  checks.check_continuous("strength", strength)

  return _pull(
    "proximal",
    optax.EmptyState,
    lambda state, _: (_anchor.scalar(strength), state),
  )


def _pull(
  name: str,
  first: Callable[[], Any],
  factor: Callable[[Any, Any], tuple[jax.Array, Any]],
  needs_interval: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Adds `factor(state, interval_steps)` times the way from the anchor."""

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    *,
    anchor: optax.Params | None = None,
    interval_steps: jax.typing.ArrayLike | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, Any]:
    del extra_args
    unknown = needs_interval and interval_steps is None
    if params is None or anchor is None or unknown:
      raise ValueError(
        f"`{name}` must stand in the inner chain of `local_steps`, and "
        "`update` must be given `params`: it found no anchor. Write "
        f"`local_steps(optax.chain({name}(...), optax.sgd(...)), ...)`."
      )
    by, state = factor(state, interval_steps)

    def pulled(g: jax.Array, w: jax.Array, a: jax.Array) -> jax.Array:
      # In the anchor's dtype, which is at least float32.
      pull = by.astype(a.dtype) * (w.astype(a.dtype) - a)
      return (g.astype(a.dtype) + pull).astype(g.dtype)

    return jax.tree.map(pulled, updates, params, anchor), state

  return optax.GradientTransformationExtraArgs(
    lambda params: first(), update_fn
  )
