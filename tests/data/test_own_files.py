"""The page's module of own images and tables is a data set of every command."""

import importlib
import pathlib

import numpy as np
import pytest

from jdist import cli, data
from jdist.cli import _commands, _parts, _workload

PIL = pytest.importorskip("PIL.Image")
_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "docs" / "own_files"


@pytest.fixture
def load(monkeypatch):
  """Reads both parts of a path by `--dataset own_files:load`."""
  monkeypatch.syspath_prepend(str(_FOLDER))
  module = importlib.import_module("own_files")

  def run(path):
    module._read.cache_clear()
    data.DATASETS.pop("own_files:load", None)
    monkeypatch.setenv("OWN_FILES", str(path))
    options = _commands.Train(dataset="own_files:load")
    _parts.resolve(options)
    return _workload._load(options)

  yield run
  data.DATASETS.pop("own_files:load", None)


def _rows(label):
  rng = np.random.default_rng(0)
  return {"label": label, "a": rng.normal(size=40), "b": np.ones(40)}


def test_sub_folders_are_classes(load, tmp_path):
  for place, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
    (tmp_path / place).mkdir()
    for i in range(20):
      image = PIL.new("RGB", (40, 30 + i), colour)
      image.save(tmp_path / place / f"{i:02}.png")
  train, test = load(tmp_path)
  assert (len(train), len(test), train.num_classes) == (36, 4, 2)
  assert train.input_shape == (32, 32, 3)
  assert train.images[train.labels == 1][0, 0, 0].tolist() == [255, 0, 0]
  assert train.mean == test.mean and train.mean[1] == 0 < train.std[1]


@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_columns_are_numbers_and_a_label(kind, load, tmp_path):
  rows, path = _rows(np.array(["x", "y"] * 20)), tmp_path / f"mine.{kind}"
  if kind == "npz":
    np.savez(path, **rows)
  else:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(rows), path)
  train, test = load(path)
  assert (len(train), len(test), train.input_shape) == (36, 4, (1, 1, 2))
  normal = train.normalize(train.images)
  np.testing.assert_allclose(normal.mean((0, 1, 2)), 0, atol=1e-5)
  np.testing.assert_allclose(normal[..., 0].std(), 1, rtol=1e-5)


@pytest.mark.parametrize(
  ("rows", "told"),
  [
    ({"a": np.ones(40)}, "must have a column `label`, got a"),
    ({**_rows(np.zeros(40)), "a": np.array(["z"] * 40)}, "must be numbers"),
    ({**_rows(np.zeros(40)), "a": np.full(40, np.nan)}, "finite numbers"),
    (_rows(np.arange(40)), "ten samples of a class"),
    (None, "must be a folder of images, or a file"),
  ],
)
def test_bad_files_are_named_in_one_line(rows, told, load, tmp_path, capsys):
  path = tmp_path / ("mine.npz" if rows else "mine.txt")
  if rows:
    np.savez(path, **rows)
  with pytest.raises(ValueError, match=told):
    load(path)
  # The command says so in a line.
  assert cli.main(["train", "--dataset", "own_files:load"]) == 2
  told_line = capsys.readouterr().err
  assert "`--dataset` must take 'train', but raised ValueError: " in told_line
  assert told in told_line and told_line.count("\n") == 1


def test_file_that_is_no_image_is_named(load, tmp_path):
  (tmp_path / "a").mkdir()
  (tmp_path / "a" / "notes.txt").write_text("none")
  with pytest.raises(ValueError, match=r"notes.txt must be an image"):
    load(tmp_path)
