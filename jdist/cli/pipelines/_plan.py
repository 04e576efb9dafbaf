"""`jdist pipeline plan`: the fastest choice, and what else there was."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist import cluster, models, pipeline, training
from jdist.cli import _commands, _output


def run(options: _commands.Pipeline) -> None:
  """Searches, prints the best plan beside others, and writes all of them."""
  if (options.costs is None) == (options.model is None):
    raise ValueError(
      "`--costs` must be given to plan: a TOML file with a [[stages]] table "
      "for each layer; or else `--model`, a network by its name."
    )
  training.check_plots()
  costs, input_bytes = _costs(options)
  machines = (
    cluster.workers([1.0] * (options.stages or 4))
    if options.cluster is None
    else cluster.load_cluster(options.cluster)[0]
  )
  best, found = pipeline.plan(
    costs,
    machines,
    options.batch_size,
    samples=options.samples,
    tables=options.tables or None,
    num_microbatches=_one(options.microbatches),
    num_stages=_one(options.stages),
    windows=_one(options.window),
    optimizer_copies=options.optimizer_copies,
    input_bytes=input_bytes,
  )
  output = _output.output_directory(options.output, "plan")
  config = dataclasses.asdict(options)
  rows = [training.make_row(config, 0, **x.row()) for x in found]
  training.append_rows(output / "rows.jsonl", rows)
  assert best.times is not None and best.made is not None
  (output / "table.txt").write_text(pipeline.format_table(best.made))
  cluster.plot_trace(
    best.times.trace,
    output / "plan.png",
    title=f"{best.made}",
    resources=[*best.nodes, *best.times.link_use],
    end_s=min(best.times.makespan_s, 3 * best.times.ends_s[0]),
    colours=pipeline.PIPELINE_COLOURS,
  )
  console = _output.console()
  console.print(_stages(best, machines))
  console.print(_candidates(found))
  print(f"Rows: {output / 'rows.jsonl'}")
  print(f"Table: {output / 'table.txt'}")
  print(f"Picture: {output / 'plan.png'}")


def _costs(
  options: _commands.Pipeline,
) -> tuple[list[pipeline.LayerCost], float]:
  """Returns the layers' costs, and the bytes of a micro-batch of inputs."""
  if options.costs is not None:
    return pipeline.load_costs(options.costs), 0.0
  assert options.model is not None
  text = options.model == "transformer"
  shape: tuple[int, ...] = (256,) if text else (32, 32, 3)
  model = models.build(
    options.model,
    input_shape=shape,
    num_classes=256 if text else 10,
    abstract=True,
  )
  dtype = jnp.int32 if text else jnp.float32
  inputs = jax.ShapeDtypeStruct((options.samples, *shape), dtype)
  costs = pipeline.layer_costs(
    model.layers, {"x": inputs}, inputs="x", source="lowered"
  )
  return costs, inputs.size * inputs.dtype.itemsize


def _one(value: int | None) -> list[int] | None:
  return None if value is None else [value]


def _stages(best: pipeline.Candidate, machines: cluster.Cluster) -> Any:
  from rich import table

  assert best.plan is not None and best.times is not None
  grid = table.Table(
    title=_title(best),
    caption="Seconds at speed 1, of a micro-batch, both passes. Cut at "
    + (" ".join(map(str, best.plan.cuts)) or "no layer")
    + ".",
  )
  for title in ("stage", "layers", "machine"):
    grid.add_column(title)
  for title in ("seconds", "out MB", "busy %", "memory MB", "of MB"):
    grid.add_column(title, justify="right")
  for i, (stage, name) in enumerate(
    zip(best.plan.stages, best.plan.nodes, strict=True)
  ):
    device = best.nodes.index(name)
    grid.add_row(
      str(i),
      stage.name,
      name,
      f"{stage.compute_s:.4g}",
      f"{stage.output_bytes / 1e6:.4g}",
      f"{100 * best.times.utilisation[device]:.1f}",
      f"{best.times.memory_bytes[device] / 1e6:.4g}",
      f"{machines.node(name).memory_bytes / 1e6:.4g}",
    )
  return grid


def _title(best: pipeline.Candidate) -> str:
  words = [f"{best.table}: {best.num_microbatches} micro-batches"]
  if best.window is not None:
    words.append(f"window {best.window}")
  if best.recompute:
    words.append("recomputation")
  return f"{', '.join(words)}, {best.samples_per_s:.4g} samples/s"


def _candidates(found: Sequence[pipeline.Candidate]) -> Any:
  from rich import table

  done = [x for x in found if x.times is not None]
  # The first of a table is its best.
  best = {x.table: x for x in reversed(done)}
  grid = table.Table(
    title="The best of each table",
    caption=f"{len(found)} considered, {len(done)} simulated: others do not "
    "fit into memory, or their bottleneck alone makes them slower.",
  )
  grid.add_column("table", no_wrap=True)
  for title in (
    "micro-batches", "stages", "window", "recompute", "samples/s", "of best %",
    "delay", "memory MB",
  ):  # fmt: skip
    grid.add_column(title, justify="right")
  for each in sorted(best.values(), key=done.index):
    assert each.times is not None
    grid.add_row(
      each.table,
      str(each.num_microbatches),
      str(each.num_stages),
      str(each.window or ""),
      "yes" if each.recompute else "",
      f"{each.samples_per_s:.4g}",
      f"{100 * each.samples_per_s / done[0].samples_per_s:.1f}",
      str(each.delay),
      f"{max(each.times.memory_bytes) / 1e6:.4g}",
    )
  return grid
