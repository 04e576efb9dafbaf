"""Random orders that stay the same with every version of NumPy.

NumPy guarantees the raw bits of a generator forever, but its permutations only
within a version; a resumed run may have a newer NumPy.
"""

import numpy as np

# The streams of a seed that `balanced` takes.
_IMAGES_KEY, _ORDER_KEY = 6, 7


def permutation(size: int, seed: int, *stream: int) -> np.ndarray:
  """Returns a random order of 0 to size - 1, by a seed and a stream."""
  sequence = np.random.SeedSequence(seed, spawn_key=stream)
  bits = np.random.PCG64(sequence).random_raw(size)
  return np.argsort(bits, kind="stable")


def balanced(
  labels: np.ndarray, size: int, seed: int, number: int
) -> np.ndarray:
  """Draws images without replacement, the same share of each class."""
  order = permutation(len(labels), seed, _IMAGES_KEY, number)
  # Each image has a place within its class, as a share of the class.  Sorting
  # by it interleaves the classes, and every prefix is balanced.
  place = np.empty(len(labels))
  for label in np.unique(labels):
    inside = np.flatnonzero(labels[order] == label)
    place[inside] = (np.arange(len(inside)) + 0.5) / len(inside)
  drawn = order[np.argsort(place, kind="stable")[:size]]
  # The interleaved order would give every mini-batch the same sequence of
  # classes.
  return drawn[permutation(size, seed, _ORDER_KEY, number)]
