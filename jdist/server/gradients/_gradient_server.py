"""The server's learner of plain gradients: parameters, optimizer, messages."""

import collections
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks
from jdist.server import _messages
from jdist.server.gradients import _gradient_messages, _learner, _merge
from jdist.server.gradients._merge import Pushed

PyTree = Any


class GradientServer:
  r"""Decodes workers' gradients, updates the model, encodes the parameters.

  A task's gradient is that of the parameters which were sent for it,
  :math:`g_k = \nabla L(\theta_{t - \tau_k}; B_k)`, as its message decodes:

  .. math:: \theta \leftarrow \theta + \mathrm{optimizer}\Bigl(\sum_k w_k
            \bigl(g_k + \lambda \, g_k \odot g_k \odot
            (\theta - \theta_{t - \tau_k})\bigr)\Bigr)

  Batch statistics move by the mean of the workers' changes, weighted by
  samples.  With plans of bits a pull sends the difference from what its worker
  holds, of which the server keeps a copy for each worker.  The first pull, and
  the first after a return, is exact.  A push whose size is not that of a
  gradient's message, or with a number that is not finite, is refused.

  Args:
    optimizer: any Optax chain; its schedules count updates.
    params: the first parameters.
    plans: codecs of the messages, `message_plans(...)`.
    workers: the names of all workers, in the order of the data's numbers.
    shared: whether all workers take from one stream of samples.
    model_state: the first batch statistics, if any.
    seed: seed of the rounding of messages.
    compensation: strength lambda >= 0 of the delay compensation; 0 turns it
      off.  With it the server keeps the parameters of tasks that are out.

  Attributes:
    model: parameters and states now.
    position: samples given out, by worker; one entry, 0, of a shared stream.
    num_workers: number of all workers.
    tasks: tasks that are out, by number: the worker's number, samples, and
      the plan of the push.
    samples: samples in updates.
    losses: `(samples so far, loss)` of the last updates, at most 1,000.

  Raises:
    ValueError: when an argument is not as described.

  References:
    Zheng et al., Asynchronous Stochastic Gradient Descent with Delay
    Compensation (arXiv 1609.08326): DC-ASGD-c, lambda constant.
  """

  def __init__(
    self,
    optimizer: optax.GradientTransformation,
    params: PyTree,
    plans: _gradient_messages.MessagePlans,
    *,
    workers: Sequence[_messages.Worker],
    shared: bool = True,
    model_state: PyTree | None = None,
    seed: int = 0,
    compensation: float = 0.0,
  ):
    checks.check_optimizer("optimizer", optimizer)
    checks.check_number("compensation", compensation)
    checks.check_seed(seed)
    _gradient_messages.check_names(workers)
    plans.check_fits(params)
    model_state = {} if model_state is None else model_state
    self.model = _learner.ServerModel(
      # A copy: the caller may overwrite or donate its own arrays.
      jax.tree.map(jnp.array, params),
      optimizer.init(params),
      jax.tree.map(jnp.array, model_state),
    )
    self.plans, self._shared = plans, shared
    self._compensation = compensation
    self.num_workers = len(workers)
    self._numbers = {name: i for i, name in enumerate(workers)}
    self._layouts = [
      _gradient_messages.layout(codec, params, model_state)
      for codec in plans.push
    ]
    self._pull_states = [
      _gradient_messages.first_states(plans, params, seed, i, len(workers))[1]
      for i in range(self.num_workers)
    ]
    # Exact parameters are encoded once for all workers that wait at a barrier.
    # The model is kept with them, since users may replace `model`.
    self._exact: tuple[PyTree, PyTree] | None = None
    # Parameters as each worker has them, by its number.
    self._held: dict[int, PyTree] = {}
    # With compensation, the parameters that were sent for tasks still out.
    self._read: dict[int, PyTree] = {}
    self._settled: dict[int, int] = {}
    self.tasks: dict[int, tuple[int, int, int]] = {}
    self._pushes: dict[int, Pushed] = {}
    self._losses: dict[int, float] = {}
    self.position: collections.Counter[int] = collections.Counter()
    self.samples = 0
    self.losses: collections.deque[tuple[int, float]] = collections.deque(
      maxlen=1000
    )
    self._update = _update_program(optimizer, compensation)

  def prepare(self) -> None:
    """Compiles what messages and updates need, before the first of them."""
    model, state = self.model, self._pull_states[0]
    # Compiled from empty messages: a first push that had to wait for the
    # compiler would look like a slow worker to a protocol that measures.
    for codec, kinds in zip(self.plans.push, self._layouts, strict=True):
      empty = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), kinds)
      pushed, _ = _gradient_messages.decode_push(codec)(empty, model.params)
    for plan, codec in enumerate(self.plans.pull):
      message, _ = _gradient_messages.encode_pull(codec, plan == 0)(
        model.params, model.params, state, model.model_state
      )
      _gradient_messages.receive_pull(codec, plan == 0)(message, model.params)
    if self._compensation:
      pushed = pushed._replace(read=model.params)
    for width in _merge.widths(self.num_workers):
      factors = np.zeros((2, width), np.float32)
      jax.block_until_ready(
        self._update(model, [pushed] * width, factors, np.float32(1.0))
      )

  def reply(self, reply: _messages.Reply) -> tuple[dict[str, Any], Any]:
    """Takes samples for a task, and encodes the parameters."""
    worker = self._numbers[reply.worker]
    whose = 0 if self._shared else worker
    more = {
      "start": self.position[whose],
      # A worker whose last task is later has a gradient that is not in these
      # parameters yet, and may take its local step.
      "settled": self._settled.get(worker, -1),
    }
    self.position[whose] += reply.samples
    self.tasks[reply.task] = (worker, reply.samples, reply.push_plan)
    payload = self._encode(worker, reply.pull_plan)
    if self._compensation:
      self._read[reply.task] = self._held[worker]
    return more, payload

  def _encode(self, worker: int, plan: int | None) -> PyTree:
    model = self.model
    if plan is None:
      return None
    codec, whole = self.plans.pull[plan], plan == 0
    if codec is None:
      if self._exact is None or self._exact[0] is not model:
        self._exact = model, (model.params, model.model_state)
      self._keep(worker, model.params)
      return self._exact[1]
    encode = _gradient_messages.encode_pull(codec, whole)
    held = model.params if whole else self._held[worker]
    message, self._pull_states[worker] = encode(
      model.params, held, self._pull_states[worker], model.model_state
    )
    # The worker runs the same program, so both hold the same bits.
    receive = _gradient_messages.receive_pull(codec, whole)
    self._keep(worker, receive(message, held)[0])
    return message

  def _keep(self, worker: int, held: PyTree) -> None:
    """Keeps what a worker holds where a difference or a delay asks for it."""
    if len(self.plans.pull) > 1 or self._compensation:
      self._held[worker] = held

  def push(self, task: int, more: dict[str, Any], payload: Any) -> None:
    """Decodes a push, or refuses it."""
    plan = self.tasks[task][2]
    message = _gradient_messages.tree_of_push(payload, self._layouts[plan])
    pushed, finite = _gradient_messages.decode_push(self.plans.push[plan])(
      message, self.model.params
    )
    self._losses[task] = _gradient_messages.finite_loss(more, finite)
    self._pushes[task] = pushed

  def apply(self, update: _messages.Apply) -> None:
    """Updates the model by pushes, summed in the protocol's order."""
    tasks = [self.tasks.pop(task) for task in update.tasks]
    whole = sum(samples for _, samples, _ in tasks)
    self.samples += whole
    pushes, parts, loss = [], [], 0.0
    for number, (worker, samples, _) in zip(update.tasks, tasks, strict=True):
      pushed = self._pushes.pop(number)
      # DC-ASGD compensates the decoded gradient, by the parameters before this
      # update: the server alone knows both.
      if self._compensation:
        pushed = pushed._replace(read=self._read.pop(number))
      pushes.append(pushed)
      parts.append(samples / whole)
      loss += parts[-1] * self._losses.pop(number)
      self._settle(worker, number)
    # In the protocol's order, whatever the order of the pushes: sums of floats
    # depend on it, and equal runs must end with equal bits.
    pushes, factors = _merge.narrowed(
      pushes, update.weights, parts, self.num_workers, self.model.params,
      self._compensation,
    )  # fmt: skip
    self.model = self._update(self.model, pushes, factors, np.float32(loss))
    self.losses.append((self.samples, loss))

  def _settle(self, worker: int, task: int) -> None:
    self._settled[worker] = max(self._settled.get(worker, -1), task)

  def discard(self, task: int) -> None:
    """Drops a task, and its push if that has been decoded."""
    self._settle(self.tasks.pop(task)[0], task)
    for kept in (self._pushes, self._losses, self._read):
      kept.pop(task, None)

  def leave(self, worker: _messages.Worker) -> None:
    """Forgets what a worker holds."""
    self._held.pop(self._numbers[worker], None)

  def save(self, *, whole: bool = False) -> tuple[dict[str, Any], np.ndarray]:
    """Returns model, pushes that no update has used, and positions."""
    # A live server's workers begin anew, so that tasks without a push are lost
    # with what was sent for them.
    read = sorted(self._read if whole else self._read.keys() & self._pushes)
    held = sorted(self._held) if whole else []
    notes = {
      "samples": self.samples,
      "position": sorted(self.position.items()),
      "tasks": [[task, *x] for task, x in self.tasks.items()],
      "pushes": [[task, self._losses[task]] for task in self._pushes],
      "settled": sorted(self._settled.items()),
      "read": read,
      "held": held,
    }
    tree = (
      self.model,
      self._pull_states,
      list(self._pushes.values()),
      [self._read[task] for task in read],
      [self._held[worker] for worker in held],
    )
    return notes, _gradient_messages.tree_bytes(tree)

  def load(self, notes: dict[str, Any], payload: np.ndarray) -> None:
    """Restores what `save` returned."""
    params, _, model_state = self.model
    like = (
      self.model,
      self._pull_states,
      [Pushed(params, model_state)] * len(notes["pushes"]),
      [params] * len(notes["read"]),
      [params] * len(notes["held"]),
    )
    self.model, self._pull_states, pushes, read, held = jax.tree.map(
      jnp.asarray, _gradient_messages.tree_of_bytes(payload, like)
    )
    self.samples = notes["samples"]
    self.position = collections.Counter(dict(map(tuple, notes["position"])))
    self.tasks = {task: tuple(x) for task, *x in notes["tasks"]}
    self._losses = dict(map(tuple, notes["pushes"]))
    self._pushes = dict(zip(self._losses, pushes, strict=True))
    self._settled = dict(map(tuple, notes["settled"]))
    self._read = dict(zip(notes["read"], read, strict=True))
    self._held = dict(zip(notes["held"], held, strict=True))

  def snapshot(self) -> np.ndarray:
    """Returns the model's bytes, for `tree_of_bytes`."""
    return _gradient_messages.tree_bytes(
      (self.model.params, self.model.model_state)
    )


@functools.lru_cache(maxsize=16)
def _update_program(
  optimizer: optax.GradientTransformation, compensation: float
) -> Any:
  """Compiles an update by all of its pushes."""
  optimizer = optax.with_extra_args_support(optimizer)

  @jax.jit
  def update(
    model: _learner.ServerModel,
    pushes: Sequence[Pushed],
    factors: jax.Array,
    loss: jax.Array,
  ) -> _learner.ServerModel:
    total = _merge.merge(pushes, factors, model.params, compensation)
    updates, opt_state = optimizer.update(
      total.grads, model.opt_state, model.params, loss=loss, value=loss
    )
    model_state = jax.tree.map(
      lambda x, c: x + c if _merge.is_number(x) else c,
      model.model_state,
      total.change,
    )
    params = optax.apply_updates(model.params, updates)
    return _learner.ServerModel(params, opt_state, model_state)

  return update
