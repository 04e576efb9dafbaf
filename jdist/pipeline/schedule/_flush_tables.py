"""Synchronous tables in closed form: each iteration ends before the next."""

from collections.abc import Callable, Iterable, Iterator

from jdist import checks
from jdist.pipeline.schedule._actions import Action, Op
from jdist.pipeline.schedule._table import Table, with_updates

Order = Iterable[tuple[Op, int, int]]


def naive(
  num_stages: int, num_microbatches: int, *, num_iterations: int = 1
) -> Table:
  """Runs one micro-batch after the other: one device works at a time.

  Args:
    num_stages: S, a device each.
    num_microbatches: M, of an iteration.
    num_iterations: in the table, one after the other.

  >>> from jdist import pipeline
  >>> print(pipeline.draw_table(naive(2, 2)))
  device 0 |F0  .   .   .   B0  B0  F1  .   .   .   B1  B1*
  device 1 |.   F0  B0  B0  .   .   .   F1  B1  B1*
  """

  def order(stage: int) -> Order:
    for i in range(num_microbatches):
      yield Op.FORWARD, stage, i
      yield Op.BACKWARD, stage, i

  return _flushed(
    "naive", order, num_stages, 1, num_microbatches, num_iterations
  )


def gpipe(
  num_stages: int, num_microbatches: int, *, num_iterations: int = 1
) -> Table:
  r"""Runs all forward passes, then all backward passes.

  The bubble is :math:`(S - 1) / (M + S - 1)` of the time; every stage keeps
  all M micro-batches.

  Args:
    num_stages: S, a device each.
    num_microbatches: M, of an iteration.
    num_iterations: in the table, one after the other.

  References:
    Huang et al., "GPipe", NeurIPS 2019, arXiv:1811.06965.  Departure: backward
    passes take the order of the forward passes.
  """

  def order(stage: int) -> Order:
    for op in (Op.FORWARD, Op.BACKWARD):
      for i in range(num_microbatches):
        yield op, stage, i

  return _flushed(
    "gpipe", order, num_stages, 1, num_microbatches, num_iterations
  )


def one_f_one_b(
  num_stages: int, num_microbatches: int, *, num_iterations: int = 1
) -> Table:
  r"""Alternates forward and backward passes (1F1B, PipeDream-Flush).

  The bubble is GPipe's; stage s keeps :math:`\min(S - s, M)` micro-batches.

  Args:
    num_stages: S, a device each.
    num_microbatches: M, of an iteration.
    num_iterations: in the table, one after the other.

  References:
    Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML
    2021, arXiv:2006.09503.
  """

  def order(stage: int) -> Order:
    return (
      (op, stage, i)
      for op, i in alternating(num_microbatches, num_stages - 1 - stage)
    )

  return _flushed(
    "1f1b", order, num_stages, 1, num_microbatches, num_iterations
  )


def eager_one_f_one_b(
  num_stages: int, num_microbatches: int, *, num_iterations: int = 1
) -> Table:
  r"""Alternates both passes, with twice as many micro-batches ahead.

  A micro-batch may be on its way for as long as a pass in each direction
  without a wait for it.  The bubble is 1F1B's; stage s keeps :math:`\min(2 (S -
  s) - 1, M)` micro-batches.

  Args:
    num_stages: S, a device each.
    num_microbatches: M, of an iteration.
    num_iterations: in the table, one after the other.

  References:
    Zhuang et al., "On optimizing the communication of model parallelism",
    MLSys 2023, arXiv:2211.05322.

  >>> from jdist import pipeline
  >>> print(pipeline.draw_table(eager_one_f_one_b(2, 3)))
  device 0 |F0  F1  F2  .   B0  B0  .   B1  B1  .   B2  B2*
  device 1 |.   F0  B0  B0  F1  B1  B1  F2  B2  B2*
  """

  def order(stage: int) -> Order:
    return (
      (op, stage, i)
      for op, i in alternating(num_microbatches, 2 * (num_stages - 1 - stage))
    )

  return _flushed(
    "eager_1f1b", order, num_stages, 1, num_microbatches, num_iterations
  )


def interleaved(
  num_devices: int,
  num_microbatches: int,
  *,
  num_chunks: int = 2,
  num_iterations: int = 1,
) -> Table:
  r"""Runs 1F1B with several stages on each device.

  Stage c D + d lies on device d of D, as its chunk c of v.  The bubble is
  :math:`(D - 1) / (v M + D - 1)` of the time.

  Args:
    num_devices: D.
    num_microbatches: M, of an iteration; D must divide it.
    num_chunks: v, stages of a device.
    num_iterations: in the table, one after the other.

  References:
    Narayanan et al., "Efficient large-scale language model training on GPU
    clusters using Megatron-LM", SC 2021, arXiv:2104.04473.
  """
  checks.check_int("num_chunks", num_chunks, 1)
  _check_sizes(num_devices, num_microbatches)
  if num_microbatches % num_devices:
    raise ValueError(
      "`num_microbatches` must be a multiple of the devices in an interleaved "
      f"table, got {num_microbatches} on {num_devices}. Take a multiple, or "
      "1f1b."
    )
  group = num_devices * num_chunks
  total = num_microbatches * num_chunks

  def place(i: int, op: Op, device: int) -> tuple[Op, int, int]:
    chunk = i % group // num_devices
    if op == Op.BACKWARD:
      chunk = num_chunks - 1 - chunk
    microbatch = i // group * num_devices + i % num_devices
    return op, chunk * num_devices + device, microbatch

  def order(device: int) -> Order:
    ahead = 2 * (num_devices - device - 1) + (num_chunks - 1) * num_devices
    if num_chunks == 1:
      ahead = num_devices - device - 1
    return (place(i, op, device) for op, i in alternating(total, ahead))

  return _flushed(
    "interleaved",
    order,
    num_devices,
    num_chunks,
    num_microbatches,
    num_iterations,
  )


def zb_h1(
  num_stages: int, num_microbatches: int, *, num_iterations: int = 1
) -> Table:
  r"""Fills the bubble of 1F1B with gradients of the parameters (ZB-H1).

  Stage s runs the weight part of a micro-batch s micro-batches after its input
  part.  Where forward pass, input part and weight part take one time each, the
  bubble is :math:`(S - 1) / (3 M + S - 1)` of the time for
  :math:`M \ge S`, a third of 1F1B's; no stage keeps more than S micro-batches.

  Args:
    num_stages: S, a device each.
    num_microbatches: M, of an iteration.
    num_iterations: in the table, one after the other.

  References:
    Qi et al., "Zero bubble pipeline parallelism", ICLR 2024,
    arXiv:2401.10241.
  """

  def order(stage: int) -> Order:
    for op, i in alternating(num_microbatches, num_stages - 1 - stage):
      if op == Op.FORWARD:
        yield op, stage, i
        continue
      yield Op.BACKWARD_INPUT, stage, i
      if i >= stage:
        yield Op.BACKWARD_WEIGHT, stage, i - stage
    for i in range(max(num_microbatches - stage, 0), num_microbatches):
      yield Op.BACKWARD_WEIGHT, stage, i

  return _flushed(
    "zb_h1", order, num_stages, 1, num_microbatches, num_iterations
  )


def alternating(total: int, ahead: int) -> Iterator[tuple[Op, int]]:
  """Goes through both passes, the forward ones so many ahead of the others.

  >>> [f"{op.letter}{i}" for op, i in alternating(3, 1)]
  ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
  """
  ahead = min(ahead, total)
  for i in range(ahead):
    yield Op.FORWARD, i
  for i in range(total):
    if i + ahead < total:
      yield Op.FORWARD, i + ahead
    yield Op.BACKWARD, i


def _flushed(
  name: str,
  order: Callable[[int], Order],
  num_devices: int,
  num_chunks: int,
  num_microbatches: int,
  num_iterations: int,
) -> Table:
  _check_sizes(num_devices, num_microbatches)
  devices = tuple(
    with_updates(
      (
        Action(op, stage, i, iteration)
        for iteration in range(num_iterations)
        for op, stage, i in order(device)
      ),
      num_microbatches,
    )
    for device in range(num_devices)
  )
  return Table(
    name, devices, num_devices * num_chunks, num_microbatches, num_iterations
  )


def _check_sizes(num_stages: int, num_microbatches: int) -> None:
  checks.check_int("num_stages", num_stages, 1)
  checks.check_int("num_microbatches", num_microbatches, 1)
