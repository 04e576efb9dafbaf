"""Writes the tables of the ladder's page, and its picture, from the rows.

    python experiments/records/report.py          # README.md and ladder.png
    python experiments/records/report.py --check  # fails if a number differs

All numbers of the page stand between markers and are written here.  A row whose
commit cannot be checked out is refused.
"""

import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import ladder
import run
import studies

from jdist.training import comparison

Row = run.Row
FOLDER = run.FOLDER
Value = Callable[[Row], float]
MARGIN = 0.01
"""Nats below which the interval of a difference must end, stated before any
run."""

BASE = "ssgd"
PUBLIC = 1.88
"""The loss that nanoGPT states for its setting for CPUs."""


def of(rows: Sequence[Row], purpose: str, setting: str = "cpu") -> list[Row]:
  """Returns the rows of a purpose in a setting."""
  return [
    row
    for row in rows
    if (row["purpose"], row["config"]["setting"]) == (purpose, setting)
  ]


def loss(row: Row) -> float:
  """Returns the last validation loss, infinity for a run that diverged."""
  return float("inf") if row["val_loss"] is None else float(row["val_loss"])


def by_run(rows: Sequence[Row]) -> dict[tuple[int, str], list[Row]]:
  """Returns the rows by rung and method, the first rung first."""
  found = studies.group(rows, lambda row: (row["rung"], row["method"]))
  return dict(sorted(found.items()))


def difference(
  rows: Sequence[Row], base: Sequence[Row], value: Value = loss
) -> comparison.Difference:
  """Returns the paired difference of losses in nats."""
  found = comparison.paired_difference(rows, base, value=value)
  if found is None:
    raise ValueError("`rows` must share two seeds or more with `base`.")
  return found


def chosen(rows: Sequence[Row]) -> dict[int, str]:
  """Returns each rung's method.

  The method with the lowest mean loss of the tuning seeds is taken; where a
  rung was not tuned, the losses of 400x decide.
  """
  tuning = by_run(of(rows, "tuning"))
  found: dict[int, tuple[float, str]] = {}
  for rung, method in by_run(of(rows, "comparison")):
    if rung > 1:
      own = tuning.get((rung, method)) or tuning[run.TUNED, method]
      one = min(run.means(own).values()), method
      found[rung] = min(found.get(rung, one), one)
  return {rung: method for rung, (_, method) in found.items()}


def train_loss(row: Row) -> float:
  """Returns the mean training loss of the last part of a run."""
  return float(row["curve"][-1]["train_loss"])


def lowest(row: Row) -> float:
  """Returns the lowest validation loss along a run."""
  return min(x["val_loss"] for x in row["curve"])


def _mean(rows: Sequence[Row], value: Value = loss) -> str:
  """Writes a mean over seeds and half of its interval."""
  zeros = [{"seed": row["seed"], "zero": True} for row in rows]
  found = comparison.paired_difference(
    rows, zeros, value=lambda row: 0.0 if "zero" in row else value(row)
  )
  if found is None:
    return f"{statistics.mean(map(value, rows)):.4f}"
  return f"{found.mean:.4f} ± {found.high - found.mean:.4f}"


def _outer(row: Row) -> str:
  if row["rung"] == 1:
    return "-"
  return f"{row['outer_rate']:g}, {row['outer_momentum']:g}"


def _rung(rung: int) -> str:
  return "-" if rung == 1 else f"{rung:,}x"


def ladder_table(rows: Sequence[Row]) -> str:
  """Returns the table of all compared runs."""
  runs = by_run(of(rows, "comparison"))
  base = runs[1, BASE]
  lines = []
  for (rung, method), own in runs.items():
    first = own[0]
    gap, gap_train, held = "-", "-", "-"
    if method != BASE:
      found = difference(own, base)
      gap, held = found.plus_minus(4), "yes" if holds(found) else "no"
      gap_train = difference(own, base, train_loss).plus_minus(3)
    seconds = statistics.mean(x["program_s"] / x["program_runs"] for x in own)
    lines.append([
      _rung(rung), method, first["rounds"], f"{first['ratio']:,.1f}x",
      f"{first['sent_bytes'] / 1e6:,.1f}", len(own), _mean(own), gap, held,
      f"{statistics.mean(map(lowest, own)):.4f}", gap_train, f"{seconds:.1f}",
    ])  # fmt: skip
  return studies.table(
    "rung | method | means | fewer bytes | MB sent by a worker | seeds "
    "| validation loss | less ssgd | holds | lowest on the way "
    "| training loss less ssgd | seconds a run",
    lines,
  )


def tuning_table(rows: Sequence[Row]) -> str:
  """Returns the table of the tuning, with a line for each outer optimizer."""
  lines = []
  for (rung, method), own in by_run(of(rows, "tuning")).items():
    tried = run.means(own)
    best = min(tried, key=tried.__getitem__)
    for outer, some in studies.group(own, _outer).items():
      losses = sorted(run.means(some).items())
      lines.append([
        _rung(rung), method, outer, len({x["seed"] for x in some}),
        ", ".join(
          f"**{point.rate:g}: {x:.4f}**" if point == best
          else f"{point.rate:g}: {x:.4f}"
          for point, x in losses
        ),
      ])  # fmt: skip
  return studies.table(
    "rung | method | outer rate, momentum | seeds "
    "| mean validation loss by rate",
    lines,
  )


def holds(found: comparison.Difference) -> bool:
  """Returns whether a loss is not above that of ssgd by the margin or more."""
  return found.high < MARGIN


def verdict(rows: Sequence[Row]) -> str:
  """Returns what the rows say, as a list."""
  runs, best = by_run(of(rows, "comparison")), chosen(rows)
  base = runs[1, BASE]
  steps = base[0]["rounds"]
  found = {x: difference(runs[x, best[x]], base) for x in sorted(best)}
  trained = {x: difference(runs[x, best[x]], base, train_loss) for x in best}
  held = [x for x in found if holds(found[x])]
  broken = [x for x in found if x not in held]
  lines = [
    f"Synchronous AdamW ends at {_mean(base)} nat "
    f"({len(base)} seeds, mean and 95 % interval); nanoGPT's public loss, with "
    f"an eighth of the text in a step, is {PUBLIC:g}."
  ]
  if held:
    top = max(held)
    lines.append(
      f"**{_rung(top)} fewer bytes hold** with {best[top]}: the loss less that "
      f"of synchronous AdamW is {found[top].interval(4)} nat, and the margin "
      f"is {MARGIN:g}."
    )
  if run.TUNED in found:
    lines.append(
      f"**At {_rung(run.TUNED)} it is {found[run.TUNED].interval(4)} nat**, "
      "after a mean every "
      f"{steps / runs[run.TUNED, best[run.TUNED]][0]['rounds']:.0f} steps."
    )
  lines += [
    f"{_rung(x)} does not hold: {found[x].interval(4)} nat." for x in broken
  ]
  lines.append(
    "The training loss less that of synchronous AdamW is "
    + ", ".join(f"{x.plus_minus(3)} at {_rung(k)}" for k, x in trained.items())
    + "."
  )
  if missing := [x for x in ladder.RUNGS if x not in found]:
    names = ", ".join(map(_rung, missing))
    lines.append(f"Not run: {names}.")
  return "\n".join(f"- {line}" for line in lines)


def setting(rows: Sequence[Row]) -> str:
  """Returns the setting of the rows, from the code that ran them."""
  own, workers = ladder.SETTINGS["cpu"], ladder.SETTINGS["cpu"].workers
  commits = ", ".join(sorted({row["commit"] for row in rows}))
  devices = ", ".join(sorted({row["device"] for row in rows}))
  seeds = ", ".join(map(str, run.TUNING_SEEDS))
  return "\n".join((
    f"- The transformer has {own.num_layers} layers, {own.num_heads} heads, a "
    f"width of {own.width} and a context of {own.length} characters; "
    f"{own.steps:,} steps of {own.batch_size} windows for each of {workers} "
    "workers.",
    "- AdamW has betas of 0.9 and 0.99, a weight decay of "
    f"{own.weight_decay:g} on matrices, gradients clipped at a norm of "
    f"{own.clip:g}, "
    f"{own.warmup_steps} steps of warm-up and a cosine down to "
    f"{own.last_rate:g} of the highest rate.",
    f"- Tuning has the seeds {seeds} and rates from {run.RATES[0]:g} to "
    f"{run.RATES[-1]:g}; the report has the seeds {run.SEEDS[0]} to "
    f"{run.SEEDS[-1]}.",
    f"- {len(rows)} rows, of the commits {commits}, on {devices}.",
  ))  # fmt: skip


def draw(rows: Sequence[Row], path: pathlib.Path) -> None:
  """Draws both differences to synchronous AdamW against the bytes."""
  from matplotlib import figure

  runs = by_run(of(rows, "comparison"))
  base = runs[1, BASE]
  picture = figure.Figure(figsize=(8.5, 3.8), layout="constrained")
  panels = picture.subplots(1, 2)
  lines = studies.group([x for x in runs if x[0] > 1], lambda key: key[1])
  colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#333333", "#e69f00")
  for axes, value, name in zip(
    panels, (loss, train_loss), ("validation", "training"), strict=True
  ):
    for (method, keys), colour in zip(lines.items(), colours, strict=False):
      found = [difference(runs[key], base, value) for key in keys]
      axes.errorbar(
        [runs[key][0]["ratio"] for key in keys],
        [x.mean for x in found],
        [x.high - x.mean for x in found],
        marker="o", ms=4, lw=1.2, capsize=3, label=method, color=colour,
      )  # fmt: skip
    if (1, "ssgd-muon") in runs:
      other = difference(runs[1, "ssgd-muon"], base, value)
      axes.axhline(other.mean, color="#777777", ls=":", lw=1, label="ssgd-muon")
    axes.axhline(0, color="black", lw=0.8, label="ssgd (AdamW)")
    if value is loss:
      axes.axhline(MARGIN, color="#cc3311", ls="--", lw=0.8, label="margin")
    axes.set_xscale("log")
    axes.set_xticks(ladder.RUNGS, [f"{x}x" for x in ladder.RUNGS])
    axes.minorticks_off()
    axes.set_xlim(8, 1300)
    axes.set_xlabel("fewer bytes than ssgd in float32")
    axes.set_ylabel(f"{name} loss less that of ssgd, nat")
  panels[0].legend(fontsize=8, frameon=False)
  picture.savefig(path, dpi=150)


def parts_of(rows: Sequence[Row]) -> dict[str, str]:
  """Returns what the rows say, by the name of its place on the page."""
  return {
    "verdict": verdict(rows),
    "setting": setting(rows),
    "ladder": ladder_table(rows),
    "tuning": tuning_table(rows),
  }


def main() -> None:
  """Writes the page and the picture, or checks the page."""
  rows = studies.read(FOLDER / "results" / "ladder.jsonl")
  studies.publish(
    {FOLDER / "README.md": parts_of(rows)},
    lambda: draw(rows, FOLDER / "results" / "ladder.png"),
  )


if __name__ == "__main__":
  main()
