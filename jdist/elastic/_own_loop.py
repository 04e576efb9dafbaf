"""A worker of elastic rounds whose local steps are a loop of one's own."""

import queue
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jdist import server


class _EndedError(Exception):
  """The loop was left, and takes no further step."""


class OwnLoop(server.FragmentRunner):
  """Yields the state of each local step, until the server ends the run.

  `Rounds.loop` makes it.  Threads handle the messages; a merge, or a new
  beginning after this worker was taken for lost, shows in the next state:

      for state in loop:
        params, opt_state, loss = step(state.params, state.opt_state, batch)
        loop.advance(params, opt_state, loss)

  A step must not donate the parameters, of which a message may be made.
  """

  def connect(self, channel: server.Channel, name: str, depth: int) -> None:
    """Sets the connection to the server."""
    self._loop = server.WorkerLoop(channel, name, self, depth=depth)
    self._asked: queue.Queue[Any] = queue.Queue()
    self._answers: queue.Queue[Any] = queue.Queue()
    self._advanced = True

  def advance(
    self, params: Any, opt_state: Any, loss: Any, model_state: Any = None
  ) -> None:
    """Hands over a step: what it returns, and the mean loss of its samples."""
    self._advanced = True
    self._answers.put((params, opt_state, jnp.asarray(loss), model_state))

  def __iter__(self) -> Iterator[Any]:
    """Joins the run, and yields the state before each step."""
    threading.Thread(target=self._run, daemon=True).start()
    try:
      while not isinstance(found := self._asked.get(), BaseException | None):
        self._advanced = False
        yield found
        if not self._advanced:
          raise ValueError(
            "`advance` must be called once in each step of the loop, and was "
            "not: hand over the parameters, the optimizer's state and the loss."
          )
    finally:
      self._answers.put(None)
    if found is not None:
      raise found

  def _run(self) -> None:
    try:
      self._loop.run()
      self._asked.put(None)
    except BaseException as error:
      self._asked.put(error)

  def _local_step(
    self, state: Any, samples: tuple[int, int, int], key: jax.Array
  ) -> tuple[Any, jax.Array]:
    del samples, key
    self._asked.put(state)
    answer = self._answers.get()
    if answer is None:
      raise _EndedError
    params, opt_state, loss, model_state = answer
    if model_state is None:
      model_state = state.model_state
    state = state._replace(opt_state=opt_state, model_state=model_state)
    return state._replace(params=params), loss
