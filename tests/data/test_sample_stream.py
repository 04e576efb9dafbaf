"""Samples follow from worker, position and count."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jdist import data

DIGITS = data.load("digits")


def stream(**options):
  return data.SampleStream(DIGITS, 4, seed=0, **options)


@pytest.mark.parametrize(
  "options", [{}, {"owned": True}, {"alpha": 0.1}], ids=str
)
@hypothesis.settings(max_examples=30)
@hypothesis.given(
  st.lists(st.integers(1, 700), min_size=1, max_size=8), st.integers(0, 3)
)
def test_stream_does_not_depend_on_batch_sizes(options, counts, worker):
  samples, position, pieces = stream(**options), 0, []
  for count in counts:
    pieces.append(samples.indices(worker, position, count))
    position += count
  whole = stream(**options).indices(worker, 0, position)
  np.testing.assert_array_equal(np.concatenate(pieces), whole)


def test_epoch_has_every_sample_once():
  shared = stream().indices(0, 0, len(DIGITS))
  assert sorted(shared) == list(range(len(DIGITS)))
  own = stream(owned=True)
  sizes = map(len, data.partition(DIGITS.labels, 4, seed=0))
  parts = [own.indices(i, 0, size) for i, size in enumerate(sizes)]
  assert sorted(np.concatenate(parts)) == list(range(len(DIGITS)))


def test_workers_pass_over_their_parts_in_orders_of_their_own():
  own, size = stream(owned=True), len(DIGITS) // 4
  parts = data.partition(DIGITS.labels, 4, seed=0)
  places = []
  for worker, part in enumerate(parts):
    place = {sample: i for i, sample in enumerate(part.tolist())}
    found = own.indices(worker, 0, size // 2).tolist()
    places.append(tuple(place[sample] for sample in found))
  assert len(set(places)) == 4


@pytest.mark.parametrize("alpha", [None, 0.3])
def test_stream_of_equal_counts_equals_batches(alpha):
  batches = data.Batches(DIGITS, 4, 8, seed=0, alpha=alpha)
  samples = stream(alpha=alpha)
  for step in (0, 5, 99):
    for worker, rows in enumerate(batches.indices(step)):
      start = step * 32 + worker * 8 if alpha is None else step * 8
      np.testing.assert_array_equal(samples.indices(worker, start, 8), rows)


def test_padding_is_masked():
  batch = stream().batch(2, 10, 3, size=5)
  assert batch["mask"].tolist() == [1, 1, 1, 0, 0]
  assert batch["image"].shape == (5, *DIGITS.images.shape[1:])
  plain = stream().batch(2, 10, 3)
  for name, value in plain.items():
    np.testing.assert_array_equal(batch[name][:3], value)


def test_orders_of_parts_are_those_of_raw_bits():
  """A run that resumes with a later version sees the same samples."""
  own = stream(owned=True)
  parts = data.partition(DIGITS.labels, 4, seed=0)
  for worker in (0, 3):
    part = parts[worker]
    sequence = np.random.SeedSequence(0, spawn_key=(2, 1 + worker, 0))
    bits = np.random.PCG64(sequence).random_raw(len(part))
    found = own.indices(worker, 0, len(part))
    np.testing.assert_array_equal(found, part[np.argsort(bits)])


def test_two_epochs_are_kept():
  samples = stream()
  for epoch in range(5):
    samples.indices(0, epoch * len(DIGITS), 1)
  assert list(samples._order(0, len(DIGITS))._epochs) == [3, 4]
