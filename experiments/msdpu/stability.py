"""Largest rates that rounds and delays allow: `transforms.stability_limit`.

python experiments/msdpu/stability.py

Rows and the picture go to `results/`; rows that are there are not computed
again.  No training, some seconds.
"""

import pathlib
from typing import Any

from jdist import training, transforms

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
  plt = training.pyplot()
  figure, axes = plt.subplots(figsize=(7.0, 4.2), layout="constrained")
  for name in _CASES:
    some = [row for row in found if row["case"] == name]
    axes.plot(
      [row["config"]["interval"] for row in some],
      [row["limit"] for row in some],
      marker="o",
      label=name,
    )
  axes.set_xscale("log", base=2)
  axes.set_yscale("log")
  axes.set_xticks(_INTERVALS, [str(x) for x in _INTERVALS])
  axes.set_xlabel("local steps of a round, H")
  axes.set_ylabel("largest stable rate x curvature")
  axes.set_title("Nesterov momentum 0.9, 1/8 of one's own progress kept")
  axes.grid(alpha=0.3)
  axes.legend()
  figure.savefig(path, dpi=130)
  plt.close(figure)


def table(found: list[dict[str, Any]]) -> str:
  """Returns a Markdown table: a line for each case."""
  shown = (1, 2, 4, 8, 16)
  lines = [
    "| the mean comes | " + " | ".join(f"H={h}" for h in shown) + " |",
    "|---|" + "---|" * len(shown),
  ]
  for name in _CASES:
    of = {
      r["config"]["interval"]: r["limit"] for r in found if r["case"] == name
    }
    cells = [f"{of[h]:.3f}" if h in of else "" for h in shown]
    lines.append(f"| {name} | " + " | ".join(cells) + " |")
  return "\n".join(lines)


if __name__ == "__main__":
  results = pathlib.Path(__file__).resolve().parent / "results"
  path = results / "stability.jsonl"
  if not path.exists():
    training.append_rows(path, rows())
  found = training.read_rows(path)
  print(table(found))
  draw(found, results / "stability.png")
