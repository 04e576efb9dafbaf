"""Synchronous tables in closed form: each iteration ends before the next.

Each function yields the order of one device within an iteration, as triples of
op, stage and micro-batch.
"""

from collections.abc import Callable, Iterable, Iterator

from jdist import checks
from jdist.pipeline.schedule._table import Action, Op, Table, with_updates

Order = Iterable[tuple[Op, int, int]]


def naive(device: int, num_devices: int, num_microbatches: int) -> Order:
  """Runs one micro-batch after the other: one device works at a time.

  >>> from jdist import pipeline
  >>> print(pipeline.draw_table(pipeline.make_table("naive", 2, 2)))
  device 0 |F0  .   .   .   B0  B0  F1  .   .   .   B1  B1*
  device 1 |.   F0  B0  B0  .   .   .   F1  B1  B1*
  """
  del num_devices
  for i in range(num_microbatches):
    yield Op.FORWARD, device, i
    yield Op.BACKWARD, device, i


def gpipe(device: int, num_devices: int, num_microbatches: int) -> Order:
  r"""Runs all forward passes, then all backward passes.

  The bubble is :math:`(S - 1) / (M + S - 1)` of the time; every stage keeps
  all M micro-batches.

  References:
    Huang et al., "GPipe", NeurIPS 2019, arXiv:1811.06965.  Departure: backward
    passes take the order of the forward passes.
  """
  del num_devices
  for op in (Op.FORWARD, Op.BACKWARD):
    for i in range(num_microbatches):
      yield op, device, i


def one_f_one_b(device: int, num_devices: int, num_microbatches: int) -> Order:
  r"""Alternates forward and backward passes (1F1B, PipeDream-Flush).

  The bubble is GPipe's; stage s keeps :math:`\min(S - s, M)` micro-batches.

  References:
    Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML
    2021, arXiv:2006.09503.
  """
  for op, i in alternating(num_microbatches, num_devices - 1 - device):
    yield op, device, i


def eager_one_f_one_b(
  device: int, num_devices: int, num_microbatches: int
) -> Order:
  r"""Alternates both passes, with twice as many forward passes ahead.

  A message may take as long as a pass in each direction before a device has to
  wait for it.  The bubble is 1F1B's; stage s keeps :math:`\min(2 (S - s) - 1,
  M)` micro-batches.

  References:
    Zhuang et al., "On optimizing the communication of model parallelism",
    MLSys 2023, arXiv:2211.05322.

  >>> from jdist import pipeline
  >>> print(pipeline.draw_table(pipeline.make_table("eager_1f1b", 2, 3)))
  device 0 |F0  F1  F2  .   B0  B0  .   B1  B1  .   B2  B2*
  device 1 |.   F0  B0  B0  F1  B1  B1  F2  B2  B2*
  """
  for op, i in alternating(num_microbatches, 2 * (num_devices - 1 - device)):
    yield op, device, i


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
    num_devices: The number D of devices.
    num_microbatches: The number M of micro-batches, a multiple of D.
    num_chunks: The number v of stages on each device.
    num_iterations: The number of iterations in the table.

  References:
    Narayanan et al., "Efficient large-scale language model training on GPU
    clusters using Megatron-LM", SC 2021, arXiv:2104.04473.
  """
  checks.check_int("num_chunks", num_chunks, 1)
  if num_microbatches % num_devices:
    raise ValueError(
      "`num_microbatches` must be a multiple of the devices in an interleaved "
      f"table, got {num_microbatches} on {num_devices}. Take a multiple, or "
      "1f1b."
    )
  group = num_devices * num_chunks

  def place(i: int, op: Op, device: int) -> tuple[Op, int, int]:
    # A device runs D micro-batches through one chunk, then the same D through
    # the next; the backward passes visit the chunks in reverse.
    chunk = i % group // num_devices
    if op == Op.BACKWARD:
      chunk = num_chunks - 1 - chunk
    microbatch = i // group * num_devices + i % num_devices
    return op, chunk * num_devices + device, microbatch

  def order(device: int, num_devices: int, num_microbatches: int) -> Order:
    # Megatron-LM's warm-up: twice 1F1B's, as a micro-batch has to return from
    # the last device to the first, and the first passes of all chunks but one
    # precede the first backward pass.
    ahead = num_devices - device - 1
    if num_chunks > 1:
      ahead = 2 * ahead + (num_chunks - 1) * num_devices
    passes = alternating(num_microbatches * num_chunks, ahead)
    return (place(i, op, device) for op, i in passes)

  return flushed(
    "interleaved",
    order,
    num_chunks,
    num_devices,
    num_microbatches,
    num_iterations=num_iterations,
  )


def zb_h1(device: int, num_devices: int, num_microbatches: int) -> Order:
  r"""Fills the bubble of 1F1B with gradients of the parameters (ZB-H1).

  Stage s runs the weight part of a micro-batch s micro-batches after its input
  part.  If forward pass, input part and weight part take equal time, the bubble
  is :math:`(S - 1) / (3 M + S - 1)` of the time for :math:`M \ge S`, a third of
  1F1B's; no stage keeps more than S micro-batches.

  References:
    Qi et al., "Zero bubble pipeline parallelism", ICLR 2024,
    arXiv:2401.10241.
  """
  for op, i in alternating(num_microbatches, num_devices - 1 - device):
    if op == Op.FORWARD:
      yield op, device, i
      continue
    yield Op.BACKWARD_INPUT, device, i
    # A later stage keeps fewer micro-batches in 1F1B and so has room to delay
    # its weight parts by s micro-batches, into the bubble at the end.
    if i >= device:
      yield Op.BACKWARD_WEIGHT, device, i - device
  for i in range(max(num_microbatches - device, 0), num_microbatches):
    yield Op.BACKWARD_WEIGHT, device, i


def alternating(total: int, ahead: int) -> Iterator[tuple[Op, int]]:
  """Alternates forward and backward passes, with a fixed warm-up of forwards.

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


def flushed(
  name: str,
  order: Callable[[int, int, int], Order],
  num_chunks: int,
  num_devices: int,
  num_microbatches: int,
  *,
  num_iterations: int = 1,
) -> Table:
  """Makes a table whose iterations follow each other after a flush."""
  devices = tuple(
    with_updates(
      (
        Action(op, stage, i, iteration)
        for iteration in range(num_iterations)
        for op, stage, i in order(device, num_devices, num_microbatches)
      ),
      num_microbatches,
    )
    for device in range(num_devices)
  )
  return Table(
    name, devices, num_devices * num_chunks, num_microbatches, num_iterations
  )
