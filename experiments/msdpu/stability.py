"""Largest rates that rounds and delays allow: `transforms.stability_limit`.

python experiments/msdpu/stability.py

Rows and the picture go to `results/`; rows that are there are not computed
again.  No training, some seconds.
"""

import pathlib
from typing import Any

from jdist import training, transforms
from jdist.training import comparison

_SHARE = 1 / 8  # What a worker of eight keeps of its progress.
_CASES: dict[str, dict[str, Any]] = {
  "no delay": {"steps": 0},
  "1 step late": {"steps": 1},
  "2 steps late": {"steps": 2},
  "a round late": {"steps": None},
  "a round late, correction 0.1": {"steps": None, "correction": 0.1},
}
_INTERVALS = (1, 2, 3, 4, 6, 8, 12, 16)


def rows() -> list[dict[str, Any]]:
  """Computes the limits of all cases and intervals."""
  found = []
  for name, options in _CASES.items():
    for interval in _INTERVALS:
      if (options["steps"] or 0) > interval:
        continue
      config = {"interval": interval, "carry": _SHARE, **options}
      limit = transforms.stability_limit(**config)
      found.append(training.make_row(config, 0, case=name, limit=limit))
  return found


def draw(found: list[dict[str, Any]], path: pathlib.Path) -> None:
  """Draws a line for each case."""
  with comparison.picture(path, figsize=(7.0, 4.2), grid={"lw": 0.8}) as (
    (axes,),
  ):
    axes.spines[["top", "right"]].set_visible(True)
    for name, own in comparison.group(found, lambda row: row["case"]).items():
      points = [(row["config"]["interval"], row["limit"]) for row in own]
      axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(_INTERVALS, [str(x) for x in _INTERVALS])
    axes.set_xlabel("local steps of a round, H")
    axes.set_ylabel("largest stable rate x curvature")
    axes.set_title("Nesterov momentum 0.9, 1/8 of one's own progress kept")
    axes.legend()


def table(found: list[dict[str, Any]]) -> str:
  """Returns a table with a line for each case."""
  shown = (1, 2, 4, 8, 16)
  limits = {
    (row["case"], row["config"]["interval"]): f"{row['limit']:.3f}"
    for row in found
  }
  return comparison.table(
    " | ".join(["the mean comes", *(f"H={h}" for h in shown)]),
    [(name, *(limits.get((name, h), "") for h in shown)) for name in _CASES],
  )


if __name__ == "__main__":
  results = pathlib.Path(__file__).resolve().parent / "results"
  path = results / "stability.jsonl"
  if not path.exists():
    training.append_rows(path, rows())
  found = training.read_rows(path)
  print(table(found))
  draw(found, results / "stability.png")
