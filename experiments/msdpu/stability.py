"""Largest rates that rounds and delays allow, by a linear analysis.

python experiments/msdpu/stability.py

Rows and the picture are written to `results/`; existing rows are not computed
again.  Nothing is trained, and it takes some seconds.
"""

import pathlib
import sys
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np
import studies

from jdist import checks, training

# The searched range of rates times curvatures; training stays inside of it.
_LOWEST, _HIGHEST, _STEPS = 1e-4, 8.0, 400
# Growth per round below this is rounding error.
_MARGIN = 1e-9
_SHARE = 1 / 8  # What a worker of eight keeps of its progress.
_CASES: dict[str, dict[str, Any]] = {
  "no delay": {"steps": 0},
  "1 step late": {"steps": 1},
  "2 steps late": {"steps": 2},
  "a round late": {"steps": None},
  "a round late, correction 0.1": {"steps": None, "correction": 0.1},
}
_INTERVALS = (1, 2, 3, 4, 6, 8, 12, 16)


def stability_limit(
  interval: int = 1,
  steps: int | None = 0,
  *,
  momentum: float = 0.9,
  nesterov: bool = True,
  carry: float = 1.0,
  correction: float = 0.0,
  outer_learning_rate: float = 1.0,
  outer_momentum: float = 0.0,
) -> float:
  r"""Finds the largest rate times curvature at which rounds are stable.

  All workers minimize :math:`\lambda w^2 / 2` by SGD with the rate
  :math:`\eta`, in rounds of H local steps whose mean progress is applied d
  steps late, as in `Delayed`.  A round is then a linear map of the anchor, the
  message in flight, the momentum and the outer momentum.  The limit is the
  largest :math:`\eta\lambda` up to which all eigenvalues are in the unit
  circle, to half a percent, and at most 8.

  A rate that has fallen to a fraction of its peak needs only that fraction of
  synchronous SGD's limit: a delay with a higher limit costs nothing then.

  Args:
    interval: H, the local steps of a round.
    steps: d, from 0, no delay, to H; None is a whole round.
    momentum: The momentum of the workers' SGD, in [0, 1).
    nesterov: Whether the momentum is Nesterov's.
    carry: rho, the part of its own progress that a worker keeps meanwhile.
    correction: beta of `pull_to_anchor`.
    outer_learning_rate: The rate of an outer Nesterov momentum; 1 with
      `outer_momentum=0` applies the mean as it is.
    outer_momentum: The outer Nesterov momentum, in [0, 1).

  Returns:
    The limit; 0 if even a rate times curvature of 1e-4 is unstable.

  Raises:
    ValueError: If an argument is out of its range.
  """
  checks.check_structural("interval", interval, minimum=1)
  late = interval if steps is None else steps
  checks.check_structural("steps", late, minimum=0)
  if late > interval:
    raise ValueError(
      f"`steps` must be at most `interval`, {interval}, got {late}: a mean "
      "arrives at the end of the next round at the latest."
    )
  for name, value in (
    ("momentum", momentum),
    ("outer_momentum", outer_momentum),
  ):
    checks.check_continuous(name, value)
    if value >= 1:
      raise ValueError(f"`{name}` must be below 1, got {value}.")
  checks.check_continuous("carry", carry, high=1.0)
  checks.check_continuous("correction", correction)
  checks.check_continuous("outer_learning_rate", outer_learning_rate)

  def growth(curvature: np.ndarray) -> np.ndarray:
    """Returns the largest magnitude of a round's eigenvalues."""
    # A round maps the j-th unit vector to column j of its matrix.
    units = np.eye(4)[:, None, :] * np.ones((1, len(curvature), 1))
    anchor, message, velocity, outer = units
    scale = curvature[:, None]

    def arrived() -> tuple[np.ndarray, np.ndarray]:
      speed = outer_momentum * outer + message
      ahead = outer_momentum * speed + message
      return anchor - outer_learning_rate * ahead, speed

    start = anchor - (carry * message if late else 0.0)
    local, kept = start, start
    for step in range(1, interval + 1):
      gradient = scale * local + correction / interval * (local - anchor)
      velocity = momentum * velocity + gradient
      ahead = momentum * velocity + gradient if nesterov else velocity
      local = local - ahead
      if step == late:
        done = kept - local
        anchor, outer = arrived()
        local, kept = anchor - done, anchor
    message = kept - local
    if not late:
      anchor, outer = arrived()
      message = np.zeros_like(message)
    after = np.stack([anchor, message, velocity, outer])
    found = np.linalg.eigvals(after.transpose(1, 0, 2))
    return np.abs(found).max(-1)

  # The growth is not monotonic in the rate, so that a grid finds the first
  # unstable one, and a bisection refines it.
  tried = np.geomspace(_LOWEST, _HIGHEST, _STEPS)
  grows = growth(tried) > 1 + _MARGIN
  if not grows.any():
    return _HIGHEST
  first = int(np.argmax(grows))
  if first == 0:
    return 0.0
  low, high = tried[first - 1], tried[first]
  while high > low * 1.0005:
    middle = (low * high) ** 0.5
    if growth(np.array([middle]))[0] > 1 + _MARGIN:
      high = middle
    else:
      low = middle
  return float(low)


def rows() -> list[dict[str, Any]]:
  """Computes the limits of all cases and intervals."""
  found = []
  for name, options in _CASES.items():
    for interval in _INTERVALS:
      if (options["steps"] or 0) > interval:
        continue
      config = {"interval": interval, "carry": _SHARE, **options}
      limit = stability_limit(**config)
      found.append(training.make_row(config, 0, case=name, limit=limit))
  return found


def draw(found: list[dict[str, Any]], path: pathlib.Path) -> None:
  """Draws a line for each case."""
  with studies.picture(path, figsize=(7.0, 4.2), grid={"lw": 0.8}) as (
    (axes,),
  ):
    axes.spines[["top", "right"]].set_visible(True)
    for name, own in studies.group(found, lambda row: row["case"]).items():
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
  return studies.table(
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
