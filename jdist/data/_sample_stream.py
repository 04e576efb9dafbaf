"""Samples as a pure function of seed, worker and position, and their parts."""

import math

import numpy as np

from jdist import checks, signatures, states
from jdist.data._dataset import Dataset, TextDataset

# Each use of a user's seed adds a key of its own, so that no two uses draw the
# same numbers.
_PARTITION_KEY = 1
# Gamma variates of a larger concentration overflow; mixes are even long before.
_LARGEST_ALPHA = 1e100
_ORDER_KEY = 2


def check_num_workers(num_workers: int, num_samples: int) -> int:
  """Returns the number of workers; a ValueError if one would own no sample."""
  remedy = "Use fewer workers or more data, as each must own a sample."
  return checks.check_int("num_workers", num_workers, 1, num_samples, remedy)


def partition(
  labels: np.ndarray, num_workers: int, *, alpha: float | None = None, seed: int
) -> tuple[np.ndarray, ...]:
  """Splits samples over workers, i.i.d. or skewed by label.

  Every sample goes to exactly one worker. Sizes differ by at most one, so that
  all workers make a pass in the same number of steps.

  With `alpha`, worker w draws its mix of classes from a Dirichlet distribution
  around the frequencies p of the classes, and draws its part without
  replacement; exhausted classes are left out of the mix:

    q_w ~ Dirichlet(alpha * K * p),  part_w ~ q_w

  where K is the number of classes present.

  Args:
    labels: The class of each sample, integers [n].
    num_workers: The number of parts, from 1 to n.
    alpha: The concentration, > 0: 0.1 skews strongly, 100 hardly. None
      (default) for an i.i.d. split.
    seed: An integer >= 0; the same seed gives the same split.

  Returns:
    The indices of each worker's samples, int64, ascending.

  >>> labels = np.array([0, 0, 0, 1, 1, 1])
  >>> [len(part) for part in partition(labels, 4, seed=0)]
  [2, 2, 1, 1]
  >>> parts = partition(labels, 2, alpha=1e-3, seed=0)
  >>> sorted(labels[part].tolist() for part in parts)
  [[0, 0, 0], [1, 1, 1]]

  References:
    Hsu, Qi and Brown, "Measuring the effects of non-identical data
    distribution for federated visual classification", 2019, arXiv:1909.06335.
    Departures: their concentration is `alpha * p`, so their alpha is K times
    ours. When all classes of a worker's mix are exhausted, it draws from the
    rest in proportion.
  """
  if states.is_key(labels) or np.ndim(labels) != 1:
    raise ValueError(f"`labels` must be one axis, got {checks.show(labels)}.")
  labels = np.asarray(labels)
  num_workers = check_num_workers(num_workers, len(labels))
  if alpha is not None:
    alpha = checks.check_number("alpha", alpha, open_low=True)
  seed = checks.check_int("seed", seed, 0, math.inf)
  sequence = np.random.SeedSequence(seed, spawn_key=(_PARTITION_KEY,))
  rng = np.random.default_rng(sequence)
  if alpha is None:
    parts = np.array_split(rng.permutation(len(labels)), num_workers)
    return tuple(np.sort(part) for part in parts)
  _, classes = np.unique(labels, return_inverse=True)
  frequency = np.bincount(classes) / len(labels)
  concentration = min(alpha, _LARGEST_ALPHA) * len(frequency) * frequency
  # Samples of a class are shuffled once and then taken from the front, which is
  # drawing without replacement.
  queues = [
    rng.permutation(np.flatnonzero(classes == k)) for k in range(len(frequency))
  ]
  taken = np.zeros(len(queues), int)
  available = np.array([len(queue) for queue in queues])
  owned = []
  # Workers draw in order: the last ones find some classes exhausted, which is
  # why a strong skew is not exactly Dirichlet for them.
  for worker in range(num_workers):
    # The first workers own one sample more where the split is not even.
    num_owned = len(labels) // num_workers
    num_owned += worker < len(labels) % num_workers
    counts = _draw_counts(
      rng, rng.dirichlet(concentration), available - taken, num_owned
    )
    pieces = [
      queue[start : start + count]
      for queue, start, count in zip(queues, taken, counts, strict=True)
    ]
    owned.append(np.sort(np.concatenate(pieces)))
    taken += counts
  return tuple(owned)


def _draw_counts(
  rng: np.random.Generator, mix: np.ndarray, available: np.ndarray, total: int
) -> np.ndarray:
  """Draws `total` samples from a mix of classes without replacement.

  Many are drawn at once, and those that exceed a class are drawn again: the
  distribution is that of single draws that leave out exhausted classes.
  """
  counts = np.zeros_like(available)
  while missing := total - counts.sum():
    left = available - counts
    weights = np.where(left > 0, mix, 0.0)
    # A mix may vanish on all remaining classes, exactly or by underflow.
    if weights.sum() < 1e-100:
      weights = left.astype(float)
    drawn = rng.multinomial(int(missing), weights / weights.sum())
    counts += np.minimum(drawn, left)
  return counts


class _Order:
  """An endless stream of positions: one permutation after the other."""

  # Grain's `shuffle().repeat()` takes 9 to 17 µs per sample, and this 0.1.
  # Grain also seeds epoch e with seed + e: the second epoch of seed 0 would be
  # the first one of seed 1.

  def __init__(self, size: int, seed: int, stream: int):
    self._size = size
    self._seed = seed
    self._stream = stream
    self._epochs: dict[int, np.ndarray] = {}

  def _epoch(self, epoch: int) -> np.ndarray:
    order = self._epochs.get(epoch)
    if order is None:
      # The spawn key separates epochs, streams and other uses of the seed.
      sequence = np.random.SeedSequence(
        self._seed, spawn_key=(_ORDER_KEY, self._stream, epoch)
      )
      # NumPy guarantees the raw bits of a generator for all versions, but not
      # its permutations: a run may resume with a newer NumPy.
      bits = np.random.PCG64(sequence).random_raw(self._size)
      order = np.argsort(bits, kind="stable")
      # A step rarely sees more than two epochs, so only two are kept.  The
      # dict is replaced at once, as a prefetching thread may read it meanwhile.
      kept = list(self._epochs.items())[-1:]
      self._epochs = dict([*kept, (epoch, order)])
    return order

  def positions(self, start: int, count: int) -> np.ndarray:
    """Returns positions number start .. start + count - 1 of the stream."""
    pieces = []
    while count:
      epoch, offset = divmod(start, self._size)
      pieces.append(self._epoch(epoch)[offset : offset + count])
      start += len(pieces[-1])
      count -= len(pieces[-1])
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


@signatures.explained
@signatures.checked
class SampleStream:
  """An endless stream of samples for batches of any size.

  Workers may take batches of different sizes at different times: a batch
  depends on the seed, the worker, its position in the stream and its size.  An
  epoch has as many samples as the data set.

  Args:
    dataset: Images, or a text.
    num_workers: Workers of the whole run, at most the number of samples.
    seed: An integer >= 0.
    owned: Whether each worker passes again and again over a part of its own; if
      not, all share one stream with a new permutation for each epoch.
    alpha: Label skew of owned parts, > 0; None for i.i.d. parts. A number
      implies `owned`.

  Attributes:
    shared: Whether all workers take from one stream with one position.

  >>> from jdist import data
  >>> samples = data.SampleStream(data.load("digits"), 2, seed=0)
  >>> whole = samples.indices(0, 0, 7)
  >>> bool((samples.indices(1, 3, 4) == whole[3:]).all())
  True
  >>> samples.batch(0, 0, 3, size=4)["mask"].tolist()
  [1.0, 1.0, 1.0, 0.0]
  """

  def __init__(
    self,
    dataset: Dataset | TextDataset,
    num_workers: int,
    *,
    seed: int,
    owned: bool = False,
    alpha: float | None = None,
  ):
    self.dataset = dataset
    self.num_workers = check_num_workers(num_workers, len(dataset))
    self.shared = not owned and alpha is None
    self._seed = checks.check_int("seed", seed, 0, math.inf)
    self._parts: tuple[np.ndarray, ...] = ()
    if not self.shared:
      self._parts = partition(
        _labels_of(dataset, alpha), self.num_workers, alpha=alpha,
        seed=self._seed,
      )  # fmt: skip
    self._orders: dict[int, _Order] = {}

  def indices(self, worker: int, start: int, count: int) -> np.ndarray:
    """Returns `count` samples from position `start` on, int64 [count].

    A shared stream is the same for every worker.
    """
    count = checks.check_int("count", count, 1, 2**31 - 1)
    if not 0 <= worker < self.num_workers:
      raise IndexError(
        f"`worker` must be from 0 to {self.num_workers - 1}, got {worker}."
      )
    if start < 0:
      raise IndexError(f"`start` must be >= 0, got {start}.")
    if self.shared:
      return self._order(0, len(self.dataset)).positions(start, count)
    part = self._parts[worker]
    return part[self._order(1 + worker, len(part)).positions(start, count)]

  def batch(
    self, worker: int, start: int, count: int, *, size: int | None = None
  ) -> dict[str, np.ndarray]:
    """Returns samples of `indices` as a batch, padded to a size if given.

    The `size` is at least `count`, and padding repeats the first sample.

    Returns:
      A batch of one worker as in `Batches`, [size, ...], with "mask": float32
      [size], 1 for samples and 0 for padding.
    """
    size = count if size is None else size
    size = checks.check_int("size", size, count, 2**31 - 1)
    rows, mask = self.indices(worker, start, count), np.ones(size, np.float32)
    if size > count:
      rows = np.concatenate([rows, np.repeat(rows[:1], size - count)])
      mask[count:] = 0.0
    return {**self.dataset.batch(rows), "mask": mask}

  def _order(self, number: int, size: int) -> _Order:
    return self._orders.setdefault(number, _Order(size, self._seed, number))


def _labels_of(
  dataset: Dataset | TextDataset, alpha: float | None
) -> np.ndarray:
  """Returns the labels to skew by; i.i.d. parts need their number only."""
  if isinstance(dataset, Dataset):
    return dataset.labels
  if alpha is not None:
    raise ValueError(
      f"`alpha` must be None for a text, which has no labels, got {alpha}."
    )
  return np.zeros(len(dataset), np.int32)
