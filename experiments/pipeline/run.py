"""Pipelines of several methods on a virtual clock, from profiled layers.

    python experiments/pipeline/run.py hosts
    python experiments/pipeline/run.py hosts --networks vgg16 --stages 8

Layers are profiled once, in rows of their own; then each method's plan is
simulated in each cell: a network on machines.  Cells whose rows are there are
not repeated.
"""

import dataclasses
import itertools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import config
import methods
import profile_layers
import tyro

from jdist import training

FOLDER = pathlib.Path(__file__).resolve().parent / "results"
# Options in which rows of one comparison may differ.
_FREE = ("networks", "topologies", "stages")


def cell(
  options: config.Config, network: str, topology: str, stages: int
) -> Any:
  """Makes a cell."""
  chosen = config.NETWORKS[network]
  return methods.Cell(
    profile_layers.costs(options, network),
    config.TOPOLOGIES[topology](options, stages),
    config.levels(options, topology, stages),
    options.microbatches * stages,
    chosen.samples,
    chosen.bytes_of_input(),
  )


def results(made: methods.Cell) -> list[dict[str, Any]]:
  """Returns what each method comes to, ours first."""
  bound = made.samples / made.bound_s()

  def row(method: str, partition: str, plan: Any, *args: Any, **options: Any):
    try:
      found = plan(made, *args, **options)
    except ValueError as error:
      found = {"samples_per_s": 0.0, "reason": str(error)}
    return {"method": method, "partition": partition} | found

  found = [row("ours", "ours", methods.ours) | {"bound_samples_per_s": bound}]
  for name in methods.BASELINES:
    found.append(row(name, "paper", methods.by_its_paper, name))
    found.append(row(name, "ours", methods.by_our_plan, name))
  found.append(
    row(
      "pipedream",
      "paper, replicated",
      methods.by_its_paper,
      "pipedream",
      replicate=True,
    )
  )
  return found


def main(
  path: pathlib.Path,
  options: config.Config,
  results: Callable[[methods.Cell], list[dict[str, Any]]],
) -> None:
  """Runs the cells whose rows are not there.

  Args:
    path: of the rows.
    options: of the cells.
    results: makes the rows of a cell, ours first.
  """
  rows = training.read_rows(path) if path.exists() else []
  kept = {
    key: value
    for key, value in dataclasses.asdict(options).items()
    if key not in _FREE
  }
  kept = json.loads(json.dumps(kept))
  done = set()
  for each in rows:
    if each["settings"] != kept:
      raise ValueError(
        f"{path} has rows of other settings: {each['settings']}."
      )
    done.add((each["network"], each["topology"], each["stages"]))
  for place in itertools.product(
    options.networks, options.topologies, options.stages
  ):
    if place in done:
      continue
    keys = dict(zip(("network", "topology", "stages"), place, strict=True))
    made = cell(options, *place)
    found = [
      training.make_row(
        dataclasses.asdict(options),
        0,
        purpose="simulation",
        settings=kept,
        **keys,
        **result,
      )
      for result in results(made)
    ]
    training.append_rows(path, found)
    ours = found[0]
    told = ", ".join(
      f"{x['method']} {ours['samples_per_s'] / x['samples_per_s']:.2f}"
      for x in found[1:]
      if x["partition"] == "paper" and x["samples_per_s"]
    )
    speed = f"{ours['samples_per_s']:.1f} samples/s"
    print(f"{place}: {ours['table']}, {speed}; times faster than {told or '-'}")


if __name__ == "__main__":
  chosen = tyro.extras.overridable_config_cli(config.PRESETS)
  name = next(word for word in sys.argv[1:] if word in config.PRESETS)
  main(FOLDER / f"{name}.jsonl", chosen, results)
