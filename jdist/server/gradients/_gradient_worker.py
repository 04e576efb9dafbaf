"""A worker's learner of plain gradients, and a server with all its workers."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks, reducers, signatures, states
from jdist.server import _messages
from jdist.server.gradients import (
  _gradient_messages,
  _gradient_server,
  _learner,
  _packed,
)
from jdist.server.h_ps import _bit_plans, _local_step
from jdist.states import PyTree


@signatures.checked
class GradientWorker:
  """Computes gradients at the parameters that it was sent, and encodes them.

  The residual of its feedback stays with it.  With a `local_step` a worker
  whose last gradient is missing in those parameters, as it is in a pipeline,
  takes the next gradient where that step leads.

  Args:
    loss_fn: As in `training.make_step`; it heeds a batch's `"mask"`.
    params: Parameters of the shapes that are sent.
    samples: Source of the batches.
    plans: Codecs of the messages, `message_plans(...)`.
    number: Number of this worker, from 0.
    num_workers: Number of all workers.
    sizes: Sizes to which batches are padded, compiled by `prepare`; powers of
      two, compiled when they are met, if None.  A task that memory does not
      hold at once states the number of batches into which it is cut
      (`server.Reply.passes`), each padded to one of these.
    model_state: Batch statistics of the shapes that are sent.
    seed: Seed of the random numbers in the loss, and of the rounding.
    local_step: Step in front of what was sent; None takes none.

  Raises:
    ValueError: At a task whose batch is larger than all `sizes`.
  """

  # As in `ServerLedger`.
  decoded = False

  def __init__(
    self,
    loss_fn: Callable[..., Any],
    params: signatures.Numbers,
    samples: _learner.Samples,
    plans: _gradient_messages.MessagePlans,
    *,
    number: int,
    num_workers: signatures.PositiveInt,
    sizes: Sequence[signatures.PositiveInt] | None = None,
    model_state: signatures.Arrays = None,
    seed: signatures.Seed = 0,
    local_step: _local_step.LocalStep | None = None,
  ):
    checks.check_int("number", number, 0, num_workers - 1)
    self._plans, self._samples, self._number = plans, samples, number
    self._sizes = None if sizes is None else sorted(set(sizes))
    self._loss_fn = loss_fn
    self._programs: dict[tuple[int, int], Callable[..., Any]] = {}
    self._held = jax.tree.map(jnp.array, params)
    self._model_state = jax.tree.map(
      jnp.array, {} if model_state is None else model_state
    )
    self.shapes = _gradient_messages.shapes_of(self._held, self._model_state)
    self._key = jax.random.key(seed)
    self._local_step = local_step
    # Random numbers of its own: if all workers rounded alike, the error of a
    # mean of N gradients would not fall with N.
    self._stream = seed * num_workers + number
    self._own = self._first_states()
    self._last_task = -1
    self._last_version: int | None = None

  def _first_states(self) -> tuple[PyTree, PyTree]:
    codec, step = self._plans.push[-1], self._local_step
    held = _packed.unpack(self._held)
    first = _gradient_messages.first_state(codec, held, self._stream)
    own = first, () if step is None else step.init(held)
    return _packed.pack(*own) if self.decoded else own

  def pack(self) -> None:
    """Packs what it has, as a `Pair` does with all small trees."""
    self._held, self._model_state, *own = _packed.pack(
      self._held, self._model_state, *self._own
    )
    self._own = tuple(own)

  def _program(self, passes: int, plan: int) -> Callable[..., Any]:
    # Not the cache of the programs alone: a codec takes long to hash.
    if (passes, plan) not in self._programs:
      step = self._local_step
      if step is not None:  # Its rate is an argument, and recompiles nothing.
        step = dataclasses.replace(step, rate=1.0)
      self._programs[passes, plan] = _gradient_messages.gradient_program(
        self._loss_fn, step, passes, self._plans.push[plan], self.decoded
      )
    return self._programs[passes, plan]

  @property
  def stateless(self) -> bool:
    """Whether no later push depends on whether a task has been computed."""
    return self._local_step is None and all(
      codec is None or codec.stateless for codec in self._plans.push
    )

  def prepare(self) -> None:
    """Compiles the gradient of each size, and each plan's messages."""
    for size in self._sizes or ():
      batch = self._samples.batch(self._number, 0, 1, size=size)
      for plan in range(len(self._plans.push)):
        found = self._program(1, plan)(
          self._held, self._model_state, self._own, self._control(0, 0), batch,
          self._key, np.uint32(0),
        )  # fmt: skip
        jax.block_until_ready(found)
    for plan, codec in enumerate(self._plans.pull):
      kinds = self._layout(plan)
      empty = _gradient_messages.tree_of_bytes(
        np.zeros(states.num_bytes(kinds), np.uint8), kinds
      )
      receive = _gradient_messages.receive_pull(codec)
      jax.block_until_ready(receive(empty, self._held))

  def _layout(self, plan: int) -> PyTree:
    codec = None if self.decoded else self._plans.pull[plan]
    return _gradient_messages.layout(codec, self._held, self._model_state)

  def _control(self, version: int, settled: int) -> np.ndarray | None:
    """Notes for a local step whether parameters include the last gradient."""
    if self._local_step is None:
      return None
    return self._local_step.control(
      version, leads=self._last_task > settled, last=self._last_version
    )

  def receive(self, header: dict[str, Any], payload: Any) -> None:
    """Takes the parameters of a task, if they were sent."""
    plan = header["pull_plan"]
    if plan is None:
      return
    assert payload is not None
    if isinstance(payload, np.ndarray):
      payload = _gradient_messages.tree_of_bytes(payload, self._layout(plan))
    if not self.decoded:
      receive = _gradient_messages.receive_pull(self._plans.pull[plan])
      payload = receive(payload, self._held)
    self._held, self._model_state = payload

  def compute(self, header: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Returns the gradient of a task's batch, at the parameters held now."""
    task, more, samples = header["task"], header["more"], header["samples"]
    passes = header.get("passes", 1)
    control = self._control(header["version"], more["settled"])
    compute = self._program(passes, header["push_plan"])
    size = passes * _gradient_messages.padded_size(
      self._sizes, math.ceil(samples / passes)
    )
    batch = self._samples.batch(self._number, more["start"], samples, size=size)
    _gradient_messages.check_rows(batch, samples, size)
    found, loss, self._own = compute(
      self._held, self._model_state, self._own, control, batch, self._key,
      np.uint32(task),
    )  # fmt: skip
    self._last_task, self._last_version = task, header["version"]
    return {"loss": loss}, found

  def restart(self, *, lost: bool = False) -> None:
    """Forgets its last gradient, and the feedback's residual if it was lost."""
    # The next local step must not take the server's progress during the
    # absence for momentum, nor a refused gradient for one that is under way.
    self._last_task, self._last_version = -1, None
    push_state, last = self._first_states()
    self._own = push_state if lost else self._own[0], last

  def save(self, *, whole: bool = False) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the feedback's state, or all state."""
    if not whole:
      return {}, _gradient_messages.tree_bytes(self._own[0])
    notes = {"last": [self._last_task, self._last_version]}
    return notes, _gradient_messages.tree_bytes(self._whole())

  def _whole(self) -> PyTree:
    return self._own, self._held, self._model_state

  def load(self, notes: dict[str, Any], payload: np.ndarray) -> None:
    """Restores what `save` returned."""
    read = _gradient_messages.tree_of_bytes
    if "last" in notes:
      self._last_task, self._last_version = notes["last"]
      self._own, self._held, self._model_state = read(payload, self._whole())
    else:
      self._own = read(payload, self._own[0]), self._own[1]


@signatures.checked
class GradientLearner(_learner.Pair):
  """Pairs a `GradientServer` with a `GradientWorker` for each name.

  The arguments are theirs, and those of `server.message_plans`; `options` are
  the workers' alone: `sizes` and `local_step`.
  """

  def __init__(
    self,
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    params: signatures.Numbers,
    samples: _learner.Samples,
    *,
    workers: Sequence[_messages.Worker],
    push_codec: reducers.MessageCodec | None = None,
    plans: _bit_plans.BitPlans | None = None,
    compensation: float = 0.0,
    model_state: signatures.Arrays = None,
    seed: int = 0,
    **options: Any,
  ):
    # The same object on both sides, so that both run the same programs.
    codecs = _gradient_messages.message_plans(push_codec, plans)
    common: dict[str, Any] = {"model_state": model_state, "seed": seed}
    server = _gradient_server.GradientServer(
      optimizer, params, codecs, workers=workers, shared=samples.shared,
      compensation=compensation, **common,
    )  # fmt: skip
    options |= common | {"num_workers": len(workers)}
    learners = {
      name: GradientWorker(
        loss_fn, params, samples, codecs, number=i, **options
      )
      for i, name in enumerate(workers)
    }
    super().__init__(server, learners)
