"""The server's learner of plain gradients: parameters, optimizer, messages."""

import collections
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks, signatures, states, transforms
from jdist.server import _messages
from jdist.server.gradients import _gradient_messages, _learner, _merge, _packed
from jdist.server.gradients._merge import Pushed
from jdist.states import PyTree


class Task(NamedTuple):
  """A task that is out; `kind` is the plan or the fragment of its push."""

  worker: int
  samples: int
  kind: int
  passes: int


class ServerLedger(_learner.ServerLearner):
  """The base of server learners: tasks that are out, and their pushes.

  A subclass has `model`, and says by `_like` what a push looks like.

  Attributes:
    decoded: Whether payloads are trees of what messages decode to, and not of
      what a channel carries.  A `Pair`, which is in one process, sets it.
    num_workers: Number of all workers.
    tasks: Tasks that are out, by number.
    position: Samples given out, by worker; one entry, 0, of a shared stream.
    samples: Samples in updates.
    losses: `(samples so far, loss)` of the last updates, at most 1,000.
  """

  model: Any
  decoded = False

  def __init__(
    self,
    workers: Sequence[_messages.Worker],
    shared: bool,
    codecs: Sequence[_gradient_messages.Codec],
  ):
    checks.check_distinct("workers", workers, "names")
    self._shared, self._codecs = shared, codecs
    self.num_workers = len(workers)
    self._numbers = {name: i for i, name in enumerate(workers)}
    self._layouts: dict[int, PyTree] = {}
    self.tasks: dict[int, Task] = {}
    self._pushes: dict[int, Pushed] = {}
    self._losses: dict[int, float] = {}
    self.position: collections.Counter[int] = collections.Counter()
    self.samples = 0
    self.losses = collections.deque[tuple[int, float]](maxlen=1000)

  def _like(self, kind: int) -> tuple[PyTree, PyTree]:
    """Returns a gradient and statistics as those in a push of a kind."""
    raise NotImplementedError

  def _give(self, reply: _messages.Reply, kind: int) -> tuple[int, int]:
    """Takes samples for a task; returns its worker's number and their start."""
    worker = self._numbers[reply.worker]
    whose = 0 if self._shared else worker
    start = self.position[whose]
    self.position[whose] = start + reply.samples
    self.tasks[reply.task] = Task(worker, reply.samples, kind, reply.passes)
    return worker, start

  def push(self, task: int, more: dict[str, Any], payload: Any) -> None:
    """Decodes a push, or refuses it."""
    kind = self.tasks[task].kind
    self._pushes[task], self._losses[task] = _gradient_messages.received_push(
      *self._kind(kind), more, payload, self._like(kind)[0]
    )

  def _kind(self, kind: int) -> tuple[_gradient_messages.Codec, PyTree]:
    """Returns the codec and the layout of a push."""
    codec = None if self.decoded else self._codecs[kind]
    if kind not in self._layouts:
      self._layouts[kind] = _gradient_messages.layout(codec, *self._like(kind))
    return codec, self._layouts[kind]

  def _empty_push(self, kind: int) -> Pushed:
    """Returns a push of zeros, whose programs `prepare` compiles."""
    codec, kinds = self._kind(kind)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), kinds)
    decode = _gradient_messages.decode_push(codec)
    return decode(zeros, self._like(kind)[0])[0]

  def _take(
    self, update: _messages.Apply
  ) -> tuple[list[Task], list[Pushed], list[float], float]:
    """Counts an update; returns tasks, pushes, parts of samples, the loss.

    They are in the protocol's order: sums of floats depend on it, and equal
    runs must end with equal bits, whatever the order of the pushes.
    """
    tasks = [self.tasks[task] for task in update.tasks]
    pushes = [self._pushes[task] for task in update.tasks]
    whole = sum(task.samples for task in tasks)
    parts = [task.samples / whole for task in tasks]
    loss = 0.0
    for number, part, task in zip(update.tasks, parts, tasks, strict=True):
      loss += part * self._losses[number]
      if number not in update.kept:
        self.samples += task.samples
        ServerLedger.discard(self, number)
    self.losses.append((self.samples, loss))
    return tasks, pushes, parts, loss

  def discard(self, task: int) -> None:
    """Drops a task, and its push if that has been decoded."""
    del self.tasks[task]
    self._pushes.pop(task, None)
    self._losses.pop(task, None)

  def _save(self) -> tuple[dict[str, Any], list[Pushed]]:
    """Returns the ledger: what JSON can hold, and the decoded pushes."""
    notes = {
      "samples": self.samples,
      "position": sorted(self.position.items()),
      "tasks": [[task, *x] for task, x in self.tasks.items()],
      "pushes": [[task, self._losses[task]] for task in self._pushes],
    }
    return notes, list(self._pushes.values())

  def _read(
    self, notes: dict[str, Any], payload: np.ndarray, tree: PyTree
  ) -> PyTree:
    """Restores the ledger; returns the tree in front of a payload's pushes."""
    self.samples = notes["samples"]
    self.position = collections.Counter(dict(map(tuple, notes["position"])))
    self.tasks = {task: Task(*x) for task, *x in notes["tasks"]}
    self._losses = dict(map(tuple, notes["pushes"]))
    like = [Pushed(*self._like(self.tasks[x].kind)) for x in self._losses]
    found, pushes = jax.tree.map(
      jnp.asarray, _gradient_messages.tree_of_bytes(payload, (tree, like))
    )
    self._pushes = dict(zip(self._losses, pushes, strict=True))
    return found

  def snapshot(self) -> np.ndarray:
    """Returns the model's bytes, for `tree_of_bytes`."""
    model: _learner.ServerModel = self.model
    return _gradient_messages.tree_bytes((model.params, model.model_state))


@signatures.checked
class GradientServer(ServerLedger):
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
    optimizer: Any Optax chain; its schedules count updates.
    params: The first parameters.
    plans: Codecs of the messages, `message_plans(...)`.
    workers: The names of all workers, in the order of the data's numbers.
    shared: Whether all workers take from one stream of samples.
    model_state: The first batch statistics, if any.
    seed: Seed of the rounding of messages.
    compensation: Strength lambda >= 0 of the delay compensation; 0 turns it
      off.  With it the server keeps the parameters of tasks that are out.

  Attributes:
    model: Parameters and states now; packed in a `Pair`, whose `model` is not.
    plans: Codecs of the messages.

  References:
    Zheng et al., Asynchronous Stochastic Gradient Descent with Delay
    Compensation (arXiv 1609.08326): DC-ASGD-c, lambda constant.
  """

  def __init__(
    self,
    optimizer: signatures.Optimizer,
    params: signatures.Numbers,
    plans: _gradient_messages.MessagePlans,
    *,
    workers: Sequence[_messages.Worker],
    shared: bool = True,
    model_state: signatures.Arrays = None,
    seed: signatures.Seed = 0,
    compensation: signatures.NonNegativeFloat = 0.0,
  ):
    super().__init__(workers, shared, plans.push)
    self._options: dict[str, Any] = {
      "optimizer": optimizer, "workers": workers, "shared": shared,
      "seed": seed, "compensation": compensation,
    }  # fmt: skip
    plans.check_fits(params)
    self.shapes = _gradient_messages.shapes_of(params, model_state)
    self.model = _learner.ServerModel(
      # A copy: the caller may overwrite or donate its own arrays.
      jax.tree.map(jnp.array, params),
      optimizer.init(params),
      jax.tree.map(jnp.array, {} if model_state is None else model_state),
    )
    # Refused here, and not by a first update that fails.
    step = transforms.lenient(optimizer).update
    jax.eval_shape(
      step, params, self.model.opt_state, params, loss=0.0, value=0.0
    )
    # A mask that is infinite at the beginning stays so.
    self.laws = states.exceptions(self.model.model_state)
    self.plans = plans
    self._compensation = compensation
    first = seed * self.num_workers
    self._pull_states = [
      # The last codec: where plans differ, the first may have no state.
      _gradient_messages.first_state(plans.pull[-1], params, first + i)
      for i in range(self.num_workers)
    ]
    # Exact parameters are encoded once for all workers at a barrier, by model.
    self._exact: tuple[PyTree, PyTree] = (None, None)
    # Parameters as each worker has them, by its number.
    self._held: dict[int, PyTree] = {}
    # With compensation, the parameters that were sent for tasks still out.
    self._sent: dict[int, PyTree] = {}
    self._settled: dict[int, int] = {}
    self._updates = _update_programs(optimizer, compensation)

  @property
  def model(self) -> _learner.ServerModel:
    """Parameters and states now."""
    return self._model

  @model.setter
  def model(self, model: _learner.ServerModel) -> None:
    parts = _packed.pack(*model) if self.decoded else model
    self._model = _learner.ServerModel(*parts)

  def pack(self) -> None:
    """Packs what it has, as a `Pair` does with all small trees."""
    self.model = self._model
    self._pull_states = list(_packed.pack(*self._pull_states))

  def part(self, first: int, end: int, model_state: PyTree) -> dict[str, Any]:
    """Returns the arguments of a server of some leaves; others are None."""
    leaves, structure = jax.tree.flatten(self.model.params)
    kept = [x if first <= i < end else None for i, x in enumerate(leaves)]
    return self._options | {
      "params": jax.tree.unflatten(structure, kept),
      "plans": self.plans.part(first, end),
      "model_state": model_state,
    }

  def _like(self, kind: int) -> tuple[PyTree, PyTree]:
    del kind
    return self.model.params, self.model.model_state

  def prepare(self) -> None:
    """Compiles what messages and updates need, before the first of them."""
    model, state = self.model, self._pull_states[0]
    # Compiled from empty messages: a first push that had to wait for the
    # compiler would look like a slow worker to a protocol that measures.
    for plan in range(len(self.plans.push)):
      pushed = self._empty_push(plan)
    for codec in self.plans.pull:
      encode = _gradient_messages.encode_pull(codec, self.decoded)
      found, _ = encode(model.params, model.params, state, model.model_state)
      if not self.decoded:
        _gradient_messages.receive_pull(codec)(found, model.params)
    if self._compensation:
      pushed = pushed._replace(read=model.params)
    for width, factors in _merge.forms(self.num_workers):
      update = self._updates[factors is None and not self._compensation]
      jax.block_until_ready(
        update(model, [pushed] * width, factors, np.float32(1.0))
      )

  def reply(self, reply: _messages.Reply) -> tuple[dict[str, Any], Any]:
    """Takes samples for a task, and encodes the parameters."""
    worker, start = self._give(reply, reply.push_plan)
    # A worker whose last task is later has a gradient that is not in these
    # parameters yet, and may take its local step.
    more = {"start": start, "settled": self._settled.get(worker, -1)}
    payload = self._encode(worker, reply.pull_plan)
    if self._compensation:
      self._sent[reply.task] = self._held[worker]
    return more, payload

  def _encode(self, worker: int, plan: int | None) -> PyTree:
    model = self.model
    if plan is None:
      return None
    codec = self.plans.pull[plan]
    if codec is None:
      if self._exact[0] is not model:
        self._exact = model, (model.params, model.model_state)
      self._keep(worker, model.params)
      return self._exact[1]
    encode = _gradient_messages.encode_pull(codec, self.decoded)
    held = self._held[worker]
    message, self._pull_states[worker] = encode(
      model.params, held, self._pull_states[worker], model.model_state
    )
    found = message
    if not self.decoded:
      # The worker runs the same program, so both hold the same bits.
      found = _gradient_messages.receive_pull(codec)(message, held)
    self._keep(worker, found[0])
    return message

  def _keep(self, worker: int, held: PyTree) -> None:
    """Keeps what a worker holds where a difference or a delay asks for it."""
    if len(self.plans.pull) > 1 or self._compensation:
      self._held[worker] = held

  def apply(self, update: _messages.Apply) -> None:
    """Updates the model by pushes, summed in the protocol's order."""
    tasks, pushes, parts, loss = self._take(update)
    for number, task in zip(update.tasks, tasks, strict=True):
      self._settle(task.worker, number)
    if self._compensation:
      # DC-ASGD compensates the decoded gradient, by the parameters before this
      # update: the server alone knows both.
      pushes = [
        x._replace(read=self._sent[number])
        for number, x in zip(update.tasks, pushes, strict=True)
      ]
      for number in {*update.tasks} - update.kept:
        del self._sent[number]
    pushes, factors = _merge.narrowed(
      pushes, update.weights, parts, self.num_workers, self.model.params,
      self._compensation,
    )  # fmt: skip
    # A single push that is not used again gives its memory to the parameters.
    spent = factors is None and not update.kept and not self._compensation
    move = self._updates[spent]
    self._model = move(self._model, pushes, factors, np.float32(loss))

  def _settle(self, worker: int, task: int) -> None:
    self._settled[worker] = max(self._settled.get(worker, -1), task)

  def discard(self, task: int) -> None:
    """Drops a task, and its push if that has been decoded."""
    self._settle(self.tasks[task].worker, task)
    self._sent.pop(task, None)
    super().discard(task)

  def leave(self, worker: _messages.Worker) -> None:
    """Forgets what a worker holds."""
    self._held.pop(self._numbers.get(worker, -1), None)

  def save(self, *, whole: bool = False) -> tuple[dict[str, Any], np.ndarray]:
    """Returns model, pushes that no update has used, and positions."""
    # A live server's workers start again, so that tasks without a push are lost
    # with what was sent for them.
    read = sorted(self._sent if whole else self._sent.keys() & self._pushes)
    held = sorted(self._held) if whole else []
    notes, pushes = self._save()
    notes |= {"read": read, "held": held}
    notes["settled"] = sorted(self._settled.items())
    kept = [self._sent[x] for x in read], [self._held[x] for x in held]
    tree = self.model, self._pull_states, *kept
    return notes, _gradient_messages.tree_bytes((tree, pushes))

  def load(self, notes: dict[str, Any], payload: np.ndarray) -> None:
    """Restores what `save` returned."""
    sent, held = ([self.model.params] * len(notes[x]) for x in ("read", "held"))
    like = self.model, self._pull_states, sent, held
    self.model, self._pull_states, sent, held = self._read(notes, payload, like)
    self._settled = dict(map(tuple, notes["settled"]))
    self._sent = dict(zip(notes["read"], sent, strict=True))
    self._held = dict(zip(notes["held"], held, strict=True))


@functools.lru_cache(maxsize=16)
def _update_programs(
  optimizer: optax.GradientTransformation, compensation: float
) -> Any:
  optimizer = transforms.lenient(optimizer)

  def update(
    model: _learner.ServerModel,
    pushes: Sequence[Pushed],
    factors: jax.Array,
    loss: jax.Array,
  ) -> _learner.ServerModel:
    packs = any(isinstance(x, _packed.Packed) for x in model)
    # Pushes and parameters are packed alike, and a sum goes entry by entry.
    total = _merge.merge(pushes, factors, model.params, compensation)
    model, total = _packed.unpack((model, total))
    updates, opt_state = optimizer.update(
      total.grads, model.opt_state, model.params, loss=loss, value=loss
    )
    model_state = jax.tree.map(
      lambda x, c: x + c if _merge.is_number(x) else c,
      model.model_state,
      total.change,
    )
    params = optax.apply_updates(model.params, updates)
    found = params, opt_state, model_state
    return _learner.ServerModel(*(_packed.pack(*found) if packs else found))

  return jax.jit(update), jax.jit(update, donate_argnums=1)
