"""Tunes and compares the methods of the front page, and measures their steps.

    python experiments/first_comparison/run.py costs    # one more measurement
    python experiments/first_comparison/run.py tune     # rates and rounds
    python experiments/first_comparison/run.py compare  # the report's seeds
    python experiments/first_comparison/run.py small    # three seeds, a table

Runs of one kind of rounds are one program on one core.  Runs whose rows exist
are skipped.  Rows name the commit of a clean checkout.
"""

import argparse
import pathlib
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import choice
import program
import protocol
import studies

from jdist import advice, training

FOLDER = pathlib.Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
STAGES = ("costs", "tune", "compare", "small")
_MOST_EXTENSIONS = 4
_CONFIG = {
  "dataset": "digits",
  "model": "mlp",
  "workers": protocol.WORKERS,
  "batch_size": protocol.WORKERS * protocol.BATCH_SIZE,
}


class Runs:
  """Runs the missing settings and keeps their rows."""

  def __init__(self, folder: pathlib.Path, *, clean: bool = True):
    """Reads the rows that there are."""
    # A row of changed code would be refused after its run.
    if clean:
      studies.check_commit(training.make_row({}, 0)["commit"])
    self.digits = program.Digits()
    self.paths = {
      name: folder / f"{name}.jsonl"
      for name in ("costs", "tuning", "comparison")
    }
    self.rows = {
      name: studies.read(path, clean=clean) for name, path in self.paths.items()
    }

  def _keep(self, name: str, row: dict[str, Any]) -> None:
    training.append_rows(self.paths[name], [row])
    self.rows[name].append(row)

  def costs(self, method: str, first: int) -> None:
    """Measures a method's step and the base's on this machine."""
    digits, model = self.digits, self.digits.model(0)
    samples, _ = digits.samples("comparison", 0)

    def loss(params: Any, state: Any, batch: Any, key: Any) -> Any:
      del key
      return digits.loss(params, batch)[0], (state, {})

    def build(name: str, first: int) -> Any:
      return (
        lambda axis: protocol.chain(name, first, 1, 0.1, axis),
        first,
      )

    kinds = {protocol.BASE: 1, method: first}
    chains = {name: build(name, steps) for name, steps in kinds.items()}
    # Processor seconds of one thread: other programs share the cores.
    with mock.patch.object(time, "perf_counter", time.process_time):
      found = advice.advise(
        loss, model.params, samples[0, 0], chains, protocol.LINK,
        num_workers=protocol.WORKERS, optimizer=protocol.inner(0.1),
        limit_s=10.0,
      )  # fmt: skip
    costs = found.costs[method]
    self._keep("costs", training.make_row(
      _CONFIG, 0, method=method, first=first, step_s=costs.step_s,
      extra_s=costs.extra_s, messages=costs.round_messages,
      round_bytes=costs.round_bytes,
    ))  # fmt: skip
    print(f"{method}, {first}: {1e3 * found.step_s:.3f} ms a step", flush=True)

  def run(
    self, purpose: str, method: str, first: int, points: Sequence[Any]
  ) -> list[dict[str, Any]]:
    """Returns the rows of points; those that have none are run."""
    delay = choice.delay(self.rows["costs"], method, first)
    own = choice.of(self.rows[purpose], method, first)
    there = {(row["learning_rate"], row["seed"]): row for row in own}
    missing = [point for point in points if tuple(point) not in there]
    if missing:
      began = time.monotonic()
      measured = self._program(method, first, delay).run(purpose, missing)
      for point, found in zip(missing, measured, strict=True):
        there[tuple(point)] = training.make_row(
          _CONFIG, point.seed, method=method, first=first, delay=delay,
          learning_rate=point.rate, **found,
        )  # fmt: skip
        self._keep(purpose, there[tuple(point)])
      print(
        f"{purpose} {method}, {first}, {delay} late: {len(missing)} runs in "
        f"{time.monotonic() - began:.0f} s",
        flush=True,
      )
    return [there[tuple(point)] for point in points]

  def _program(self, method: str, first: int, delay: int) -> program.Program:
    kind = method, first, delay
    if getattr(self, "_kept", (None,))[0] != kind:
      self._kept = kind, program.Program(self.digits, *kind)
    return self._kept[1]

  def tune(self, method: str, first: int) -> None:
    """Runs the grid, and extends it until its best rate is inside."""
    # A command that was stopped has extended it already.
    own = choice.of(self.rows["tuning"], method, first)
    rates = [*{*protocol.RATES, *(row["learning_rate"] for row in own)}]
    for _ in range(_MOST_EXTENSIONS + 1):
      self.run("tuning", method, first, [
        program.Point(rate, seed)
        for rate in sorted(rates) for seed in protocol.TUNING_SEEDS
      ])  # fmt: skip
      best = choice.best_rate(choice.of(self.rows["tuning"], method, first))
      if min(rates) < best < max(rates):
        return
      rates += [min(rates) / 2 if best == min(rates) else max(rates) * 2]
    print(f"The best rate of {method}, {first}, {best:g}, is at an end.")

  def compare(self, method: str, by: Any, seeds: Sequence[int]) -> None:
    """Runs seeds at a method's choice."""
    chosen = choice.choose(self.rows["tuning"], self.rows["costs"], by)[method]
    self.run("comparison", method, chosen.first, [
      program.Point(chosen.rate, seed) for seed in seeds
    ])  # fmt: skip


def small(folder: pathlib.Path) -> None:
  """Runs three seeds of four methods at the page's choice, in minutes."""
  import report

  folder.mkdir(parents=True, exist_ok=True)
  for name in ("costs", "tuning"):
    shutil.copy(RESULTS / f"{name}.jsonl", folder)
  runs = Runs(folder, clean=False)
  for method in protocol.SMALL:
    runs.compare(method, choice.by_seconds, protocol.SEEDS[:3])
  found = report.Found(folder, clean=False)
  print(report.comparison_table(found))
  report.draw(found, folder / "compare.png")
  print(f"Rows and a picture are in {folder}.")


def main() -> None:
  """Runs what is missing."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("stages", nargs="+", choices=STAGES)
  parser.add_argument("--methods", nargs="+", default=list(protocol.METHODS))
  parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
  args = parser.parse_args()
  if args.stages == ["small"]:
    small(pathlib.Path("runs") / "front_page")
    return
  runs = Runs(args.results)
  for stage in args.stages:
    if stage == "costs":
      for method in protocol.METHODS:
        base = method == protocol.BASE
        runs.costs(method, 1 if base else protocol.MEASURED)
      continue
    for method in args.methods:
      if stage == "compare":
        for by in (choice.by_seconds, choice.by_bytes):
          runs.compare(method, by, protocol.SEEDS)
        continue
      for first in protocol.firsts(method):
        runs.tune(method, first)


if __name__ == "__main__":
  main()
