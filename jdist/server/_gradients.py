"""Real gradients in the order that a protocol dictates."""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from typing import Protocol as Interface

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks, training
from jdist.server import _messages

PyTree = Any


class Samples(Interface):
  """Where batches come from; `data.SampleStream` is one."""

  @property
  def shared(self) -> bool:
    """Returns whether all workers take from one stream."""

  def batch(
    self, worker: int, start: int, count: int, *, size: int | None = None
  ) -> PyTree:
    """Returns `count` samples padded to `size`, with a `"mask"`."""


class ServerModel(NamedTuple):
  """What a server keeps of a model.

  Attributes:
    params: the parameters.
    opt_state: the server's optimizer.
    model_state: batch statistics and the like.
  """

  params: PyTree
  opt_state: PyTree
  model_state: PyTree


class _Pulled(NamedTuple):
  """A task: what its worker has pulled, and which samples are its."""

  params: PyTree
  model_state: PyTree
  worker: int
  start: int
  num_samples: int


class _Programs(NamedTuple):
  """What is compiled: an update of one task, or of several one by one."""

  step: Callable[..., tuple[ServerModel, jax.Array]]
  first: Callable[..., PyTree]
  add: Callable[..., PyTree]
  update: Callable[..., tuple[ServerModel, jax.Array]]


# Learners of the same loss and optimizer share their compiled programs.
@functools.lru_cache(maxsize=16)
def _programs(
  loss_fn: Callable[..., Any],
  optimizer: optax.GradientTransformation,
  compensation: float,
) -> _Programs:
  optimizer = optax.with_extra_args_support(optimizer)
  compute = training.make_gradient(loss_fn)

  def zeros(model: ServerModel) -> PyTree:
    tree = (model.params, model.model_state)
    return (*jax.tree.map(jnp.zeros_like, tree), jnp.zeros(()))

  def add(
    total: PyTree,
    model: ServerModel,
    read: PyTree,
    state_read: PyTree,
    batch: PyTree,
    key: jax.Array,
    number: jax.Array,
    weight: jax.Array,
    share: jax.Array,
  ) -> PyTree:
    gradient = compute(read, state_read, batch, jax.random.fold_in(key, number))

    def one(total: Any, g: Any, old: Any, new: Any) -> Any:
      if compensation:
        g = g + (compensation * g * g * (new - old)).astype(g.dtype)
      return total + weight.astype(g.dtype) * g

    grads = jax.tree.map(one, total[0], gradient.grads, read, model.params)
    change = jax.tree.map(
      lambda t, new, old: (
        t + share.astype(t.dtype) * (new - old)
        if jnp.issubdtype(t.dtype, jnp.floating)
        else new
      ),
      total[1], gradient.model_state, state_read,
    )  # fmt: skip
    return grads, change, total[2] + share * gradient.loss

  def update(
    model: ServerModel, total: PyTree
  ) -> tuple[ServerModel, jax.Array]:
    grads, change, loss = total
    updates, opt_state = optimizer.update(
      grads, model.opt_state, model.params, loss=loss, value=loss
    )
    model_state = jax.tree.map(
      lambda x, c: x + c if jnp.issubdtype(x.dtype, jnp.floating) else c,
      model.model_state, change,
    )  # fmt: skip
    params = optax.apply_updates(model.params, updates)
    return ServerModel(params, opt_state, model_state), loss

  def first(model: ServerModel, *task: Any) -> PyTree:
    return add(zeros(model), model, *task)

  # Most updates are of one task: one program and not three.
  def step(model: ServerModel, *task: Any) -> tuple[ServerModel, jax.Array]:
    return update(model, first(model, *task))

  return _Programs(jax.jit(step), jax.jit(first), jax.jit(add), jax.jit(update))


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
  ):
    checks.check_optimizer("optimizer", optimizer)
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
    self.model = ServerModel(
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
    self._programs = _programs(loss_fn, optimizer, compensation)

  def pull(self, reply: _messages.Reply) -> None:
    """Keeps what a worker has been sent, and takes its samples."""
    worker = self._numbers[reply.worker]
    whose = 0 if self._samples.shared else worker
    start = self.position[whose]
    self.position[whose] += reply.samples
    self._tasks[reply.task] = _Pulled(
      self.model.params, self.model.model_state, worker, start, reply.samples
    )

  def apply(self, update: _messages.Apply) -> None:
    """Updates the parameters with the gradients of tasks."""
    tasks = [self._tasks.pop(task) for task in update.tasks]
    whole = sum(task.num_samples for task in tasks)
    arguments = [
      (
        task.params,
        task.model_state,
        self._samples.batch(
          task.worker,
          task.start,
          task.num_samples,
          size=self._size(task.num_samples),
        ),
        self._key,
        np.uint32(number),
        np.float32(weight),
        np.float32(task.num_samples / whole),
      )
      for number, weight, task in zip(
        update.tasks, update.weights, tasks, strict=True
      )
    ]
    programs = self._programs
    if len(arguments) == 1:
      self.model, loss = programs.step(self.model, *arguments[0])
    else:
      total = programs.first(self.model, *arguments[0])
      for task in arguments[1:]:
        total = programs.add(total, self.model, *task)
      self.model, loss = programs.update(self.model, total)
    self.samples += whole
    self.losses.append((self.samples, loss))

  def discard(self, task: int) -> None:
    """Drops a task; its gradient is never computed."""
    del self._tasks[task]

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
