"""The page of optimizers says what is right, and what is refused."""

import pytest

from jdist import checks
from tests.optimizers import _cells, _page, _table

SHOWN = _page.read()
CELLS = [
  (name, method, overlap)
  for name in _table.OPTIMIZERS
  for method, overlap in _table.CELLS
]
# Every third optimizer is tried by default, in each of the cells in turn.
DEFAULT = {
  (name, *_table.CELLS[number % len(_table.CELLS)])
  for number, name in enumerate(_table.OPTIMIZERS)
  if number % 3 == 0
}


def test_page_shows_every_cell():
  assert set(SHOWN) == set(CELLS)
  assert sum(outcome == "right" for outcome in SHOWN.values()) > 900


@pytest.mark.parametrize("name", _table.OPTIMIZERS)
def test_optimizer_of_the_page_is_one_to_every_door(name):
  """Some have arguments by name, which only a call can miss."""
  optimizer = _table.OPTIMIZERS[name]()
  assert hasattr(checks.check_optimizer("optimizer", optimizer), "update")


@pytest.mark.parametrize(
  ("name", "method", "overlap"),
  [
    pytest.param(*x, marks=() if x in DEFAULT else pytest.mark.slow)
    for x in CELLS
  ],
)
def test_outcome_is_that_of_the_page(name, method, overlap):
  assert _cells.outcome(name, method, overlap) == SHOWN[name, method, overlap]
