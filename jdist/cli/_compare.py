"""`jdist compare`: methods and seeds, same budget, one table, one picture."""

import math
import statistics
from typing import Any

from jdist import cluster, training
from jdist.cli import _experiment, _methods, _options, _trained

# Tuning uses no seed that is compared afterwards.
_TUNING_SEED = 10_000


def compare(options: _options.Compare) -> None:
  """Runs the comparison and leaves rows, a table and a picture."""
  _check(options)
  experiment = _experiment.build(options)
  link = cluster.Link(
    bandwidth_bits_per_s=options.bandwidth_mbit_per_s * 1e6,
    latency_s=options.latency_ms / 1e3,
  )
  # Each method once, to see every complaint before anything is written.
  for method in options.methods:
    _experiment.Prepared(experiment, method, options.learning_rate[0])
  output = _experiment.output_directory(options, "compare")
  console = _console()
  console.print(_heading(experiment))
  rates = dict.fromkeys(options.methods, options.learning_rate[0])
  if len(options.learning_rate) > 1:
    rates = _tune(experiment, options, console, output)
  prepared = {
    method: _experiment.Prepared(experiment, method, rates[method])
    for method in options.methods
  }
  rows = []
  # Seed by seed and not method by method: what else the machine does then
  # slows all methods alike.
  for seed in options.seeds:
    for method, programs in prepared.items():
      records = programs.run(seed, label=f"{method} seed {seed}")
      row = _experiment.result(options, method, rates[method], seed, records)
      rows.append(row)
      training.append_rows(output / "rows.jsonl", [row])
  console.print(_table(rows, options))
  training.plot_comparison(rows, output / "compare.png", link)
  # Not through the console, which would break a long path into lines.
  print(f"Rows: {output / 'rows.jsonl'}")
  print(f"Picture: {output / 'compare.png'}")


def _check(options: _options.Compare) -> None:
  for name, values in (
    ("--seeds", options.seeds),
    ("--learning-rate", options.learning_rate),
  ):
    if not values or len(set(values)) < len(values):
      raise ValueError(
        f"`{name}` must be one or more different values, got {values}."
      )
  _methods.check_methods("--methods", options.methods)
  _trained.check_given(options, options.methods)
  _methods.check_used(options, options.methods)
  if min(options.seeds) < 0:
    raise ValueError(f"`--seeds` must not be negative, got {options.seeds}.")
  for peak in options.learning_rate:
    _methods.check_rate(peak)
  if not 0 < options.bandwidth_mbit_per_s < math.inf:
    raise ValueError(
      "`--bandwidth-mbit-per-s` must be positive, got "
      f"{options.bandwidth_mbit_per_s}."
    )
  if not 0 <= options.latency_ms < math.inf:
    raise ValueError(
      f"`--latency-ms` must not be negative, got {options.latency_ms}."
    )
  training.check_plots()


def _tune(
  experiment: _experiment.Experiment,
  options: _options.Compare,
  console: Any,
  output: Any,
) -> dict[str, float]:
  """Each method's best learning rate, on held-out training samples."""
  held_out = _experiment.hold_out(experiment)
  best = {}
  for method in options.methods:
    found = []
    for peak in options.learning_rate:
      programs = _experiment.Prepared(held_out, method, peak)
      records = programs.run(_TUNING_SEED, label=f"tuning {method} {peak:g}")
      row = _experiment.result(options, method, peak, _TUNING_SEED, records)
      training.append_rows(output / "tuning.jsonl", [row])
      # Equal accuracies are common on few samples; the loss decides then.
      # A loss that is not a number is the worst.
      loss = row["test_loss"] if math.isfinite(row["test_loss"]) else math.inf
      found.append((row["accuracy"], -loss, peak))
    best[method] = max(found)[2]
  told = ", ".join(f"{method} {peak:g}" for method, peak in best.items())
  console.print(
    f"Learning rates of {_listed(options.learning_rate)}, chosen on "
    f"{len(held_out.test)} held-out training samples: {told}.\n"
  )
  return best


def _heading(experiment: _experiment.Experiment) -> str:
  from jdist import models

  options = experiment.options
  size = models.num_params(experiment.model(0))
  return (
    f"{options.dataset}: {len(experiment.train)} training and "
    f"{len(experiment.test)} test images; {options.model}, {size:,} "
    f"parameters; N = {options.workers} workers "
    f"({experiment.workers.substrate}), {options.batch_size} images a step."
  )


def _console() -> Any:
  import sys

  from rich import console

  # As wide as the table where the output is a file or a pipe.
  return console.Console(
    width=None if sys.stdout.isatty() else 100, highlight=False
  )


def _listed(values: tuple[float, ...]) -> str:
  return ", ".join(f"{value:g}" for value in sorted(values))


def _table(rows: list[dict[str, Any]], options: _options.Compare) -> Any:
  from rich import table

  grid = table.Table(
    title=(
      f"{options.dataset}, {options.model}, N = {options.workers} workers, "
      f"{len(options.seeds)} seed{'s' if len(options.seeds) > 1 else ''}"
    ),
    caption=(
      "Mean ± standard deviation over the seeds. Sent: bytes that each worker "
      "sends on the wire in a ring of N, over the whole run."
    ),
  )
  grid.add_column("method")
  for name in (
    "test accuracy %", "rounds", "MB sent", "fewer bytes", "images/s", "rate",
  ):  # fmt: skip
    grid.add_column(name, justify="right")
  by_method = {
    method: [row for row in rows if row["method"] == method]
    for method in options.methods
  }
  most = max(_mean(runs, "sent_bytes") for runs in by_method.values())
  for method, runs in by_method.items():
    accuracies = [100 * row["accuracy"] for row in runs]
    told = f"{statistics.mean(accuracies):.2f}"
    if len(runs) > 1:
      told += f" ± {statistics.stdev(accuracies):.2f}"
    sent = _mean(runs, "sent_bytes")
    grid.add_row(
      method,
      told,
      f"{_mean(runs, 'rounds'):,.0f}",
      f"{sent / 1e6:.3g}",
      f"{most / sent:.1f}x" if sent else "-",
      f"{_mean(runs, 'samples_per_s'):,.0f}",
      f"{runs[0]['learning_rate']:g}",
    )
  return grid


def _mean(rows: list[dict[str, Any]], key: str) -> float:
  return statistics.mean(row[key] for row in rows)
