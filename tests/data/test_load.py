"""Data sets are read, cached, and missing ones reported."""

import json
import pathlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import data
from jdist.data import _load, _prepare
from jdist.storage import sealed_json

BUNDLED = {"digits", "synthetic"}
TFDS_NAMES = [
  name for name in data.DATASETS if name not in (*BUNDLED, *data.TEXT_NAMES)
]


def load_or_skip(name, split="train"):
  try:
    return data.load(name, split)
  except FileNotFoundError:
    pytest.skip(f"{name} is not prepared on this machine")


def fake_prepared(folder, name, version, file_format="array_record"):
  path = pathlib.Path(folder) / name / version
  path.mkdir(parents=True)
  info = json.dumps({"fileFormat": file_format})
  (path / "dataset_info.json").write_text(info)
  return path


@pytest.fixture
def empty_machine(tmp_path, monkeypatch):
  monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
  monkeypatch.setenv("JDIST_CACHE_DIR", str(tmp_path / "cache"))
  return tmp_path


@pytest.fixture
def fake_mnist(empty_machine, monkeypatch):
  """A prepared set whose decoding is counted and gives three small images."""
  fake_prepared(empty_machine / "tfds", "mnist", "3.0.1")
  decoded = []

  def decode(prepared, split, size):
    assert size is None
    decoded.append((prepared.name, split))
    return np.ones((3, 28, 28, 1), np.uint8), np.arange(3, dtype=np.int32)

  monkeypatch.setattr(_prepare, "decode", decode)
  return empty_machine / "cache" / "mnist-3.0.1-train", decoded


def test_digits_are_real_and_split_by_class():
  train, test = data.load("digits"), data.load("digits", "test")
  assert (len(train), len(test)) == (1442, 355)
  assert train.images.dtype == np.uint8 and train.labels.dtype == np.int32
  assert train.images.max() == 16 and train.input_shape == (8, 8, 1)
  for k in range(10):
    in_train, in_test = (train.labels == k).sum(), (test.labels == k).sum()
    assert in_test == (in_train + in_test) // 5


def test_no_digit_is_lost_or_in_both_splits():
  import sklearn.datasets

  images, _ = sklearn.datasets.load_digits(return_X_y=True)
  together = [data.load("digits", split).images for split in ("train", "test")]
  together = np.concatenate(together).reshape(-1, 64)
  assert sorted(map(bytes, together)) == sorted(
    map(bytes, images.astype(np.uint8))
  )


@pytest.mark.parametrize(
  "name, shape, labels",
  [
    ("mnist", (60000, 28, 28, 1), [4, 1, 0, 7, 8, 1, 2, 7]),
    ("fashion_mnist", (60000, 28, 28, 1), None),
    ("cifar10", (50000, 32, 32, 3), [7, 8, 4, 4, 6, 5, 2, 9]),
    ("cifar100", (50000, 32, 32, 3), [66, 23, 40, 39, 7, 15, 11, 44]),
  ],
)
def test_train_split_has_the_published_order(name, shape, labels):
  dataset = load_or_skip(name)
  assert dataset.images.shape == shape and dataset.images.dtype == np.uint8
  assert labels is None or dataset.labels[:8].tolist() == labels
  counts = np.bincount(dataset.labels, minlength=dataset.num_classes)
  assert len(counts) == dataset.num_classes and counts.min() > 0
  assert len(load_or_skip(name, "test")) == 10000


STATED = [
  name for name, source in data.DATASETS.items() if source.mean is not None
]


@pytest.mark.parametrize("name", STATED)
def test_statistics_are_those_of_the_train_split(name):
  dataset = load_or_skip(name)
  # Values are counted, because a mean of 150 million pixels is slow.
  values = np.arange(256)
  count = [
    np.bincount(dataset.images[..., channel].ravel(), minlength=256)
    for channel in range(dataset.input_shape[-1])
  ]
  mean = [np.average(values, weights=c) for c in count]
  square = [np.average(values**2, weights=c) for c in count]
  std = np.sqrt(np.array(square) - np.square(mean))
  np.testing.assert_allclose(dataset.mean, mean, rtol=1e-6)
  np.testing.assert_allclose(dataset.std, std, rtol=1e-6)


def test_statistics_count_every_image_of_every_chunk(monkeypatch):
  monkeypatch.setattr(_prepare, "_CHUNK", 2)
  images = np.random.default_rng(0).integers(0, 256, (5, 2, 3, 2), np.uint8)
  mean, std = _prepare.measure(images)
  pixels = images.reshape(-1, 2).astype(float)
  np.testing.assert_allclose(mean, pixels.mean(0), 1e-12)
  np.testing.assert_allclose(std, pixels.std(0), 1e-12)


def test_both_splits_are_normalized_by_the_train_split():
  train, test = data.load("digits"), data.load("digits", "test")
  assert (train.mean, train.std) == (test.mean, test.std)


def test_normalize_is_the_same_inside_jit():
  digits = data.load("digits")
  raw = digits.images[:5]
  normalized = jax.jit(digits.normalize)(jnp.asarray(raw))
  assert normalized.dtype == jnp.float32 and normalized.shape == raw.shape
  np.testing.assert_allclose(normalized, digits.normalize(raw), rtol=1e-6)
  whole = digits.normalize(digits.images)
  assert abs(whole.mean()) < 1e-5 and abs(whole.std() - 1) < 1e-5


def test_normalize_uses_statistics_of_each_channel():
  images = np.full((1, 1, 1, 3), 6, np.uint8)
  dataset = data.Dataset(
    "mine", "train", images, np.zeros(1, np.int32), 1, (0, 4, 6), (1, 2, 4)
  )
  assert dataset.normalize(images).ravel().tolist() == [6, 1, 0]


def test_loaded_arrays_are_read_only():
  for array in (data.load("digits").images, data.load("digits").labels):
    with pytest.raises(ValueError, match="read-only"):
      array[0] = 0


def test_dataset_prints_without_its_pixels():
  assert repr(data.load("digits")).startswith(
    "Dataset(name='digits', split='train', num_classes=10, mean="
  )


@pytest.mark.parametrize("name", TFDS_NAMES)
def test_missing_set_names_the_command_at_once(
  name, empty_machine, monkeypatch
):
  """Importing what decodes it takes seconds."""
  for module in ("tensorflow_datasets", "tensorflow", "array_record", "PIL"):
    monkeypatch.setitem(sys.modules, module, None)
  with pytest.raises(FileNotFoundError) as error:
    data.load(name)
  assert f"python -m jdist.data prepare {name}" in str(error.value)
  assert str(empty_machine / "tfds") in str(error.value)


def test_set_of_another_format_counts_as_not_prepared(
  empty_machine,
):
  fake_prepared(empty_machine / "tfds", "mnist", "3.0.1", "tfrecord")
  with pytest.raises(FileNotFoundError, match="another format"):
    data.load("mnist")


def test_newest_prepared_version_is_read(empty_machine):
  for version in ("3.9.0", "3.10.0", "3.2.7"):
    fake_prepared(empty_machine / "tfds", "mnist", version)
  fake_prepared(empty_machine / "tfds", "mnist", "3.11.0", "tfrecord")
  fake_prepared(empty_machine / "tfds", "mnist", "9.0.0.incomplete")
  assert _prepare.find_prepared("mnist").name == "3.10.0"


def test_set_is_decoded_once(fake_mnist):
  path, decoded = fake_mnist
  first, second = data.load("mnist"), data.load("mnist")
  assert decoded == [("3.0.1", "train")]
  assert [file.name for file in path.parent.iterdir()] == [path.name]
  np.testing.assert_array_equal(first.images, second.images)
  np.testing.assert_array_equal(first.labels, second.labels)
  assert second.images.dtype == np.uint8 and second.labels.dtype == np.int32


def test_another_version_or_split_is_decoded_anew(fake_mnist, empty_machine):
  _, decoded = fake_mnist
  data.load("mnist")
  data.load("mnist", "test")
  fake_prepared(empty_machine / "tfds", "mnist", "3.1.0")
  data.load("mnist")
  assert decoded == [("3.0.1", "train"), ("3.0.1", "test"), ("3.1.0", "train")]


def flip_a_bit(content):
  middle = len(content) // 2
  return content[:middle] + b"\x07" + content[middle + 1 :]


@pytest.mark.parametrize(
  "file", ("images-*.npy", "labels-*.npy", "arrays.json")
)
@pytest.mark.parametrize(
  "damage",
  [
    lambda content: b"",
    lambda content: b"neither an array nor JSON",
    lambda content: content[: len(content) // 2],
    flip_a_bit,
    None,
  ],
  ids=["emptied", "replaced", "cut", "a bit flipped", "removed"],
)
def test_damaged_cache_is_rebuilt(fake_mnist, damage, file):
  folder, decoded = fake_mnist
  data.load("mnist")
  (path,) = folder.glob(file)
  if damage is None:
    path.unlink()
  else:
    path.write_bytes(damage(path.read_bytes()))
  assert (data.load("mnist").images == 1).all()
  data.load("mnist")
  assert len(decoded) == 2


def test_cache_that_cannot_be_written_does_not_end_the_run(
  fake_mnist, monkeypatch, tmp_path
):
  _, decoded = fake_mnist
  (tmp_path / "file").write_text("")
  monkeypatch.setenv("JDIST_CACHE_DIR", str(tmp_path / "file" / "cache"))
  data.load("mnist")
  assert len(data.load("mnist")) == 3
  assert len(decoded) == 2


def test_write_that_fails_leaves_nothing_behind(fake_mnist, monkeypatch):
  path, _ = fake_mnist
  write = sealed_json.write_whole

  def write_whole(path, *data):
    # The lease of another test is renewed by a thread.
    if threading.current_thread() is not threading.main_thread():
      return write(path, *data)
    path.write_bytes(b"half")
    raise OSError("No space left on device")

  monkeypatch.setattr(sealed_json, "write_whole", write_whole)
  data.load("mnist")
  assert list(path.parent.iterdir()) == []


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
  def cache():
    return _load.path_of("mnist", tmp_path / "3.0.1", "test").parent

  monkeypatch.setenv("JDIST_CACHE_DIR", str(tmp_path / "mine"))
  assert cache() == tmp_path / "mine"
  monkeypatch.delenv("JDIST_CACHE_DIR")
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  assert cache() == tmp_path / "jdist"
  monkeypatch.delenv("XDG_CACHE_HOME")
  monkeypatch.setenv("HOME", str(tmp_path))
  assert cache() == tmp_path / ".cache" / "jdist"


@pytest.mark.parametrize(
  "missing, call",
  [
    ("sklearn.datasets", lambda: data.load("digits")),
    ("tensorflow_datasets", lambda: data.load("mnist")),
    ("PIL.Image", lambda: data.load("mnist")),
    ("array_record", lambda: data.load("mnist")),
  ],
)
def test_missing_package_names_the_extra(
  missing, call, monkeypatch, empty_machine
):
  fake_prepared(empty_machine / "tfds", "mnist", "3.0.1")
  if missing != "tensorflow_datasets":
    fake = type("tfds", (), {})
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", fake)
  monkeypatch.setitem(sys.modules, missing, None)
  with pytest.raises(ImportError, match=r'pip install "\.\[data\]"'):
    call()


def make_batches():
  images = np.zeros((8, 1, 1, 1), np.uint8)
  labels = np.zeros(8, np.int32)
  dataset = data.Dataset("mine", "train", images, labels, 1, (0,), (1,))
  return data.Batches(dataset, 2, 2, seed=0)


def modules_after(code):
  code += "\nimport sys; print(*sys.modules)"
  result = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  return set(result.stdout.split())


def test_importing_data_loads_no_extra():
  loaded = modules_after("import jdist.data")
  extras = {"sklearn", "grain", "tensorflow_datasets", "PIL", "array_record"}
  assert not loaded & (extras | {"tensorflow"})


def test_reading_never_imports_tensorflow(tmp_path, monkeypatch):
  if not _prepare.find_prepared("mnist"):
    pytest.skip("mnist is not prepared on this machine")
  # With an empty cache the records themselves are read and decoded.
  monkeypatch.setenv("JDIST_CACHE_DIR", str(tmp_path))
  loaded = modules_after(
    "from jdist import data\n"
    "assert data.load('mnist', 'test').labels[:4].tolist() == [2, 0, 4, 8]"
  )
  assert "tensorflow_datasets" in loaded and "tensorflow" not in loaded
  assert (tmp_path / "mnist-3.0.1-test").exists()


@pytest.mark.parametrize("split", ["train", "test"])
def test_set_of_ones_own_gives_each_split(split, monkeypatch):
  monkeypatch.setitem(
    data.DATASETS, "own", lambda split: data.load("synthetic", split)
  )
  assert data.load("own", split).split == split
  monkeypatch.setitem(data.DATASETS, "own", lambda split: None)
  with pytest.raises(ValueError, match="`own` must be a function that returns"):
    data.load("own", split)
