"""Weighs what `OneProgram`'s late sends cost on GPUs, and what they hide.

    python experiments/pipeline/late_sends.py ratios
    python experiments/pipeline/late_sends.py programs   # extra `schedules`
    python experiments/pipeline/late_sends.py report

The first asks for the ticks of tables whose sends take a stated part of the
computation. The second compiles pipelines for GPUs, which need not be there,
reads what each stage's passes compute, and asks the same at the rates of data
sheets: forecasts, nothing is measured. Rows that are there are not made again.
"""

import argparse
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import optax
import scheduled_loop
import studies

import jdist
from jdist import cluster, collectives, models, pipeline, profiling, training
from jdist.pipeline import Op

_FOLDER = pathlib.Path(__file__).resolve().parent
ROWS = _FOLDER / "results" / "late_sends.jsonl"
SYNCHRONOUS = ("gpipe", "1f1b", "eager_1f1b", "interleaved", "zb_h1")
RATIOS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0)
# Model, stages, GPUs, samples of a micro-batch.
PROGRAMS = (
  ("vgg19", 4, "4xh200", 16),
  ("transformer", 4, "4xh200", 8),
  ("vgg19", 16, "2x8xh200", 16),
  ("transformer", 16, "2x8xh200", 8),
)
# A forward pass is one; a backward pass runs it again, and then takes two.  The
# weight part of a split one repeats nothing.
_PASSES = {
  Op.FORWARD: 1.0,
  Op.BACKWARD: 3.0,
  Op.BACKWARD_INPUT: 2.0,
  Op.BACKWARD_WEIGHT: 1.0,
}
_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"


def _table(name: str, stages: int, microbatches: int) -> pipeline.Table:
  if name == "ours":  # Late sends need a window of 3 where M = S.
    window = 2 if microbatches >= 2 * stages else 3
    return pipeline.ours(stages, microbatches, window=window)
  return pipeline.make_table(name, stages, microbatches)


def _stand_in(table: pipeline.Table, late: bool) -> pipeline.OneProgram:
  """A pipeline of the table whose layers do nothing."""
  layers = [
    models.Layer(f"layer{i}", {}, {}, lambda p, s, x, **_: (x, s))
    for i in range(table.num_stages)
  ]
  return pipeline.OneProgram(
    pipeline.cut_layers(layers, table.num_stages),
    lambda y, batch: (jnp.mean(y), {}),
    table,
    {"x": jax.ShapeDtypeStruct((1,), jnp.float32)},
    inputs="x",
    late_sends=late,
  )


def _both(
  table: pipeline.Table,
  seconds: Callable[[Op, int], float],
  send_s: Callable[[bool], float],
  between_s: float = 0.0,
) -> dict[str, Any]:
  """Forecasts a step with late sends, and with sends between ticks."""
  found = {}
  for name, late in (("late", True), ("between", False)):
    pipe = _stand_in(table, late)
    times = pipe.times(seconds, send_s(late), between_s=between_s)
    found[name] = {
      "ticks": times.ticks,
      "step": times.step_s,
      "free": times.free_s,
      "send": times.send_s,
      "hidden_share": times.hidden_share,
      "slots": pipe.grid.slots,
      "behind": pipe.grid.behind,
    }
  return found


def ratios() -> Iterator[dict[str, Any]]:
  """Yields rows: equal stages, and sends that take a part of the passes."""
  done = {
    (row["config"]["table"], row["config"]["stages"])
    for row in _rows()
    if row["config"]["kind"] == "ratio"
  }
  names = (*SYNCHRONOUS, "ours")
  for name, stages, times in itertools.product(names, (4, 8, 16), (1, 2, 4)):
    if (name, stages) in done:
      continue
    table = _table(name, stages, times * stages)
    # Of interleaved each of twice as many stages takes half the time.
    size = len(table.devices) / table.num_stages
    last = table.num_stages - 1

    def seconds(op: Op, stage: int, size=size, last=last) -> float:
      idle = op == Op.FORWARD and stage == last
      return 0.0 if idle else size * _PASSES[op]

    for ratio in RATIOS:
      # Of the mean of both passes of a device's whole part.
      found = _both(table, seconds, lambda _, ratio=ratio: 2.0 * ratio)
      config = {
        "kind": "ratio",
        "table": name,
        "stages": stages,
        "microbatches": table.num_microbatches,
        "window": table.window,
        "ratio": ratio,
      }
      yield training.make_row(config, 0, **found)


def _network(name: str, samples: int) -> tuple[Any, dict[str, Any], Any, Any]:
  """A model of shapes, its micro-batch, inputs and loss; bfloat16."""
  if name == "transformer":
    # GPT-2 with 14 blocks in place of 12: with both ends, a layer a stage.
    model = models.build(
      name,
      input_shape=(1024,),
      num_classes=50_257,
      abstract=True,
      num_layers=14,
      width=768,
      num_heads=12,
    )
    tokens = jax.ShapeDtypeStruct((samples, 1024), jnp.int32)

    def next_tokens(logits: jax.Array, batch: Any) -> Any:
      losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), batch["next"]
      )
      return losses.mean(), {}

    return model, {"tokens": tokens, "next": tokens}, "tokens", next_tokens
  model = models.build(
    name,
    input_shape=(224, 224, 3),
    num_classes=1000,
    abstract=True,
    norm="none",
  )
  batch = {
    "image": jax.ShapeDtypeStruct((samples, 224, 224, 3), jnp.float32),
    "label": jax.ShapeDtypeStruct((samples,), jnp.int32),
  }

  def images(batch: Any) -> jax.Array:
    return batch["image"].astype(jnp.bfloat16)

  return model, batch, images, training.label_loss


def _in_bfloat16(layer: models.Layer) -> models.Layer:
  def apply(params: Any, state: Any, x: Any, **options: Any) -> Any:
    params = training.cast(params, jnp.bfloat16)
    return layer.apply(params, state, x, **options)

  return models.Layer(layer.name, layer.params, layer.state, apply)


def _cuts(layers: list[models.Layer], x: Any, stages: int) -> tuple[int, ...]:
  """Cuts for the least bottleneck, by the layers' operations."""
  costs = []
  for layer in layers:

    def run(params: Any, x: Any, layer=layer) -> Any:
      return layer.apply(params, {}, x, train=True)[0]

    lowered = jax.jit(run).lower(layer.params, x)
    flops = (lowered.cost_analysis() or {}).get("flops", 0.0)
    costs.append(pipeline.LayerCost(layer.name, 1e-12 * flops))
    x = jax.eval_shape(run, layer.params, x)
  machines = cluster.workers([1.0] * stages)
  return tuple(pipeline.partition(costs, machines).cuts)


def programs() -> Iterator[dict[str, Any]]:
  """Yields rows: compiled pipelines at the rates of data sheets."""
  done = {
    (row["config"]["model"], row["config"]["topology"])
    for row in _rows()
    if row["config"]["kind"] == "program"
  }
  for name, stages, text, samples in PROGRAMS:
    if (name, text) not in done:
      yield from _program(name, stages, text, samples)


def _program(
  name: str, stages: int, text: str, samples: int
) -> Iterator[dict[str, Any]]:
  model, microbatch, inputs, loss = _network(name, samples)
  layers = [_in_bfloat16(x) for x in model.layers]
  first = jax.eval_shape(
    lambda batch: batch[inputs] if inputs == "tokens" else inputs(batch),
    microbatch,
  )
  cuts = _cuts(layers, first, stages)
  table = _table("1f1b", stages, 2 * stages)
  pipe = pipeline.OneProgram(
    pipeline.cut_layers(layers, cuts), loss, table, microbatch, inputs=inputs
  )
  gpus = profiling.gpu_target(text)
  mesh = collectives.make_mesh((1, stages), ("worker", "stage"), gpus.devices())
  team = collectives.workers(1, mesh=mesh)
  optimizer = jdist.ssgd(optax.sgd(0.1, momentum=0.9), axis=team.axis)
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      (samples * table.num_microbatches, *x.shape[1:]), x.dtype
    ),
    microbatch,
  )
  begun_s = time.monotonic()
  program = (
    team.jit(pipe.make_step(optimizer, axis=team.axis), donate_argnums=0)
    .lower(
      pipe.abstract_state(team, optimizer), profiling.abstract(team, batch)
    )
    .compile(compiler_options={_LIMIT: 2, "xla_backend_optimization_level": 0})
  )
  compile_s = time.monotonic() - begun_s
  loop = scheduled_loop.read_loop(program)
  for kind in ("h200", "h100"):
    gpu = profiling.GPUS[kind]
    device = gpu.device("bfloat16", launch_s=2e-6)
    link = gpu.link(gpus.nodes, latency_s=2e-6)

    def sum_s(events: Any, device=device) -> float:
      return sum(
        device.compute_s(x.flops, x.num_bytes)
        for x in events
        if x.kind == "compute"
      )

    # A backward pass has the forward pass in it: the longer lane is its.
    forward, backward = sorted(
      ([sum_s(branch) for branch in lane] for lane in loop.branches), key=sum
    )
    lanes = {Op.FORWARD: forward[1:], Op.BACKWARD: backward[1:]}

    def send_s(late: bool, link=link) -> float:
      # Both ways leave by one NVLink, together if late; between two nodes
      # each of two GPUs sends one of them.
      ways = 2 if late and gpus.nodes == 1 else 1
      return link.send_s(ways * pipe.sent_bytes, 1)

    for other in ("gpipe", "1f1b", "eager_1f1b", "ours"):
      for times in (2, 4):
        made = _table(other, stages, times * stages)
        found = _both(
          made,
          lambda op, stage, lanes=lanes: lanes[op][stage],
          send_s,
          between_s=sum_s(loop.events),
        )
        config = {
          "kind": "program",
          "model": name,
          "topology": text,
          "gpu": kind,
          "table": other,
          "stages": stages,
          "microbatches": made.num_microbatches,
          "samples": samples,
          "window": made.window,
          "cuts": cuts,
        }
        yield training.make_row(
          config,
          0,
          **found,
          around=loop.around,
          sent_bytes=pipe.sent_bytes,
          send_s=send_s(False),
          forward_s=lanes[Op.FORWARD],
          backward_s=lanes[Op.BACKWARD],
          between_s=sum_s(loop.events),
          idle_s=max(forward[0], backward[0]),
          compile_s=compile_s,
        )


def _rows() -> list[dict[str, Any]]:
  if not ROWS.exists():
    return []
  return [json.loads(line) for line in ROWS.read_text().splitlines()]


def report() -> None:
  """Prints the tables of LATE_SENDS.md, and of TABLES.md."""
  rows = studies.group(_rows(), lambda row: row["config"]["kind"])
  lines = []
  for (name, stages, number), found in studies.group(
    rows["ratio"],
    lambda row: tuple(
      row["config"][x] for x in ("table", "stages", "microbatches")
    ),
  ).items():
    late, between = found[0]["late"], found[0]["between"]
    gains = [x["between"]["step"] / x["late"]["step"] for x in found]
    ticks = between["ticks"], late["ticks"]
    lines.append((name, stages, number, *ticks, *(f"{x:.2f}" for x in gains)))
  titles = "table | S | M | ticks | late | r = 0 | 0.1 | 0.25 | 0.5 | 1 | 2"
  print(studies.table(titles, lines))
  lines = []
  for row in rows["program"]:
    config, late, between = row["config"], row["late"], row["between"]
    hidden = abs(100 * between["hidden_share"])
    gpus = config["topology"].replace("h200", config["gpu"])
    lines.append(
      f"{config['model']} | {gpus} | {config['table']} "
      f"| {config['microbatches']} | {1e3 * row['send_s']:.3f} "
      f"| {1e3 * max(row['backward_s']):.2f} | {1e3 * between['step']:.1f} "
      f"| {hidden:.0f} % | {1e3 * late['step']:.1f} "
      f"| {100 * late['hidden_share']:.0f} % "
      f"| {between['step'] / late['step']:.2f}"
    )
  table = studies.table(
    "model | GPUs | table | M | send, ms | longest pass, ms | between, ms "
    "| hidden | late, ms | hidden | gain",
    lines,
  )
  print(f"\n{table}")


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("part", choices=("ratios", "programs", "report"))
  part = parser.parse_args().part
  if part == "report":
    report()
  else:
    jax.config.update("jax_platforms", "cpu")
    for row in {"ratios": ratios, "programs": programs}[part]():
      training.append_rows(ROWS, [row])
