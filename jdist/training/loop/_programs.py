"""The programs of a step, and the choice of the next one.

A program depends on the number of sub-tensors that the step sends, and on
whether it ends a round. The host chooses it without waiting for the device,
because the state holds the places of the next two updates in their rounds.
"""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist import checks, collectives, transforms
from jdist.states import PyTree

# Without a decision of the host the device ends rounds.
DEVICE = transforms.Control()


class Choice(NamedTuple):
  """The static arguments for which a step is compiled."""

  control: transforms.Control = DEVICE
  # Whether the round's end sends nothing, because all was streamed before.
  idle: bool = False


class Programs:
  """The programs of a run, and the choice between them."""

  def __init__(
    self, stream_steps: Sequence[int], host_rounds: bool | None = None
  ):
    """Checks the numbers of steps; with `host_rounds=None` a state decides."""
    found = {
      checks.check_int(f"stream_steps[{i}]", number, 1)
      for i, number in enumerate(
        checks.check_list("stream_steps", stream_steps, "ints >= 1")
      )
    }
    self.stream_steps = tuple(sorted(found))
    self.host_rounds = host_rounds

  def for_state(self, opt_state: Any) -> "Programs":
    """Decides from a state, or its shapes, whether the host ends its rounds."""
    if self.stream_steps and not transforms.streams(opt_state):
      raise ValueError(
        "`stream_steps` must be empty for an optimizer that streams nothing, "
        f"got {self.stream_steps}: each is a program, and none would run. "
        "Leave it out, or build the optimizer with "
        "`overlap=Delayed(stream=Stream())`."
      )
    can = jax.eval_shape(transforms.rounds_ahead, opt_state) is not None
    if self.host_rounds and not can:
      raise ValueError(
        "`host_rounds` must be False for an optimizer whose rounds no host "
        "ends, got True. Leave it out: the loop ends rounds where it can."
      )
    ends = can if self.host_rounds is None else self.host_rounds
    return Programs(self.stream_steps, ends)

  def needed(self, due: int, undelayed: bool) -> tuple[Choice, ...]:
    """Returns the programs that a run without fragments may need.

    Args:
      due: The number of updates of a round after which a mean is applied; 0 if
        it is applied at the round's end.
      undelayed: Whether the device ends the first rounds, without a delay.
    """
    places = [(-1, 0, 1)] if undelayed else []
    # Longer rounds than these need no other programs.
    for interval in range(1, max(due, *self.stream_steps, 1) + 3):
      window = min(interval, due) or interval
      places += [(window, offset, interval) for offset in range(interval)]
    chosen = [self._one(*place) for place in places]
    return tuple({choice.control: choice for choice in chosen}.values())

  @property
  def at_once(self) -> tuple[Choice, ...]:
    """The programs of rounds whose means are sent whole, when they are due."""
    if self.stream_steps or not self.host_rounds:
      return (self._one(-1, 0, 1),)
    return (self._one(1, 0, 1), self._one(2, 0, 2))

  def fragments_at_once(self, fragments: int) -> Choice:
    """Returns the choice for fragments that are sent whole, when due."""
    if not self.stream_steps:
      return Choice()
    one = transforms.Control(stream_steps=None)
    return Choice(transforms.Control(fragments=(one,) * fragments))

  def choose(self, place: np.ndarray) -> Choice:
    """Chooses the program of one step.

    Args:
      place: The window, offset and interval of the update, [3] or [fragments,
        3], see `transforms.rounds_ahead`.

    >>> programs = Programs((1, 2, 4, 8), False)
    >>> programs.choose(np.array([6, 0, 6])).control.stream_steps
    4
    >>> programs.choose(np.array([6, 4, 6])).idle
    True
    """
    if place.ndim == 1:
      return self._one(*map(int, place))
    each = [self._one(*map(int, row)) for row in place]
    if not self.host_rounds and not self.stream_steps:
      return Choice()
    return Choice(
      transforms.Control(fragments=tuple(one.control for one in each)),
      all(one.idle for one in each),
    )

  def _one(self, window: int, offset: int, interval: int) -> Choice:
    # A negative window marks a round that the device ends, as the first one is
    # with a delayed method.
    host_ends = self.host_rounds and window >= 0
    steps: Any = "fixed"
    idle = False
    if self.stream_steps:
      fitting = [s for s in self.stream_steps if s <= window]
      steps = fitting[-1] if fitting and offset < fitting[-1] else None
      # If no number of steps fits into the window, the round's end sends.
      idle = steps is None and (bool(fitting) or window == 0)
    control = transforms.Control(
      round_ends=offset + 1 >= interval if host_ends else None,
      arrives=offset + 1 == window if host_ends else None,
      stream_steps=steps,
    )
    return Choice(control, idle)


class RoundHost:
  """Chooses the program of each update, as `Trainer` does.

  A program depends on whether its update ends a round, and on how much of a
  streamed message it sends. The host passes both by `update(...,
  control=control)`. It never waits for the running update: meanwhile it reads
  the state before it.

  >>> import functools, jax.numpy as jnp, jdist, optax
  >>> from jdist import training
  >>> workers = jdist.workers(2, substrate="vmap")
  >>> optimizer = jdist.local_sgd(optax.sgd(0.5), 2, axis=workers.axis)
  >>> def step(w, state, control):
  ...   updates, state = optimizer.update(w, state, w, control=control)
  ...   return jdist.apply_updates(w, updates, state), state
  >>> @functools.cache
  ... def program(control):
  ...   return workers.jit(functools.partial(step, control=control))
  >>> w = workers.place(jnp.array([8.0, 4.0]))
  >>> state = workers.jit(optimizer.init)(w)
  >>> host = training.RoundHost(workers, state)
  >>> for _ in range(2):
  ...   control = host.control()
  ...   w, state = program(control)(w, state)
  ...   host.follow(state)
  ...   print(control.round_ends, w.tolist())
  False [4.0, 2.0]
  True [1.5, 1.5]
  """

  def __init__(
    self,
    workers: collectives.Workers,
    opt_state: PyTree,
    *,
    stream_steps: Sequence[int] = (),
    host_rounds: bool | None = None,
  ):
    """Reads the position of the run in its round.

    Args:
      workers: The run's workers.
      opt_state: The optimizer's state, `[workers, ...]`, before an update.
      stream_steps: As in `Trainer`, the numbers of updates in which a streamed
        message may be sent.
      host_rounds: As in `Trainer`. By default (None) the host ends rounds if
        the method allows it.

    Raises:
      ValueError: If the optimizer streams nothing although `stream_steps` is
        given, or if no host can end its rounds although `host_rounds` is True.
    """
    self._choices = Programs(stream_steps, host_rounds).for_state(opt_state)
    self._places: collections.deque[Any] = collections.deque()
    if jax.eval_shape(transforms.rounds_ahead, opt_state) is None:
      return
    ahead = workers.jit(transforms.rounds_ahead)(opt_state)
    both = np.asarray(workers.view(ahead))
    self._places.extend((both[..., 0, :], both[..., 1, :]))
    # The place of the next update is known already, that of the one after it is
    # new in each state.
    self._following = workers.jit(
      lambda state: transforms.rounds_ahead(state)[..., 1, :]  # type: ignore[index]
    )

  def control(self) -> transforms.Control:
    """Returns the control of the next update."""
    if not self._places:
      return transforms.Control()
    place = self._places[0]
    if isinstance(place, jax.Array):
      # All workers have it. A view would start a program in each step.
      place = np.asarray(place.addressable_shards[0].data)[0]
    return self._choices.choose(place).control

  def follow(self, opt_state: PyTree) -> None:
    """Takes the state that an update has returned, before it is donated."""
    if self._places:
      self._places.popleft()
      self._places.append(self._following(opt_state))
