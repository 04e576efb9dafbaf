"""The tables and pictures of what was measured, from its rows.

python experiments/pipeline/measured_report.py
"""

import pathlib
import statistics
from typing import Any

import matplotlib.figure
import measured

from jdist import cluster, pipeline, training

Row = dict[str, Any]


def timeline_table(rows: list[Row]) -> str:
  """Markdown: measured over simulated times."""
  lines = [
    "| stages, forward | table | makespan, s | simulated, s | ratio "
    "| iteration, s | simulated, s | ratio | load |",
    "|---|---|---|---|---|---|---|---|---|",
  ]
  for row in rows:
    config = row["config"]
    stages = f"{row['processes']} that compute, width {config['width']}"
    if config["kind"] == "sleeping":
      even = len(set(config["forward_s"])) == 1
      first, last = (
        round(1e3 * x)
        for x in (min(config["forward_s"]), max(config["forward_s"]))
      )
      kind = f"even, {first} ms" if even else f"uneven, {first} to {last} ms"
      stages = f"{row['processes']} {kind}"
    lines.append(
      f"| {stages} | {row['table']} "
      f"| {statistics.median(row['makespan_s']):.3f} "
      f"| {row['simulated_makespan_s']:.3f} | {row['makespan_ratio']:.3f} "
      f"| {statistics.median(row['iteration_s']):.3f} "
      f"| {row['simulated_iteration_s']:.3f} | {row['iteration_ratio']:.3f} "
      f"| {_load(row)} |"
    )
  return "\n".join(lines)


def _load(row: Row) -> str:
  """Tasks that were ready to run, this machine's average of a minute."""
  if "load" not in row:
    return "11 to 20"  # Of the log: the first rows do not have it.
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
  found = cluster.Trace(map(tuple_span, spans))  # type: ignore[arg-type]
  rows = [f"device {i}" for i in range(row["processes"])]
  end_s = 1.01 * max(found.end_s, simulated.end_s)
  figure = matplotlib.figure.Figure(
    figsize=(11, 1.8 + 0.64 * len(rows)), layout="constrained"
  )
  above, below = figure.subplots(2, sharex=True)
  for axes, trace, title in (
    (above, found, "measured"),
    (below, simulated, "simulated"),
  ):
    cluster.draw_trace(
      trace,
      axes,
      rows=rows,
      end_s=end_s,
      colours=pipeline.PIPELINE_COLOURS,
      legend=axes is above,
    )
    axes.set_title(title, loc="left", fontsize=10)
  above.set_xlabel("")
  figure.savefig(path, dpi=120)


def tuple_span(values: list[Any]) -> cluster.Span:
  """Returns a span of its values in a row."""
  return cluster.Span(*values)


def write(name: str, text: str) -> None:
  """Puts a table into MEASURED.md, between the marks of its name."""
  path = measured.HERE / "MEASURED.md"
  mark = f"<!-- {name} -->"
  parts = path.read_text().split(mark)
  path.write_text(f"{parts[0]}{mark}\n\n{text}\n\n{mark}{parts[-1]}")


def main() -> None:
  """Writes tables and draws pictures."""
  rows = training.read_rows(measured.RESULTS)
  write("timelines", timeline_table(rows))
  for kept in training.read_rows(measured.SPANS):
    if kept["table"] == "gpipe":
      continue
    (row,) = (
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
