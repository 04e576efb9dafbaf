"""Tables without a flush: iterations follow each other without a pause."""

import math
from collections.abc import Sequence

from jdist import checks
from jdist.pipeline.schedule._actions import Action
from jdist.pipeline.schedule._flush_tables import alternating
from jdist.pipeline.schedule._list_schedule import (
  check_times,
  list_schedule,
  live_for_full_use,
  StageTimes,
)
from jdist.pipeline.schedule._table import Table, Weights, with_updates


def pipedream(
  num_stages: int, num_microbatches: int = 1, *, num_iterations: int = 8
) -> Table:
  r"""Updates after each micro-batch and stashes the weights that it read.

  Stage s of S reads, in both passes of micro-batch t,

  .. math:: w^s_{\max(0, t - (S - 1 - s))}

  and keeps S - s versions: the delay of S - 1 - s that
  `transforms.delay_gradients` has with a delay for each stage.

  Args:
    num_stages: S, a device each.
    num_microbatches: between updates; 1 as published.
    num_iterations: in the table.

  References:
    Narayanan et al., "PipeDream", SOSP 2019, arXiv:1806.03377.
  """
  checks.check_int("num_microbatches", num_microbatches, 1)
  return _continuous(
    "pipedream",
    num_stages,
    num_microbatches,
    num_iterations,
    window=1 + math.ceil((num_stages - 1) / num_microbatches),
    weights="stashed",
  )


def two_bw(
  num_stages: int, num_microbatches: int, *, num_iterations: int = 4
) -> Table:
  r"""Accumulates over M micro-batches and keeps two versions of the weights.

  .. math:: w_{t + 1} = w_t - \eta \nabla f(w_{t - 1})

  Args:
    num_stages: S, a device each.
    num_microbatches: M, of an iteration; at least S - 1.
    num_iterations: in the table.

  References:
    Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML
    2021, arXiv:2006.09503 (PipeDream-2BW).
  """
  checks.check_int("num_microbatches", num_microbatches, 1)
  if num_microbatches < num_stages - 1:
    raise ValueError(
      "`num_microbatches` must be at least the stages less one with two "
      f"versions of the weights, got {num_microbatches} for {num_stages} "
      "stages. Take more micro-batches, or a window beyond 2 (`ours`)."
    )
  return _continuous(
    "2bw", num_stages, num_microbatches, num_iterations, window=2
  )


def paci(
  num_stages: int, num_microbatches: int, *, num_iterations: int = 4
) -> Table:
  """Accumulates over M micro-batches and reads the newest weights in each pass.

  Nothing is stashed: the backward pass of a micro-batch may read later weights
  than its forward pass did, by at most `ceil((S - 1 - s) / M)` updates, which
  accumulation keeps small.

  Args:
    num_stages: S, a device each.
    num_microbatches: M, of an iteration.
    num_iterations: in the table.

  References:
    PACI, arXiv:2606.07881; a reconstruction from its summary.
  """
  checks.check_int("num_microbatches", num_microbatches, 1)
  return _continuous(
    "paci",
    num_stages,
    num_microbatches,
    num_iterations,
    window=1 + math.ceil((num_stages - 1) / num_microbatches),
    weights="newest",
  )


def ours(
  times: int | Sequence[StageTimes],
  num_microbatches: int,
  *,
  window: int | None = None,
  num_iterations: int = 8,
  max_live: Sequence[int] | None = None,
) -> Table:
  r"""Keeps W iterations under way without a flush.

  Both passes of iteration k read version :math:`\max(0, k - W + 1)`, so that

  .. math:: w_{k + 1} = w_k - \eta \nabla f(w_{\max(0, k - W + 1)})

  which is what `transforms.delay_gradients(inner, W - 1)` does on one device.
  A device takes a backward pass before a forward pass and the oldest iteration
  first; a stage keeps at most the micro-batches that keep the slowest stage
  busy.

  Args:
    times: of each stage, in any unit; a number of stages for equal ones and
      free links.
    num_microbatches: M, of an iteration.
    window: W, at most the versions of the weights that a stage keeps; if None
      the least that never makes the slowest stage wait, as `least_window` has
      it.
    num_iterations: in the table.
    max_live: of each stage, how many micro-batches it may keep.

  References:
    Reconstruction of the multi-iteration asynchronous-parallel management of
    "Adaptive task scheduling for model parallelism".
  """
  if isinstance(times, int):
    checks.check_int("times", times, 1)
    times = [StageTimes()] * times
  check_times(times)
  if window is None:
    window = least_window(times, num_microbatches)
  return list_schedule(
    "ours",
    times,
    num_microbatches,
    num_iterations=num_iterations,
    window=window,
    max_live=live_for_full_use(times) if max_live is None else max_live,
  )


def least_window(times: Sequence[StageTimes], num_microbatches: int) -> int:
  r"""Returns the least window with which the slowest stage never waits.

  .. math:: 1 + \left\lceil (L - 1) / M \right\rceil

  with the micro-batches L that the first stage keeps when none ever waits.
  """
  checks.check_int("num_microbatches", num_microbatches, 1)
  live = max(live_for_full_use(times))
  return 1 + math.ceil((live - 1) / num_microbatches)


def _continuous(
  name: str,
  num_stages: int,
  num_microbatches: int,
  num_iterations: int,
  *,
  window: int,
  weights: Weights = "delayed",
) -> Table:
  """Makes 1F1B without a flush, of equal stages."""
  checks.check_int("num_stages", num_stages, 1)
  checks.check_int("num_iterations", num_iterations, 1)
  total = num_microbatches * num_iterations
  devices = tuple(
    with_updates(
      (
        Action(op, s, i % num_microbatches, i // num_microbatches)
        for op, i in alternating(total, num_stages - 1 - s)
      ),
      num_microbatches,
    )
    for s in range(num_stages)
  )
  return Table(
    name,
    devices,
    num_stages,
    num_microbatches,
    num_iterations,
    window,
    weights,
  )
