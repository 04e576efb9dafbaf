"""Predicts on which links a method takes less time than synchronous SGD."""

import collections as counting
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks, cluster, collectives, signatures, training, transforms

PyTree = Any
Chain = Callable[[collectives.Axis], optax.GradientTransformation]
# The states of all measured workers are on one device.
_MEASURED_BYTES = 2**30
_LONGEST_MEAN = 2**26  # Bytes by which a link is measured.
# Numbers of updates in which a streamed message may be sent.
_STREAM_STEPS = (1, 2, 4, 8, 16)
_LEFT_OUT = 0.1
# Logarithms of bits a second, between which all links lie.
_SLOWEST, _FASTEST = math.log(1e3), math.log(1e15)


class MethodCosts(NamedTuple):
  """The costs of a method for a worker; `Advice` has the equation.

  Attributes:
    interval: The steps of a round, H; 1 for a method without rounds.
    step_s: The seconds c of a step that sends nothing, one for each block of
      measurements.
    extra_s: The seconds x that the method adds to a step here, by encoding and
      decoding, and by sending hidden messages if they were sent; as blocks.
    round_bytes: The bytes that a worker sends in a round.
    round_messages: The consecutive messages in which it sends them.
    hidden_steps: The steps d under which they are sent.
    send_ratio: The seconds that they took in those that the link gives them; 1
      (default) if they were not sent.
  """

  interval: int
  step_s: Sequence[float]
  extra_s: Sequence[float]
  round_bytes: float
  round_messages: int
  hidden_steps: int
  send_ratio: float = 1.0

  def send_s(self, link: cluster.Link) -> float:
    """Returns the seconds s of a round's messages on a link."""
    return self.send_ratio * link.send_s(self.round_bytes, self.round_messages)


@dataclasses.dataclass(frozen=True)
class Advice:
  r"""The predicted times of methods for one model, machine and link.

  The mean step of a round of H steps takes

  .. math:: t = c + x + \tfrac{1}{H} \max(0, s - d \, c)

  where s are the seconds of a round's messages (`MethodCosts.send_s`), and c
  and x are those of the slowest machine.

  Attributes:
    costs: The costs of each method; others are compared with the first one.
    link: The link of each worker.
    slowdown: The seconds of the slowest machine in those of this one.
  """

  costs: Mapping[str, MethodCosts]
  link: cluster.Link
  slowdown: float = 1.0

  @property
  def base(self) -> str:
    """The method with which others are compared."""
    return next(iter(self.costs))

  @property
  def step_s(self) -> float:
    """The seconds of a step without any communication."""
    return self.slowdown * statistics.median(self.costs[self.base].step_s)

  def exposed_s(self, name: str, link: cluster.Link | None = None) -> float:
    """Returns the seconds for which a mean step waits for messages."""
    own, link = self.costs[name], link or self.link
    return (
      max(0.0, own.send_s(link) - own.hidden_steps * self.step_s) / own.interval
    )

  def delay_steps(self, name: str) -> int:
    """Returns by how many steps a mean must be late to hide its messages.

    At least 1, and at most a third of a round: a later one may be unstable.
    """
    own = self.costs[name]
    hiding = math.ceil(own.send_s(self.link) / self.step_s)
    return max(1, min(hiding, own.interval // 3))

  def seconds(
    self, name: str, link: cluster.Link | None = None
  ) -> tuple[float, float, float]:
    """Returns a mean step's seconds: the 5 % quantile, median and 95 % one.

    They have the profile's spread, and a tenth that the equation leaves out.
    """
    low, middle, high = self._quantiles(name, link)
    return low * (1 - _LEFT_OUT), middle, high * (1 + _LEFT_OUT)

  def _quantiles(self, name: str, link: cluster.Link | None = None) -> Any:
    own = self.costs[name]
    computed = np.array(own.step_s) + np.maximum(0.0, own.extra_s)
    found = self.slowdown * computed + self.exposed_s(name, link)
    return np.quantile(found, (0.05, 0.5, 0.95)).tolist()

  def pays(self, name: str) -> bool:
    """Returns whether a method's step is shorter than the base's.

    Within the profile's spread it does not pay; what is left out is common.
    """
    return self._quantiles(name)[2] < self._quantiles(self.base)[0]

  @property
  def best(self) -> str:
    """The method with the shortest step; the base unless another one pays."""
    paying = [name for name in self.costs if self.pays(name)]
    return min(paying or [self.base], key=lambda name: self.seconds(name)[1])

  def pays_below(self, name: str) -> float | None:
    """Returns the bandwidth below which a method's step is the shorter one.

    Returns:
      Bits a second with the latency of the link; infinity if it pays on every
      link, and None if on none.
    """

    def costs(link: cluster.Link) -> bool:
      return self.seconds(name, link)[1] >= self.seconds(self.base, link)[1]

    rate = self._first(costs)
    return None if rate == 0 else math.inf if rate is None else rate

  def rate_for(self, name: str, utilization: float) -> float | None:
    """Returns the lowest bandwidth at which a method reaches a utilization.

    Args:
      name: The method's name.
      utilization: The part of a mean step in which the model's own step is
        computed, in (0, 1].

    Returns:
      Bits a second with the latency of the link; 0 if it is reached on every
      link, and None if on none.
    """
    checks.check_number("utilization", utilization, high=1, open_low=True)
    aim_s = self.step_s / utilization
    return self._first(lambda link: self.seconds(name, link)[1] <= aim_s)

  def _first(self, holds: Callable[[cluster.Link], bool]) -> float | None:
    """Returns the lowest rate at which something holds that holds above it."""

    def at(log_rate: float) -> bool:
      rate = math.exp(log_rate)
      return holds(dataclasses.replace(self.link, bandwidth_bits_per_s=rate))

    low, high = _SLOWEST, _FASTEST
    if at(low) or not at(high):
      return 0.0 if at(low) else None
    for _ in range(40):
      middle = (low + high) / 2
      low, high = (low, middle) if at(middle) else (middle, high)
    return math.exp(high)


@signatures.checked
def advise(
  loss_fn: Callable[..., Any],
  params: signatures.Arrays,
  batch: signatures.Arrays,
  chains: Mapping[str, tuple[Chain, int]],
  link: cluster.Link,
  *,
  num_workers: int,
  optimizer: optax.GradientTransformation,
  model_state: signatures.Arrays = None,
  slowdown: float = 1.0,
  limit_s: signatures.PositiveFloat = 60.0,
  workers: collectives.Workers | None = None,
) -> Advice:
  """Measures one worker's step here, and predicts it on a link.

  The step, and each method's own updates with their encoding and decoding, run
  on this machine and take turns. Bytes are counted from the traced updates.
  Accuracy is not predicted.

  Args:
    loss_fn: As of `training.make_step`.
    params: One worker's parameters.
    batch: One worker's batch.
    chains: A function from the workers' axis to the chain, and the steps of a
      round, for each method; the first method is the base of comparisons.
    link: The link of each worker, with the rate that collectives reach on it.
    num_workers: The number of machines, one worker each, 2 or more.
    optimizer: The worker's optimizer inside all chains.
    model_state: One worker's batch statistics.
    slowdown: How much longer the slowest machine computes than this one, 1 or
      more.
    limit_s: The seconds after which no further block of measurements begins;
      there are three at least and nine at most.
    workers: One worker in each process of this run, all of which call this with
      the same link. They also take some rounds of each method and send its
      messages, if that fits into `limit_s`, and predict by what these took. By
      default no message is sent.
  """
  optimizer = transforms.lenient(checks.check_optimizer("optimizer", optimizer))
  checks.check_int("num_workers", num_workers, 2)
  checks.check_number("slowdown", slowdown, low=1)
  if not chains:
    raise ValueError("`chains` must have a method at least, got none.")
  started_s = time.monotonic()
  # In a run of several processes each measures by itself.
  one_worker = collectives.workers(1, substrate="none")
  step = training.make_step(loss_fn, optimizer, axis=one_worker.axis)
  begun = training.init_state(one_worker, optimizer, params, model_state)
  rows = one_worker.place(jax.tree.map(lambda x: np.asarray(x)[None], batch))
  alone = functools.partial(_seconds, one_worker.jit(step), (begun, rows))
  alone(1)
  state = {} if model_state is None else model_state
  gradient, key = training.make_gradient(loss_fn), jax.random.key(0)
  grads = gradient(params, state, batch, key).grads
  # As many workers as fit run their updates on this device.
  size = sum(x.nbytes for x in jax.tree.leaves(grads))
  held = max(2, min(num_workers, _MEASURED_BYTES // max(1, 8 * size)))
  team = collectives.Workers(held, "vmap", "worker")
  plain = _Updates(team, lambda axis: optimizer, 1, grads, params)
  measured = {
    name: _Updates(team, make, interval, grads, params)
    for name, (make, interval) in chains.items()
  }
  # A turn lasts long enough for the clock.
  count = max(1, min(20, math.ceil(0.05 / alone(1))))
  blocks: list[list[float]] = []
  while len(blocks) < 10:
    row = [alone(count), plain.seconds()]
    blocks.append(row + [one.seconds() for one in measured.values()])
    if len(blocks) > 3 and time.monotonic() - started_s > limit_s:
      break
  # The first block warms up.
  step_s, plain_s, *own = np.array(blocks[1:]).T
  costs = {
    name: MethodCosts(
      one.interval,
      step_s.tolist(),
      (own_s - plain_s).tolist(),
      *_sent(chains[name][0], one.controls, params, num_workers),
      one.hidden_steps,
    )
    for (name, one), own_s in zip(measured.items(), own, strict=True)
  }
  if workers is None:
    return Advice(costs, link, slowdown)
  mean = workers.jit(functools.partial(collectives.mean, axis=workers.axis))
  # All processes decide alike which messages they send.
  own_step_s = _same(workers, mean, float(np.median(step_s)))
  for name, one in measured.items():
    sent = _sent(chains[name][0], one.controls, params, workers.num_workers)
    sent_s = link.send_s(*sent)
    # A stream finds its pace first, by other programs.
    first = 5 if one.hidden_steps else 2
    rounds = first + max(3, 16 // one.interval)
    round_s = sent_s + one.interval * own_step_s
    if sent_s and len(chains) * rounds * round_s <= limit_s:
      there = _Updates(workers, *chains[name], grads, params)
      taken_s = [there.seconds(alone) for _ in range(rounds)][first:]
      extra_s = max(0.0, float(np.median(costs[name].extra_s)))
      alone_s = float(np.median(step_s) + np.median(plain_s)) + extra_s
      waits_s = statistics.median(taken_s) - alone_s
      costs[name] = _as_sent(costs[name], waits_s, sent_s)
  return Advice(costs, link, slowdown)


def _as_sent(costs: MethodCosts, waits_s: float, sent_s: float) -> MethodCosts:
  """Returns the costs of steps that wait so long for a round of `sent_s`."""
  hidden_s = costs.hidden_steps * statistics.median(costs.step_s)
  if sent_s > hidden_s:
    own_s = max(0.0, costs.interval * waits_s + hidden_s)
    return costs._replace(send_ratio=own_s / sent_s)
  # The thread that sends a hidden message takes time from the step.
  return costs._replace(extra_s=[x + waits_s for x in costs.extra_s])


def _same(
  workers: collectives.Workers, mean: Callable[..., jax.Array], seconds: float
) -> float:
  """Returns the mean of all processes' seconds."""
  rows = np.full((len(workers.local_workers), 1), seconds, np.float32)
  found = mean(workers.place(rows))
  return float(np.asarray(found.addressable_shards[0].data).flat[0])


def _seconds(function: Callable[..., Any], given: Any, count: int) -> float:
  started_s = time.perf_counter()
  for _ in range(count):
    jax.block_until_ready(function(*given))
  return (time.perf_counter() - started_s) / count


class _Updates:
  """The updates of all workers' chain, of whole rounds, on one device."""

  def __init__(
    self,
    team: collectives.Workers,
    make: Chain,
    interval: int,
    grads: PyTree,
    params: PyTree,
  ):
    self.interval, self._team = interval, team
    optimizer = transforms.lenient(make(team.axis))
    self._params, self._grads = team.replicate(params), team.replicate(grads)
    self._state = team.jit(optimizer.init)(self._params)
    streams = transforms.streams(self._state)
    self._program = functools.cache(
      lambda control: team.jit(functools.partial(_update, optimizer, control))
    )
    self._host = training.RoundHost(
      team, self._state, stream_steps=_STREAM_STEPS if streams else ()
    )
    self.hidden_steps = 0
    # A message is in flight from the second round on.
    self.seconds()
    self.seconds()
    if streams:
      ahead: Any = transforms.rounds_ahead(self._state)
      window = int(np.max(np.asarray(team.view(ahead))[..., 0, 0]))
      self.hidden_steps = window if window > 0 else interval

  def seconds(self, step: Callable[[int], Any] | None = None) -> float:
    """Returns an update's mean seconds in a round.

    Args:
      step: The computation of a step, which may hide messages.
    """
    params, self.controls = self._params, []
    started_s = time.perf_counter()
    with futures.ThreadPoolExecutor(1) as other:
      for _ in range(self.interval):
        computed = None if step is None else other.submit(step, 1)
        if computed is not None and not self.hidden_steps:
          computed.result()
        control = self._host.control()
        self.controls.append(control)
        program = self._program(control)
        params, self._state = program(self._grads, self._state, params)
        if computed is not None:
          jax.block_until_ready(params)
          computed.result()
        self._host.follow(self._state)
    jax.block_until_ready((params, self._state))
    taken_s = time.perf_counter() - started_s
    return taken_s / self.interval / len(self._team.local_workers)


def _update(
  optimizer: optax.GradientTransformationExtraArgs,
  control: transforms.Control,
  grads: PyTree,
  state: PyTree,
  params: PyTree,
) -> tuple[PyTree, PyTree]:
  loss = jnp.zeros(())
  updates, state = optimizer.update(
    grads, state, params, loss=loss, value=loss, control=control
  )
  return transforms.apply_updates(params, updates, state), state


def _sent(
  make: Chain, controls: Sequence[Any], params: PyTree, num_workers: int
) -> tuple[float, int]:
  """Counts the bytes and messages of a round, given its updates."""
  optimizer = transforms.lenient(make("worker"))
  num_bytes, messages = 0.0, 0
  for control, count in counting.Counter(controls).items():

    def step(params: PyTree, control: Any = control) -> Any:
      # Bytes do not depend on numbers: the parameters serve as gradients.
      return _update(optimizer, control, params, optimizer.init(params), params)

    sent = collectives.traffic(
      step, params, axis="worker", num_workers=num_workers
    ).collectives
    # A conditional's branch is taken once a round, if the device ends it.
    times = [1 if one.conditional else count for one in sent]
    num_bytes += sum(n * x.wire_bytes for n, x in zip(times, sent, strict=True))
    # A sum that depends on another one is a message of its own.
    kinds = {(n, x.kind, x.depth) for n, x in zip(times, sent, strict=True)}
    messages += sum(
      n * cluster.ring_messages(num_workers, kind) for n, kind, _ in kinds
    )
  return num_bytes, messages


@signatures.checked
def measure_link(
  workers: collectives.Workers,
  *,
  num_bytes: signatures.PositiveInt = 2**22,
  repeats: signatures.PositiveInt = 5,
) -> cluster.Link:
  """Measures the latency and the rate that means over all workers reach.

  The rate follows from means of two sizes, and the latency from programs of one
  and of nine means of a few numbers: differences leave out the start of a
  program, which belongs to the step. Every process calls it, and gets the same.

  Args:
    workers: One worker in each of several processes.
    num_bytes: The size of the longer mean, best that of the parameters, in
      bytes; the other one has a quarter of it. Both grow on a link that is too
      fast for them, to 64 MiB at most.
    repeats: Measurements of each program, of which the median counts.

  Raises:
    ValueError: If all workers are in this process.
  """
  if jax.process_count() == 1:
    raise ValueError(
      "`workers` must be in several processes, got one: there is no link to "
      "measure. State its bandwidth and latency."
    )

  def means(count: int, x: jax.Array) -> jax.Array:
    for _ in range(count):  # Each needs the one before it.
      x = collectives.mean(x, axis=workers.axis)
    return x

  def seconds(size: int, count: int = 1) -> float:
    rows = np.zeros((len(workers.local_workers), size), np.float32)
    run = functools.partial(_seconds, jitted[count], (workers.place(rows),), 1)
    # In turns, short means would wait for the last packets of long ones.
    own_s = statistics.median([run() for _ in range(repeats + 1)][1:])
    # All processes go on with the same number, as their means must be alike.
    return _same(workers, jitted[1], own_s)

  jitted = {n: workers.jit(functools.partial(means, n)) for n in (1, 9)}
  one_s, many_s = seconds(16), seconds(16, 9)
  size = max(1024, num_bytes // 4)
  short_s, long_s = seconds(size // 4), seconds(size)
  while long_s < 2 * short_s and 4 * size <= _LONGEST_MEAN // 4:
    # The program's fixed costs still take longer than the bytes.
    size, short_s, long_s = 4 * size, long_s, seconds(4 * size)
  count = workers.num_workers
  sent_bits = 32 * (size - size // 4) * 2 * (count - 1) / count
  return cluster.Link(
    sent_bits / max(long_s - short_s, 1e-9),
    max(0.0, many_s - one_s) / 8 / cluster.ring_messages(count),
  )
