"""Batches as a pure function of seed, step and worker."""

import itertools
import math
import operator
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jdist import checks, signatures
from jdist.data import _sample_stream
from jdist.data._dataset import Dataset, TextDataset


@signatures.explained
@signatures.checked
class Batches:
  """Cuts a data set into one batch per worker and step.

  Batch t is a pure function of (seed, t, worker). A run resumes exactly at the
  next step, and a process that asks for its own workers gets the rows that a
  single process would have given them.

  Without `alpha` all workers share one stream with a new permutation per epoch.
  Step t takes the next `num_workers * batch_size` samples and splits them by
  worker, so an epoch may end in the middle of a step. With `alpha` each worker
  owns a part skewed by label (see `partition`), reshuffled on every pass.

  Args:
    dataset: Images, or a text.
    num_workers: Workers of the whole run, at most the number of samples.
    batch_size: Samples per worker and step, >= 1.
    seed: An integer >= 0. Runs with different seeds share no permutation.
    alpha: Label skew, > 0; None (default) for i.i.d. workers. A text has no
      labels.
    worker_ids: Workers whose batches are returned, in this order; default all.

  Attributes:
    steps_per_epoch: Steps, as a float, in which all workers together see as
      many samples as the data set has.

  >>> from jdist import data
  >>> digits = data.load("digits")
  >>> batches = data.Batches(digits, num_workers=4, batch_size=8, seed=0)
  >>> batches[0]["image"].shape, batches[0]["label"].shape
  ((4, 8, 8, 8, 1), (4, 8))
  >>> mine = data.Batches(digits, 4, 8, seed=0, worker_ids=[2])
  >>> bool((mine[7]["label"][0] == batches[7]["label"][2]).all())
  True
  """

  def __init__(
    self,
    dataset: Dataset | TextDataset,
    num_workers: int,
    batch_size: int,
    *,
    seed: int,
    alpha: float | None = None,
    worker_ids: Sequence[int] | None = None,
  ):
    self.dataset = dataset
    # The stream checks the other arguments.
    self._samples = _sample_stream.SampleStream(
      dataset, num_workers, seed=seed, alpha=alpha
    )
    self.num_workers = self._samples.num_workers
    self.batch_size = checks.check_int("batch_size", batch_size, 1, 2**31 - 1)
    self.worker_ids = _check_worker_ids(worker_ids, self.num_workers)
    self.steps_per_epoch = len(dataset) / (self.num_workers * self.batch_size)

  def indices(self, step: int) -> np.ndarray:
    """Returns a step's samples, int64 [len(worker_ids), batch_size]."""
    step = operator.index(step)
    if step < 0:
      raise IndexError(
        f"`step` must be >= 0, got {step}. Steps are counted from the start; "
        "the stream has no end to count from."
      )
    # All rows are drawn and then chosen from: a worker's rows must not depend
    # on which workers a process asks for.
    if self._samples.shared:
      count = self.num_workers * self.batch_size
      rows = self._samples.indices(0, step * count, count)
      return rows.reshape(self.num_workers, -1)[list(self.worker_ids)]
    start = step * self.batch_size
    return np.stack(
      [
        self._samples.indices(worker, start, self.batch_size)
        for worker in self.worker_ids
      ]
    )

  def __getitem__(self, step: int) -> dict[str, np.ndarray]:
    """Returns the batch of a step, for the w workers of `worker_ids`.

    Images give {"image": uint8 [w, batch_size, height, width, channels],
    "label": int32 [w, batch_size]}, and a text gives {"tokens", "targets"},
    both int32 [w, batch_size, length].
    """
    return self.dataset.batch(self.indices(step))

  def iterate(self, start_step: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Returns an endless iterator that prefetches two batches by Grain.

    Without Grain, batches are made on demand.  The prefetching thread ends when
    the iterator is closed (`contextlib.closing`, or its `close()`) or dropped.

    Args:
      start_step: The first step, >= 0, for instance the one to resume at.

    Returns:
      A generator of `self[start_step]`, `self[start_step + 1]`, ...
    """
    start_step = checks.check_int("start_step", start_step, 0)
    try:
      import grain
    except ImportError:
      return (self[step] for step in itertools.count(start_step))
    return self._prefetched(grain, start_step)

  def _prefetched(
    self, grain: Any, start_step: int
  ) -> Iterator[dict[str, np.ndarray]]:
    steps = grain.MapDataset.range(start_step, sys.maxsize).map(
      self.__getitem__
    )
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    iterator = iter(steps.to_iter_dataset(options))
    # Without `close` Grain's thread would outlive an abandoned generator.
    try:
      yield from iterator
    finally:
      iterator.close()


class EvaluationBatches(Sequence[dict[str, np.ndarray]]):
  """Cuts a data set, in its order, into padded batches of one size.

  Every sample appears exactly once with mask 1. The last batch is padded with
  zeros of mask 0, perhaps all samples of a worker: sum over the mask, and
  divide once at the end.

  Args:
    dataset: Images, or a text.
    num_workers: Workers of the whole run, >= 1.
    batch_size: Samples per worker and batch, >= 1.

  Returns:
    A sequence, with a length, of batches as `Batches` gives, with "mask":
    float32 [num_workers, batch_size].

  >>> from jdist import data
  >>> batches = data.evaluation_batches(data.load("digits", "test"), 2, 100)
  >>> len(batches), [int(batch["mask"].sum()) for batch in batches]
  (2, [200, 155])
  """

  def __init__(
    self, dataset: Dataset | TextDataset, num_workers: int, batch_size: int
  ):
    self.dataset = dataset
    self.num_workers = checks.check_int("num_workers", num_workers, 1)
    self.batch_size = checks.check_int("batch_size", batch_size, 1, 2**31 - 1)

  def __len__(self) -> int:
    return math.ceil(len(self.dataset) / (self.num_workers * self.batch_size))

  def __getitem__(self, index: Any) -> Any:
    if isinstance(index, slice):
      return [self[i] for i in range(*index.indices(len(self)))]
    if not -len(self) <= index < len(self):
      raise IndexError(f"batch {index} of {len(self)}")
    count = self.num_workers * self.batch_size
    rows = index % len(self) * count + np.arange(count)
    rows = rows.reshape(self.num_workers, -1)
    # Equal shapes of all batches mean one compiled program.
    inside = rows < len(self.dataset)
    batch = self.dataset.batch(np.where(inside, rows, 0))
    for values in batch.values():
      values[~inside] = 0
    return {**batch, "mask": inside.astype(np.float32)}


evaluation_batches = EvaluationBatches


def _check_worker_ids(
  worker_ids: Sequence[int] | None, num_workers: int
) -> tuple[int, ...]:
  if worker_ids is None:
    return tuple(range(num_workers))
  ids = tuple(operator.index(worker) for worker in worker_ids)
  if not ids or len({*ids} & {*range(num_workers)}) < len(ids):
    raise ValueError(
      f"`worker_ids` must be one or more of 0 .. {num_workers - 1}, each once, "
      f"got {ids}."
    )
  return ids
