r"""Predicts steps of pipelines as `jdist advise` does, and measures them.

    sudo python scripts/slow_network.py --hosts 2 --rate 1000mbit -- \\
      python experiments/advise/pipelines.py --model cnn --rates 30mbit 100mbit
    python experiments/advise/report.py

Each host has one core, and a stage of the model.  All of them measure its
layers at the same time, and at each rate a few means measure the link.  The
rows have the plans' times before any step is measured: those of each table by
turns, and of synchronous SGD with the same samples.
"""

import argparse
import math
import os
import socket
import statistics
import time

import jax
import numpy as np
import run

import jdist
from jdist import advice, cluster, collectives, pipeline, training

TABLES = "gpipe", "1f1b", "zb_h1"
_BLOCKS = 7
_BLOCK_S = 0.5


def layer_costs(model, batch, mean):
  """Returns the layers' costs, the means over the hosts."""
  own = pipeline.layer_costs(model.layers, batch, source="timed", repeats=20)
  fields = [x for x in pipeline.LayerCost.__dataclass_fields__ if x != "name"]
  numbers = mean([[getattr(x, field) for field in fields] for x in own])
  return [
    pipeline.LayerCost(x.name, **dict(zip(fields, row, strict=True)))
    for x, row in zip(own, numbers.tolist(), strict=True)
  ]


def plans(options, costs, machines):
  """Returns the plan of each table, as `jdist advise` makes it."""
  samples, parts = options.batch_size, math.gcd(options.batch_size, 4)
  return {
    name: pipeline.plan(
      costs, machines, samples * options.hosts, samples=samples // parts,
      tables=(name,), num_microbatches=(options.hosts * parts,),
      num_stages=(options.hosts,), recompute=(False,),
    )[0]
    for name in TABLES
  }  # fmt: skip


def round_trip_s(number):
  """Returns the seconds of a few bytes to the first host and back."""
  started_s = time.perf_counter()
  collectives.agree(f"round trip {number}", {})
  return time.perf_counter() - started_s


class Pipe:
  """A table's steps, one iteration after the other."""

  def __init__(self, model, found, microbatch, batch, peers):
    self.process = pipeline.StageProcess(
      pipeline.cut_layers(model.layers, found.plan.cuts), training.label_loss,
      found.made, microbatch, peers=peers,
    )  # fmt: skip
    self.batch, self.state = batch, self.process.init_state(run.sgd())

  def take(self, steps):
    """Runs steps; returns the seconds of each one."""
    started_s = time.perf_counter()
    self.state, _ = self.process.run(self.state, [self.batch] * steps)
    return (time.perf_counter() - started_s) / steps


def measure(turns, mean):
  """Measures all steps by turns; returns the seconds of the blocks."""
  seconds, steps = {name: [] for name in turns}, dict.fromkeys(turns, 3)
  for block in range(_BLOCKS + 2):
    for name, take in turns.items():
      taken_s = take(steps[name])
      if block == 1:  # All hosts take as many.
        steps[name] = math.ceil(_BLOCK_S / float(mean(taken_s)))
      elif block > 1:
        seconds[name].append(taken_s)
  return seconds


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", choices=tuple(run.SHAPES), default="lenet")
  parser.add_argument("--batch-size", type=int, default=32,
                      help="images of a worker in a step")  # fmt: skip
  parser.add_argument("--rates", nargs="+", default=["100mbit"])
  options = parser.parse_args()
  rates = options.rates
  del options.rates
  options.hosts = int(os.environ["JDIST_PROCESSES"])
  number, coordinator = run.take_core(), os.environ["JDIST_COORDINATOR"]
  collectives.start_processes(
    coordinator, options.hosts, number, cpu_devices_per_process=1
  )
  workers = jdist.workers(options.hosts)
  program = workers.jit(lambda x: collectives.mean(x, axis=workers.axis))

  def mean(own):
    here = np.asarray(own, np.float32)[None]
    return np.asarray(workers.view(program(workers.place(here))))

  model, loss_fn, batch = run.problem(options)
  num_bytes = sum(x.nbytes for x in jax.tree.leaves(model.params))
  base = run.Turn(workers, run.CHAINS["ssgd"][0], model, loss_fn, batch)
  whole = jax.tree.map(lambda x: np.concatenate([x] * options.hosts), batch)
  size = options.batch_size // math.gcd(options.batch_size, 4)
  microbatch = jax.tree.map(lambda x: x[:size], batch)
  host, _, port = coordinator.rpartition(":")
  addresses = [(host, int(port) + 1), *[("", 0)] * (options.hosts - 1)]
  names = [
    f"{socket.gethostname()[: -len(str(number))]}{i}"
    for i in range(options.hosts)
  ]
  with pipeline.connect(number, addresses, "on one machine") as peers:
    for rate in rates:
      if number == 0:
        run.slow_network.change_rate(names, rate)
      collectives.agree(f"the rate {rate}", {})
      options.bits_per_s = 8 * run.slow_network.bytes_per_s(rate)
      own = advice.measure_link(workers, num_bytes=num_bytes)
      # A mean waits for threads of its own, and a pipeline's messages do not.
      latency_s = float(mean(statistics.median(map(round_trip_s, range(20)))))
      # A message takes the links of two machines.
      link = cluster.Link(own.bandwidth_bits_per_s, latency_s / 4)
      machines = cluster.workers([1.0] * options.hosts, link=link)
      found = plans(options, layer_costs(model, microbatch, mean), machines)
      turns = {
        name: Pipe(model, one, microbatch, whole, peers).take
        for name, one in found.items()
      }
      turns["ssgd"] = lambda steps: base.take(math.ceil(steps / run.INTERVAL))
      said_s = {
        name: options.batch_size * options.hosts / one.samples_per_s
        for name, one in found.items()
      }
      run.say(f"{rate}: {said_s}")
      taken = measure(turns, mean)
      if number:
        continue
      for name, seconds in taken.items():
        run.say(f"{name}: {1e3 * statistics.median(seconds):.2f} ms a step")
      rows = [
        training.make_row(
          vars(options), 0, table=name, said_s=said_s.get(name),
          step_s=seconds, link=[link.bandwidth_bits_per_s, link.latency_s],
          cuts=found[name].plan.cuts if name in found else None,
        )
        for name, seconds in taken.items()
      ]  # fmt: skip
      training.append_rows(run.RESULTS / "others.jsonl", rows)


if __name__ == "__main__":
  main()
