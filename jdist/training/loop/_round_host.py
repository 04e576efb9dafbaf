"""The host's part of a round, for a loop of one's own."""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdist import collectives as _collectives
from jdist import transforms
from jdist.training.loop import _programs

PyTree = Any


class RoundHost:
  """Chooses the program of each update, as `Trainer` does.

  Whether an update ends its round, and how much of a streamed message goes in
  it, shape its program.  The host says so by `update(..., control=control)` and
  waits for nothing: while one update runs it reads the state before it.

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
    workers: _collectives.Workers,
    opt_state: PyTree,
    *,
    stream_steps: Sequence[int] = (),
    host_rounds: bool | None = None,
  ):
    """Reads where in its round the run is.

    Args:
      workers: the run's workers.
      opt_state: the optimizer's state, `[workers, ...]`, before an update.
      stream_steps: as of `Trainer`: in how many updates a streamed message may
        be sent.
      host_rounds: as of `Trainer`; None (default) ends rounds where a host can.

    Raises:
      ValueError: when the optimizer streams nothing or its rounds no host ends,
        and it is asked for.
    """
    self._workers = workers
    self._choices = _programs.Programs(stream_steps, host_rounds).for_state(
      opt_state
    )
    self._places: collections.deque[Any] = collections.deque()
    if jax.eval_shape(transforms.rounds_ahead, opt_state) is None:
      return
    ahead = workers.jit(transforms.rounds_ahead)(opt_state)
    both = np.asarray(workers.view(ahead))
    self._places.extend((both[..., 0, :], both[..., 1, :]))
    self._following = workers.jit(
      lambda state: transforms.rounds_ahead(state)[..., 1, :]  # type: ignore[index]
    )

  def control(self) -> transforms.Control:
    """Returns the control of the next update."""
    if not self._places:
      return transforms.Control()
    place = self._places[0]
    if isinstance(place, jax.Array):
      place = np.asarray(self._workers.view(place))
    return self._choices.choose(place).control

  def follow(self, opt_state: PyTree) -> None:
    """Notes the state that an update has returned, before it is donated."""
    if self._places:
      self._places.popleft()
      self._places.append(self._following(opt_state))
