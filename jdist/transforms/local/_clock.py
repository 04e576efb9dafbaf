"""Rounds: local steps that are counted, and an interval that is decided.

All methods whose workers meet after a number of local steps count alike and
ask an interval policy alike.  These functions do it on the fields that their
states share: `step`, `round`, `round_step`, `interval`, `next_interval`,
`synchronized`, `interval_state`, `round_loss`, and `anchor` and `inner`, with
which a step is taken.  What is sent, and when, is not theirs.

    begin   take_step ... take_step   end   take_step ...
                                  cut_short, in between
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist.transforms import intervals
from jdist.transforms.local import _anchor

PyTree = Any
# A NamedTuple with the fields above, and others.
State = Any


def begin(policy: intervals.IntervalPolicy) -> dict[str, Any]:
  """The fields of a state before the first step."""
  interval_state = policy.init()
  zero = jnp.zeros((), jnp.int32)
  first, interval_state = policy.next(interval_state, zero, None)
  second, interval_state = policy.next(interval_state, first, None)
  # Each leaf a buffer of its own, because the state may be donated.
  first, second, interval_state = jax.tree.map(
    jnp.copy, (first, second, interval_state)
  )
  return {
    "step": zero,
    "round": jnp.copy(zero),
    "round_step": jnp.copy(zero),
    "interval": first,
    "next_interval": second,
    "synchronized": jnp.asarray(True),  # All workers begin alike.
    "interval_state": interval_state,
    "round_loss": jnp.zeros((), jnp.float32) if policy.needs_loss else (),
  }


def take_step(
  policy: intervals.IntervalPolicy,
  inner: optax.GradientTransformationExtraArgs,
  updates: optax.Updates,
  state: State,
  params: optax.Params,
  extra_args: dict[str, Any],
) -> tuple[optax.Updates, State]:
  """Takes a local step with the inner optimizer, and counts it."""
  extra_args = extra_args | {
    "anchor": state.anchor,
    "interval_steps": state.interval,
  }
  updates, inner_state = inner.update(
    updates, state.inner, params, **extra_args
  )
  state = state._replace(
    step=optax.safe_increment(state.step),
    round_step=optax.safe_increment(state.round_step),
    inner=inner_state,
  )
  if policy.needs_loss:
    loss = _given_loss(extra_args.get("loss"))
    state = state._replace(round_loss=state.round_loss + loss)
  return updates, state


def is_over(state: State) -> jax.Array:
  """Whether the round has had its steps."""
  return state.round_step >= state.interval


def loss(policy: intervals.IntervalPolicy, state: State) -> Any:
  """The round's mean loss, this worker's; `()` when none is needed."""
  if not policy.needs_loss:
    return ()
  return state.round_loss / state.round_step.astype(jnp.float32)


def no_loss(policy: intervals.IntervalPolicy) -> Any:
  """The loss of no round: NaN, or `()` when none is needed."""
  return jnp.full((), jnp.nan, jnp.float32) if policy.needs_loss else ()


def go_on(state: State) -> State:
  """The state after a step that ends no round."""
  return state._replace(synchronized=jnp.asarray(False))


def end(
  policy: intervals.IntervalPolicy, state: State, mean_loss: Any
) -> State:
  """Ends a round, and decides the interval after the next one.

  Args:
    policy: the interval policy.
    state: the state after the round's last step.
    mean_loss: the workers' mean of the loss that the policy gets, float32
      scalar; ignored when it needs none.
  """
  start = state.step + state.next_interval
  following, interval_state = policy.next(
    state.interval_state, start, mean_loss if policy.needs_loss else None
  )
  return _without_loss(policy, state)._replace(
    round=optax.safe_increment(state.round),
    round_step=jnp.zeros_like(state.round_step),
    interval=state.next_interval,
    next_interval=following,
    synchronized=jnp.asarray(True),
    interval_state=interval_state,
  )


def is_begun(state: State) -> jax.Array:
  """Whether the round has had a step."""
  return state.round_step > 0


def cut_short(policy: intervals.IntervalPolicy, state: State) -> State:
  """Ends a round where it is, and leaves one alone that is not begun.

  Its loss is not told: the interval is decided as without one.
  """
  begun = is_begun(state)
  start = state.step + state.next_interval
  following, interval_state = policy.next(state.interval_state, start, None)
  return _without_loss(policy, state)._replace(
    round=state.round + begun.astype(jnp.int32),
    round_step=jnp.zeros_like(state.round_step),
    interval=jnp.where(begun, state.next_interval, state.interval),
    next_interval=jnp.where(begun, following, state.next_interval),
    synchronized=jnp.asarray(True),
    interval_state=_anchor.either(begun, interval_state, state.interval_state),
  )


def two_ahead(
  state: State, *, since_step: int, at_most: int | None = None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Looks two steps ahead, for a host that chooses programs.

  Args:
    state: the state between two steps.
    since_step: rounds that begin earlier count as of interval 0.
    at_most: of longer intervals this is told in their place.

  Returns:
    The interval of the next step's round, and how many steps of the round
    come before it; both of the step after it.  Int32 scalars.
  """
  start = state.step - state.round_step
  ends = state.round_step + 1 >= state.interval
  following = jnp.where(ends, state.step + 1, start)
  steps = jnp.where(ends, state.next_interval, state.interval)
  present = state.interval
  if at_most is not None:
    present, steps = (jnp.minimum(x, at_most) for x in (present, steps))
  return (
    jnp.where(start >= since_step, present, 0),
    jnp.copy(state.round_step),
    jnp.where(following >= since_step, steps, 0),
    jnp.where(ends, 0, state.round_step + 1),
  )


def _without_loss(policy: intervals.IntervalPolicy, state: State) -> State:
  if not policy.needs_loss:
    return state
  return state._replace(round_loss=jnp.zeros_like(state.round_loss))


def _given_loss(given: Any) -> jax.Array:
  if given is None:
    raise ValueError(
      "`loss` must be given to `update` when the interval is adaptive: call "
      "`optimizer.update(grads, state, params, loss=loss)`."
    )
  if jnp.shape(given) != ():
    raise ValueError(
      "`loss` must be a scalar, the mean over this worker's batch, got shape "
      f"{jnp.shape(given)}."
    )
  return _anchor.scalar(given)
