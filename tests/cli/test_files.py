"""Folders of images and tables in files are data sets, also of commands."""

import json
import re
import sys

import numpy as np
import pytest

from jdist import cli, data
from jdist.cli import _output

PIL = pytest.importorskip("PIL.Image")


def _write_images(folder, sizes, number=10):
  for place, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
    (folder / place).mkdir(parents=True)
    for i in range(number):
      image = PIL.new("RGB", sizes[i % len(sizes)], colour)
      image.save(folder / place / f"{i:02}.png")


def _rows(**more):
  rng = np.random.default_rng(0)
  label = np.array(["x", "y"] * 20)
  return {"label": label, "a": rng.normal(size=40), "b": np.ones(40)} | more


def _write_table(path, rows):
  if path.suffix == ".npz":
    np.savez(path, **rows)
  elif path.suffix == ".npy":
    fields = [(x, y.dtype, y.shape[1:]) for x, y in rows.items()]
    np.save(path, np.array([*zip(*rows.values(), strict=True)], fields))
  else:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(rows), path)


def test_sub_folders_are_classes(tmp_path):
  _write_images(tmp_path, [(6, 4)])
  (tmp_path / ".notes").mkdir()
  (tmp_path / "red" / ".index").write_text("hidden")
  train, test = data.load(tmp_path), data.load(tmp_path, "test")
  assert (len(train), len(test), train.num_classes) == (16, 4, 2)
  assert train.input_shape == (4, 6, 3)
  assert train.images[train.labels == 1][0, 0, 0].tolist() == [255, 0, 0]
  assert train.mean == test.mean == (127.5, 0, 127.5)
  assert train.std == (127.5, 1, 127.5)  # Green has one value.


def test_images_of_different_sizes_are_scaled_and_cropped(tmp_path):
  _write_images(tmp_path, [(20, 10), (10, 40)])
  assert data.load(tmp_path, size=8).input_shape == (8, 8, 3)
  told = r"`size` .*: \S+/01.png has 10x40 pixels, and \S+/00.png 20x10\."
  with pytest.raises(ValueError, match=told):
    data.load(tmp_path)


def test_every_fifth_sample_of_a_class_is_for_testing(tmp_path):
  path = tmp_path / "mine.npz"
  _write_table(path, {"label": np.arange(20) % 2, "a": np.arange(20)})
  test = data.load(path, "test")
  assert test.images.ravel().tolist() == [8, 9, 18, 19]
  # A file that has changed is read again.
  _write_table(path, {"label": np.arange(10) % 2, "a": np.arange(10)})
  assert data.load(path, "test").images.ravel().tolist() == [8, 9]


@pytest.mark.parametrize("kind", ["npz", "npy", "parquet"])
def test_columns_are_numbers_and_a_label(kind, tmp_path):
  path = tmp_path / f"mine.{kind}"
  _write_table(path, _rows())
  train, test = data.load(path), data.load(path, "test")
  assert (len(train), len(test), train.input_shape) == (32, 8, (1, 1, 2))
  normal = train.normalize(train.images)
  np.testing.assert_allclose(normal.mean((0, 1, 2)), 0, atol=1e-5)
  np.testing.assert_allclose(normal[..., 0].std(), 1, rtol=1e-5)


def test_mean_of_many_rows_is_exact(tmp_path):
  # Sums of float32 row by row would be off by 175 deviations.
  path, x = tmp_path / "mine.npy", np.arange(200_000)
  rows = np.zeros(len(x), [("label", "i1"), ("a", "f4"), ("b", "f4")])
  rows["a"], rows["b"] = 1e5 + x % 3, 1.0
  np.save(path, rows)
  train = data.load(path)
  np.testing.assert_allclose(train.mean, [1e5 + 1, 1], rtol=1e-9)
  np.testing.assert_allclose(train.std, [(2 / 3) ** 0.5, 1], rtol=1e-4)


@pytest.mark.parametrize("kind", ["npz", "npy", "parquet"])
def test_numbers_of_rows_that_pandas_writes_are_no_column(kind, tmp_path):
  path = tmp_path / f"mine.{kind}"
  # A constant is no offset, although float32 rounds it.
  rows = _rows(__index_level_0__=np.arange(40), a=np.full(40, 0.1))
  _write_table(path, rows)
  assert data.load(path).input_shape == (1, 1, 2)


def test_one_column_may_hold_images(tmp_path):
  pixels = np.arange(160, dtype=np.uint8).reshape(10, 4, 4)
  np.savez(tmp_path / "mine.npz", image=pixels, label=np.zeros(10, int))
  train = data.load(tmp_path / "mine.npz")
  assert (train.input_shape, train.images.dtype) == ((4, 4, 1), np.uint8)
  assert train.images[0, ..., 0].tolist() == pixels[0].tolist()


@pytest.mark.parametrize(
  ("columns", "shape", "dtype"),
  [
    ({"a": np.ones((10, 4, 4, 2), np.uint8)}, (4, 4, 2), np.uint8),
    ({"a": np.ones((10, 4, 4))}, (4, 4, 1), np.float32),
    ({"a": np.ones((10, 3), np.uint8)}, (1, 1, 3), np.float32),
    # Images are in a column alone.
    (
      {"a": np.ones((10, 2, 2), np.uint8), "b": np.ones(10, bool)},
      (1, 1, 5), np.float32,
    ),
    ({"a": np.full(10, 2**24)}, (1, 1, 1), np.float32),
  ],
)  # fmt: skip
@pytest.mark.parametrize("label", [[True, False], [b"x", b"y"]])
def test_columns_have_their_shape(columns, shape, dtype, label, tmp_path):
  np.savez(tmp_path / "mine.npz", **columns, label=np.array(label * 5))
  train = data.load(tmp_path / "mine.npz")
  assert (train.input_shape, train.images.dtype) == (shape, dtype)
  assert train.images.max() == columns["a"].max()
  assert sorted(train.labels.tolist()) == [0] * 4 + [1] * 4


_BAD_FOLDERS = [
  ("blue", "blue must have images"),
  (".", "must have images"),
  ("red/04.png", "red/04.png must be an image"),
  ("", "`size` (`--image-size`) must be given"),
  (None, "must have five samples of a class"),
]
_BAD_TABLES = [
  ({"a": np.ones(40)}, "a column `label` with a whole number"),
  (_rows(label=np.linspace(0, 1, 40)), "a column `label` with a whole number"),
  (
    _rows(label=np.eye(2, dtype=int)[np.arange(40) % 2]),
    "a column `label` with a whole number",
  ),
  (_rows(label=np.array(3)), "a column `label` with a whole number"),
  ({"label": np.zeros(40, int)}, "must have columns"),
  (_rows(a=np.array(["z"] * 40)), "a of PATH must have a finite float32"),
  (_rows(a=np.full(40, -1e300)), "got float64 [40] with others"),
  (_rows(a=np.full(40, 2**24 + 1)), "with others. Divide integers above 2**24"),
  (_rows(a=1e9 + np.arange(40) / 8), "subtract a large mean"),
  (_rows(a=np.full(40, -(2**63))), "got int64 [40] with others"),
  (_rows(a=np.ones((40, 0))), "got float64 [40, 0] with others"),
  (_rows(b=np.full(40, np.nan)), "got float64 [40] with others"),
  (_rows(b=np.ones(39)), "for each of the 40 labels, got float64 [39]"),
  (_rows(label=np.arange(40)), "five samples of a class"),
  (None, "must be a folder of images, or a file .npz"),
]


def _refused(path, told, capsys=None, *more):
  """Checks an error of the library, and the line of a command."""
  told = told.replace("PATH", str(path))
  if capsys is None:
    with pytest.raises(ValueError, match=re.escape(told)):
      data.load(path)
    return
  assert cli.main(["train", "--files", str(path), *more]) == 2
  line = capsys.readouterr().err
  assert told in line
  assert line.startswith("jdist: error: ") and line.count("\n") == 1


@pytest.mark.parametrize(("broken", "told"), _BAD_FOLDERS)
def test_bad_folder_is_named(broken, told, tmp_path):
  folder = tmp_path / "photos"
  if broken == ".":
    folder.mkdir()
  else:
    sizes = [(8, 8), (9, 9)] if broken == "" else [(8, 8)]
    _write_images(folder, sizes, 4 if broken is None else 5)
  if broken == "blue":
    for file in (folder / "blue").iterdir():
      file.unlink()
  elif broken and broken != ".":
    (folder / broken).write_text("no pixels")
  _refused(folder, told)


@pytest.mark.parametrize("dtype", ["uint16", "int32", "float32"])
def test_images_of_more_bits_are_not_cut_off(dtype, tmp_path):
  for place in ("blue", "red"):
    (tmp_path / place).mkdir()
    for i in range(5):
      pixels = np.full((8, 8), 300, dtype)
      PIL.fromarray(pixels).save(tmp_path / place / f"{i}.tiff")
  _refused(tmp_path, "0.tiff must have 8 bits a channel")


@pytest.mark.parametrize(("rows", "told"), _BAD_TABLES)
def test_bad_table_is_named(rows, told, tmp_path):
  path = tmp_path / "mine.npz"
  if rows is None:
    path.write_text("none")
  else:
    _write_table(path, rows)
  _refused(path, told)


# NumPy leaves the file of a damaged archive open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_table_is_named(tmp_path):
  path = tmp_path / "mine.npz"
  np.savez_compressed(path, **_rows())
  whole, refused = path.read_bytes(), 0
  for place in range(0, len(whole), 7):
    path.write_bytes(
      whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :]
    )
    try:
      data.load(path)
    except ValueError as error:
      refused += str(path) in str(error)
  assert refused > len(whole) / 14


def test_files_stand_alone_and_exist(tmp_path, capsys):
  (tmp_path / "photos" / "red").mkdir(parents=True)
  _refused(tmp_path / "photos", "red must have images", capsys)
  _refused(tmp_path / "none", "`--files` must be a folder or a file", capsys)
  path = tmp_path / "mine.npz"
  _write_table(path, _rows())
  given = ["--model", "transformer"]
  _refused(path, "`--model` must be one for images", capsys, *given)
  given = ["--dataset", "synthetic"]
  _refused(path, "`--dataset` must be left out with `--files`", capsys, *given)
  assert cli.main(["train", "--text", str(path), "--files", str(path)]) == 2
  assert "`--files` must be left out with `--text`" in capsys.readouterr().err
  assert cli.main(["train", "--image-size", "8"]) == 2
  assert "left out without `--files`" in capsys.readouterr().err


def test_missing_package_is_named_with_its_extra(tmp_path, capsys, monkeypatch):
  _write_images(tmp_path / "photos", [(8, 8)])
  monkeypatch.setitem(sys.modules, "PIL.Image", None)
  _refused(tmp_path / "photos", 'pip install ".[data]"', capsys)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["photos", "mine.npz", "mine.parquet"])
def test_command_trains_with_own_files(kind, tmp_path, capsys):
  path = tmp_path / kind
  if kind == "photos":
    _write_images(path, [(8, 8)])
  else:
    rows = _rows()
    _write_table(path, rows | {"a": rows["a"] + 9 * (rows["label"] == "y")})
  words = ["--files", str(path), "--workers", "2", "--substrate", "vmap"]
  words += ["--batch-size", "8", "--epochs", "20", "--warmup-epochs", "0"]
  output = ["--output", str(tmp_path / "run")]
  words += ["--checkpoints", str(tmp_path / "saved"), *output]
  assert cli.main(["train", *words]) == 0
  shown = " ".join(capsys.readouterr().out.split())
  unit = "images" if kind == "photos" else "rows"
  assert f"training and {4 if kind == 'photos' else 8} test {unit};" in shown
  row = json.loads((tmp_path / "run" / "rows.jsonl").read_text())
  assert row["accuracy"] == 1.0
  assert row["config"]["dataset"].startswith(f"{path.stem}-")
  # The same files may lie elsewhere when a run is resumed.
  moved = path.rename(tmp_path / f"{path.stem}{path.suffix}")
  words[1] = str(moved)
  assert cli.main(["train", *words]) == 0
  assert "Nothing left to train" in capsys.readouterr().out
  # Other files are another run.
  if kind == "photos":
    (moved / "red" / "00.png").unlink()
  else:
    _write_table(moved, _rows())
  assert cli.main(["train", *words]) == 2
  assert "`--dataset` is" in capsys.readouterr().err


def test_new_directory_of_a_dataset_of_ones_own_has_no_colon(
  tmp_path, monkeypatch
):
  """A path with a colon is another host's for some programs."""
  monkeypatch.chdir(tmp_path)
  path = _output.output_directory(None, "train-mine:ds")
  assert path.is_dir() and path.name.startswith("train-mine-ds-2")
