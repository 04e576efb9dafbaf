"""matplotlib without a display."""

from typing import Any

from jdist import checks


def pyplot() -> Any:
  """Returns matplotlib's pyplot, with a backend that needs no display.

  A command calls it first, so that a missing package ends it at once.

  Raises:
    ImportError: If matplotlib is not installed.
  """
  checks.import_extra("matplotlib", "plots").use("Agg")
  return checks.import_extra("matplotlib.pyplot", "plots")
