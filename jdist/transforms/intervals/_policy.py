"""The interface of interval policies, and their arithmetic."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks

# An int32 that is longer than any training.
LONGEST = 2**30
# A loss that is not known yet; `jax.debug_nans` would stop at a NaN.
UNKNOWN_LOSS = math.inf


class IntervalPolicy(NamedTuple):
  """A pair of pure functions, like an Optax transformation.

  Attributes:
    init: `() -> state`, a pytree of arrays.
    next: `(state, start_step, loss) -> interval, state`: the number of local
      steps, an int32 scalar >= 1, of the round that begins at local step
      `start_step`.  `loss` is the mean training loss of the last finished
      round over steps and workers, a float32 scalar; with a delay it is that of
      the round before; NaN if it is not known; None before the first one.
    needs_loss: Whether the loss is used.  `update` of the local steps then
      needs `loss=`, and 4 bytes more are sent in every round.
    constant: The interval if it never changes, else None.
  """

  init: Callable[[], Any]
  next: Callable[[Any, jax.Array, jax.Array | None], tuple[jax.Array, Any]]
  needs_loss: bool = False
  constant: int | None = None


def longest(max_interval: int | None, shortest: int) -> int:
  """Returns the checked largest interval."""
  if max_interval is None:
    return LONGEST
  max_interval = checks.check_structural(
    "max_interval", max_interval, minimum=shortest
  )
  return min(max_interval, LONGEST)


def check_first(name: str, interval: int, longest: int) -> None:
  """Raises a ValueError if a rule begins above its longest interval."""
  if interval > longest:
    raise ValueError(
      f"`{name}` must be at most `max_interval`, {longest}, got {interval}: "
      "the rule would cut every longer round, the first one too. Give "
      f"`max_interval={interval}` or more."
    )


def rate_at(
  learning_rate: optax.ScalarOrSchedule,
  step: jax.Array | int,
  name: str = "learning_rate",
) -> jax.Array:
  """Returns the learning rate at a local step, float32 scalar."""
  rate = learning_rate(step) if callable(learning_rate) else learning_rate
  if not checks.is_number(rate):
    rule = f"`{name}` must give a number for each step"
    raise ValueError(f"{rule}, got {checks.show(rate)}.")
  # An injected number has the dtype of the parameters, which may be bfloat16.
  return jnp.asarray(rate).astype(jnp.float32)


def whole_steps(steps: jax.Array, longest: float = math.inf) -> jax.Array:
  """Casts a number of steps to int32 in 1 to `longest`; NaN becomes 1."""
  steps = jnp.where(jnp.isnan(steps), 1.0, steps)
  return jnp.clip(steps, 1.0, min(longest, LONGEST)).astype(jnp.int32)
