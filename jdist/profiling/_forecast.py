"""What a compiled step does on stated machines, before there are any."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jdist import cluster, collectives, training
from jdist.profiling import _gpu_target, _timeline

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Message:
  """A collective of a step, and what hides it.

  Attributes:
    name: the instruction's.
    kind: `"all-reduce"` and so on.
    wire_bytes: bytes that a worker sends, in a ring.
    conditional: whether it happens in the steps that end a round only.
    kernels: how many run between its start and its done.
    products: how many of these are matrix products or convolutions.
    compute_s: seconds that they take.
    start_s: when the link begins to send it.
    end_s: when it has been sent.
    exposed_s: how long the device waits for it.
  """

  name: str
  kind: str
  wire_bytes: float
  conditional: bool
  kernels: int
  products: int
  compute_s: float
  start_s: float
  end_s: float
  exposed_s: float

  @property
  def send_s(self) -> float:
    """Seconds that the link needs for it."""
    return self.end_s - self.start_s

  @property
  def hidden_share(self) -> float:
    """The part of sending that the device does not wait for, in [0, 1]."""
    if not self.send_s:
      return 1.0
    return max(0.0, 1.0 - self.exposed_s / self.send_s)


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A computation on the device.

  Attributes:
    name: the instruction's.
    start_s: when it begins.
    end_s: when it ends.
    flops: two for each multiply and add of products and convolutions.
  """

  name: str
  start_s: float
  end_s: float
  flops: int


@dataclasses.dataclass(frozen=True)
class Forecast:
  """One step on a stated device and link.

  Attributes:
    timeline: when what happens; its `hidden_share` is that of the step.
    messages: every collective, in the order of their starts.
    kernels: every computation, in order.
  """

  timeline: cluster.Timeline
  messages: tuple[Message, ...]
  kernels: tuple[Kernel, ...]

  @property
  def wire_bytes(self) -> float:
    """Bytes that a worker sends."""
    return sum(message.wire_bytes for message in self.messages)

  @property
  def flops(self) -> int:
    """Of products and convolutions."""
    return sum(kernel.flops for kernel in self.kernels)


def forecast(
  program: Any,
  device: cluster.Device,
  link: cluster.Link,
  *,
  branch: Literal["sends", "idles"] = "sends",
) -> Forecast:
  """Says what hides a step's communication, from its compiled program.

  The order is the compiler's, read by `profiling.read_schedule`; the times
  are a model's: a kernel is bounded by arithmetic, memory or its launch, the
  link sends one message after the other in a ring, and neither slows the
  other.

  Args:
    program: a compiled step (`jitted.lower(...).compile()`) or its text.
    device: the device's rates.
    link: each device's link to the others.
    branch: which step: "sends" (default), one that ends a round, or "idles",
      one that does not.

  Returns:
    The forecast.

  >>> device = cluster.Device("toy", flops_per_s=16, memory_bytes_per_s=1e9)
  >>> link = cluster.Link(bandwidth_bits_per_s=8 * 4)
  >>> found = forecast('''
  ... ENTRY %main (x: f32[8], w: f32[8,8]) -> f32[8] {
  ...   %x = f32[8]{0} parameter(0)
  ...   %w = f32[8,8]{1,0} parameter(1)
  ...   %s = f32[8]{0} all-reduce-start(%x), replica_groups={{0,1}}
  ...   %y = f32[8]{0} dot(%x, %w), lhs_contracting_dims={0}
  ...   ROOT %d = f32[8]{0} all-reduce-done(%s)
  ... }''', device, link)
  >>> (message,) = found.messages  # 32 bytes, while 128 operations run.
  >>> message.send_s, message.compute_s, message.hidden_share
  (8.0, 8.0, 1.0)
  """
  events = _timeline.read_schedule(program, branch=branch)
  timeline = cluster.overlap([_task(e) for e in events], device, link)
  # The device and the link each take their tasks in the program's order.
  busy = iter([s for s in timeline.spans if s.where == "device"])
  sent = iter([s for s in timeline.spans if s.where == "link"])
  kernels: list[Kernel] = []
  open_messages: dict[str, tuple[int, int]] = {}
  messages: list[Message] = []

  def close(name: str) -> None:
    number, first = open_messages.pop(name)
    under = kernels[first:]
    messages[number] = dataclasses.replace(
      messages[number],
      kernels=len(under),
      products=sum(k.flops > 0 for k in under),
      compute_s=sum(k.end_s - k.start_s for k in under),
    )

  for event in events:
    if event.kind == "compute":
      span = next(busy)
      kernels.append(Kernel(event.name, span.start_s, span.end_s, event.flops))
    elif event.collective is not None:
      span = next(sent)
      open_messages[event.name] = (len(messages), len(kernels))
      messages.append(
        Message(
          event.name,
          event.collective.kind,
          event.collective.wire_bytes,
          event.collective.conditional,
          kernels=0,
          products=0,
          compute_s=0.0,
          start_s=span.start_s,
          end_s=span.end_s,
          exposed_s=span.exposed_s,
        )
      )
    else:
      close(event.name)
  for name in list(open_messages):  # Never waited for: until the end.
    close(name)
  return Forecast(timeline, tuple(messages), tuple(kernels))


def _task(event: _timeline.Event) -> cluster.Task:
  if event.collective is None:
    return cluster.Task(event.kind, event.name, event.flops, event.num_bytes)
  return cluster.Task(
    event.kind,
    event.name,
    num_bytes=event.collective.wire_bytes,
    messages=_messages(event.collective),
  )


def _messages(collective: collectives.Collective) -> int:
  """How many messages follow each other in a ring."""
  both_ways = cluster.ring_messages(collective.num_workers)
  if collective.kind == "all-reduce":
    return both_ways
  return 1 if collective.kind == "permute" else both_ways // 2


def abstract_state(
  workers: collectives.Workers,
  optimizer: optax.GradientTransformation,
  params: PyTree,
  model_state: PyTree | None = None,
) -> training.TrainState:
  """Makes the shapes of `init_state`, to compile a step without any arrays.

  Works for workers on devices that are described only.

  Args:
    workers: the run's workers.
    optimizer: an Optax chain.
    params: one worker's parameters, arrays or `jax.ShapeDtypeStruct`, as of
      `models.build(..., abstract=True)`.
    model_state: one worker's batch statistics, likewise.

  Returns:
    `jax.ShapeDtypeStruct` `[workers, ...]`.

  >>> one = collectives.workers(2, substrate="vmap")
  >>> shapes = abstract_state(one, optax.sgd(0.1), jnp.zeros(3))
  >>> shapes.params.shape, shapes.step.shape
  ((2, 3), (2,))
  """
  replicated = _gpu_target.abstract(workers, params)
  sharding = workers.sharding()
  opt_state = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
    jax.eval_shape(workers.spmd(optimizer.init), replicated),
  )
  step, model_state, key = _gpu_target.abstract(
    workers,
    (
      jax.ShapeDtypeStruct((), jnp.int32),
      {} if model_state is None else model_state,
      jax.ShapeDtypeStruct((2,), jnp.uint32),
    ),
  )
  return training.TrainState(step, replicated, opt_state, model_state, key)
