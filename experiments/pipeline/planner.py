"""The planner and the clock against what is known: formulas and all cuts.

    python experiments/pipeline/planner.py

Bubbles of tables on equal stages beside the formulas of their papers; the
partition's bottleneck beside the least of all cuts in 200 random cases; and the
seconds for 200 layers on 64 machines.
"""

import itertools
import math
import pathlib
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import studies

from jdist import cluster, pipeline, training

_PATH = pathlib.Path(__file__).resolve().parent / "results" / "planner.jsonl"
_SIZES = ((2, 2), (4, 8), (8, 8), (8, 32))


def formula(name: str, stages: int, number: int) -> float | None:
  """The part of the time in which devices wait, by the table's paper, or None.

  With passes of 1 and 2 seconds, and two stages a device where interleaved.
  """
  fill = stages - 1
  return {
    "naive": fill / stages,
    "gpipe": fill / (number + fill),
    "1f1b": fill / (number + fill),
    "eager_1f1b": fill / (number + fill),
    "interleaved": fill / (2 * number + fill),
    # A third of 1F1B's: both parts of the backward pass take a second.
    "zb_h1": fill / (3 * number + fill),
    "zb_h2": 0.0 if number > 2 * fill else None,
    "zb_v": None,
  }.get(name, 0.0)


def bubble(name: str, stages: int, number: int) -> float:
  """That on the clock; in the steady state of tables without a flush."""
  options: dict[str, Any] = {}
  if pipeline.TABLES[name].asynchronous:
    number = 1 if name == "pipedream" else number
    options["num_iterations"] = 40
  table = pipeline.make_table(name, stages, number, **options)
  cost = pipeline.LayerCost("stage", 1.0, 2.0)
  machines = cluster.workers([1.0] * stages)
  times = pipeline.simulate(table, [cost] * table.num_stages, machines)
  if options:
    return 1 - sum(times.utilisation) / stages
  return times.bubble


def _random_case(seed: int) -> tuple[list[pipeline.LayerCost], cluster.Cluster]:
  generator = random.Random(seed)
  stages = generator.randint(2, 4)
  costs = [
    pipeline.LayerCost(
      f"layer {i}",
      generator.uniform(0.1, 2.0),
      generator.uniform(0.1, 4.0),
      parameter_bytes=generator.uniform(0.0, 100.0),
      output_bytes=generator.uniform(1.0, 50.0),
      saved_bytes=generator.uniform(0.0, 100.0),
    )
    for i in range(generator.randint(stages, 9))
  ]
  memory = generator.choice([math.inf, 900.0])
  names = [f"n{i}" for i in range(stages)]
  nodes = tuple(
    cluster.Node(
      x, speed=generator.choice([0.5, 1.0, 1.0, 3.0]), memory_bytes=memory
    )
    for x in names
  )
  links = {
    x: cluster.Link(8 * generator.choice([5.0, 20.0, 100.0])) for x in names
  }
  return costs, cluster.Cluster(
    nodes, cluster.star(links, "switch"), server="switch"
  )


def _bottleneck(
  costs: Sequence[pipeline.LayerCost],
  cuts: Sequence[int],
  machines: cluster.Cluster,
) -> float:
  """That of given cuts, counted here; infinite where memory is short."""
  edges = [0, *cuts, len(costs)]
  sent = [0.0, *(costs[cut - 1].output_bytes for cut in cuts), 0.0]
  most = 0.0
  for s, node in enumerate(machines.nodes):
    stage = costs[edges[s] : edges[s + 1]]
    assert machines.topology is not None
    link = machines.topology.link(node.name, "switch")
    need = sum(
      3 * x.parameter_bytes + (len(cuts) + 1 - s) * x.saved_bytes for x in stage
    )
    if need > node.memory_bytes:
      return math.inf
    most = max(
      most,
      sum(x.compute_s for x in stage) / node.speed,
      (sent[s] + sent[s + 1]) * 8 / link.bandwidth_bits_per_s,
    )
  return most


def cases(number: int) -> dict[str, Any]:
  """The partition against the best of all cuts, in random cases."""
  worst, fitting, refused = 1.0, 0, 0
  for seed in range(number):
    costs, machines = _random_case(seed)
    stages = len(machines.nodes)
    least = min(
      _bottleneck(costs, cuts, machines)
      for cuts in itertools.combinations(range(1, len(costs)), stages - 1)
    )
    footprint = pipeline.Footprint(in_flight=tuple(range(stages, 0, -1)))
    try:
      found = pipeline.partition(costs, machines, footprint=footprint)
    except ValueError:
      assert least == math.inf
      refused += 1
      continue
    fitting += 1
    worst = max(worst, found.bottleneck_s / least)
  return {"cases": number, "fitting": fitting, "refused": refused,
          "worst_ratio": worst}  # fmt: skip


def large(layers: int, machines: int) -> dict[str, Any]:
  """The seconds of a large problem: cuts alone, and the machines' order too."""
  generator = random.Random(0)
  costs = [
    pipeline.LayerCost(
      f"{i}",
      generator.uniform(0.1, 2.0),
      generator.uniform(0.1, 4.0),
      parameter_bytes=generator.uniform(0.0, 100.0),
      output_bytes=generator.uniform(1.0, 50.0),
    )
    for i in range(layers)
  ]
  links = {}
  for i in range(machines):
    links[f"n{i}", f"m{i // 8}"] = cluster.Link(8 * 100.0)
    links[f"m{i // 8}", "server"] = cluster.Link(8 * 10.0)
  there = cluster.Cluster(
    tuple(
      cluster.Node(f"n{i}", speed=generator.uniform(0.5, 2.0))
      for i in range(machines)
    ),
    cluster.Topology(links),
  )
  start_s = time.perf_counter()
  cut = pipeline.partition(costs, there)
  cut_s = time.perf_counter() - start_s
  start_s = time.perf_counter()
  placed = pipeline.place(costs, there)
  return {
    "layers": layers,
    "machines": machines,
    "partition_s": cut_s,
    "place_s": time.perf_counter() - start_s,
    "bottleneck_s": (cut.bottleneck_s, placed.bottleneck_s),
  }


def measure() -> None:
  """Writes a row for each of the three."""
  bubbles = {
    name: [
      (bubble(name, *size), formula(name, *size))
      for size in _SIZES
      if name != "interleaved" or not size[1] % size[0]
    ]
    for name in pipeline.TABLES
  }
  rows = [
    {"purpose": "bubbles", "sizes": _SIZES, "bubbles": bubbles},
    {"purpose": "cases", **cases(200)},
    {"purpose": "large", **large(200, 64)},
  ]
  _PATH.unlink(missing_ok=True)
  training.append_rows(_PATH, [training.make_row({}, 0, **row) for row in rows])


def _shown(simulated: float, known: float | None) -> str:
  formula = "" if known is None else f" ({100 * known:.1f})"
  return f"{100 * simulated:.1f}{formula}"


def report() -> None:
  """Prints what the rows say."""
  rows = {row["purpose"]: row for row in training.read_rows(_PATH)}
  sizes = [f"S={s}, M={m}" for s, m in _SIZES]
  lines = [
    (name, *itertools.starmap(_shown, found))
    for name, found in rows["bubbles"]["bubbles"].items()
  ]
  print(studies.table(" | ".join(["table", *sizes]), lines))
  small, big = rows["cases"], rows["large"]
  print(
    f"{small['cases']} cases, worst ratio {small['worst_ratio']:.4f}, "
    f"{small['refused']} refused"
  )
  print(
    f"{big['layers']} layers on {big['machines']} machines: cuts "
    f"{big['partition_s']:.2f} s, their order too {big['place_s']:.1f} s"
  )


if __name__ == "__main__":
  if sys.argv[1:] != ["report"]:
    measure()
  report()
