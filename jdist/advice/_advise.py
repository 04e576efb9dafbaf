"""Measures what methods cost on this machine, and links between processes."""

import collections as counting
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks, cluster, collectives, signatures, training, transforms
from jdist.advice import _prediction
from jdist.states import PyTree

Chain = Callable[[collectives.Axis], optax.GradientTransformation]
# The states of all measured workers are on one device.
_MEASURED_BYTES = 2**30
_LONGEST_MEAN = 2**26  # Bytes by which a link is measured.
_TRIED_S = 1.5  # Seconds of a method's rounds at least, if steps are short.
_TURNS = 5  # Of each method's rounds, of whose means the median counts.
# Numbers of updates in which a streamed message may be sent.
_STREAM_STEPS = (1, 2, 4, 8, 16)


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
) -> _prediction.Advice:
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
      more; it is measured between `workers`.
    limit_s: The seconds after which no further block of measurements begins;
      there are three at least and nine at most. Half of the seconds belong to
      the messages of `workers`.
    workers: One worker in each process of this run, all of which call this with
      the same link. They also train for some rounds by each method, as far as
      that fits into `limit_s`, and predict by what its messages took there. By
      default no message is sent.
  """
  optimizer = transforms.lenient(checks.check_optimizer("optimizer", optimizer))
  checks.check_int("num_workers", num_workers, 2)
  checks.check_number("slowdown", slowdown, low=1)
  if not chains:
    raise ValueError("`chains` must have a method at least, got none.")
  if workers is not None and slowdown != 1:
    raise ValueError(
      f"`slowdown` must be left out with `workers`, got {slowdown}: their "
      "processes measure it."
    )
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
  here = collectives.Workers(held, "vmap", "worker")

  def rounds_of(
    team: Any, given: PyTree, make: Chain, interval: int, model_state: PyTree
  ) -> _Rounds:
    chain = transforms.lenient(make(team.axis))
    step: Any = functools.partial(_update, chain, team.axis)
    if team is not here:
      step = training.make_step(loss_fn, chain, axis=team.axis)
    return _Rounds(team, chain, interval, step, given, (params, model_state))

  own = functools.partial(rounds_of, here, here.replicate(grads))
  plain = own(lambda axis: optimizer, 1, {})
  measured = {name: own(*chain, state) for name, chain in chains.items()}
  # A turn lasts long enough for the clock.
  count = max(1, min(20, math.ceil(0.05 / alone(1))))
  last_s = started_s + (limit_s if workers is None else limit_s / 2)
  blocks: list[list[float]] = []
  while len(blocks) < 10:
    row = [alone(count), plain.seconds()]
    blocks.append(row + [one.seconds() for one in measured.values()])
    if len(blocks) > 3 and time.monotonic() > last_s:
      break
  # The first block warms up.
  step_s, plain_s, *taken = np.array(blocks[1:]).T
  costs = {
    name: _prediction.MethodCosts(
      one.interval,
      step_s.tolist(),
      (own_s - plain_s).tolist(),
      *_sent(chains[name][0], one.controls, params, state, num_workers),
      one.hidden_steps,
    )
    for (name, one), own_s in zip(measured.items(), taken, strict=True)
  }
  if workers is None:
    return _prediction.Advice(costs, link, (slowdown,))
  mean = workers.jit(functools.partial(collectives.mean, axis=workers.axis))
  median_s, everywhere = np.median(step_s), workers.replicate(batch)
  # All processes know the same numbers, and so send the same messages.
  slowdowns = (_gathered(workers, mean, float(median_s)) / median_s).tolist()
  slowdown = max(1.0, *slowdowns)
  left_s = limit_s / 2  # They are compiled once more, which does not count.
  tried: dict[str, tuple[_Rounds, int, float, list[float]]] = {}
  for number, (name, one) in enumerate(measured.items()):
    sent_s = link.send_s(
      *_sent(chains[name][0], one.controls, params, state, workers.num_workers)
    )
    # A stream finds its pace first, by other programs.
    first = 5 if one.hidden_steps else 2
    round_s = sent_s + one.interval * slowdown * float(median_s)
    able = int(left_s / (len(measured) - number) / round_s)
    wanted = max(3, 64 // one.interval, math.ceil(_TRIED_S / round_s))
    rounds = min(first + wanted, able)
    if sent_s and rounds >= first + 3:
      left_s -= rounds * round_s
      there = rounds_of(workers, everywhere, *chains[name], state)
      for _ in range(first):
        there.seconds()
      tried[name] = there, rounds - first, sent_s, []
  # Processes may wait for each other in one order for a whole turn.
  for turn in range(_TURNS):
    for there, rounds, _, taken_s in tried.values():
      if own_s := [there.seconds() for _ in range(turn, rounds, _TURNS)]:
        taken_s.append(statistics.fmean(own_s))
  for name, (_, _, sent_s, taken_s) in tried.items():
    extra_s = max(0.0, float(np.median(costs[name].extra_s)))
    # Messages begin when the slowest machine has computed.
    waits_s = statistics.median(taken_s) - slowdown * float(median_s + extra_s)
    costs[name] = _as_sent(costs[name], waits_s, sent_s, slowdown)
  return _prediction.Advice(costs, link, slowdowns)


def _as_sent(
  costs: _prediction.MethodCosts, waits_s: float, sent_s: float, slowdown: float
) -> _prediction.MethodCosts:
  """Returns the costs of steps that wait so long for a round of `sent_s`."""
  hidden_s = costs.hidden_steps * slowdown * statistics.median(costs.step_s)
  more_s = waits_s / slowdown
  if sent_s > hidden_s:
    own_s = max(0.0, costs.interval * waits_s + hidden_s)
    costs = costs._replace(send_ratio=own_s / sent_s)
    more_s = min(0.0, more_s)
  # A thread that sends takes time from the step; own work may hide in waits.
  return costs._replace(extra_s=[x + more_s for x in costs.extra_s])


def _seconds(function: Callable[..., Any], given: Any, count: int) -> float:
  """Returns the mean seconds of a function's calls."""
  started_s = time.perf_counter()
  for _ in range(count):
    jax.block_until_ready(function(*given))
  return (time.perf_counter() - started_s) / count


def _gathered(
  workers: collectives.Workers, mean: Callable[..., jax.Array], seconds: float
) -> np.ndarray:
  """Returns the seconds that all workers' processes call this with."""
  own = list(workers.local_workers)
  rows = np.zeros((len(own), workers.num_workers), np.float32)
  # The mean of rows that have one entry each.
  rows[range(len(own)), own] = seconds * workers.num_workers
  return np.asarray(mean(workers.place(rows)).addressable_shards[0].data)[0]


class _Rounds:
  """Rounds of a step as `training.make_step` makes it, of one batch `given`."""

  def __init__(
    self,
    team: collectives.Workers,
    optimizer: optax.GradientTransformation,
    interval: int,
    step: Callable[..., Any],
    given: PyTree,
    start: tuple[PyTree, PyTree],
  ):
    self.interval = checks.check_int("chains", interval, 1, 10_000)
    self._team, self._given = team, given
    self._state = training.init_state(team, optimizer, *start)
    opt_state = self._state.opt_state
    streams = transforms.streams(opt_state)
    self._program = functools.cache(
      lambda control: team.jit(functools.partial(step, control=control))
    )
    self._host = training.RoundHost(
      team, opt_state, stream_steps=_STREAM_STEPS if streams else ()
    )
    self.hidden_steps = 0
    # A message is in flight from the second round on.
    self.seconds()
    self.seconds()
    if streams:
      ahead: Any = transforms.rounds_ahead(self._state.opt_state)
      window = int(np.max(np.asarray(team.view(ahead))[..., 0, 0]))
      self.hidden_steps = window if window > 0 else interval

  def seconds(self) -> float:
    """Returns a step's mean seconds in a round."""
    self.controls = []
    started_s = time.perf_counter()
    for _ in range(self.interval):
      control = self._host.control()
      self.controls.append(control)
      self._state, metrics = self._program(control)(self._state, self._given)
      self._host.follow(self._state.opt_state)
      jax.block_until_ready(metrics)
    jax.block_until_ready(self._state)
    taken_s = time.perf_counter() - started_s
    return taken_s / self.interval / len(self._team.local_workers)


def _update(
  optimizer: optax.GradientTransformationExtraArgs,
  axis: collectives.Axis,
  state: training.TrainState,
  grads: PyTree,
  control: transforms.Control,
) -> tuple[training.TrainState, dict[str, Any]]:
  loss = jnp.zeros(())
  updates, opt_state = optimizer.update(
    grads, state.opt_state, state.params, loss=loss, value=loss, control=control
  )
  own = training.synchronize_statistics(
    state.model_state, opt_state, axis=axis, control=control
  )
  params = transforms.apply_updates(state.params, updates, opt_state)
  return state._replace(params=params, opt_state=opt_state, model_state=own), {}


def _sent(
  make: Chain,
  controls: Sequence[Any],
  params: PyTree,
  model_state: PyTree,
  num_workers: int,
) -> tuple[float, int]:
  """Counts the bytes and messages of a round, given its updates."""
  optimizer = transforms.lenient(make("worker"))
  num_bytes, messages = 0.0, 0
  for control, count in counting.Counter(controls).items():

    def step(params: PyTree, own: PyTree, control: Any = control) -> Any:
      # Bytes do not depend on numbers: the parameters serve as gradients.
      zero, opt_state = jnp.zeros(()), optimizer.init(params)
      state = training.TrainState(zero, params, opt_state, own, zero)
      return _update(optimizer, "worker", state, params, control)

    sent = collectives.traffic(
      step, params, model_state, axis="worker", num_workers=num_workers
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
    # All processes continue with one number, as their means must be alike.
    return float(np.mean(_gathered(workers, jitted[1], own_s)))

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
