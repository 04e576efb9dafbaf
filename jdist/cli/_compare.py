"""`jdist compare`: methods and seeds, same budget, one table, one page."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from jdist import data, training
from jdist.cli import (
  _commands,
  _methods,
  _options,
  _output,
  _run_end,
  _workload,
)
from jdist.cli.report import _status
from jdist.training import comparison

# Options that may differ between rows of one comparison.
_FREE = (
  "methods", "learning_rate", "grid_extensions", "seeds", "output", "preset",
  "tuning_seeds", "bandwidth_mbit_per_s", "latency_ms", "text",
  "files",
)  # fmt: skip

_Runs = Sequence[comparison.Row]
# First seed of tuning, far from the seeds of the comparison.
_TUNING_SEED = 10_000


def compare(options: _commands.Compare) -> None:
  """Runs the comparison, and writes rows, a table and a page."""
  options = _workload.named(options)
  study = _check(options)
  with _output.doing("preparing data and models"):
    workload = _workload.build(options)
    # Every method is built once, so that each refusal precedes any output.
    for method in options.methods:
      _workload.Prepared(workload, options, method, options.learning_rate[0])
  console = _output.console()
  heading = _workload.heading(options, workload, ", ".join(options.methods))
  command = functools.partial(_options.command_line, options)
  label = f"compare-{options.dataset}"
  status = _status.Status(vars(options), command, label, heading)
  output = status.output
  rows = comparison.Rows(
    output / "rows.jsonl", dataclasses.asdict(options),
    defaults=dataclasses.asdict(type(options)()), free=_FREE,
    tuning=output / "tuning.jsonl",
  )  # fmt: skip
  if len(rows):
    console.print(
      f"{len(rows)} rows are in {output}; runs among them are not repeated."
    )
  # An estimate for the progress bar: rows that exist count as trials done.
  rates = options.learning_rate if len(options.learning_rate) > 1 else ()
  each = len(options.seeds) + len(rates) * options.tuning_seeds
  trials = len(options.methods) * each
  chosen = dict.fromkeys(options.methods, options.learning_rate[0])
  with status:

    def on_tuned(method: str, tuned: comparison.Tuned) -> None:
      chosen[method] = tuned.best
      _print_tuned(console, method, tuned)

    try:
      found = comparison.compare(
        study,
        rows,
        _Fit(options, workload, rows, status, max(trials - len(rows), 1)),
        # The loss of a language model says more than its accuracy.
        rank=comparison.by_loss
        if isinstance(workload.train, data.TextDataset)
        else comparison.quality,
        on_tuned=on_tuned,
      )
    except KeyboardInterrupt:
      ended: dict[str, list[comparison.Row]] = {}
      for method, rate in chosen.items():
        pairs = (
          comparison.Trial("comparison", method, rate, x) for x in options.seeds
        )
        ended[method] = list(filter(None, map(rows.find, pairs)))
      _print_table(console, {x: y for x, y in ended.items() if y}, options)
      raise KeyboardInterrupt(
        f"{len(rows)} rows are saved in {output}. This resumes: "
        f"{status.command}"
      ) from None
    _print_table(console, found.rows, options)
    _output.finish(output, options)
    _raise_diverged(found)


@dataclasses.dataclass
class _Fit:
  """Runs trials, and compiles a method once for all seeds of a rate."""

  options: _commands.Compare
  workload: comparison.Workload
  rows: comparison.Rows
  # Its bar shows all trials, and is extended when tuning adds rates.
  status: _status.Status
  trials: int

  def __post_init__(self) -> None:
    self._begun = 0
    # Rates are chosen without the test set, on a part of the training set.
    held_out = self.workload.hold_out()
    self._workloads = {"comparison": self.workload, "tuning": held_out}
    self._compiled: dict[tuple[str, str], _workload.Prepared] = {}

  def __call__(self, trial: comparison.Trial) -> dict[str, Any]:
    key = trial.purpose, trial.variant
    prepared = self._compiled.get(key)
    if prepared is None or prepared.peak != trial.learning_rate:
      if trial.purpose == "tuning":
        # Tuning proceeds rate by rate, and never returns to a program.
        self._compiled.clear()
      prepared = self._compiled[key] = _workload.Prepared(
        self._workloads[trial.purpose], self.options, trial.variant,
        trial.learning_rate,
      )  # fmt: skip
    label = f"{trial.variant} seed {trial.seed}"
    if trial.purpose == "tuning":
      label = f"tuning {trial.variant} {trial.learning_rate:g}"
    steps, begun = prepared.budget.num_steps, self._begun
    self._begun += 1
    total = max(self.trials, self._begun) * steps
    self.status.bar.extend(total)
    done: list[training.Record] = []

    def on_record(record: training.Record) -> None:
      done.append(record)
      self.status.note(row=self.rows.make_row(trial, measured()))

    def measured() -> dict[str, Any]:
      workers = self.options.workers
      return {"workers": workers, **comparison.summarize(done)}

    self.status.note(num_steps=total)
    on_step = functools.partial(
      self.status.step, run=label, before=begun * steps
    )
    prepared.run(trial.seed, label=on_step, on_record=on_record)
    self.status.note(row=None)
    return measured()


def _check(options: _commands.Compare) -> comparison.Study:
  _options.check_names("--seeds", options.seeds, "values")
  _options.check_names("--learning-rate", options.learning_rate, "values")
  _methods.check("--methods", options, options.methods)
  _workload.check(options)
  if len(options.learning_rate) == 1:
    tuning = ("grid_extensions", "tuning_seeds")
    _options.check_left_out(options, tuning, "with one `--learning-rate`")
  return comparison.Study(
    options.methods,
    options.learning_rate,
    options.seeds,
    options.grid_extensions,
    tuple(range(_TUNING_SEED, _TUNING_SEED + options.tuning_seeds)),
    # Other load on the machine then slows all methods alike.
    order="seed",
  )


def _raise_diverged(found: comparison.Compared) -> None:
  """Raises a DivergedError that names the methods that have diverged."""
  # Methods without any finite rate have no rows.
  names = [name for name, tuned in found.tuned.items() if tuned.diverged]
  names += [
    name
    for name, runs in found.rows.items()
    if any(row["test_loss"] is None for row in runs)
  ]
  if names:
    raise _run_end.DivergedError(
      f"{', '.join(names)} ended with a loss that is not finite. Take lower "
      "values of `--learning-rate`, or a longer `--warmup-epochs`."
    )


def _print_tuned(console: Any, method: str, tuned: comparison.Tuned) -> None:
  rates = ", ".join(f"{rate:g}" for rate in tuned.tried)
  if tuned.diverged:
    console.print(
      f"Warning: {method} is left out: it diverged at every learning rate "
      f"tried, {rates}. Add lower ones to `--learning-rate`."
    )
    return
  console.print(
    f"{method}: learning rate {tuned.best:g}, of {rates}, by held-out training "
    "samples."
  )
  # Extensions of the grid have run out before its best rate was inside.
  if tuned.end is not None:
    console.print(
      f"Warning: {method}'s best rate is the {tuned.end} that was tried; a "
      "better one may lie beyond. Widen `--learning-rate`."
    )


def _print_table(
  console: Any,
  found: dict[str, list[comparison.Row]],
  options: _commands.Compare,
) -> None:
  """Prints a table of the methods that have rows, if there are any."""
  if not found:
    return
  base = next(iter(found))
  text = "bits_per_token" in found[base][0]
  digits = 3 if text else 2
  sent = {x: comparison.mean(y, "sent_bytes") for x, y in found.items()}

  def value(row: comparison.Row) -> float:
    one = row["bits_per_token"] if text else comparison.accuracy(row)
    return math.nan if one is None else float(one)  # It has diverged.

  def name(method: str, runs: _Runs) -> str:
    wrong = sum(row["test_loss"] is None for row in runs)
    return f"{method} ({wrong} diverged)" if wrong else method

  def quality(method: str, runs: _Runs) -> str:
    mean, spread = comparison.mean_and_spread(runs, value)
    text = f"{mean:.{digits}f}"
    return f"{text} ± {spread:.{digits}f}" if len(runs) > 1 else text

  def difference(method: str, runs: _Runs) -> str:
    # Seeds are paired: a difference of the same seed has less variance.
    more = comparison.paired_difference(runs, found[base], value=value)
    if more is None or method == base:
      return "-"
    return more.plus_minus(digits)

  columns: dict[str, Callable[[str, _Runs], str]] = {
    "method": name,
    "test bits per byte" if text else "test accuracy %": quality,
    f"more than {base}": difference,
    "rounds": lambda _, runs: f"{comparison.mean(runs, 'rounds'):,.0f}",
    "MB sent": lambda method, _: f"{sent[method] / 1e6:.3g}",
    "fewer bytes": lambda method, _: (
      f"{max(sent.values()) / sent[method]:.1f}x" if sent[method] else "-"
    ),
    "windows/s" if text else "images/s": lambda _, runs: training.format_rate(
      _mean_rate(runs)
    ),
    "rate": lambda _, runs: f"{runs[0]['learning_rate']:g}",
  }
  caption = (
    "Mean ± standard deviation over the seeds. Sent: bytes that each worker "
    "sends in a ring of N, over the whole run."
  )
  if len(options.seeds) > 1 < len(options.methods):
    caption += (
      f" More than {base}: mean of the differences with the same seeds, and "
      "half of its 95 % interval."
    )
  else:
    del columns[f"more than {base}"]
  console.print(
    _output.table(
      f"{options.dataset}, {options.model}, N = {options.workers} workers, "
      f"{len(options.seeds)} seed{'s' if len(options.seeds) > 1 else ''}",
      caption,
      columns,
      found.items(),
    )
  )


def _mean_rate(rows: _Runs) -> float:
  """Returns the mean rate of the runs that have one, or NaN."""
  # A run of one step has no rate: its time is that of compiling.
  known = [row["samples_per_s"] for row in rows if row["samples_per_s"]]
  return statistics.mean(known) if known else math.nan
