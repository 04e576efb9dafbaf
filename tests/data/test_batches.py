"""Batches lose and repeat no sample, and depend on the step alone."""

import contextlib
import itertools
import pickle
import sys
import threading
import time

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jdist import data

quick = hypothesis.settings(max_examples=50)


def numbered(n, num_classes=3):
  """A set whose pixel says which sample it is, counted from 1."""
  pixels = np.arange(1, n + 1, dtype=np.uint8).reshape(n, 1, 1, 1)
  labels = (np.arange(1, n + 1) % num_classes).astype(np.int32)
  return data.Dataset("mine", "train", pixels, labels, num_classes, (0,), (1,))


@st.composite
def shapes(draw):
  n = draw(st.integers(1, 40))
  return n, draw(st.integers(1, n)), draw(st.integers(1, 12))


seeds = st.integers(0, 2**70)
alphas = st.sampled_from([None, 0.1, 10.0])


def stream(batches, num_samples):
  """The samples of an i.i.d. run in the order in which steps take them."""
  taken = []
  for step in itertools.count():
    if len(taken) >= num_samples:
      return taken[:num_samples]
    taken.extend(batches.indices(step).ravel().tolist())


@quick
@hypothesis.given(shapes(), seeds)
def test_every_epoch_uses_every_sample_once(shape, seed):
  n, num_workers, batch_size = shape
  batches = data.Batches(numbered(n), num_workers, batch_size, seed=seed)
  taken = stream(batches, 3 * n)
  for epoch in range(3):
    assert sorted(taken[epoch * n : (epoch + 1) * n]) == list(range(n))


@quick
@hypothesis.given(shapes(), seeds)
def test_skewed_worker_uses_its_part_once_per_pass(shape, seed):
  n, num_workers, batch_size = shape
  dataset = numbered(n)
  batches = data.Batches(dataset, num_workers, batch_size, seed=seed, alpha=0.5)
  parts = data.partition(dataset.labels, num_workers, alpha=0.5, seed=seed)
  num_steps = 1 + 2 * n // batch_size
  rows = np.stack([batches.indices(step) for step in range(num_steps)])
  for worker, part in enumerate(parts):
    taken = rows[:, worker].ravel().tolist()
    assert sorted(taken[: len(part)]) == part.tolist()
    assert sorted(taken[len(part) : 2 * len(part)]) == part.tolist()


@quick
@hypothesis.given(shapes(), seeds, alphas, st.data())
def test_process_gets_the_rows_of_a_single_process(shape, seed, alpha, draws):
  n, num_workers, batch_size = shape
  ids = draws.draw(
    st.lists(st.integers(0, num_workers - 1), min_size=1, unique=True)
  )

  def make(**kwargs):
    return data.Batches(
      numbered(n), num_workers, batch_size, seed=seed, alpha=alpha, **kwargs
    )

  whole, view = make(), make(worker_ids=ids)
  for step in (0, 7, 10**9):
    for name in ("image", "label"):
      np.testing.assert_array_equal(view[step][name], whole[step][name][ids])


@quick
@hypothesis.given(shapes(), seeds, alphas, st.permutations([0, 3, 50, 10**12]))
def test_batches_do_not_depend_on_the_order_of_requests(
  shape, seed, alpha, steps
):
  n, num_workers, batch_size = shape

  def make():
    return data.Batches(
      numbered(n), num_workers, batch_size, seed=seed, alpha=alpha
    )

  asked = make()
  for step in steps:
    np.testing.assert_array_equal(asked.indices(step), make().indices(step))


@pytest.mark.parametrize("alpha", [None, 1.0])
def test_permutations_differ_over_seeds_epochs_and_workers(alpha):
  # If epoch e were seeded with seed + e, seed 1 would repeat seed 0.
  seen = set()
  for seed in range(4):
    batches = data.Batches(numbered(60, 1), 2, 30, seed=seed, alpha=alpha)
    for step in range(5):
      # Skewed workers are compared by ranks in their parts, which differ.
      rows = batches.indices(step)
      rows = rows.reshape(1, 60) if alpha is None else rows
      seen |= {tuple(np.argsort(np.argsort(row))) for row in rows}
  assert len(seen) == 4 * 5 * (1 if alpha is None else 2)


def test_order_is_the_same_under_every_numpy():
  # A run may resume years later, and must see the same data.
  batches = data.Batches(numbered(8), 2, 2, seed=0)
  rows = [batches.indices(step).tolist() for step in range(3)]
  assert rows == [[[1, 3], [7, 0]], [[2, 5], [6, 4]], [[3, 5], [4, 1]]]


def test_batch_holds_the_samples_of_its_indices():
  dataset = numbered(50)
  batches = data.Batches(dataset, 4, 3, seed=1)
  batch, rows = batches[5], batches.indices(5)
  assert batch["image"].shape == (4, 3, 1, 1, 1)
  assert batch["image"].dtype == np.uint8 and batch["label"].dtype == np.int32
  np.testing.assert_array_equal(batch["image"][..., 0, 0, 0], rows + 1)
  np.testing.assert_array_equal(batch["label"], (rows + 1) % 3)


def test_steps_per_epoch_count_all_samples():
  assert data.Batches(numbered(50), 4, 3, seed=0).steps_per_epoch == 50 / 12


def test_skewed_workers_see_skewed_labels():
  digits = data.load("digits")
  batches = data.Batches(digits, 8, 150, seed=0, alpha=0.01)
  classes = [len(set(labels.tolist())) for labels in batches[0]["label"]]
  assert np.median(classes) <= 3


def grain_threads():
  names = [thread.name for thread in threading.enumerate()]
  return [name for name in names if "grain" in name]


def wait_for_no_grain_threads():
  deadline = time.monotonic() + 60
  while grain_threads() and time.monotonic() < deadline:
    time.sleep(0.01)
  return grain_threads() == []


@pytest.mark.parametrize("start_step", [0, 11])
def test_iterating_gives_the_steps_in_order(start_step):
  batches = data.Batches(numbered(50), 4, 3, seed=1, alpha=1.0)
  with contextlib.closing(batches.iterate(start_step)) as iterator:
    for step in range(start_step, start_step + 20):
      batch = next(iterator)
      np.testing.assert_array_equal(batch["image"], batches[step]["image"])
      np.testing.assert_array_equal(batch["label"], batches[step]["label"])


def test_iterating_without_grain_gives_the_same_steps(monkeypatch):
  monkeypatch.setitem(sys.modules, "grain", None)
  batches = data.Batches(numbered(50), 4, 3, seed=1)
  iterator = batches.iterate(7)
  for step in range(7, 30):
    np.testing.assert_array_equal(
      next(iterator)["image"], batches[step]["image"]
    )


def test_prefetching_is_bounded():
  batches = data.Batches(numbered(50), 4, 3, seed=1)
  asked = []
  batches.indices = lambda step: asked.append(step) or np.zeros((4, 3), int)
  with contextlib.closing(batches.iterate()) as iterator:
    next(iterator)
    deadline = time.monotonic() + 60
    while len(asked) < 3 and time.monotonic() < deadline:
      time.sleep(0.01)
    assert 3 <= len(asked) <= 5
    assert sorted(asked) == list(range(len(asked)))


def test_closed_or_dropped_iterator_ends_its_thread():
  batches = data.Batches(numbered(50), 4, 3, seed=1)
  iterator = batches.iterate()
  next(iterator)
  iterator.close()
  assert wait_for_no_grain_threads()
  for _ in batches.iterate():
    break
  assert wait_for_no_grain_threads()
  batches.iterate().close()
  assert wait_for_no_grain_threads()


def test_error_while_prefetching_reaches_the_caller():
  batches = data.Batches(numbered(50), 4, 3, seed=1)
  batches.indices = lambda step: np.full((4, 3), 50 * step)
  with (
    contextlib.closing(batches.iterate()) as iterator,
    pytest.raises(IndexError, match="50"),
  ):
    for _ in range(2):
      next(iterator)
  assert wait_for_no_grain_threads()


def test_batches_can_be_pickled_for_loader_processes():
  batches = data.Batches(numbered(50), 4, 3, seed=1, alpha=1.0)
  copy = pickle.loads(pickle.dumps(batches))
  np.testing.assert_array_equal(copy.indices(9), batches.indices(9))


@quick
@hypothesis.given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 12))
def test_evaluation_shows_every_sample_once(n, num_workers, batch_size):
  dataset = numbered(n)
  batches = data.evaluation_batches(dataset, num_workers, batch_size)
  images, labels = [], []
  for batch in batches:
    assert batch["image"].shape == (num_workers, batch_size, 1, 1, 1)
    assert batch["mask"].shape == batch["label"].shape
    assert batch["mask"].dtype == np.float32
    inside = batch["mask"] == 1
    assert set(np.unique(batch["mask"])) <= {0, 1}
    images += batch["image"][inside].ravel().tolist()
    labels += batch["label"][inside].tolist()
    assert not batch["image"][~inside].any()
    assert not batch["label"][~inside].any()
  assert images == list(range(1, n + 1)) and labels == dataset.labels.tolist()


def test_evaluation_batches_are_a_sequence():
  batches = data.evaluation_batches(numbered(10), 2, 2)
  assert len(batches) == 3
  np.testing.assert_array_equal(batches[-1]["mask"], [[1, 1], [0, 0]])
  assert len(batches[1:]) == 2
  for outside in (3, -4):
    with pytest.raises(IndexError):
      batches[outside]
