"""Real gradients in the order that a protocol dictates."""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from typing import Protocol as Interface

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks
from jdist.server import _message_codec, _messages, _server_programs
from jdist.server.h_ps import _bit_plans, _local_step, _plan_codecs

PyTree = Any


class Samples(Interface):
  """Source of batches; `data.SampleStream` is one."""

  @property
  def shared(self) -> bool:
    """Returns whether all workers take from one stream."""

  def batch(
    self, worker: int, start: int, count: int, *, size: int | None = None
  ) -> PyTree:
    """Returns `count` samples padded to `size`, with a `"mask"`."""


class _Pulled(NamedTuple):
  """A task: what its worker has pulled, and which samples are its."""

  version: int
  params: PyTree
  model_state: PyTree
  worker: int
  start: int
  num_samples: int
  push_plan: int


class GradientLearner:
  r"""Computes the gradients of tasks and makes a server's updates.

  A task's gradient is that of the parameters which were sent for it,
  :math:`g_k = \nabla L(\theta_{t - \tau_k}; B_k)`, and is computed when the
  protocol applies it:

  .. math:: \theta \leftarrow \theta + \mathrm{optimizer}\Bigl(\sum_k w_k
            \bigl(g_k + \lambda \, g_k \odot g_k \odot
            (\theta - \theta_{t - \tau_k})\bigr)\Bigr)

  Batches of changing sizes are padded to a few sizes and masked, so that few
  programs are compiled.  Batch statistics move by the mean of the workers'
  changes, weighted by samples.

  A push and a pull may pass a codec: g is then what the message of g
  decodes to, and a worker computes with the parameters that it has received.
  What a feedback keeps stays with each worker.  A push that is discarded is
  not computed, and its worker's feedback stays as it was.

  With `plans` each message has the bits that the protocol says: pushes with
  error feedback, pulls as differences from what the worker holds, of which the
  server keeps a copy for each worker: the memory of the parameters, once for
  each.  A pull by plan 0 sends the parameters themselves.

  With a `local_step` a worker whose last gradient is not yet in what it was
  sent, as it is in a pipeline, takes the next one where that step leads.

  Args:
    loss_fn: as of `training.make_step`; it heeds a batch's `"mask"`.
    optimizer: any Optax chain; its schedules count updates.
    params: the first parameters.
    samples: where batches come from.
    workers: the names of the workers, in the order of the stream's numbers.
    model_state: the first batch statistics, if any.
    seed: of the random numbers in the loss.
    compensation: lambda >= 0, of the delay compensation; 0 is none.
    sizes: to which batches are padded; powers of two if None.
    push_codec: of the workers' gradients; None sends every bit.
    pull_codec: of the parameters that are sent to a worker.
    plans: in place of both, messages by the protocol's plans.
    local_step: of workers in front of what they were sent; none without it.

  Attributes:
    model: parameters and states now.
    position: samples taken from the stream, by worker; one entry, 0, of a
      shared stream.
    losses: of the last updates, `(samples so far, loss)`, at most 1,000.

  Raises:
    ValueError: when an argument is not as described; at a pull, when a batch
      is larger than all `sizes`.

  References:
    Zheng et al., Asynchronous Stochastic Gradient Descent with Delay
    Compensation (arXiv 1609.08326): DC-ASGD-c, lambda constant.
  """

  def __init__(
    self,
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    params: PyTree,
    samples: Samples,
    *,
    workers: Sequence[_messages.Worker],
    model_state: PyTree | None = None,
    seed: int = 0,
    compensation: float = 0.0,
    sizes: Sequence[int] | None = None,
    push_codec: _message_codec.MessageCodec | None = None,
    pull_codec: _message_codec.MessageCodec | None = None,
    plans: _bit_plans.BitPlans | None = None,
    local_step: _local_step.LocalStep | None = None,
  ):
    optimizer = checks.check_optimizer("optimizer", optimizer)
    checks.check_number("compensation", compensation)
    if len(set(workers)) < len(workers) or not workers:
      raise ValueError(
        f"`workers` must be one or more different names, got {workers!r}."
      )
    if sizes is not None:
      for size in sizes:
        checks.check_int("sizes", size, 1)
    self._sizes = None if sizes is None else sorted(sizes)
    model_state = {} if model_state is None else model_state
    for name, one in (("push_codec", push_codec), ("pull_codec", pull_codec)):
      if one is not None:
        checks.check_type(
          name, one, _message_codec.MessageCodec, "a `server.MessageCodec`"
        )
    if local_step is not None:
      checks.check_type(
        "local_step", local_step, _local_step.LocalStep, "a `server.LocalStep`"
      )
    push_codecs = [push_codec]
    if plans is not None:
      _check_plans(plans, params, push_codec, pull_codec)
      numbers = range(len(plans.bits))
      push_codecs = [_plan_codecs.plan_codec(plans, i) for i in numbers]
      # The residual of a difference is in the next one.
      self._differences = [
        _plan_codecs.difference_program(
          _plan_codecs.plan_codec(plans, i, feedback=False)
        )
        for i in numbers
      ]
      pull_codec = _plan_codecs.plan_codec(plans, 0, feedback=False)
    self._plans = plans
    self._local_step = local_step
    self.model = _server_programs.ServerModel(
      # Copies: the updates take the memory of the model before.
      jax.tree.map(jnp.array, params),
      optimizer.init(params),
      jax.tree.map(jnp.array, model_state),
    )
    self._samples = samples
    self._numbers = {worker: i for i, worker in enumerate(workers)}
    self._key = jax.random.key(checks.check_seed(seed))
    self._tasks: dict[int, _Pulled] = {}
    self.position: collections.Counter[int] = collections.Counter()
    self.samples = 0
    self.losses: collections.deque[tuple[int, jax.Array]] = collections.deque(
      maxlen=1000
    )
    self._programs = [
      _server_programs.server_programs(
        loss_fn, optimizer, compensation, one, pull_codec,
        local_step and local_step.without_rate(),
      )
      for one in push_codecs
    ]  # fmt: skip
    # By worker's number; of no use without a compression.
    states: list[list[PyTree]] = [
      [() if one is None else one.init(params)] * len(workers)
      for one in (push_codecs[0], pull_codec)
    ]
    if plans is not None:
      # Each rounds by random numbers of its own, in programs for all seeds.
      states = [
        [
          one._replace(step=one.step + ((seed * len(workers) + i) % 2048 << 20))
          for i, one in enumerate(each)
        ]
        for each in states
      ]
    self._push_states, self._pull_states = states
    if local_step is not None:
      first = local_step.init(self.model.params)
      self._push_states = [(state, first) for state in self._push_states]
    self._compresses_pulls = pull_codec is not None
    # What each worker was sent last, with plans.
    self._held = [self.model.params] * len(workers)
    # Each worker's last task: the version that it was sent, and to which its
    # gradient was added.
    self._led: dict[int, tuple[int, int]] = {}
    # On the way to a checkpoint only what follows from the messages is kept.
    self.replays = False

  def pull(self, reply: _messages.Reply) -> None:
    """Keeps what a worker has been sent, and takes its samples."""
    worker = self._numbers[reply.worker]
    whose = 0 if self._samples.shared else worker
    start = self.position[whose]
    self.position[whose] += reply.samples
    params = self.model.params
    if self._plans is not None:
      params = self._send(worker, reply.pull_plan)
    elif self._compresses_pulls and not self.replays:
      params, self._pull_states[worker] = self._programs[0].send(
        params, self._pull_states[worker]
      )
    self._tasks[reply.task] = _Pulled(
      reply.version,
      params,
      self.model.model_state,
      worker,
      start,
      reply.samples,
      reply.push_plan,
    )

  def _send(self, worker: int, plan: int | None) -> PyTree:
    """Returns what a worker holds after a message, if it is sent one."""
    if self.replays or plan is None:
      return self._held[worker]
    held = self.model.params
    if plan:
      held, self._pull_states[worker] = self._differences[plan](
        held, self._held[worker], self._pull_states[worker]
      )
    self._held[worker] = held
    return held

  def apply(self, update: _messages.Apply) -> None:
    """Updates the parameters with the gradients of tasks."""
    tasks = [self._tasks.pop(task) for task in update.tasks]
    whole = sum(task.num_samples for task in tasks)
    self.samples += whole
    controls = []
    for task, stale in zip(tasks, update.staleness, strict=True):
      controls.append(self._control(task))
      self._led[task.worker] = task.version, task.version + stale
    if self.replays:
      return
    total, loss = None, None
    for number, weight, task, control in zip(
      update.tasks, update.weights, tasks, controls, strict=True
    ):
      programs = self._programs[task.push_plan if self._plans else 0]
      arguments = (
        task.params,
        task.model_state,
        self._samples.batch(
          task.worker,
          task.start,
          task.num_samples,
          size=self._size(task.num_samples),
        ),
        self._push_states[task.worker],
        self._key,
        np.uint32(number),
        np.float32(weight),
        np.float32(task.num_samples / whole),
        control,
      )
      if len(tasks) == 1:
        self.model, push_state, loss = programs.step(self.model, *arguments)
      elif total is None:
        total, push_state = programs.first(self.model, *arguments)
      else:
        total, push_state = programs.add(total, self.model, *arguments)
      self._push_states[task.worker] = push_state
    if total is not None:
      self.model, loss = self._programs[0].update(self.model, total)
    assert loss is not None
    self.losses.append((self.samples, loss))

  def _control(self, task: _Pulled) -> np.ndarray | None:
    """Says to a local step whether the last gradient is in what was sent."""
    if self._local_step is None:
      return None
    last, added = self._led.get(task.worker, (None, -1))
    return self._local_step.control(
      task.version, leads=task.version <= added, last=last
    )

  def discard(self, task: int) -> None:
    """Drops a task; its gradient is never computed."""
    self._led.pop(self._tasks.pop(task).worker, None)

  def arrays(self) -> PyTree:
    """Returns all arrays that a resumed run needs, as a tree.

    Besides the model: what is on its way, by the version that was sent (each
    once, but what a compression made of it for a worker), feedbacks, and what
    workers hold.
    """
    return {
      "model": self.model,
      "tasks": {
        self._name(number, task): (task.params, task.model_state)
        for number, task in self._tasks.items()
      },
      "push": self._push_states,
      "pull": self._pull_states,
      "held": [] if self._plans is None else self._held,
    }

  def load(self, arrays: PyTree) -> None:
    """Takes over arrays after the messages until then were replayed."""
    self.model = arrays["model"]
    self._push_states = list(arrays["push"])
    self._pull_states = list(arrays["pull"])
    if self._plans is not None:
      self._held = list(arrays["held"])
    for number, task in self._tasks.items():
      params, model_state = arrays["tasks"][self._name(number, task)]
      self._tasks[number] = task._replace(
        params=params, model_state=model_state
      )
    self.replays = False

  def _name(self, number: int, task: _Pulled) -> str:
    if self._compresses_pulls:
      return f"task {number}"
    return f"version {task.version}"

  def _size(self, count: int) -> int:
    if self._sizes is None:
      return 1 << (count - 1).bit_length()
    for size in self._sizes:
      if size >= count:
        return size
    raise ValueError(
      f"`sizes` must reach the largest batch, got {self._sizes} for {count} "
      "samples. Add a larger size, or bound the batches (`maximum=`)."
    )


def _check_plans(plans: Any, params: PyTree, *others: Any) -> None:
  """Raises a ValueError unless plans fit the parameters and stand alone."""
  checks.check_type("plans", plans, _bit_plans.BitPlans, "a `server.BitPlans`")
  if any(each is not None for each in others):
    raise ValueError(
      "`plans` must be given without `push_codec` and `pull_codec`, in whose "
      "place they are."
    )
  sizes = tuple(int(np.size(leaf)) for leaf in jax.tree.leaves(params))
  if plans.sizes != sizes:
    raise ValueError(
      f"`plans` must be of the parameters' {len(sizes)} sizes, got "
      f"{checks.show(plans.sizes)}. Make them with `server.fit_bit_plans`."
    )
