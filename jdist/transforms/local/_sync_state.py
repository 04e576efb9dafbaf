"""State of local steps: the anchor, and a message that is being sent."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist import states
from jdist.states import PyTree
from jdist.transforms.local import _round

# A step that no run reaches: the delay has not begun yet.
NEVER = 2**30


@states.declare(
  shared=("in_flight", "arrived_loss", "due_after", "device_before")
)
class Flight(NamedTuple):
  """A message that is being sent while the next round is computed.

  Attributes:
    held: This worker's message of the last round, in its sender's form.
    in_flight: Whether `held` holds a message, bool scalar.
    arrived_loss: The mean loss that was received in this round, float32
      scalar, infinite if there was none; `()` where a mean is due at a round's
      end.
    due_after: The steps of a round after which the mean of the last round is
      due, 0 for all of them, int32 scalar, constant.
    device_before: The device ends rounds that begin before this step, int32
      scalar; it changes only where the first long round begins the delay.
  """

  held: PyTree
  in_flight: jax.Array
  arrived_loss: Any
  due_after: jax.Array
  device_before: jax.Array

  def ahead(self, clock: _round.RoundClock) -> jax.Array:
    """Returns the places of the next two updates; see `rounds_ahead`."""
    rows = clock.ahead()
    interval, offset = rows[..., 0], rows[..., 1]
    begins = jnp.stack([clock.step, clock.step + 1], -1) - offset
    due = self.due_after[..., None]
    # Where the first long round begins the delay, the state says so only once
    # that round has begun.  A host that resumes there must choose the program
    # of a round that has not.
    first_long = (self.device_before[..., None] == NEVER) & (offset == 0)
    first_long &= interval > jnp.maximum(due, 1)
    late = (begins >= self.device_before[..., None]) | first_long
    # The second of the two updates may be in a new round, in which the message
    # of the present round is sent.
    sends = (offset[..., 1] == 0) & late[..., 0]
    flying = jnp.stack([self.in_flight, self.in_flight | sends], -1)
    window = jnp.minimum(interval, due)
    window = jnp.where(flying | (offset >= window), window, 0)
    window = jnp.where(due > 0, window, interval)
    return jnp.stack([jnp.where(late, window, -1), offset, interval], -1)


@states.declare(shared=("anchor", "memory", "kept", "iterates"))
class SyncState(NamedTuple):
  """State of a `Synchronizer`.

  Attributes:
    clock: The round's clock.
    anchor: The parameters on which all workers agree, float32.
    memory: The sync rule's state, for instance the outer optimizer's.
    kept: The part of its pending progress that the worker keeps in its
      parameters, and so its intended distance from the anchor, float32 scalar;
      `()` where every round ends on the anchor.
    flight: The message that is being sent, a `Flight`; `()` without a delay.
    compression: The compression's state, `()` without one.
    iterates: The agreed distances of the inner optimizer's iterates from the
      anchor, and its agreed statistics, float32; `()` for most optimizers.
  """

  clock: _round.RoundClock
  anchor: PyTree
  memory: PyTree
  kept: Any
  flight: Any
  compression: Any
  iterates: Any = ()

  @property
  def streams(self) -> bool:
    """Whether a message is sent in parts, some in every step."""
    held = getattr(self.flight, "held", None)
    return bool(getattr(type(held), "streams", False))

  @property
  def due_after(self) -> jax.Array | int:
    """After how many steps of a round a mean is due; 0 at its end."""
    return getattr(self.flight, "due_after", 0)

  def ahead(self) -> jax.Array:
    """Returns the places of the next two updates; see `rounds_ahead`."""
    if self.flight == ():
      return self.clock.ahead()
    return self.flight.ahead(self.clock)


class Step(NamedTuple):
  """A worker's local step, before and after the workers synchronize."""

  updates: PyTree
  inner: PyTree
  sync: SyncState


@states.declare(rounds=True, drains=True)
class LocalStepsState(NamedTuple):
  """State of `local_steps`.

  Attributes:
    inner: The inner optimizer's state, each worker its own.
    sync: The clock, the anchor, and the message that is being sent.
  """

  inner: PyTree
  sync: SyncState

  @property
  def clock(self) -> _round.RoundClock:
    """The round's clock."""
    return self.sync.clock

  @property
  def anchor(self) -> PyTree:
    """The parameters on which all workers agree, float32."""
    return self.sync.anchor
