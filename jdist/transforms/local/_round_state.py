"""State of rounds: a clock, a message under way, the anchor."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import states
from jdist.transforms import intervals

PyTree = Any

# A step that no run reaches: no long round has begun the delay.
NEVER = 2**30


@states.declare(
  shared=(
    "step",
    "round",
    "round_step",
    "interval",
    "next_interval",
    "synchronized",
    "interval_state",
  )
)
class RoundClock(NamedTuple):
  """A worker's position in its rounds.

  Attributes:
    step: local steps so far, int32 scalar.
    round: rounds so far, int32 scalar.
    round_step: local steps so far in this round, int32 scalar.
    interval: local steps of this round, int32 scalar.
    next_interval: local steps of the next round, int32 scalar: a host that
      prepares for it can read it now.
    synchronized: whether the last update ended a round, bool scalar.
    interval_state: the interval policy's state.
    round_loss: sum of this round's losses, float32 scalar, each worker its
      own; `()` when the interval needs no loss.
  """

  step: jax.Array
  round: jax.Array
  round_step: jax.Array
  interval: jax.Array
  next_interval: jax.Array
  synchronized: jax.Array
  interval_state: PyTree
  round_loss: Any

  def is_over(self) -> jax.Array:
    """Returns whether the round has had its steps."""
    return self.round_step >= self.interval

  def is_begun(self) -> jax.Array:
    """Returns whether the round has had a step."""
    return self.round_step > 0

  def mean_loss(self) -> Any:
    """The round's mean loss, this worker's; `()` when none is needed."""
    if isinstance(self.round_loss, tuple):
      return ()
    return self.round_loss / self.round_step.astype(jnp.float32)

  def advance(self, loss: Any) -> "RoundClock":
    """Counts a local step, and its loss where the interval needs it."""
    clock = self._replace(
      step=optax.safe_increment(self.step),
      round_step=optax.safe_increment(self.round_step),
    )
    if isinstance(self.round_loss, tuple):
      return clock
    return clock._replace(round_loss=self.round_loss + _checked_loss(loss))

  def end(
    self, policy: intervals.IntervalPolicy, mean_loss: Any
  ) -> "RoundClock":
    """Ends a round, and decides the interval after the next one.

    By the workers' mean loss, float32 scalar, if the policy needs one.
    """
    following, interval_state = _next(
      policy, self, mean_loss if policy.needs_loss else None
    )
    return self._without_loss()._replace(
      round=optax.safe_increment(self.round),
      round_step=jnp.zeros_like(self.round_step),
      interval=self.next_interval,
      next_interval=following,
      synchronized=jnp.asarray(True),
      interval_state=interval_state,
    )

  def cut_short(self, policy: intervals.IntervalPolicy) -> "RoundClock":
    """Ends a round where it is; leaves one alone that has had no step.

    The interval is decided as without a loss.
    """
    begun = self.is_begun()
    following, interval_state = _next(policy, self, None)
    return self._without_loss()._replace(
      round=self.round + begun.astype(jnp.int32),
      round_step=jnp.zeros_like(self.round_step),
      interval=jnp.where(begun, self.next_interval, self.interval),
      next_interval=jnp.where(begun, following, self.next_interval),
      synchronized=jnp.asarray(True),
      interval_state=optax.tree.where(
        begun, interval_state, self.interval_state
      ),
    )

  def ahead(self) -> jax.Array:
    """The places of the next two updates; see `transforms.rounds_ahead`.

    As of a mean that arrives at the round's end: the window is the interval.
    """
    ends = self.round_step + 1 >= self.interval
    now, then = (
      self.interval,
      jnp.where(ends, self.next_interval, self.interval),
    )
    before = jnp.where(ends, 0, self.round_step + 1)
    rows = [now, self.round_step, now], [then, before, then]
    return jnp.stack([jnp.stack(row, -1) for row in rows], -2)

  def _without_loss(self) -> "RoundClock":
    if isinstance(self.round_loss, tuple):
      return self
    return self._replace(round_loss=jnp.zeros_like(self.round_loss))


@states.declare(
  shared=("in_flight", "arrived_loss", "due_after", "device_before")
)
class Flight(NamedTuple):
  """A message under way, part of the state of local steps.

  Attributes:
    held: this worker's message of the last round, as its sender holds it.
    in_flight: whether `held` holds one, bool scalar.
    arrived_loss: the mean loss that arrived in this round, float32 scalar,
      infinite if none has; `()` where a mean arrives at a round's end.
    due_after: the steps of a round after which the mean of the last one is due,
      0 for all of them, int32 scalar, constant.
    device_before: rounds that begin before this step the device ends, int32
      scalar; it changes only where the first long round begins the delay.
  """

  held: PyTree
  in_flight: jax.Array
  arrived_loss: Any
  due_after: jax.Array
  device_before: jax.Array

  def ahead(self, clock: RoundClock) -> jax.Array:
    """Returns the places of the next two updates; see `rounds_ahead`."""
    rows = clock.ahead()
    interval, offset = rows[..., 0], rows[..., 1]
    begins = jnp.stack([clock.step, clock.step + 1], -1) - offset
    due = self.due_after[..., None]
    # Where the first long round begins the delay the state says so only once
    # that round has begun.  A host that has resumed there must choose the
    # program of one that has not.
    first_long = (self.device_before[..., None] == NEVER) & (offset == 0)
    first_long &= interval > jnp.maximum(due, 1)
    late = (begins >= self.device_before[..., None]) | first_long
    # The second of the two updates may be in a new round, and the message under
    # way then is that of the present one.
    sends = (offset[..., 1] == 0) & late[..., 0]
    flying = jnp.stack([self.in_flight, self.in_flight | sends], -1)
    window = jnp.minimum(interval, due)
    window = jnp.where(flying | (offset >= window), window, 0)
    window = jnp.where(due > 0, window, interval)
    return jnp.stack([jnp.where(late, window, -1), offset, interval], -1)


@states.declare(shared=("anchor", "memory", "kept"))
class SyncState(NamedTuple):
  """State of a `Synchronizer`.

  Attributes:
    clock: the round's.
    anchor: the parameters all workers agree on, float32.
    memory: the sync rule's state: the outer optimizer's, for instance.
    kept: how far the worker stands beside the anchor on purpose: the part of
      its pending progress that is in its parameters, float32 scalar; `()`
      where every round ends on the anchor.
    flight: the message under way, a `Flight`; `()` without a delay.
    compression: the compression's state, `()` without one.
  """

  clock: RoundClock
  anchor: PyTree
  memory: PyTree
  kept: Any
  flight: Any
  compression: Any

  @property
  def streams(self) -> bool:
    """Returns whether a message is sent in parts, some in every step."""
    held = getattr(self.flight, "held", None)
    return bool(getattr(type(held), "streams", False))

  @property
  def due_after(self) -> jax.Array | int:
    """After how many steps of a round a mean arrives; 0 at its end."""
    return getattr(self.flight, "due_after", 0)

  def ahead(self) -> jax.Array:
    """Returns the places of the next two updates; see `rounds_ahead`."""
    if self.flight == ():
      return self.clock.ahead()
    return self.flight.ahead(self.clock)


class Step(NamedTuple):
  """A worker's local step, before and after the workers come together."""

  updates: PyTree
  inner: PyTree
  sync: SyncState


@states.declare(rounds=True, drains=True)
class LocalStepsState(NamedTuple):
  """State of `local_steps`.

  Attributes:
    inner: the inner optimizer's state, each worker its own.
    sync: the round's: clock, anchor, and what is under way.
  """

  inner: PyTree
  sync: SyncState

  @property
  def clock(self) -> RoundClock:
    """The round's clock."""
    return self.sync.clock

  @property
  def anchor(self) -> PyTree:
    """The parameters all workers agree on, float32."""
    return self.sync.anchor


def start_clock(policy: intervals.IntervalPolicy) -> RoundClock:
  """The clock before the first step; all workers begin alike."""
  interval_state = policy.init()
  zero = jnp.zeros((), jnp.int32)
  first, interval_state = policy.next(interval_state, zero, None)
  second, interval_state = policy.next(interval_state, first, None)
  # Each leaf a buffer of its own, because the state may be donated.
  first, second, interval_state = jax.tree.map(
    jnp.copy, (first, second, interval_state)
  )
  return RoundClock(
    step=zero,
    round=jnp.copy(zero),
    round_step=jnp.copy(zero),
    interval=first,
    next_interval=second,
    synchronized=jnp.asarray(True),
    interval_state=interval_state,
    round_loss=jnp.zeros((), jnp.float32) if policy.needs_loss else (),
  )


def _next(
  policy: intervals.IntervalPolicy, clock: RoundClock, loss: Any
) -> tuple[jax.Array, PyTree]:
  """The interval of the round after the next one."""
  if policy.constant is not None:
    return jnp.asarray(policy.constant, jnp.int32), clock.interval_state
  begins = clock.step + clock.next_interval
  return policy.next(clock.interval_state, begins, loss)


def _checked_loss(loss: Any) -> jax.Array:
  if loss is None:
    raise ValueError(
      "`loss` must be given to `update` when the interval is adaptive: call "
      "`optimizer.update(grads, state, params, loss=loss)`."
    )
  if jnp.shape(loss) != ():
    raise ValueError(
      "`loss` must be a scalar, the mean over this worker's batch, got shape "
      f"{jnp.shape(loss)}."
    )
  return jnp.asarray(loss).astype(jnp.float32)
