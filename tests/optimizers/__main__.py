"""Tries all cells and writes docs/optimizers.md: `python -m tests.optimizers`.

An argument names a file of results, one JSON line a cell: cells that it has
are not tried again, so that a run can be interrupted.
"""

import json
import pathlib
import sys
import tempfile

from tests import conftest as conftest  # Devices and strict promotion.
from tests.optimizers import _cells, _page, _table

default = pathlib.Path(tempfile.mkdtemp()) / "optimizers.jsonl"
path = pathlib.Path(sys.argv[1]) if sys.argv[1:] else default
path.touch()
results = {}
for line in path.read_text().splitlines():
  *cell, outcome = json.loads(line)
  results[tuple(cell)] = outcome
with path.open("a") as file:
  for name in _table.OPTIMIZERS:
    for method, overlap in _table.CELLS:
      cell = name, method, overlap
      if cell not in results:
        results[cell] = _cells.outcome(*cell)
        file.write(json.dumps([*cell, results[cell]]) + "\n")
        file.flush()
wrong = {k: v for k, v in results.items() if v.startswith("wrong")}
for cell, outcome in wrong.items():
  print(*cell, outcome, sep=" | ")
_page.write(results)
sys.exit(bool(wrong))
