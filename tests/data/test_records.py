"""Small prepared sets are decoded like the large ones."""

import numpy as np
import pytest

from jdist import data
from jdist.data import _prepare
from tests.data import _prepared


@pytest.fixture
def machine(tmp_path, monkeypatch):
  monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
  monkeypatch.setenv("JDIST_CACHE_DIR", str(tmp_path / "cache"))
  return tmp_path


def pixels(n, *shape):
  rng = np.random.default_rng(n)
  return rng.integers(0, 256, (n, *shape), np.uint8)


def test_grayscale_images_are_read_unchanged(machine):
  train, test = pixels(5, 28, 28, 1), pixels(3, 28, 28, 1)
  _prepared.write(
    machine / "tfds",
    "fashion_mnist",
    "3.0.1",
    {
      "train": [(_prepared.encode(x[..., 0]), i) for i, x in enumerate(train)],
      "test": [(_prepared.encode(x[..., 0]), 9) for x in test],
    },
    num_classes=10,
    shape=(28, 28, 1),
  )
  dataset = data.load("fashion_mnist")
  np.testing.assert_array_equal(dataset.images, train)
  assert dataset.labels.tolist() == [0, 1, 2, 3, 4]
  held_out = data.load("fashion_mnist", "test")
  np.testing.assert_array_equal(held_out.images, test)
  # Both splits have the statistics of the train split.
  for split in (dataset, held_out):
    np.testing.assert_allclose(split.mean, [train.mean()], rtol=1e-6)
    np.testing.assert_allclose(split.std, [train.std()], rtol=1e-6)


def write_imagenet_resized(machine):
  train, test = pixels(4, 8, 8, 3), pixels(2, 8, 8, 3)
  _prepared.write(
    machine / "tfds",
    "imagenet_resized/8x8",
    "0.1.0",
    {
      "train": [(_prepared.encode(x), 999) for x in train],
      "validation": [(_prepared.encode(x), 7) for x in test],
    },
    num_classes=1000,
    shape=(8, 8, 3),
  )
  return train, test


def test_validation_split_replaces_a_missing_test_split(machine):
  train, test = write_imagenet_resized(machine)
  dataset = data.load("imagenet_resized/8x8", "test")
  np.testing.assert_array_equal(dataset.images, test)
  assert dataset.labels.tolist() == [7, 7] and dataset.num_classes == 1000
  np.testing.assert_allclose(dataset.mean, train.mean((0, 1, 2)), rtol=1e-6)
  np.testing.assert_allclose(dataset.std, train.std((0, 1, 2)), rtol=1e-6)


def test_statistics_are_measured_once(machine, monkeypatch):
  write_imagenet_resized(machine)
  first = data.load("imagenet_resized/8x8", "test")
  files = {path.name for path in (machine / "cache").iterdir()}
  stem = "imagenet_resized-8x8-0.1.0"
  assert files == {f"{stem}-{x}" for x in ("train", "test", "statistics")}
  monkeypatch.setattr(_prepare, "measure", None)
  second = data.load("imagenet_resized/8x8", "test")
  assert (first.mean, first.std) == (second.mean, second.std)


def test_damaged_statistics_are_measured_again(machine):
  write_imagenet_resized(machine)
  first = data.load("imagenet_resized/8x8")
  (path,) = (machine / "cache").glob("*statistics/mean*")
  path.write_bytes(path.read_bytes()[:50])
  assert data.load("imagenet_resized/8x8").mean == first.mean


def write_imagenette(machine, *encoded):
  _prepared.write(
    machine / "tfds",
    "imagenette/160px-v2",
    "1.0.0",
    {
      "train": [(x, i) for i, x in enumerate(encoded)],
      "validation": [(encoded[0], 0)],
    },
    num_classes=10,
    encoding_format="jpeg",
  )


def test_photographs_of_all_sizes_and_colours_become_squares(machine):
  # These are a wide and a high dark photograph with a bright middle.
  wide = np.full((160, 240, 3), 20, np.uint8)
  wide[:, 80:160] = 200
  high = wide.transpose(1, 0, 2)
  large = np.repeat(np.repeat(wide, 2, 0), 2, 1)
  small = wide[::2, ::2]
  write_imagenette(
    machine,
    _prepared.encode(wide, "JPEG"),
    _prepared.encode(high, "JPEG"),
    _prepared.encode(large, "JPEG"),
    _prepared.encode(small, "JPEG"),
    _prepared.encode(wide, "JPEG", "L"),
    _prepared.encode(wide, "JPEG", "CMYK"),
  )
  images = data.load("imagenette").images
  assert images.shape == (6, 160, 160, 3)
  # 40 columns are cut off on either side, which leaves 40 dark, 80 bright and
  # 40 dark ones.
  expected = wide[:, 40:200].astype(int)
  for i, image in enumerate(images):
    image = image.transpose(1, 0, 2) if i == 1 else image
    away = np.abs(image.astype(int) - expected)
    # Scaling blurs the edges.
    assert (away.mean(axis=(0, 2)) > 5).sum() <= 8, i
    assert away[:, 60:100].max() < 8 and away[:, :30].max() < 8, i


def test_channels_keep_their_order(machine):
  red = np.zeros((160, 160, 3), np.uint8)
  red[..., 0] = 250
  # A constant channel could not be normalized.
  red[80:] = 255 - red[80:]
  write_imagenette(machine, _prepared.encode(red, "JPEG"))
  dataset = data.load("imagenette", "test")
  np.testing.assert_allclose(dataset.images[0, 0, 0], [250, 0, 0], atol=4)


def test_measured_statistics_are_those_of_all_pixels(monkeypatch):
  monkeypatch.setattr(_prepare, "_CHUNK", 3)
  images = pixels(10, 4, 5, 3)
  mean, std = _prepare.measure(images)
  np.testing.assert_allclose(mean, images.mean((0, 1, 2)), rtol=1e-12)
  np.testing.assert_allclose(std, images.std((0, 1, 2)), rtol=1e-12)


def test_configurations_of_a_set_are_prepared_separately(machine):
  write_imagenet_resized(machine)
  assert _prepare.find_prepared("imagenet_resized/8x8")
  with pytest.raises(FileNotFoundError, match="prepare imagenet_resized/16x16"):
    data.load("imagenet_resized/16x16")
