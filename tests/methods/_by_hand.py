"""Methods of equal workers in NumPy, for tests against theirs."""

import numpy as np


def sign(x):
  return np.where(x < 0, -1.0, 1.0)


def descended(targets, steps_of):
  """Parameters after every step of a method that keeps the workers equal.

  Args:
    targets: [steps, workers, ...].
    steps_of: makes from the shape [workers, size] a function of the gradients
      that returns the step [size].
  """
  x = targets.reshape(*targets.shape[:2], -1).astype(np.float64)
  w, step, found = np.zeros(x.shape[2]), steps_of(x.shape[1:]), []
  for row in x:
    w = w + step(w - row)
    found.append(w)
  return np.array(found).reshape(-1, *targets.shape[2:])


class Exchange:
  """Rows to their owners, the sum there, and signs of it to all."""

  def __init__(self, shape, signs):
    self.signs, self.rows = signs, (shape[0], -1)
    self.owned = np.zeros((shape[0], shape[1] // shape[0]))

  def __call__(self, p):
    share = np.stack([self.signs(x.reshape(self.rows)) for x in p])
    wanted = share.mean(0) + self.owned
    mean = self.signs(wanted)
    self.owned = wanted - mean
    return mean.reshape(-1), share.reshape(p.shape)
