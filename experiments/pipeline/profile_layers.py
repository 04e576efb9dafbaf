"""Profiles the networks' layers: a row for each network."""

import dataclasses
import json
import pathlib
from typing import Any

import config

from jdist import pipeline, training

FOLDER = pathlib.Path(__file__).resolve().parent / "results"


def path(options: config.Config) -> pathlib.Path:
  """Returns the file of a source's rows."""
  return FOLDER / f"profile-{options.source}.jsonl"


def _settings(options: config.Config, name: str) -> dict[str, Any]:
  """Returns what a profile depends on."""
  found = dataclasses.asdict(config.NETWORKS[name]) | {"source": options.source}
  if options.source != "timed":
    return found | {
      "flops_per_s": options.flops_per_s, "bytes_per_s": options.bytes_per_s
    }  # fmt: skip
  return found | {"repeats": options.repeats}


def costs(options: config.Config, name: str) -> list[pipeline.LayerCost]:
  """Reads a network's profile, or makes it and writes its row."""
  # As a row has it.
  settings = json.loads(json.dumps(_settings(options, name)))
  for row in reversed(_rows(options)):
    if row["config"] == settings:
      return [pipeline.LayerCost(**x) for x in row["layers"]]
  network = config.NETWORKS[name]
  found = pipeline.layer_costs(
    network.build().layers,
    network.batch(),
    inputs="x",
    source=options.source,
    flops_per_s=options.flops_per_s,
    bytes_per_s=options.bytes_per_s,
    repeats=options.repeats,
  )
  row = training.make_row(
    settings,
    0,
    purpose="profile",
    layers=[dataclasses.asdict(x) for x in found],
  )
  training.append_rows(path(options), [row])
  seconds = sum(x.compute_s for x in found)
  print(f"profiled {name}: {len(found)} layers, {seconds:.3g} s", flush=True)
  return found


def _rows(options: config.Config) -> list[dict[str, Any]]:
  there = path(options)
  return training.read_rows(there) if there.exists() else []
