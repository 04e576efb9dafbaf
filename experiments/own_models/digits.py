"""Digits for the models of this folder, and what they print."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jdist import data

NUM_WORKERS = 4
CLASSES = 10


def batches(batch_size: int = 16) -> Callable[[int], Iterator[Any]]:
  """Returns batches `[workers, n, ...]` from any step on, as `Trainer` asks."""
  train = data.load("digits")
  cut = data.Batches(train, NUM_WORKERS, batch_size, seed=0)

  def start(step: int) -> Iterator[Any]:
    while True:
      batch = cut[step]
      image = train.normalize(batch["image"]).astype(np.float32)
      yield {"image": image, "label": batch["label"]}
      step += 1

  return start


def held_out() -> tuple[np.ndarray, np.ndarray]:
  """Returns the test images, normalized, and their labels."""
  test = data.load("digits", "test")
  return test.normalize(test.images).astype(np.float32), test.labels


def report(name: str, logits: Any, labels: np.ndarray, sent: float) -> float:
  """Prints a line, and returns the accuracy."""
  accuracy = float((np.argmax(np.asarray(logits), -1) == labels).mean())
  print(
    f"{name}: {accuracy:.1%} of the test digits, "
    f"{sent / 1e3:.0f} kB sent by each worker"
  )
  return accuracy
