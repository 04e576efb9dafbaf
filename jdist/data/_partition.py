"""Partitions of samples over workers, i.i.d. or skewed by label."""

import numpy as np

from jdist import checks

# Each use of a user's seed adds a key of its own, so that no two uses draw the
# same numbers.
_PARTITION_KEY = 1
# Gamma variates of a larger concentration overflow; mixes are even long before.
_LARGEST_ALPHA = 1e100


def check_num_workers(num_workers: int, num_samples: int) -> int:
  """Returns the number of workers; a ValueError if one would own no sample."""
  remedy = "Use fewer workers or more data, as each must own a sample."
  return checks.check_int("num_workers", num_workers, 1, num_samples, remedy)


def partition(
  labels: np.ndarray,
  num_workers: int,
  *,
  alpha: float | None = None,
  seed: int,
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

  Raises:
    ValueError: when an argument is out of range.

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
  labels = np.asarray(labels)
  if labels.ndim != 1:
    raise ValueError(f"`labels` must be one axis, got shape {labels.shape}.")
  num_workers = check_num_workers(num_workers, len(labels))
  if alpha is not None:
    alpha = checks.check_number("alpha", alpha, open_low=True)
  seed = checks.check_int("seed", seed, 0)
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
