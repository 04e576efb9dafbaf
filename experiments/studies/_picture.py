"""Pictures by matplotlib, without a display."""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from jdist import checks


def is_shown(path: str | os.PathLike[str]) -> bool:
  """Returns whether a page of the experiment links the picture.

  Args:
    path: The path of the picture, in the folder `results` of the experiment.
  """
  path = pathlib.Path(path)
  pages = path.parent.parent.glob("*.md")
  return any(f"results/{path.name})" in page.read_text() for page in pages)


@contextlib.contextmanager
def picture(
  path: str | os.PathLike[str],
  rows: int = 1,
  columns: int = 1,
  *,
  title: str = "",
  legend: int = 0,
  grid: dict[str, Any] | None = None,
  dpi: int = 130,
  **options: Any,
) -> Iterator[Any]:
  """Gives a grid of axes to draw on, and writes it as a PNG afterwards.

  Args:
    path: The path of the PNG.
    rows: The number of rows of axes.
    columns: The number of columns of axes.
    title: The title above all axes.
    legend: The number of columns of a legend below all axes, which names what
      the first axes show; 0 for none.
    grid: Options of the grid lines; no lines if empty.
    dpi: The resolution of the PNG, in dots per inch.
    **options: Further arguments of `matplotlib.pyplot.subplots`.

  Raises:
    ImportError: If matplotlib is not installed.
  """
  checks.import_extra("matplotlib", "plots").use("Agg")
  pyplot = checks.import_extra("matplotlib.pyplot", "plots")
  figure, found = pyplot.subplots(
    rows, columns, squeeze=False, layout="constrained", **options
  )
  try:
    # Styled before anything is drawn, so that a drawing may change the style.
    for axes in found.flat:
      if grid != {}:
        axes.grid(**({"alpha": 0.3, "lw": 0.5} | (grid or {})))
      axes.spines[["top", "right"]].set_visible(False)
    yield found
    if legend:
      handles, labels = found.flat[0].get_legend_handles_labels()
      figure.legend(
        handles, labels, loc="outside lower center", ncols=legend,
        frameon=False, fontsize=9,
      )  # fmt: skip
    if title:
      figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=dpi)
  finally:
    pyplot.close(figure)
