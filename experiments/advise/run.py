r"""Predicts step times by `advice.advise`, and measures them over links.

    sudo python scripts/slow_network.py --hosts 2 --rate 1000mbit -- \\
      python experiments/advise/run.py --model cnn --rates 30mbit 100mbit@0.5
    python experiments/advise/report.py

At each rate a few means measure the link. All hosts measure what each method
costs a worker, at the same time, because a core is slower while its neighbour
computes, and send a few rounds of messages. The file has these rows before any
step is measured. Then the steps of all methods follow in turns. Each host has
one core, and after an @ the last one has that share of it.
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import socket
import statistics
import sys
import time

os.environ["XLA_FLAGS"] = " ".join(
  (os.environ.get("XLA_FLAGS", ""), "--xla_cpu_multi_thread_eigen=false")
)

import jax
import numpy as np
import optax

import jdist
from jdist import (
  advice,
  codecs,
  collectives,
  methods,
  models,
  reducers,
  training,
  transforms,
)
from jdist.transforms import intervals

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))

import slow_network

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
INTERVAL = 8
_STREAM_STEPS = (1, 2, 4, 8)
SHAPES = {
  "lenet": (28, 28, 1), "cnn": (32, 32, 3), "mlp": (28, 28, 1),
  "resnet8": (32, 32, 3),
}  # fmt: skip
_BLOCKS = 7
_BLOCK_S = 0.5
# A network namespace has its own /sys, without control groups; what started the
# hosts has them.
_GROUPS = f"/proc/{os.getppid()}/root/sys/fs/cgroup"


def sgd():
  return optax.sgd(0.01, momentum=0.9, nesterov=True)


def int4():
  return jdist.Compression(codecs.Quantize(4), reducers.ErrorFeedback())


def msdpu(axis, compression=None):
  late = transforms.Delayed(carry=None, stream=transforms.Stream())
  return methods.msdpu(
    sgd(), intervals.fixed(INTERVAL), 0.01, axis=axis, overlap=late,
    compression=compression,
  )  # fmt: skip


CHAINS = {
  "ssgd": (lambda axis: methods.ssgd(sgd(), axis=axis), 1),
  "ssgd int4": (
    lambda axis: methods.ssgd(sgd(), axis=axis, compression=int4()), 1
  ),
  "powersgd": (lambda axis: methods.powersgd(sgd(), axis=axis), 1),
  "topk_sgd": (lambda axis: methods.topk_sgd(sgd(), axis=axis), 1),
  "local_sgd": (
    lambda axis: methods.local_sgd(sgd(), INTERVAL, axis=axis), INTERVAL
  ),
  "diloco int4": (
    lambda axis: methods.diloco(
      sgd(), INTERVAL, axis=axis, compression=int4()
    ),
    INTERVAL,
  ),
  "msdpu streamed": (msdpu, INTERVAL),
  "msdpu streamed int4": (lambda axis: msdpu(axis, int4()), INTERVAL),
}  # fmt: skip


def problem(options):
  """Returns the model, its loss and one worker's batch."""
  shape = SHAPES[options.model]
  model = models.build(options.model, input_shape=shape, num_classes=10, seed=0)
  random = np.random.default_rng(0)
  batch = {
    "image": random.normal(size=(options.batch_size, *shape)).astype(
      np.float32
    ),
    "label": random.integers(0, 10, options.batch_size).astype(np.int32),
  }
  return model, training.classification_loss(model.apply), batch


def take_core():
  """Gives this host a core of its own; returns the host's number."""
  number = int(os.environ["JDIST_PROCESS"])
  os.sched_setaffinity(0, {number % (os.cpu_count() or 1)})
  return number


def say(line):
  if jax.process_index() == 0:
    print(line, flush=True)


def predict(options, workers, parts):
  """Measures the link and each method's costs; returns the rows."""
  model, loss_fn, batch = parts
  num_bytes = sum(x.nbytes for x in jax.tree.leaves(model.params))
  link = advice.measure_link(workers, num_bytes=num_bytes)
  found = advice.advise(
    loss_fn, model.params, batch, CHAINS, link, num_workers=options.hosts,
    optimizer=sgd(), model_state=model.state, limit_s=options.limit_s,
    workers=workers,
  )  # fmt: skip
  say(
    f"{options.bits_per_s / 1e6:g} Mbit/s: means reach "
    f"{link.bandwidth_bits_per_s / 1e6:.1f}, {1e3 * link.latency_s:.2f} ms a "
    f"message; the slowest host takes {found.slowdown:.2f} times as long"
  )
  for name, costs in found.costs.items():
    say(
      f"{name}: {1e3 * statistics.median(costs.step_s):.2f} ms and "
      f"{1e3 * statistics.median(costs.extra_s):.2f} ms more, "
      f"{costs.round_bytes / 1e3:.1f} kB a round, in {costs.send_ratio:.2f} of "
      "the link's time"
    )
  return [
    training.make_row(
      vars(options), 0, method=name, costs=costs._asdict(),
      link=dataclasses.asdict(link), slowdown=found.slowdown,
      said_s=found.seconds(name),
    )
    for name, costs in found.costs.items()
  ]  # fmt: skip


class Turn:
  """A method's steps, a round after the other, as `Trainer` takes them."""

  def __init__(self, workers, make, model, loss_fn, batch):
    optimizer = make(workers.axis)
    self.state = training.init_state(
      workers, optimizer, model.params, model.state
    )
    self.batch = workers.place(
      jax.tree.map(lambda x: np.stack([x] * len(workers.local_workers)), batch)
    )
    self.step = training.make_step(loss_fn, optimizer, axis=workers.axis)

    @functools.cache
    def program(control):
      return workers.jit(functools.partial(self.step, control=control))

    streams = transforms.streams(self.state.opt_state)
    self.program = program
    self.controls = []  # Those of all steps so far.
    self.host = training.RoundHost(
      workers,
      self.state.opt_state,
      stream_steps=_STREAM_STEPS if streams else (),
    )

  def take(self, rounds=1):
    """Runs rounds of the longest interval; returns a step's seconds."""
    started_s = time.perf_counter()
    for _ in range(rounds * INTERVAL):
      self.controls.append(self.host.control())
      program = self.program(self.controls[-1])
      self.state, metrics = program(self.state, self.batch)
      self.host.follow(self.state.opt_state)
      jax.block_until_ready(metrics)
    jax.block_until_ready(self.state)
    return (time.perf_counter() - started_s) / (rounds * INTERVAL)


def measure(options, workers, turns):
  """Measures all methods' steps; returns the rows."""
  mean = workers.jit(functools.partial(collectives.mean, axis=workers.axis))
  seconds, rounds = {name: [] for name in turns}, dict.fromkeys(turns, 1)
  for block in range(_BLOCKS + 2):
    for name, turn in turns.items():
      taken_s = turn.take(rounds[name])
      if block > 1:  # A late method's first messages come in its second round.
        seconds[name].append(taken_s)
      elif block == 1:
        # A block of steps of a few milliseconds lasts long enough for the turns
        # of an operating system. All hosts take as many.
        agreed = mean(workers.place(np.array([taken_s], np.float32)))
        round_s = INTERVAL * float(workers.view(agreed))
        rounds[name] = math.ceil(_BLOCK_S / round_s)
  for name, taken in seconds.items():
    say(f"{name}: {1e3 * statistics.median(taken):.2f} ms a step")
  return [
    training.make_row(vars(options), 0, method=name, step_s=taken)
    for name, taken in seconds.items()
  ]


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", choices=tuple(SHAPES), default="lenet")
  parser.add_argument("--batch-size", type=int, default=32,
                      help="images of a worker in a step")  # fmt: skip
  parser.add_argument("--rates", nargs="+", default=["100mbit"],
                      help="of all links, RATE or RATE@SHARE, one after the "
                      "other")  # fmt: skip
  parser.add_argument("--limit-s", type=float, default=60.0)
  options = parser.parse_args()
  settings = options.rates
  del options.rates
  options.hosts = int(os.environ["JDIST_PROCESSES"])
  number = take_core()
  collectives.start_processes(
    os.environ["JDIST_COORDINATOR"], options.hosts, number,
    cpu_devices_per_process=1,
  )  # fmt: skip
  workers = jdist.workers(options.hosts)
  model, loss_fn, batch = parts = problem(options)
  turns = {
    name: Turn(workers, make, model, loss_fn, batch)
    for name, (make, _) in CHAINS.items()
  }
  host = socket.gethostname()
  names = [f"{host[: -len(str(number))]}{i}" for i in range(options.hosts)]
  for setting in settings:
    rate, _, share = setting.partition("@")
    if number == 0:
      slow_network.change_rate(names, rate)
    collectives.agree(f"the setting {setting}", {})
    options.bits_per_s = 8 * slow_network.bytes_per_s(rate)
    options.share = float(share or 1)
    with contextlib.ExitStack() as quota:
      if share and number == options.hosts - 1:
        quota.enter_context(
          slow_network.cpu_quota([os.getpid()], options.share, _GROUPS)
        )
      keep("predicted.jsonl", predict(options, workers, parts))
      keep("measured.jsonl", measure(options, workers, turns))


def keep(name, rows):
  if jax.process_index() == 0:
    training.append_rows(RESULTS / name, rows)


if __name__ == "__main__":
  main()
