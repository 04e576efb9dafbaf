"""Runs the ladder: tiny Shakespeare by characters in fewer and fewer bytes.

    python experiments/records/run.py ssgd@1
    python experiments/records/run.py muloco-int2@400 compare:muloco-int2@100

Runs that differ in rates and seeds are one program on one device.  A job tunes
a method on a rung, and runs the seeds of the report at the best point; "tune:"
and "compare:" do one of both.  The grid of rates has factors of 2 and is
extended until the best rate has a worse one on both sides.  Outer optimizers
are tuned at 400x: averaging first, then others at its best rate and at half of
it.  A rung that is not tuned has the point of 400x.  Runs whose rows exist are
skipped.  Rows name the commit of a clean checkout, or that of `--commit`
(JDIST_COMMIT) where this is a copy without its repository.
"""

import argparse
import dataclasses
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import ladder
import numpy as np
import program
import studies

from jdist import training

FOLDER = pathlib.Path(__file__).resolve().parent
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
TUNING_SEEDS = (100, 101)
SEEDS = tuple(range(10))
# Outer rates and momenta: averaging, DiLoCo's, and between them.
OUTERS = ((1.0, 0.0), (1.0, 0.5), (0.7, 0.9))
# Synchronous training has no outer optimizer.
NONE = ((1.0, 0.0),)
# The rung on which outer optimizers are tuned.
TUNED = 400
Row = dict[str, Any]
Outer = Sequence[float]
_MOST_EXTENSIONS = 3


def read_text(path: str) -> program.Text:
  """Returns both parts of a text, int32 characters, and the vocabulary.

  The first nine tenths are for training, the rest for validation.
  """
  text = pathlib.Path(path).read_bytes()
  names, tokens = np.unique(np.frombuffer(text, np.uint8), return_inverse=True)
  tokens = tokens.astype(np.int32)
  cut = int(0.9 * len(tokens))
  return tokens[:cut], tokens[cut:], len(names)


class Ladder:
  """The runs of a command: what is missing is run, and its rows are kept."""

  def __init__(self, args: argparse.Namespace):
    """Reads the text and the rows that there are."""
    # A row of unknown code would be refused after its run.
    self.commit = args.commit or training.make_row({}, 0)["commit"]
    studies.check_commit(self.commit)
    self.args, self.setting = args, ladder.SETTINGS[args.setting]
    self.text = read_text(args.text)
    self.path = pathlib.Path(args.rows)
    self.rows = training.read_rows(self.path) if self.path.exists() else []
    # Methods that differ in their rounds only share a program.
    self.programs: dict[ladder.Method, program.Program] = {}
    self.began, self.longest = time.monotonic(), 0.0

  def find(self, purpose: str, method: str, rung: int) -> list[Row]:
    """Returns the rows of a method on a rung."""
    wanted = purpose, self.args.setting, method, rung
    return [
      row for row in self.rows
      if (row["purpose"], row["config"]["setting"], row["method"], row["rung"])
      == wanted
    ]  # fmt: skip

  def run(
    self, purpose: str, name: str, rung: int, points: Sequence[ladder.Point]
  ) -> None:
    """Runs the points that have no row, as many at once as a program holds."""
    there = {point_of(row) for row in self.find(purpose, name, rung)}
    missing = [point for point in points if point not in there]
    method, size = ladder.METHODS[name], self.args.points
    sent = ladder.sent(method, self.setting, self.text[2], rung)
    for i in range(0, len(missing), size):
      began = time.monotonic()
      left = self.args.seconds - (began - self.began)
      if left < self.longest:
        raise SystemExit(
          f"{left:.0f} s are left: stopped before {name}, {rung}x."
        )
      kind = dataclasses.replace(method, growth=0.0)
      if kind not in self.programs:
        self.programs[kind] = program.Program(
          self.setting, method, self.text, size
        )
      some = missing[i : i + size]
      ends = ladder.ends(method, self.setting, sent.rounds)
      measured = self.programs[kind].run(some, ends)
      # The next program may be there already.
      self.longest = max(self.longest, measured[0]["program_s"] + 5.0)
      for point, found in zip(some, measured, strict=True):
        self._keep(purpose, name, rung, point, sent, found)
      losses = " ".join(
        f"{p.rate:g}/{p.outer_rate:g}/{p.outer_momentum:g}: {x['val_loss']:.4f}"
        for p, x in zip(some, measured, strict=True)
      )
      spent = measured[0]["program_s"]
      print(f"{purpose} {name} {rung}x {spent:.1f} s  {losses}", flush=True)

  def _keep(
    self, purpose: str, name: str, rung: int, point: ladder.Point,
    sent: ladder.Sent, found: Row,
  ) -> None:  # fmt: skip
    row = training.make_row(
      {"setting": self.args.setting, "workers": self.setting.workers},
      point.seed, purpose=purpose, method=name, rung=rung,
      learning_rate=point.rate, outer_rate=point.outer_rate,
      outer_momentum=point.outer_momentum, rounds=sent.rounds,
      sent_bytes=sent.run, received_bytes=sent.run,
      formula_bytes=sent.by_formula, ratio=sent.ratio, **found,
    )  # fmt: skip
    row["commit"] = self.commit
    training.append_rows(self.path, [row])
    self.rows.append(row)

  def tune(self, name: str, rung: int) -> None:
    """Runs the grid of a method on a rung, until its best is inside."""
    first, *others = self._outers(name, rung)
    best = self._tune_rates(name, rung, first, self.args.rates)
    # An outer momentum makes longer steps: no higher rates are tried at first.
    near = best.rate / 2, best.rate
    self._tune_points(name, rung, others, near)
    best = best_point(self.find("tuning", name, rung))
    if best[1:3] != tuple(first):
      self._tune_rates(name, rung, best[1:3], near)

  def _tune_rates(
    self, name: str, rung: int, outer: Outer, rates: Sequence[float]
  ) -> ladder.Point:
    """Extends a grid until its best rate has a worse one on both sides."""
    rates = list(rates)
    for _ in range(_MOST_EXTENSIONS + 1):
      self._tune_points(name, rung, [outer], rates)
      rows = self.find("tuning", name, rung)
      best = best_point([x for x in rows if point_of(x)[1:3] == tuple(outer)])
      if min(rates) < best.rate < max(rates):
        return best
      rates += [min(rates) / 2 if best.rate == min(rates) else max(rates) * 2]
    raise SystemExit(f"The best rate of {name}, {rung}x is still at an end.")

  def _tune_points(
    self, name: str, rung: int, outers: Sequence[Outer], rates: Sequence[float]
  ) -> None:
    points = [
      ladder.Point(rate, *outer, seed)
      for outer in outers for seed in TUNING_SEEDS for rate in rates
    ]  # fmt: skip
    self.run("tuning", name, rung, points)

  def _outers(self, name: str, rung: int) -> Sequence[Outer]:
    """Returns the outer rates and momenta that are tried on a rung."""
    if not ladder.METHODS[name].rounds:
      return NONE
    if self.args.outers:
      return self.args.outers
    known = self._known(name)
    if not known or (rung == TUNED and not name.endswith("-growing")):
      return OUTERS
    return [best_point(known)[1:3]]

  def _known(self, name: str) -> list[Row]:
    """Returns the tuning rows at 400x, for growing rounds of constant ones."""
    return self.find("tuning", name.removesuffix("-growing"), TUNED)

  def compare(self, name: str, rung: int) -> None:
    """Runs the report's seeds at a method's best point, or that of 400x."""
    best = best_point(self.find("tuning", name, rung) or self._known(name))
    points = [best._replace(seed=seed) for seed in SEEDS]
    self.run("comparison", name, rung, points)


def point_of(row: Row) -> ladder.Point:
  """Returns the point of a row."""
  names = "learning_rate", "outer_rate", "outer_momentum", "seed"
  return ladder.Point(*(row[name] for name in names))


def means(rows: Sequence[Row]) -> dict[ladder.Point, float]:
  """Returns the mean last loss by point, with None for its seed.

  A run that diverged, null in rows, makes its point's mean infinite.
  """
  found: dict[ladder.Point, list[float]] = {}
  for row in rows:
    loss = row["val_loss"]
    found.setdefault(point_of(row)._replace(seed=None), []).append(
      float("inf") if loss is None or loss != loss else loss
    )
  return {point: statistics.mean(x) for point, x in found.items()}


def best_point(rows: Sequence[Row]) -> ladder.Point:
  """Returns the point of the lowest mean loss over the tuning seeds.

  Raises:
    ValueError: if there are no rows.
  """
  tried = means(rows)
  if not tried:
    raise ValueError("`rows` must hold tuning rows: run `tune` first.")
  return min(tried, key=tried.__getitem__)


def _pair(text: str) -> tuple[float, float]:
  rate, momentum = map(float, text.split(":"))
  return rate, momentum


def _job(text: str) -> tuple[str, str, int]:
  stage, _, job = text.rpartition(":")
  name, _, rung = job.partition("@")
  if stage not in ("", "tune", "compare") or name not in ladder.METHODS:
    raise argparse.ArgumentTypeError(
      f"a job is METHOD@RUNG, tune:METHOD@RUNG or compare:METHOD@RUNG with a "
      f"method of {', '.join(ladder.METHODS)}; got {text}"
    )
  return stage, name, int(rung)


def _arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("jobs", nargs="+", type=_job, help="METHOD@RUNG")
  parser.add_argument("--setting", default="cpu", choices=ladder.SETTINGS)
  parser.add_argument("--text", default="input.txt")
  parser.add_argument(
    "--rows", default=str(FOLDER / "results" / "ladder.jsonl")
  )
  parser.add_argument("--rates", nargs="+", type=float, default=RATES)
  parser.add_argument("--outers", nargs="+", type=_pair, default=(),
                      help="outer rate:momentum")  # fmt: skip
  parser.add_argument("--points", type=int, default=10, help="runs at once")
  parser.add_argument("--seconds", type=float, default=500.0)
  parser.add_argument("--commit", default=os.environ.get("JDIST_COMMIT", ""))
  return parser.parse_args()


def main() -> None:
  """Runs what is missing."""
  args = _arguments()
  runs = Ladder(args)
  for stage, name, rung in args.jobs:
    if stage != "compare":
      runs.tune(name, rung)
    if stage != "tune":
      runs.compare(name, rung)


if __name__ == "__main__":
  main()
