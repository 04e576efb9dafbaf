"""The server's side of plain gradients: parameters, optimizer, messages."""

import collections
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks
from jdist.server import _messages, _server_programs
from jdist.server.runtime.gradients import _gradient_messages
from jdist.server.runtime.gradients._gradient_messages import Pushed

PyTree = Any


class GradientServer:
  r"""Decodes workers' gradients, makes updates, encodes what they are sent.

  .. math:: \theta \leftarrow \theta + \mathrm{optimizer}\Bigl(\sum_k w_k
            \, D(m_k)\Bigr)

  With plans of bits a pull sends the difference from what its worker holds, of
  which a copy is kept here for each: the memory of the parameters, once for
  each worker.  The first pull, and the first after a return, is exact.  A push
  of another size than a gradient's message has, or with a number that is not
  finite, is refused.

  Args:
    optimizer: any Optax chain; its schedules count updates.
    params: the first parameters.
    plans: of messages, `message_plans(...)`.
    workers: the names of all workers, in the order of the data's numbers.
    shared: whether all workers take from one stream of samples.
    model_state: the first batch statistics, if any.
    seed: of the rounding of messages.

  Attributes:
    model: parameters and states now.
    position: samples given out, by worker; one entry, 0, of a shared stream.
    samples: in updates.
  """

  def __init__(
    self,
    optimizer: optax.GradientTransformation,
    params: PyTree,
    plans: _gradient_messages.MessagePlans,
    *,
    workers: Sequence[str],
    shared: bool = True,
    model_state: PyTree | None = None,
    seed: int = 0,
  ):
    checks.check_optimizer("optimizer", optimizer)
    model_state = {} if model_state is None else model_state
    self.model = _server_programs.ServerModel(
      jax.tree.map(jnp.array, params),
      optimizer.init(params),
      jax.tree.map(jnp.array, model_state),
    )
    self.plans, self._shared = plans, shared
    self._numbers = {name: i for i, name in enumerate(workers)}
    self._layouts = [
      _gradient_messages.layout(codec, params, model_state)
      for codec in plans.push
    ]
    self._pull_states = [
      _gradient_messages.first_states(plans, params, seed, i, len(workers))[1]
      for i in range(len(workers))
    ]
    self._held: dict[int, PyTree] = {}
    self._exact: np.ndarray | None = None
    self._settled: dict[int, int] = {}
    # Of tasks that are out: number of the worker, samples, plan of the push.
    self._tasks: dict[int, tuple[int, int, int]] = {}
    self._pushes: dict[int, Pushed] = {}
    self._losses: dict[int, float] = {}
    self.position: collections.Counter[int] = collections.Counter()
    self.samples = 0
    self.last_losses: collections.deque[tuple[int, float]] = collections.deque(
      maxlen=1000
    )
    self._programs = _update_programs(optimizer)

  def prepare(self) -> None:
    """Compiles what messages and updates need, before the first of them."""
    model, state = self.model, self._pull_states[0]
    pushed = None
    for codec, kinds in zip(self.plans.push, self._layouts, strict=True):
      empty = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), kinds)
      pushed, _ = _gradient_messages.decode_push(codec)(empty, model.params)
    for plan, codec in enumerate(self.plans.pull):
      message, _ = _gradient_messages.encode_pull(codec, plan == 0)(
        model.params,
        None if plan == 0 else model.params,
        state,
        model.model_state,
      )
      _gradient_messages.receive_pull(codec, plan == 0)(message, model.params)
    first, add, update = self._programs
    one = np.float32(1.0)
    total = add(first(pushed, one, one), pushed, one, one)
    jax.block_until_ready(update(model, total, one))

  def reply(
    self, reply: _messages.Reply
  ) -> tuple[dict[str, Any], np.ndarray | None]:
    """Takes samples for a task, and encodes the parameters."""
    worker = self._numbers[str(reply.worker)]
    whose = 0 if self._shared else worker
    more = {
      "start": self.position[whose],
      # Whether a worker is ahead of what it was sent.
      "settled": self._settled.get(worker, -1),
    }
    self.position[whose] += reply.samples
    self._tasks[reply.task] = (worker, reply.samples, reply.push_plan)
    return more, self._encode(worker, reply.pull_plan)

  def _encode(self, worker: int, plan: int | None) -> np.ndarray | None:
    model = self.model
    if plan is None:
      return None
    codec = self.plans.pull[plan]
    encode = _gradient_messages.encode_pull(codec, plan == 0)
    if plan == 0:
      # The same for all workers of a barrier.
      if self._exact is None:
        message, _ = encode(
          model.params, None, self._pull_states[worker], model.model_state
        )
        self._exact = _gradient_messages.tree_bytes(message)
      if len(self.plans.pull) > 1:
        self._held[worker] = model.params
      return self._exact
    held = self._held[worker]
    message, self._pull_states[worker] = encode(
      model.params, held, self._pull_states[worker], model.model_state
    )
    self._held[worker], _ = _gradient_messages.receive_pull(codec, False)(
      message, held
    )
    return _gradient_messages.tree_bytes(message)

  def push(self, task: int, more: dict[str, Any], payload: np.ndarray) -> None:
    """Decodes a push, or refuses it."""
    plan = self._tasks[task][2]
    message = _gradient_messages.tree_of_push(payload, self._layouts[plan])
    pushed, finite = _gradient_messages.decode_push(self.plans.push[plan])(
      message, self.model.params
    )
    self._losses[task] = _gradient_messages.finite_loss(more, finite)
    self._pushes[task] = pushed

  def apply(self, update: _messages.Apply) -> None:
    """Makes an update of pushes, summed in the protocol's order."""
    tasks = [self._tasks.pop(task) for task in update.tasks]
    whole = sum(samples for _, samples, _ in tasks)
    self.samples += whole
    first, add, make = self._programs
    total, loss = None, 0.0
    for number, weight, (worker, samples, _) in zip(
      update.tasks, update.weights, tasks, strict=True
    ):
      pushed = self._pushes.pop(number)
      part = samples / whole
      loss += part * self._losses.pop(number)
      self._settle(worker, number)
      factors = np.float32(weight), np.float32(part)
      if total is None:
        total = first(pushed, *factors)
      else:
        total = add(total, pushed, *factors)
    self.model = make(self.model, total, np.float32(loss))
    self._exact = None
    self.last_losses.append((self.samples, loss))

  def _settle(self, worker: int, task: int) -> None:
    self._settled[worker] = max(self._settled.get(worker, -1), task)

  def discard(self, task: int) -> None:
    """Drops a task, and its push if it is here."""
    worker, _, _ = self._tasks.pop(task)
    self._settle(worker, task)
    self._pushes.pop(task, None)
    self._losses.pop(task, None)

  def leave(self, worker: _messages.Worker) -> None:
    """Forgets what a worker holds."""
    self._held.pop(self._numbers[str(worker)], None)

  def save(self) -> tuple[dict[str, Any], np.ndarray]:
    """Returns model, pushes that no update has used, and positions.

    Not what workers hold: they begin with exact parameters.
    """
    notes = {
      "samples": self.samples,
      "position": sorted(self.position.items()),
      "tasks": [[task, *x] for task, x in self._tasks.items()],
      "pushes": [[task, self._losses[task]] for task in self._pushes],
    }
    tree = (self.model, self._pull_states, list(self._pushes.values()))
    return notes, _gradient_messages.tree_bytes(tree)

  def load(self, notes: dict[str, Any], payload: np.ndarray) -> None:
    """Takes over what `save` returned."""
    one = Pushed(self.model.params, self.model.model_state)
    like = (self.model, self._pull_states, [one] * len(notes["pushes"]))
    found = _gradient_messages.tree_of_bytes(payload, like)
    self.model, self._pull_states, pushes = jax.tree.map(jnp.asarray, found)
    self.samples = notes["samples"]
    self.position = collections.Counter(dict(map(tuple, notes["position"])))
    self._tasks = {task: tuple(x) for task, *x in notes["tasks"]}
    self._pushes = {
      task: pushed
      for (task, _), pushed in zip(notes["pushes"], pushes, strict=True)
    }
    self._losses = dict(map(tuple, notes["pushes"]))
    self._exact = None

  def snapshot(self) -> np.ndarray:
    """Returns the model's bytes, for `tree_of_bytes`."""
    return _gradient_messages.tree_bytes(
      (self.model.params, self.model.model_state)
    )

  def totals(self) -> dict[str, Any]:
    """Returns the samples in updates, and the last of their losses."""
    return {"samples": self.samples, "losses": list(self.last_losses)[-50:]}


@functools.lru_cache(maxsize=16)
def _update_programs(optimizer: optax.GradientTransformation) -> Any:
  """Compiles the sum of weighted pushes, and the update by it."""
  optimizer = optax.with_extra_args_support(optimizer)

  def scaled(pushed: Pushed, weight: jax.Array, part: jax.Array) -> Pushed:
    change = jax.tree.map(
      lambda x: (
        part.astype(x.dtype) * x if jnp.issubdtype(x.dtype, jnp.floating) else x
      ),
      pushed.change,
    )
    grads = jax.tree.map(lambda g: weight.astype(g.dtype) * g, pushed.grads)
    return Pushed(grads, change)

  def add(
    total: Pushed, pushed: Pushed, weight: jax.Array, part: jax.Array
  ) -> Pushed:
    own = scaled(pushed, weight, part)
    change = jax.tree.map(
      lambda t, x: t + x if jnp.issubdtype(x.dtype, jnp.floating) else x,
      total.change,
      own.change,
    )
    return Pushed(jax.tree.map(jnp.add, total.grads, own.grads), change)

  def update(
    model: _server_programs.ServerModel, total: Pushed, loss: jax.Array
  ) -> _server_programs.ServerModel:
    updates, opt_state = optimizer.update(
      total.grads, model.opt_state, model.params, loss=loss, value=loss
    )
    model_state = jax.tree.map(
      lambda x, c: x + c if jnp.issubdtype(x.dtype, jnp.floating) else c,
      model.model_state,
      total.change,
    )
    params = optax.apply_updates(model.params, updates)
    return _server_programs.ServerModel(params, opt_state, model_state)

  return jax.jit(scaled), jax.jit(add), jax.jit(update)
