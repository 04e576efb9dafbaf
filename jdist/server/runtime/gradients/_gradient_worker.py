"""A worker's side of plain gradients."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist.server import _gradient_learner
from jdist.server.h_ps import _local_step
from jdist.server.runtime.gradients import _gradient_messages

PyTree = Any


class GradientWorker:
  """Computes gradients of what it was sent, and encodes them.

  What its feedback keeps stays here.  With a `local_step` a worker whose last
  gradient is not yet in what it was sent takes the next one where that step
  leads, as `GradientLearner`.

  Args:
    loss_fn: as of `training.make_step`; it heeds a batch's `"mask"`.
    params: of the shapes that are sent.
    samples: where batches come from.
    plans: of messages, `message_plans(...)`.
    number: of this worker, from 0.
    num_workers: of all.
    sizes: to which batches are padded; each is compiled beforehand.  A task
      that memory does not hold at once comes with the number of batches into
      which it is cut (`server.Reply.passes`), each padded to one of these.
    model_state: of the shapes that are sent.
    seed: of the random numbers in the loss, and of the rounding.
    local_step: in front of what it was sent; none without it.
  """

  def __init__(
    self,
    loss_fn: Callable[..., Any],
    params: PyTree,
    samples: _gradient_learner.Samples,
    plans: _gradient_messages.MessagePlans,
    *,
    number: int,
    num_workers: int,
    sizes: Sequence[int],
    model_state: PyTree | None = None,
    seed: int = 0,
    local_step: _local_step.LocalStep | None = None,
  ):
    self._plans, self._samples, self._number = plans, samples, number
    self._sizes = sorted(set(sizes))
    ahead = local_step and local_step.without_rate()

    def program(passes: int) -> Callable[..., Any]:
      return _gradient_messages.gradient_program(loss_fn, ahead, passes)

    self._program = program
    self._held = jax.tree.map(jnp.array, params)
    self._model_state = jax.tree.map(
      jnp.array, {} if model_state is None else model_state
    )
    self._layouts = [
      _gradient_messages.layout(codec, params, self._model_state)
      for codec in plans.pull
    ]
    self._key = jax.random.key(seed)
    self._local_step = local_step
    self._first_push = _gradient_messages.first_states(
      plans, params, seed, number, num_workers
    )[0]
    self._push_state = self._first_push
    self._last = () if local_step is None else local_step.init(self._held)
    self._last_task = -1
    self._last_version: int | None = None

  def prepare(self) -> None:
    """Compiles the gradient of each size, and each plan's messages."""
    pushed = None
    for size in self._sizes:
      batch = self._samples.batch(self._number, 0, 1, size=size)
      pushed, *_ = self._compute(batch, 0, self._control(0, 0), 1)
    for codec in self._plans.push:
      encode = _gradient_messages.encode_push(codec)
      jax.block_until_ready(encode(pushed, self._push_state))
    for plan, codec in enumerate(self._plans.pull):
      empty = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype), self._layouts[plan]
      )
      receive = _gradient_messages.receive_pull(codec, plan == 0)
      jax.block_until_ready(receive(empty, self._held))

  def _control(self, version: int, settled: int) -> np.ndarray | None:
    """Says to a local step whether the last gradient is in what was sent."""
    if self._local_step is None:
      return None
    return self._local_step.control(
      version,
      leads=self._last_task > settled,
      last=self._last_version,
    )

  def _compute(
    self, batch: PyTree, task: int, control: np.ndarray | None, passes: int
  ) -> Any:
    return self._program(passes)(
      self._held,
      self._model_state,
      self._last,
      control,
      batch,
      self._key,
      np.uint32(task),
    )

  def compute(
    self, header: dict[str, Any], payload: np.ndarray
  ) -> tuple[dict[str, Any], np.ndarray]:
    """Takes the gradient of a task's batch, of what is held after it."""
    plan, task = header["pull_plan"], header["task"]
    more, samples = header["more"], header["samples"]
    if plan is not None:
      receive = _gradient_messages.receive_pull(
        self._plans.pull[plan], plan == 0
      )
      message = _gradient_messages.tree_of_bytes(payload, self._layouts[plan])
      self._held, self._model_state = receive(message, self._held)
    passes = header.get("passes", 1)
    size = passes * _gradient_messages.padded_size(
      self._sizes, math.ceil(samples / passes)
    )
    batch = self._samples.batch(self._number, more["start"], samples, size=size)
    control = self._control(header["version"], more["settled"])
    pushed, loss, self._last = self._compute(batch, task, control, passes)
    self._last_task, self._last_version = task, header["version"]
    encode = _gradient_messages.encode_push(
      self._plans.push[header["push_plan"]]
    )
    found, self._push_state = encode(pushed, self._push_state)
    return {"loss": float(loss)}, _gradient_messages.tree_bytes(found)

  def restart(self) -> None:
    """Forgets its last gradient; the residual of its feedback stays."""
    self._last_task, self._last_version = -1, None

  def save(self) -> np.ndarray:
    """Returns the feedback's state as bytes."""
    return _gradient_messages.tree_bytes(self._push_state)

  def load(self, state: np.ndarray) -> None:
    """Takes over what `save` returned."""
    self._push_state = _gradient_messages.tree_of_bytes(state, self._first_push)
