"""The picture of a comparison of chains: accuracy over bytes."""

import os
from collections.abc import Sequence
from typing import Any

import studies

from jdist.training import comparison


def plot_bytes(
  runs: studies.Runs, path: str | os.PathLike[str], *, ours: str
) -> None:
  """Draws accuracy over bytes, with the Pareto front.

  A variant with one seed is drawn hollow and is not part of the front: without
  a spread its place is not known.

  Args:
    runs: The rows of each variant.
    path: The path of the PNG.
    ours: The prefix of the names of variants that are marked.

  Raises:
    ImportError: If matplotlib is not installed.
  """
  # Many variants need more room for their labels.
  size = (7.5, 4.8) if len(runs) < 12 else (10.5, 6.8)
  with studies.picture(path, figsize=size, grid={"lw": 0.8}) as grid:
    axes: Any = grid[0, 0]
    axes.spines[["top", "right"]].set_visible(True)
    labels = []
    for method, rows in runs.items():
      mean, spread = studies.mean_accuracy(rows)
      sent = comparison.mean(rows, "sent_bytes") / 1e6
      labels.append((sent, mean, method))
      marked = method.startswith(ours)
      axes.errorbar(
        sent,
        mean,
        spread,
        fmt="D" if marked else "o",
        color="#d55e00" if marked else "#0072b2",
        mfc="white" if len(rows) == 1 else None,
        capsize=3,
      )
    # A variant below the front needs more bytes for a lower accuracy.
    sure = [x[:2] for x in labels if len(runs[x[2]]) > 1]
    if sure:
      front = zip(*_front(sure), strict=True)
      axes.plot(*front, color="#999999", lw=1, zorder=0)
    some: Any = next(iter(runs.values()))[0]
    # Methods differ in bytes by up to three orders of magnitude.
    axes.set_xscale("log")
    # Margins leave room for labels next to the outermost points.
    axes.margins(x=0.15, y=0.12)
    axes.set_xlabel(
      f"MB sent by each worker (N = {some['workers']}), log scale"
    )
    axes.set_ylabel("test accuracy, %")
    alpha = some["config"].get("alpha")
    skewed = "" if alpha is None else f" (labels skewed, alpha {alpha:g})"
    axes.set_title(
      f"{some['config']['dataset']}{skewed}, {some['config']['model']}, "
      f"{some['config']['epochs']:g} epochs\n"
      "bars: standard deviation, gray: Pareto front, hollow: one seed",
      fontsize=11,
    )
    studies.label_points(axes, labels)


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
  """Returns the points (bytes, accuracy) of the Pareto front.

  >>> _front([(2, 0.6), (1, 0.5), (2, 0.7), (3, 0.65)])
  [(1, 0.5), (2, 0.7)]
  """
  front: list[tuple[float, float]] = []
  for sent, mean in sorted(points, key=lambda one: (one[0], -one[1])):
    if not front or mean > front[-1][1]:
      front.append((sent, mean))
  return front
