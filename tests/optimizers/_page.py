"""The page docs/optimizers.md, written from results and read by tests."""

import pathlib
import re

import optax

from tests.optimizers import _cells, _table

PATH = pathlib.Path(__file__).resolve().parents[2] / "docs" / "optimizers.md"
HEAD = """# Optimizers

Which optimizers and wrappers of Optax {version} train inside which methods.
`python -m tests.optimizers` writes this page from results.

A cell lists the overlaps that are **right**: parameters of {workers} workers
after each of {steps} steps, with rounds of {interval}, agree to {tolerance:g}
with the method's equations, in which every worker takes the steps of the plain
optimizer. "1" means at once, "L" late, "S" streamed; a number in brackets is a
reason below.

- `local_sgd`, `diloco`: late and streamed means are a round late, `Delayed()`.
- `msdpu`: at once is a correction without delay, late its own delay, streamed a
  stream over a round.
- compressed SGD is `ssgd` with the largest entry of each leaf and error
  feedback; late is `delay_gradients(..., 1)` around it, and streamed is
  `update_first(optimizer)`, without compression.
- server is `GradientServer` under `BSP` on the virtual clock.

Positions inside a state, such as z of `schedule_free`, move with parameters.
`lookahead` trains in rounds with its pair, `optax.LookaheadParams`.

| optimizer | local_sgd | diloco | msdpu | compressed SGD | server |
|---|---|---|---|---|---|
"""
LETTERS = {"at once": "1", "late": "L", "streamed": "S"}


def write(results):
  """Writes the page from a dict of (optimizer, method, overlap): outcome."""
  reasons, rows = {}, []
  for name in _table.OPTIMIZERS:
    cells = []
    for method in _table.METHODS:
      parts = []
      for overlap, letter in LETTERS.items():
        outcome = results.get((name, method, overlap))
        if outcome is None:
          continue
        if outcome == "right":
          parts.append(letter)
        else:
          number = reasons.setdefault(outcome, len(reasons) + 1)
          parts.append(f"{letter} [{number}]")
      cells.append(", ".join(parts))
    rows.append(f"| {name} | {' | '.join(cells)} |\n")
  head = HEAD.format(
    version=optax.__version__,
    workers=_cells.WORKERS,
    steps=_cells.STEPS,
    interval=_cells.INTERVAL,
    tolerance=_cells.TOLERANCE,
  )
  text = head + "".join(rows) + "\n## Reasons\n\n"
  text += "".join(f"{n}. {x}\n" for x, n in reasons.items())
  PATH.write_text(text)


def read():
  """Returns the outcomes that the page shows."""
  text = PATH.read_text()
  reasons = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
  found = {}
  for line in text.splitlines():
    name, *cells = [x.strip() for x in line.strip("|").split(" | ")]
    if name not in _table.OPTIMIZERS:
      continue
    for method, cell in zip(_table.METHODS, cells, strict=True):
      for overlap, letter in LETTERS.items():
        if part := re.search(rf"{letter}(?: \[(\d+)\])?(?:,|$)", cell):
          number = part.group(1)
          outcome = reasons[number] if number else "right"
          found[name, method, overlap] = outcome
  return found
