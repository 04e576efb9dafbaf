"""Goodput against how often machines fail, with up to a million of them.

    python experiments/failures/scale.py          # rows, table: seconds
    python experiments/failures/scale.py --check  # fails if the page differs

The virtual clock of `run.py` handles one message after the other, which is too
slow for a million workers.  Here the same law acts on all workers at once, in
arrays: of one job the changes of its members, one after the other; of survivors
that go on the failures of each worker, which do not touch the others.  The rows
of the clock check both.
"""

import argparse
import dataclasses
import pathlib
import sys
import time
from typing import Any

import config
import numpy as np
import scipy.special
import studies

from jdist import training

_FOLDER = pathlib.Path(__file__).resolve().parent
ROWS = _FOLDER / "results" / "scale.jsonl"
WORKERS = (100, 1_000, 100_000, 1_000_000)
# Mean seconds from a failure of a worker to its next: ten minutes as in
# `run.py`, an hour, a day, thirty days.  It is down for two minutes of these.
CYCLES = {"10 min": 600.0, "1 h": 3600.0, "1 d": 86400.0, "30 d": 30 * 86400.0}
DOWN_S = 120.0
SECONDS = 600.0
# Changes of the members of one job that are drawn.
_CHANGES = 20_000


def one_job(setting: config.Setting, seed: int) -> float:
  """Returns the goodput of a job that begins anew when one leaves or joins.

  Its members change at the moments of a Poisson process; each change costs the
  restart and the round that it interrupts.  A round lasts as long as the
  slowest of the tasks, with lognormal jitter.
  """
  random = np.random.default_rng((seed, 0))
  law = setting.law(seed)
  up = 1.0 if law is None else 1.0 - law.down_fraction
  members = max(round(up * setting.workers), 1)
  # One leaves, and one joins, once in a cycle of each worker.
  gap_s = random.exponential(setting.cycle_s / (2 * setting.workers), _CHANGES)
  slowest = random.random(_CHANGES) ** (1 / members)
  jitter = np.exp(setting.jitter * scipy.special.ndtri(slowest))
  round_s = config.TASK_S * jitter.mean() + setting.exchange_s
  rounds = np.floor(np.maximum(gap_s - setting.restart_s, 0.0) / round_s)
  return float(rounds.sum() * config.TASK_S / gap_s.sum())


def survivors(setting: config.Setting, seed: int, until_s: float) -> float:
  """Returns the goodput of workers that go on when others fail.

  A worker loses its restarts and the steps that it had not pushed, also those
  at the end of the time.
  """
  random = np.random.default_rng((seed, 1))
  law = setting.law(seed)
  if law is None:
    raise ValueError("`fraction` must be positive, got 0.")
  push_s = config.INTERVAL * config.TASK_S + setting.exchange_s
  now_s = np.zeros(setting.workers)
  # At second 0 as many are down as later.
  away = random.random(setting.workers) < law.down_fraction
  restart_s = np.zeros(setting.workers)
  up_s = merged_s = 0.0
  while now_s.size:
    down_s = random.exponential(law.down_s, now_s.size)
    now_s, restart_s = (
      np.where(away, now_s + down_s, now_s),
      np.where(away, setting.restart_s, restart_s),
    )
    length_s = random.exponential(law.up_s, now_s.size)
    length_s = np.clip(np.minimum(length_s, until_s - now_s), 0.0, None)
    up_s += length_s.sum()
    pushes = np.floor(np.maximum(length_s - restart_s, 0.0) / push_s)
    merged_s += pushes.sum() * config.INTERVAL * config.TASK_S
    now_s = now_s + length_s
    now_s, restart_s = now_s[now_s < until_s], restart_s[now_s < until_s]
    away = np.ones(now_s.size, bool)
  return float(merged_s / up_s)


def row(workers: int, cycle_s: float, seed: int = 0) -> dict[str, Any]:
  """Measures both at a number of workers and a rate of failures."""
  setting = config.Setting(DOWN_S / cycle_s, workers, cycle_s)
  began_s = time.monotonic()
  found = {
    "one_job": one_job(setting, seed),
    "survivors": survivors(setting, seed, SECONDS),
  }
  return training.make_row(
    dataclasses.asdict(setting) | {"seconds": SECONDS}, seed, **found,
    failures_per_s=workers / cycle_s, took_s=time.monotonic() - began_s,
  )  # fmt: skip


def checked(rows: list[dict[str, Any]]) -> list[str]:
  """Returns lines of a table: the clock's goodput beside that of the arrays."""
  lines = []
  for of_clock in rows:
    own = dict(of_clock["config"])
    seconds, name = own.pop("seconds"), of_clock["method"]
    if not own["fraction"] or name not in ("bsp, one job", "decoupled_diloco"):
      continue
    setting, seed = config.Setting(**own), of_clock["seed"]
    if name == "bsp, one job":
      found = one_job(setting, seed)
    else:
      found = survivors(setting, seed, seconds)
    lines.append(
      f"{name} | {setting.workers:,} | {100 * setting.fraction:g} "
      f"| {100 * of_clock['goodput']:.1f} | {100 * found:.1f}"
    )
  return lines


def table(rows: list[dict[str, Any]]) -> str:
  """Returns the table of goodput by workers and rate of failures."""
  lines = []
  for name, seconds in CYCLES.items():
    own = [x for x in rows if x["config"]["cycle_s"] == seconds]
    own.sort(key=lambda x: x["config"]["workers"])
    pairs = (
      f"{100 * x['one_job']:.1f}, {100 * x['survivors']:.1f}" for x in own
    )
    lines.append(f"{name} | " + " | ".join(pairs))
  heads = " | ".join(f"{x:,} workers" for x in WORKERS)
  return studies.table(
    f"a worker fails once in (one job, survivors) | {heads}", lines
  )


def main() -> int:
  """Writes the rows and the page's tables."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--check", action="store_true")
  check = parser.parse_args().check
  rows = studies.read(ROWS) if ROWS.exists() else []
  done = {(x["config"]["workers"], x["config"]["cycle_s"]) for x in rows}
  for workers in WORKERS:
    for cycle_s in CYCLES.values():
      if (workers, cycle_s) not in done:
        rows.append(row(workers, cycle_s))
        training.append_rows(ROWS, rows[-1:])
  took_s = sum(x["took_s"] for x in rows)
  clock = training.read_rows(ROWS.parent / "clock.jsonl")
  heads = "protocol | workers | % down | on the clock | in arrays"
  parts = {
    "scale": f"{table(rows)}\n\n{len(rows)} rows in {took_s:.0f} s.",
    "scale check": studies.table(heads, checked(clock)),
  }
  print("\n\n".join(parts.values()))
  return int(
    studies.write({_FOLDER / "TABLES.md": parts}, check=check) and check
  )


if __name__ == "__main__":
  if main():
    sys.exit(1)
