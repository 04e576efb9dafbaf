"""Draws the seconds to the target of all networks and methods."""

import studies

_COLOURS = {"jdist": "#0072b2", "PyTorch": "#d55e00"}


def draw(found, keys, path):
  """Draws the seconds to the target, a row of panels for a number of hosts.

  Args:
    found: The cells of the report.
    keys: The frameworks and methods, in their order.
    path: The path of the picture.
  """
  rows = list(studies.group(found, lambda cell: cell.hosts).items())
  columns = max(len(cells) for _, cells in rows)
  with studies.picture(
    path, len(rows), columns, figsize=(3.0 * columns + 1.5, 4.6 * len(rows)),
    sharex=True, sharey=True,
  ) as axes:  # fmt: skip
    for row, (hosts, own) in zip(axes, rows, strict=True):
      for panel, cell in zip(row, own, strict=False):
        _draw_cell(panel, cell, keys)
        title = f"{hosts}, {cell.link}".replace(", one", "\none")
        panel.set_title(title, fontsize=8)
      labels = [f"{b}, {a}" for a, b in reversed(keys)]
      row[0].set_yticks(range(len(keys)), labels, fontsize=8)
    for panel in axes[-1]:
      panel.set_xlabel("seconds to the target", fontsize=9)


def _draw_cell(panel, cell, keys):
  for i, key in enumerate(reversed(keys)):
    seconds = cell.seconds(key) if key in cell.rows else None
    if seconds is not None:
      panel.plot(seconds, i, "o", color=_COLOURS[key[0]])
      panel.annotate(
        f"{seconds:.1f}", (seconds, i), (6, 0), fontsize=7, va="center",
        textcoords="offset points",
      )  # fmt: skip
  panel.set_xscale("log")
  panel.set_xlim(2, 1000)
  ticks = (2, 5, 10, 20, 50, 100, 200, 500)
  panel.set_xticks(ticks, map(str, ticks), fontsize=8)
  panel.set_xticks((), minor=True)
