"""Tables without a flush: iterations follow each other without a pause."""

import math
from collections.abc import Sequence

from jdist import checks, signatures
from jdist.pipeline.schedule._flush_tables import alternating
from jdist.pipeline.schedule._list_schedule import (
  check_arguments,
  list_schedule,
  live_for_full_use,
  live_to_fill,
  StageTimes,
)
from jdist.pipeline.schedule._table import (
  Action,
  check_passes,
  Table,
  Weights,
  with_updates,
)


def pipedream(
  num_stages: int, num_microbatches: int = 1, *, num_iterations: int = 8
) -> Table:
  r"""Updates after each micro-batch and stashes the weights that it read.

  Stage s of S reads, in both passes of micro-batch t,

  .. math:: w^s_{\max(0, t - (S - 1 - s))}

  and keeps S - s versions: the delay of S - 1 - s that
  `transforms.delay_gradients` has with a delay for each stage.

  References:
    Narayanan et al., "PipeDream", SOSP 2019, arXiv:1806.03377, which has one
    micro-batch between updates.
  """
  return _continuous(
    "pipedream", num_stages, num_microbatches, num_iterations, "stashed"
  )


def two_bw(
  num_stages: int, num_microbatches: int, *, num_iterations: int = 4
) -> Table:
  r"""Accumulates over M micro-batches and keeps two versions of the weights.

  .. math:: w_{t + 1} = w_t - \eta \nabla f(w_{t - 1})

  References:
    Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML
    2021, arXiv:2006.09503 (PipeDream-2BW).
  """
  # The first stage is S - 1 micro-batches ahead of the last one.  With fewer in
  # an iteration it would need a version whose update has not happened yet.
  fewest, remedy = num_stages - 1, "Or take a window beyond 2 (`ours`)."
  checks.check_int("num_microbatches", num_microbatches, fewest, remedy=remedy)
  return _continuous(
    "2bw", num_stages, num_microbatches, num_iterations, "delayed", window=2
  )


def paci(
  num_stages: int, num_microbatches: int, *, num_iterations: int = 4
) -> Table:
  """Accumulates over M micro-batches and reads the newest weights in each pass.

  Nothing is stashed: the backward pass of a micro-batch may read later weights
  than its forward pass did, by at most `ceil((S - 1 - s) / M)` updates, which
  accumulation keeps small.

  References:
    PACI, arXiv:2606.07881; a reconstruction from its summary.
  """
  return _continuous(
    "paci", num_stages, num_microbatches, num_iterations, "newest"
  )


@signatures.checked
def ours(
  times: int | Sequence[StageTimes],
  num_microbatches: int,
  *,
  window: signatures.PositiveInt | None = None,
  num_iterations: int = 8,
  max_live: Sequence[signatures.PositiveInt] | None = None,
) -> Table:
  r"""Keeps W iterations in progress without a flush.

  Both passes of iteration k read version :math:`\max(0, k - W + 1)`, so that

  .. math:: w_{k + 1} = w_k - \eta \nabla f(w_{\max(0, k - W + 1)})

  which is what `transforms.delay_gradients(inner, W - 1)` does on one device.
  A device prefers a backward pass to a forward pass, and the oldest iteration;
  a stage keeps no more micro-batches than keep the slowest stage busy.

  Args:
    times: The times of each stage, in any unit; a number of stages stands for
      equal times and free links.
    num_microbatches: The number M of micro-batches in an iteration.
    window: The window W, which bounds the versions of the weights that a stage
      keeps.  The default is the least window with which the slowest stage
      never waits.
    num_iterations: The number of iterations in the table.
    max_live: How many micro-batches each stage may keep.  The default is the
      number that keeps the slowest stage busy.

  References:
    Reconstruction of the multi-iteration asynchronous-parallel management of
    "Adaptive task scheduling for model parallelism".
  """
  if isinstance(times, int):
    check_passes(times, num_microbatches, num_iterations)
    times = [StageTimes()] * times
  if window is None:
    check_arguments(times, max_live, num_microbatches, num_iterations)
    window = least_window(times, num_microbatches)
  return list_schedule(
    "ours", times, num_microbatches, num_iterations=num_iterations,
    window=window, max_live=max_live, default=live_for_full_use,
  )  # fmt: skip


@signatures.checked
def zb_h2(
  times: int | Sequence[StageTimes],
  num_microbatches: int,
  *,
  num_iterations: int = 8,
  max_live: Sequence[signatures.PositiveInt] | None = None,
  max_saved: signatures.PositiveInt | None = None,
) -> Table:
  r"""Overlaps iterations although no gradient is late (ZB-H2).

  Backward passes are split.  A stage updates its parameters as soon as its own
  weight parts are done, and starts the next iteration while the stages in front
  are still busy with this one:

  .. math:: w_{k + 1} = w_k - \eta \nabla f(w_k)

  Equal stages with passes of equal times and free links never wait from
  :math:`M \ge 2 S - 1` micro-batches on.

  An optimizer that looks at the gradients of all stages, such as one that clips
  by their norm, lets each update wait for all stages.  The gradients are the
  same, but the overlap is lost, which a simulation does not show.

  Args:
    times: The times of each stage, in any unit; a number of stages stands for
      equal times and free links.
    num_microbatches: The number M of micro-batches in an iteration.
    num_iterations: The number of iterations in the table.
    max_live: How many micro-batches each stage may keep between their forward
      pass and the input part of their backward pass.  The default is the number
      that it can start before the first gradient returns.
    max_saved: How many micro-batches each stage may keep until their weight
      part is done.  The default is the greatest `max_live`: 2 S - 1 for equal
      stages, twice the memory of 1F1B's first stage.

  References:
    Qi et al., "Zero bubble pipeline parallelism", ICLR 2024,
    arXiv:2401.10241.  Departures: a list schedule from given times in place of
    the order for equal stages; no validation after the step, because a stage
    never needs to undo its update.
  """
  if isinstance(times, int):
    times = [StageTimes()] * times
  return list_schedule(
    "zb_h2", times, num_microbatches, num_iterations=num_iterations,
    max_live=max_live, default=live_to_fill, max_saved=max_saved, split=True,
  )  # fmt: skip


@signatures.checked
def zb_v(
  times: int | Sequence[StageTimes],
  num_microbatches: int,
  *,
  num_iterations: int = 8,
  max_live: Sequence[signatures.PositiveInt] | None = None,
  max_saved: signatures.PositiveInt | None = None,
) -> Table:
  r"""Overlaps iterations with two stages on each device, laid as a V (ZB-V).

  Device d of D has the stages d and 2 D - 1 - d, so that the loss is on the
  first device and a gradient starts where the last forward pass ended.  No
  gradient is late, and updates are those of `zb_h2`.  With the default limit a
  device keeps no more activations than 1F1B's first stage.

  Args:
    times: The times of each of the 2 D stages, in any unit; a number D of
      devices stands for equal times and free links.
    num_microbatches: The number M of micro-batches in an iteration.
    num_iterations: The number of iterations in the table.
    max_live: As in `zb_h2`.
    max_saved: As in `zb_h2`, by default D; 2 D and more approach full use.

  References:
    Qi et al., "Pipeline parallelism with controllable memory", NeurIPS 2024,
    arXiv:2405.15362.  Departure: a list schedule from given times in place of
    the order for equal stages.
  """
  if isinstance(times, int):
    times = [StageTimes()] * (2 * times)
  if len(times) % 2:
    raise ValueError(
      f"`times` must be two stages for each device in a V, got {len(times)}."
    )
  devices = len(times) // 2
  there_and_back = [*range(devices), *reversed(range(devices))]
  return list_schedule(
    "zb_v", times, num_microbatches, num_iterations=num_iterations,
    max_live=max_live, default=live_to_fill, split=True,
    max_saved=devices if max_saved is None else max_saved,
    device_of=there_and_back,
  )  # fmt: skip


def least_window(times: Sequence[StageTimes], num_microbatches: int) -> int:
  r"""Returns the least window with which the slowest stage never waits.

  .. math:: 1 + \left\lceil (L - 1) / M \right\rceil

  where L is the number of micro-batches that the first stage keeps if no stage
  ever waits.
  """
  live = max(live_for_full_use(times))
  return 1 + math.ceil((live - 1) / num_microbatches)


def _continuous(
  name: str,
  num_stages: int,
  num_microbatches: int,
  num_iterations: int,
  weights: Weights,
  *,
  window: int | None = None,
) -> Table:
  """Makes 1F1B of equal stages without a flush."""
  if window is None:
    # The first stage is S - 1 micro-batches ahead of the last one.
    window = 1 + math.ceil((num_stages - 1) / num_microbatches)
  # This is 1F1B over all iterations at once, so the warm-up happens only once.
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
    name, devices, num_stages, num_microbatches, num_iterations, window, weights
  )
