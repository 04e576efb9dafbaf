"""Random problems of a plan, and the fastest of all its choices."""

import dataclasses
import itertools
import math
import random

from jdist import cluster, pipeline
from jdist.pipeline.planning import _bottleneck, _candidate

_TABLES = ("naive", "gpipe", "1f1b", "eager_1f1b", "zb_h1", "greedy", "zb_h2")


def case(seed):
  """Draws arguments of `plan`, from free to very little memory and rates."""
  draw = random.Random(1_000_003 * seed + 17)
  layers, machines = draw.randint(4, 7), draw.choice([2, 2, 3, 3, 4])
  costs = []
  equal = draw.random() < 0.2
  memory = draw.choice([math.inf, 3.0, 1.1, 1.1, 0.75])
  slow = draw.choice([0.02, 0.3, 1.0, 3.0, 10.0])
  for i in range(layers):
    no_time = draw.random() < 0.15
    forward = 1.0 if equal else draw.lognormvariate(0, 0.8)
    forward = 0.0 if no_time else forward
    backward = forward * (2 if equal else draw.choice([1, 2, 2.5, 3]))
    half = draw.random() < 0.5
    costs.append(
      pipeline.LayerCost(
        f"{i}",
        forward,
        backward,
        weight_s=None if half else backward * draw.uniform(0.1, 0.7),
        update_s=draw.choice([0, 0, 0.3, 2.0]),
        parameter_bytes=0.0 if draw.random() < 0.15 else draw.uniform(1, 20),
        saved_bytes=draw.choice([0.0, 1.0, 1.0, 1.0]) * draw.uniform(1, 10),
        working_bytes=draw.choice([0.0, 1.0]) * draw.uniform(0, 10),
        output_bytes=draw.uniform(0.1, 3),
      )
    )
  whole = sum(4 * x.parameter_bytes + 2 * x.saved_bytes for x in costs)
  speeds = [
    1.0 if equal else draw.choice([0.5, 1, 1, 2, 1.3]) for _ in range(machines)
  ]
  if draw.random() < 0.25:
    speeds[draw.randrange(machines)] = 0.1
  rates = [draw.choice([1, 3, 10]) for _ in range(machines)]
  if draw.random() < 0.25:
    rates[draw.randrange(machines)] = 0.01 * max(rates)
  nodes, links = [], {}
  for i, (speed, rate) in enumerate(zip(speeds, rates, strict=True)):
    room = whole / machines * memory
    if memory < math.inf:
      room *= draw.uniform(0.6, 1.6)
    nodes.append(cluster.Node(f"n{i}", speed=speed, memory_bytes=room))
    links[f"n{i}"] = cluster.Link(8 * rate / slow, draw.choice([0, 0.02, 0.3]))
  topology = cluster.star(links, "switch")
  batch_size, free = draw.choice([4, 6, 8, 12]), draw.random() < 0.5
  # A plan tries these numbers by default.
  numbers = [x for x in range(1, 8 * machines + 1) if batch_size % x == 0]
  numbers = numbers if free else draw.sample(numbers, min(2, len(numbers)))
  return {
    "costs": costs,
    "machines": cluster.Cluster(tuple(nodes), topology, server="switch"),
    "batch_size": batch_size,
    "tables": draw.sample(_TABLES, draw.choice([1, 2, 3])),
    "samples": draw.choice([1, 1, 2]),
    "optimizer_copies": draw.choice([0.0, 1.0, 2.0]),
    "input_bytes": draw.choice([0.0, 5.0]),
    "num_microbatches": numbers,
  }


def fastest(problem):
  """Returns the least seconds of a batch; infinite if nothing fits."""
  costs, machines = problem["costs"], problem["machines"]
  copies, batch_size = problem["optimizer_copies"], problem["batch_size"]
  jobs = []
  for number, again in itertools.product(
    problem["num_microbatches"], (False, True)
  ):
    factor = batch_size / number / problem["samples"]
    chain = _bottleneck.Chain(
      [x.scaled(factor) for x in costs],
      machines,
      pipeline.Footprint(
        copies, recompute=again, input_bytes=factor * problem["input_bytes"]
      ),
      number,
    )
    for stages in range(1, min(len(costs), len(machines.names)) + 1):
      for cuts, nodes in itertools.product(
        itertools.combinations(range(1, len(costs)), stages - 1),
        itertools.permutations(machines.names, stages),
      ):
        jobs.append((number, again, chain.plan(nodes, cuts)))
  best = math.inf
  # No table is faster than its bottleneck, so the rest of a sorted list is not.
  for number, again, found in sorted(
    jobs, key=lambda x: x[0] * x[2].bottleneck_s
  ):
    if number * found.bottleneck_s >= best * (1 - 1e-9):
      break
    for name in problem["tables"]:
      for table in _tables(name, number, again, found, machines):
        times = pipeline.simulate(
          table, found.stages, machines, nodes=found.nodes,
          optimizer_copies=copies,
        )  # fmt: skip
        limits = [machines.node(x).memory_bytes for x in found.nodes]
        needs = zip(times.memory_bytes, limits, strict=True)
        if all(x <= y * (1 + 1e-9) for x, y in needs):
          least_s = number * found.bottleneck_s
          best = min(best, max(times.iteration_s, least_s))
  return best


def _tables(name, number, again, found, machines):
  """Yields a table; of one from times, with all limits up to twice a step."""
  listed = name in _candidate.LISTED
  choice = _candidate.Candidate(
    name, number, found.num_stages, 1 if listed else None, again
  )
  first = _candidate.make_table_of(choice, found, machines)
  yield first
  if listed:
    step = found.num_stages if name in _candidate.ZERO_BUBBLE else 1
    most = max(pipeline.check_table(first).live)
    for extra in [*range(1 - most, 0), step, 2 * step]:
      other = dataclasses.replace(choice, extra_live=extra)
      yield _candidate.make_table_of(other, found, machines)
