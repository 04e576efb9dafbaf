"""Random orders that stay what they are.

NumPy promises the raw bits of a generator for good, and what it makes of them
only within a version; a resumed run may have a newer NumPy.
"""

import numpy as np


def permutation(size: int, seed: int, *stream: int) -> np.ndarray:
  """A random order of 0 .. size - 1, for a seed and a stream's numbers.

  >>> bool((permutation(9, 1, 2) == permutation(9, 1, 2)).all())
  True
  """
  sequence = np.random.SeedSequence(seed, spawn_key=stream)
  bits = np.random.PCG64(sequence).random_raw(size)
  return np.argsort(bits, kind="stable")
