"""Chooses rates, delays and rounds of each method by the rows of tuning."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import protocol
import studies

from jdist import advice

Row = dict[str, Any]


class Chosen(NamedTuple):
  """A method's setting.

  Attributes:
    first: the steps of its first round.
    rate: its highest rate.
    quality: the mean validation accuracy of its last marks, %.
    seconds: modelled seconds to the target; infinity if it is not reached.
    sent: bytes that a worker sends.
  """

  first: int
  rate: float
  quality: float
  seconds: float
  sent: float


def of(rows: Sequence[Row], method: str, first: int) -> list[Row]:
  """Returns the rows of a method with rounds of one kind."""
  return [x for x in rows if (x["method"], x["first"]) == (method, first)]


def accuracies(row: Row) -> np.ndarray:
  """Returns a run's accuracies, %, at all marks."""
  marks = row["marks"]
  return 100 * np.array(marks["hits"]) / marks["held"]


def quality(rows: Sequence[Row]) -> tuple[float, float]:
  """Returns the rank of a rate: the last marks' mean accuracy, then the loss.

  A run that diverged makes it the worst.
  """
  losses = [row["test_loss"] for row in rows]
  if None in losses:
    return -math.inf, -math.inf
  last = [accuracies(row)[-protocol.LAST_MARKS :].mean() for row in rows]
  return statistics.mean(last), -statistics.mean(losses)


def best_rate(rows: Sequence[Row]) -> float:
  """Returns the rate of the best rank, the lowest one of equals."""
  by_rate = studies.group(rows, lambda row: row["learning_rate"])
  return max(sorted(by_rate), key=lambda rate: quality(by_rate[rate]))


def quietest(rows: Sequence[Row]) -> Row:
  """Returns the measurement with the shortest plain step.

  Other load on the machine makes all steps longer.
  """
  return min(rows, key=lambda row: statistics.median(row["step_s"]))


def said(
  costs: Sequence[Row], method: str, first: int, hidden: int = 0
) -> advice.Advice:
  """Returns the cost model of a method whose messages have `hidden` steps.

  Its own computation was measured in rounds of `protocol.MEASURED` steps.
  """
  base, extra_s = quietest(costs), 0.0
  row = quietest([row for row in costs if row["method"] == method])
  if method != protocol.BASE:
    extra_s = statistics.median(row["extra_s"])
  made = advice.MethodCosts(
    first,
    base["step_s"],
    [extra_s] * len(base["step_s"]),
    row["round_bytes"],
    row["messages"],
    hidden,
  )
  return advice.Advice({method: made}, protocol.LINK)


def delay(costs: Sequence[Row], method: str, first: int) -> int:
  """Returns by how many steps a method's means are late.

  They are as late as the link needs, and not later.
  """
  if method != protocol.OURS:
    return 0
  return said(costs, method, first).delay_steps(method)


def seconds(row: Row, costs: Sequence[Row]) -> np.ndarray:
  """Returns the modelled seconds of a run at all marks."""
  method, first = row["method"], row["first"]
  found = said(costs, method, first, row["delay"])
  _, step_s, _ = found.seconds(method)
  step_s -= found.exposed_s(method)
  rounds = np.array(row["marks"]["rounds"])
  steps = protocol.EVERY * np.arange(1, len(rounds) + 1)
  return step_s * steps + first * found.exposed_s(method) * rounds


def reached(rows: Sequence[Row], costs: Sequence[Row], target: float) -> float:
  """Returns when the rows' mean accuracy reaches a target, or infinity."""
  means = np.mean([accuracies(row) for row in rows], axis=0)
  at, aims = seconds(rows[0], costs), np.array([target])
  return float(crossings(at, means[None], aims)[0])


def crossings(at: np.ndarray, curves: np.ndarray, aims: np.ndarray) -> Any:
  """Returns where each curve first reaches its aim, infinity if it does not.

  Curves begin at zero, and are straight lines between their marks.

  >>> crossings(np.array([1.0, 2.0]), np.array([[4.0, 8.0]]), np.array([6.0]))
  array([1.5])
  """
  x = np.concatenate([[0.0], at])
  y = np.concatenate([np.zeros((len(curves), 1)), curves], axis=1)
  above = y >= aims[:, None]
  last = np.argmax(above, axis=1)
  each, before = np.arange(len(y)), np.maximum(last - 1, 0)
  low, high = y[each, before], y[each, last]
  part = (aims - low) / np.maximum(high - low, 1e-12)
  found = x[before] + part * (x[last] - x[before])
  return np.where(above.any(axis=1), found, np.inf)


def choose(
  tuning: Sequence[Row],
  costs: Sequence[Row],
  by: Callable[[Chosen], float],
) -> dict[str, Chosen]:
  """Returns the setting of each method.

  Among rounds whose best rate is as good as synchronous SGD, less the margin,
  those with the least of `by` are taken; the best ones if none is as good.
  """
  tried: dict[str, list[Chosen]] = {}
  aim = math.nan
  for method in protocol.METHODS:
    for first in protocol.firsts(method):
      own = of(tuning, method, first)
      if not own:
        continue
      rate = best_rate(own)
      best = [row for row in own if row["learning_rate"] == rate]
      good, _ = quality(best)
      if method == protocol.BASE:
        aim = good - protocol.MARGIN
      tried.setdefault(method, []).append(
        Chosen(
          first, rate, good, reached(best, costs, aim), best[0]["sent_bytes"]
        )
      )
  return {
    method: min(
      [x for x in found if x.quality >= aim]
      or [max(found, key=lambda x: x.quality)],
      key=by,
    )
    for method, found in tried.items()
  }


def by_seconds(one: Chosen) -> float:
  """Returns when a setting reaches the target."""
  return one.seconds


def by_bytes(one: Chosen) -> float:
  """Returns what a setting sends."""
  return one.sent
