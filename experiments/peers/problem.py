"""The problem that both frameworks are given; it needs only NumPy."""

import argparse
import json
import os
import sys

import numpy as np

# Images of a worker's step, local steps of a round, and how often a run is
# evaluated: at the end of a round.
BATCH, INTERVAL = 32, 8
# The first seed chooses the rate.
SEEDS = (0, 1, 2)
# Synchronous steps before PyTorch's PowerSGD begins, which need two or more.
WARMUP = 8
MOMENTUM = 0.9
# DiLoCo's outer optimizer, in both frameworks.
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
RANK = 2


# Methods of one step a round; all others average after `INTERVAL` steps.
_EVERY_STEP = ("SSGD", "SSGD int4", "PowerSGD", "DDP", "DDP fp16", "alone")


def interval(method):
  """Returns the steps of a method's round."""
  if method in _EVERY_STEP:
    return 1
  return 2 * INTERVAL if method.endswith("H=16") else INTERVAL


class Problem:
  """Images, initial weights by seed, and the order of the data.

  Args:
    path: A file that `run.py prepare` has written.
  """

  def __init__(self, path):
    with np.load(path) as found:
      self.arrays = dict(found)
    self.mean, self.std = (float(self.arrays[x]) for x in ("mean", "std"))

  def weights(self, seed):
    """Returns the weights by the names of `layer/kind`."""
    first = f"weights{seed}/"
    return {
      name.removeprefix(first): value
      for name, value in self.arrays.items()
      if name.startswith(first)
    }

  def batch(self, seed, step, worker, workers):
    """Returns images, uint8 [n, 32, 32, 1], and labels, int32 [n]."""
    order = self.arrays[f"order{seed}"]
    first = (step * workers + worker) * BATCH
    chosen = order[np.arange(first, first + BATCH) % len(order)]
    return self.arrays["images"][chosen], self.arrays["labels"][chosen]

  def test(self, worker, workers):
    """Returns a worker's part of the test images, and their labels."""
    part = slice(worker, None, workers)
    return self.arrays["test_images"][part], self.arrays["test_labels"][part]


def main(about, make):
  """Answers requests, one JSON object a line, until there are no more.

  Libraries print to stderr here: only answers are on stdout.

  Args:
    about: A docstring.
    make: A function from the process's options to an object with `answer`.
  """
  parser = argparse.ArgumentParser(description=about.splitlines()[0])
  parser.add_argument("--problem", required=True)
  parser.add_argument("--address", required=True, help="host 0's, with a port")
  parser.add_argument("--host", type=int, required=True)
  parser.add_argument("--hosts", type=int, required=True)
  answer = make(parser.parse_args()).answer
  out = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  print(json.dumps({"ready": True}), file=out, flush=True)
  for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), file=out, flush=True)


def train(run, limit, target, every):
  """Trains until a target is reached; returns its curve.

  Args:
    run: An object with `steps(n)` and `accuracy()`.
    limit: The most steps.
    target: The test accuracy at which the run ends.
    every: The steps between two evaluations.
  """
  curve = []
  for step in range(every, limit + 1, every):
    run.steps(every)
    curve.append([step, run.accuracy()])
    if curve[-1][1] >= target or not np.isfinite(curve[-1][1]):
      break
  return curve
