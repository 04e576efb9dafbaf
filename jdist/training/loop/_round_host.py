"""The host's part of a round, for a user's own training loop."""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdist import collectives, transforms
from jdist.states import PyTree
from jdist.training.loop import _programs


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
    self._choices = _programs.Programs(stream_steps, host_rounds).for_state(
      opt_state
    )
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
