"""Texts are split into windows, and each byte is predicted once."""

import numpy as np
import pytest

from jdist import data
from jdist.data import __main__ as command
from jdist.data import _prepare
from tests import _refusals
from tests.data import _prepared

_TEXT = bytes(np.random.default_rng(0).integers(0, 256, 1000, np.uint8))


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "mine.txt"
  path.write_bytes(_TEXT)
  return path


def targets_of(text):
  return text.batch(np.arange(len(text)))["targets"]


@pytest.mark.parametrize("length", [1, 7, 64])
def test_every_byte_but_the_first_is_predicted_once(file, length):
  train = data.load_text(file, window_length=length)
  test = data.load_text(str(file), "test", window_length=length)
  assert (train.name, train.num_classes) == ("mine", 256)
  assert train.input_shape == test.input_shape == (length,)
  for text, whole in ((train, _TEXT[:900]), (test, _TEXT[900:])):
    # The rest at the end is shorter than a window.
    assert len(text) == (len(whole) - 1) // length
    found = bytes(targets_of(text).astype(np.uint8).ravel())
    assert found == whole[1 : 1 + len(found)]
    assert len(whole) - len(found) <= length


def test_target_is_the_next_token(file):
  batch = data.load_text(file, window_length=8).batch(np.arange(3))
  assert {name: x.dtype for name, x in batch.items()} == {
    "tokens": np.int32,
    "targets": np.int32,
  }
  np.testing.assert_array_equal(batch["tokens"].ravel(), list(_TEXT[:24]))
  np.testing.assert_array_equal(batch["targets"].ravel(), list(_TEXT[1:25]))


def test_test_part_of_a_file_is_its_end(file):
  text = data.load_text(file, "test", window_length=4, test_fraction=0.25)
  assert bytes(text.windows[0]) == _TEXT[750:755]


def test_windows_are_batched_like_images(file):
  text = data.load_text(file, window_length=10)
  batches = data.Batches(text, 2, 3, seed=0)
  taken = np.concatenate([batches.indices(t).ravel() for t in range(15)])
  assert sorted(taken[: len(text)]) == list(range(len(text)))
  batch = batches[4]
  assert batch["tokens"].shape == batch["targets"].shape == (2, 3, 10)
  mine = data.Batches(text, 2, 3, seed=0, worker_ids=[1])[4]
  np.testing.assert_array_equal(mine["tokens"][0], batch["tokens"][1])
  np.testing.assert_array_equal(
    batch["tokens"][..., 1:], batch["targets"][..., :-1]
  )


def test_windows_are_evaluated_once(file):
  text = data.load_text(file, window_length=10)
  batches = data.evaluation_batches(text, 2, 13)
  inside = [batch["mask"].astype(bool) for batch in batches]
  assert sum(x.sum() for x in inside) == len(text) == 89
  found = [b["targets"][x] for b, x in zip(batches, inside, strict=True)]
  np.testing.assert_array_equal(np.concatenate(found), targets_of(text))
  assert not batches[-1]["tokens"][~inside[-1]].any()


def test_workers_own_windows_without_labels(file):
  text = data.load_text(file, window_length=10)
  samples = data.SampleStream(text, 4, seed=0, owned=True)
  batch = samples.batch(2, 0, 3, size=4)
  assert batch["tokens"].shape == (4, 10)
  assert batch["mask"].tolist() == [1, 1, 1, 0]


def test_selected_windows_are_a_text(file):
  text = data.load_text(file, window_length=10)
  part = text.select(np.array([5, 2]))
  assert len(part) == 2 and part.split == "train"
  np.testing.assert_array_equal(part.windows[1], text.windows[2])


@pytest.mark.parametrize(
  ("argument", "options", "rule"),
  [
    ("split", {"split": "validation"}, "'train' or 'test'"),
    ("window_length", {"window_length": 0}, "int >= 1"),
    (
      "window_length",
      {"window_length": 900},
      "899, got 900. The train split of mine has 900 bytes",
    ),
    (
      "window_length",
      {"split": "test"},
      "99, got 128. The test split of mine has 100 bytes",
    ),
    ("test_fraction", {"test_fraction": 0}, "in (0, 1]"),
    (
      "window_length",
      {"test_fraction": 1.0},
      "none is possible, got 128. The train split of mine has 0 bytes",
    ),
  ],
)
def test_unreadable_texts_raise(file, argument, options, rule):
  options = {"source": file} | options
  _refusals.check(argument, lambda: data.load_text(**options), rule)


def test_load_refuses_texts_and_load_text_refuses_images():
  with pytest.raises(ValueError, match="load_text` reads"):
    data.load("tiny_shakespeare")
  assert "tiny_shakespeare" in data.TEXT_NAMES


def test_prepared_text_is_decoded_once(tmp_path, monkeypatch, capsys):
  monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
  monkeypatch.setenv("JDIST_CACHE_DIR", str(tmp_path / "cache"))
  texts = {"train": [_TEXT[:500], _TEXT[500:]], "test": [_TEXT[:40]]}
  _prepared.write_text(tmp_path, "tiny_shakespeare", "1.0.0", texts)
  train = data.load_text("tiny_shakespeare", window_length=9)
  assert train.windows.shape == (111, 10)
  assert bytes(targets_of(train).astype(np.uint8).ravel()) == _TEXT[1:]
  assert command.main(["prepare", "tiny_shakespeare"]) == 0
  assert capsys.readouterr().out.splitlines() == [
    "tiny_shakespeare train: 1,000 bytes",
    "tiny_shakespeare test: 40 bytes",
  ]
  monkeypatch.setattr(_prepare, "decode_text", None)
  assert len(data.load_text("tiny_shakespeare", window_length=9)) == 111


def test_missing_text_names_the_command(tmp_path, monkeypatch):
  monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
  with pytest.raises(FileNotFoundError, match="prepare tiny_shakespeare"):
    data.load_text("tiny_shakespeare")


def test_shakespeare_is_the_published_one():
  try:
    train, test = (
      data.load_text("tiny_shakespeare", split, window_length=1)
      for split in ("train", "test")
    )
  except (FileNotFoundError, ImportError) as error:
    pytest.skip(f"tiny_shakespeare cannot be read on this machine: {error}")
  assert (len(train), len(test)) == (1_003_853, 55_769)
  start = bytes(train.windows[:13, 0])
  assert start == b"First Citizen"
  assert len(np.unique(train.windows)) == 65
