"""Interval policies: what they are, and the numbers that they work with."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks

# A round longer than any training, and an int32.
LONGEST = 2**30
# A loss that a state does not know yet: `jax.debug_nans` stops at a NaN.
UNKNOWN_LOSS = math.inf


class IntervalPolicy(NamedTuple):
  """A pair of pure functions, like an Optax transformation.

  Attributes:
    init: `() -> state`, a pytree of arrays.
    next: `(state, start_step, loss) -> interval, state`: the number of local
      steps, an int32 scalar >= 1, of the round that begins at local step
      `start_step`.  `loss` is the mean training loss of the last finished
      round over steps and workers, a float32 scalar; of the round before that
      when rounds are delayed, and NaN where it is not known; None before
      there is one.
    needs_loss: whether the loss is used.  Then `update` of the local steps
      must be given `loss=`, and 4 bytes more are sent in every round.
    constant: the interval, where it is always the same; else None.
  """

  init: Callable[[], Any]
  next: Callable[[Any, jax.Array, jax.Array | None], tuple[jax.Array, Any]]
  needs_loss: bool = False
  constant: int | None = None


def longest(max_interval: int | None, shortest: int) -> int:
  """The longest interval that is allowed, checked."""
  if max_interval is None:
    return LONGEST
  max_interval = checks.check_structural(
    "max_interval", max_interval, minimum=shortest
  )
  return min(max_interval, LONGEST)


def check_first(name: str, interval: int, longest: int) -> None:
  """Raises a ValueError when a rule begins above its longest interval."""
  if interval > longest:
    raise ValueError(
      f"`{name}` must be at most `max_interval`, {longest}, got {interval}: "
      "the rule would cut every longer round, the first one too. Give "
      f"`max_interval={interval}` or more."
    )


def rate_at(
  learning_rate: optax.ScalarOrSchedule, step: jax.Array | int
) -> jax.Array:
  """The learning rate at a local step, float32 scalar."""
  rate = learning_rate(step) if callable(learning_rate) else learning_rate
  return as_float(rate)


def as_float(x: Any) -> jax.Array:
  """As float32."""
  return jnp.asarray(x).astype(jnp.float32)


def whole_steps(steps: jax.Array, longest: float = math.inf) -> jax.Array:
  """A number of steps as int32, between 1 and `longest`; NaN gives 1."""
  steps = jnp.where(jnp.isnan(steps), 1.0, steps)
  return jnp.clip(steps, 1.0, min(longest, LONGEST)).astype(jnp.int32)
