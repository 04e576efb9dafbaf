"""The tables and pictures of what was measured, from its rows.

python experiments/pipeline/measured_report.py
"""

import pathlib
import statistics
import sys
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import matplotlib.figure
import measured
import numpy as np
import studies

from jdist import cluster, pipeline, training

Row = dict[str, Any]


def timeline_table(rows: list[Row]) -> str:
  """Returns a table of measured over simulated times."""
  return studies.table(
    "stages, forward | table | makespan, s | simulated, s | ratio "
    "| iteration, s | simulated, s | ratio | load",
    [
      f"{_stages(row)} | {row['table']} "
      f"| {statistics.median(row['makespan_s']):.3f} "
      f"| {row['simulated_makespan_s']:.3f} | {row['makespan_ratio']:.3f} "
      f"| {statistics.median(row['iteration_s']):.3f} "
      f"| {row['simulated_iteration_s']:.3f} | {row['iteration_ratio']:.3f} "
      f"| {_load(row)}"
      for row in rows
    ],
  )


def ratio_table(rows: list[Row]) -> str:
  """Returns a table of measured over simulated iterations, by set-up."""
  lines = []
  # The three tables of a try follow each other.
  for own in zip(*(rows[start::3] for start in range(3)), strict=True):
    ratios = {row["table"]: f"{row['iteration_ratio']:.3f}" for row in own}
    cells = [ratios[name] for name in ("gpipe", "1f1b", "ours")]
    lines.append((_stages(own[0]), *cells, _load(own[-1])))
  return studies.table("stages, forward | gpipe | 1f1b | ours | load", lines)


def every_table(rows: list[Row], ratio: str = "iteration_ratio") -> str:
  """Returns measured over simulated iterations of every table."""
  names = list(dict.fromkeys(row["table"] for row in rows))
  lines = []
  for title in dict.fromkeys(map(_devices, rows)):
    own = [row for row in rows if _devices(row) == title]
    # Several tries stand beside each other.
    ratios = {
      name: ", ".join(f"{x[ratio]:.3f}" for x in own if x["table"] == name)
      for name in names
    }
    loads = [x for row in own for x in np.ravel(row["load"])]
    load = f"{min(loads):.1f} to {max(loads):.1f}"
    lines.append((title, *map(ratios.__getitem__, names), load))
  return studies.table(f"devices | {' | '.join(names)} | load", lines)


def shared_table(rows: list[Row]) -> str:
  """Returns `every_table` with a forecast in which cores slow each other."""
  own = [row for row in rows if "shared_ratio" in row]
  slower = [x for row in own for x in row["slower_beside"]]
  return (
    f"{every_table(own, 'shared_ratio')}\n\nBeside a busy core passes take "
    f"{min(slower):.2f} to {max(slower):.2f} times as long."
  )


def _devices(row: Row) -> str:
  """Returns how fast the devices of a row are."""
  config = row["config"]
  share = config.get("slow", config.get("quota", 1))
  title = "equal" if share == 1 else f"one at {100 * share:.0f} %"
  if config.get("kind") != "computing":
    return title
  # One program has all devices in its process.
  return f"{title}, {_stages(row) if 'quota' in config else 'that compute'}"


def split_table(rows: list[Row]) -> str:
  """Returns what a split backward pass costs the processor, by memory."""
  lines = []
  # The two tables of a set-up follow each other.
  for whole, own in zip(rows[::2], rows[1::2], strict=True):
    times = " | ".join(f"{min(x['processor_s']):.3f}" for x in (whole, own))
    pages = " | ".join(
      f"{statistics.median(x['new_pages']):.0f}" for x in (whole, own)
    )
    third = len(own["new_pages"]) // 3
    ratios = [
      min(own["processor_s"][i : i + third])
      / min(whole["processor_s"][i : i + third])
      for i in range(0, 3 * third, third)
    ]
    memory = "kept by the process" if own["reuses"] else "as glibc gives it"
    lines.append(
      f"{own['config']['samples']} | {memory} | {times} | {own['ratio']:.3f} "
      f"| {min(ratios):.3f} to {max(ratios):.3f} | {pages} | {own['load']:.1f}"
    )
  return studies.table(
    "samples | memory | 1f1b, s | zb_h1, s | ratio | of thirds "
    "| new pages, 1f1b | zb_h1 | load",
    lines,
  )


def machine(rows: list[Row]) -> str:
  """Returns a line about the loopback, and about other use of the cores."""
  latencies = [1e3 * row["link_latency_s"] for row in rows]
  rates = [row["link_bytes_per_s"] / 1e9 for row in rows]
  busy = [
    max(row["busy_cores"])
    for row in rows
    if row["config"]["kind"] == "computing"
  ]
  return (
    f"Loopback: {min(latencies):.2f} to {max(latencies):.2f} ms a message, "
    f"{min(rates):.1f} to {max(rates):.1f} GB/s.  Cores that others kept busy "
    f"before stages that compute: {max(busy):.2f} at most."
  )


def _stages(row: Row) -> str:
  """Returns the number of stages, and the duration of their forward passes."""
  config = row["config"]
  if config["kind"] != "sleeping":
    return f"{row['processes']} that compute, width {config['width']}"
  first, last = (
    round(1e3 * x) for x in (min(config["forward_s"]), max(config["forward_s"]))
  )
  if first == last:
    return f"{row['processes']} even, {first} ms"
  return f"{row['processes']} uneven, {first} to {last} ms"


def _load(row: Row) -> str:
  """Returns the tasks that were ready to run, on average over a minute."""
  if "load" not in row:
    # The first rows lack it; the log of their runs has these values.
    return "11 to 20"
  return f"{statistics.median(row['load']):.1f}"


def draw(row: Row, spans: list[Any], path: pathlib.Path) -> None:
  """Draws a measured timeline above the simulated one of its row."""
  config = measured.Config(**row["config"])
  (table,) = (x for x in measured.make_tables(config) if x.name == row["table"])
  costs = [
    pipeline.LayerCost(
      forward_s=forward_s,
      backward_s=backward_s,
      update_s=update_s,
      output_bytes=4.0 * config.samples * config.width,
    )
    for forward_s, backward_s, update_s in row["costs_s"]
  ]
  link = row["link_latency_s"], row["link_bytes_per_s"]
  machines = measured.cluster_of(row["processes"], link)
  simulated = pipeline.simulate(table, costs, machines).trace
  found = cluster.Trace(cluster.Span(*values) for values in spans)
  spans = [
    span._replace(resource=f"{span.resource}, {title}")
    for title, trace in (("measured", found), ("simulated", simulated))
    for span in trace
  ]
  rows = [
    f"device {i}, {title}"
    for title in ("measured", "simulated")
    for i in range(row["processes"])
  ]
  cluster.plot_trace(cluster.Trace(spans), path, resources=rows)


def runtime_table(rows: list[Row]) -> str:
  """Returns a table of iterations in one program and in two processes."""
  lines = []
  for row in rows:
    times = [
      f"{1e3 * statistics.median(row['iteration_s'][x]):.1f}"
      for x in ("one_program", "processes")
    ]
    config = row["config"]
    lines.append(
      f"{config['name']}: {config['layers']} of width {config['width']}, "
      f"{config['samples']} samples | {row['table']} | {' | '.join(times)} "
      f"| {row['ratio']:.2f} | {_load(row)}"
    )
  return studies.table(
    "model | table | one program, ms | two processes, ms | ratio | load", lines
  )


def adaptive_table(rows: list[Row]) -> str:
  """Returns a table of adaptive runs in which a device becomes slow."""
  lines = []
  for row in rows:
    config, rates = row["config"], row["samples_per_s"]
    first, last = config["tables_before"], config["compared"]
    moves = ", ".join(
      f"{step}{' (back)' if back else ''}"
      for step, back in row["moved_after_step"]
    )
    lines.append(
      f"{1e3 * config['forward_s']:.0f} | patience {config['patience']}, decay "
      f"{config.get('decay', 0.5)}, threshold {config.get('threshold', 0.2)} "
      f"| {statistics.median(rates[1:first]):.2f} | {rates[first]:.2f} "
      f"| {statistics.median(rates[-last:]):.2f} "
      f"| {statistics.median(row['fresh_samples_per_s']):.2f} "
      f"| {100 * row['recovered']:.0f} % | {moves} | {row['updates']} "
      f"({row['undisturbed_updates']}) | {max(row['differences']):g} "
      f"| {_load(row)}"
    )
  return studies.table(
    "layer's forward, ms | damping | before, samples/s | slow, samples/s | at "
    "the end | a fresh plan | recovered | moves after steps | updates "
    "(undisturbed) | parameters differ by | load",
    lines,
  )


def slow_edges_table(rows: list[Row]) -> str:
  """Returns seconds of coded and plain messages on slow and fast links."""
  lines = []
  for set_up in dict.fromkeys(map(_edges_of, rows)):
    own = [row for row in rows if _edges_of(row) == set_up]
    turn_s = {
      (row["rate"], row["codec"]): statistics.median(row["turn_s"])
      for row in own
    }
    best_s = turn_s["10gbit", "none"]
    for row in own:
      seconds = turn_s[row["rate"], row["codec"]]
      sent_mb, foretold_s = row["edge_bytes"] / 1e6, row["simulated_s"]
      foretold = "–" if foretold_s is None else f"{foretold_s:.2f}"
      lines.append(
        f"{set_up} | {row['rate']} | {row['codec']} | {sent_mb:.0f} "
        f"| {seconds:.2f} | {100 * best_s / seconds:.1f} % "
        f"| {foretold} | {row['load']:.1f}"
      )
  return studies.table(
    "stages | table | links | codec | MB an iteration | seconds | of the fast "
    "links' throughput | simulated, s | load",
    lines,
  )


def _edges_of(row: Row) -> str:
  """Returns the stages and the table of messages on slow links."""
  config = row["config"]
  layers = config.get("layers")
  kind = f"compute, {layers} layers" if layers else "sleep"
  return f"{config['stages']} that {kind} | {row['table']}"


def edge_accuracy_table(rows: list[Row]) -> str:
  """Returns accuracies by the code of messages, over seeds."""
  lines = []

  def data_of(row: Row) -> str:
    return row["config"].get("dataset", "digits")

  for set_up in dict.fromkeys((data_of(row), row["code"]) for row in rows):
    own = [row for row in rows if (data_of(row), row["code"]) == set_up]
    accuracies = [100 * row["accuracy"] for row in own]
    losses = [row["train_loss"] for row in own]
    lines.append(
      f"{' | '.join(set_up)} | {statistics.mean(accuracies):.2f} ± "
      f"{statistics.stdev(accuracies):.2f} | {statistics.mean(losses):.4f} ± "
      f"{statistics.stdev(losses):.4f} | {own[0]['edge_bytes'] / 1e6:.3f}"
    )
  return studies.table(
    "data | code | test accuracy, % | last epoch's loss | MB an iteration",
    lines,
  )


def low_rank_table(rows: list[Row]) -> str:
  """Returns what two codes of equal size leave of what crosses a cut."""
  return studies.table(
    "data | cut | what | rank | of channels | left by the best factors "
    "| left by 4 bits",
    [
      f"{row['config']['dataset']} | {row['cut']} | {row['what']} "
      f"| {row['rank']} | {row['channels']} | {100 * row['low_rank']:.1f} % "
      f"| {100 * row['int4']:.1f} %"
      for row in rows
    ],
  )


def draw_adaptive(row: Row, path: pathlib.Path) -> None:
  """Draws throughput over steps, with moves and the fresh plan."""
  config, rates = row["config"], row["samples_per_s"]
  steps = [config["iterations"] * (i + 1) for i in range(len(rates))]
  figure = matplotlib.figure.Figure(figsize=(8, 3.6), layout="constrained")
  axes = figure.subplots()
  axes.plot(steps, rates, "o-", color="#4477aa", label="adaptive run")
  fresh = row["fresh_samples_per_s"]
  axes.plot(
    steps[-len(fresh) :], fresh, "x--", color="#228833", label="a fresh plan"
  )
  slow = config["iterations"] * config["tables_before"]
  axes.axvline(slow, color="#ee6677")
  axes.annotate(
    "a device becomes \n3 times slower ", (slow, 0.02), color="#cc3311",
    xycoords=("data", "axes fraction"), ha="right",
  )  # fmt: skip
  for step, back in row["moved_after_step"]:
    axes.axvline(step, color="#999933", linestyle=":")
    axes.annotate(
      " back" if back else " layers move", (step, 0.92), color="#777722",
      xycoords=("data", "axes fraction"),
    )  # fmt: skip
  axes.set_xlabel("updates")
  axes.set_ylabel("samples a second")
  axes.set_ylim(0, 1.15 * max(*rates, *fresh))
  axes.legend(loc="upper right", bbox_to_anchor=(1, 0.9), frameon=False)
  axes.spines[["top", "right"]].set_visible(False)
  figure.savefig(path, dpi=120)


def main() -> None:
  """Prints tables, and draws pictures."""
  rows = training.read_rows(measured.RESULTS)
  sleeping, computing = (
    [row for row in rows if row["config"]["kind"] == kind]
    for kind in ("sleeping", "computing")
  )
  print(f"{ratio_table(sleeping)}\n\n{machine(rows)}\n\n{timeline_table(rows)}")
  folder = measured.RESULTS.parent
  runtimes = training.read_rows(folder / "measured_runtimes.jsonl")
  print(f"\n{runtime_table(runtimes)}")
  edges = training.read_rows(folder / "slow_edges.jsonl")
  print(f"\n{slow_edges_table(edges)}")
  coded = training.read_rows(folder / "edge_accuracy.jsonl")
  print(f"\n{edge_accuracy_table(coded)}")
  ranks = training.read_rows(folder / "low_rank_edges.jsonl")
  print(f"\n{low_rank_table(ranks)}")
  every = training.read_rows(folder / "every_table.jsonl")
  print(f"\n{every_table(every)}")
  quota = training.read_rows(measured.QUOTA)
  print(f"\n{every_table([*computing, *quota])}\n\n{timeline_table(quota)}")
  one = training.read_rows(folder / "one_program.jsonl")
  whole = [row for row in one if row["config"]["kind"] != "split"]
  print(f"\n{every_table(whole, 'ratio')}")
  print(f"\n{shared_table(one)}")
  split = [row for row in one if row["config"]["kind"] == "split"]
  print(f"\n{split_table(split)}")
  adaptive = training.read_rows(folder / "measured_adaptive.jsonl")
  print(f"\n{adaptive_table(adaptive)}")
  draw_adaptive(adaptive[-1], folder / "adaptive.png")
  for kept in training.read_rows(measured.SPANS):
    if kept["table"] == "gpipe":
      continue
    *_, row = (
      row
      for row in rows
      if row["config"]["kind"] == kept["kind"]
      and row["config"]["forward_s"] == kept["forward_s"]
      and row["config"]["width"] == kept["width"]
      and row["table"] == kept["table"]
    )
    name = f"{kept['kind']}-{kept['table']}.png"
    draw(row, kept["spans"], measured.RESULTS.parent / name)


if __name__ == "__main__":
  main()
