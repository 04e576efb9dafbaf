"""Where a predictor is moved to: other data, and another number of workers."""

import dataclasses

import config
import numpy as np

# Of images at a time, in statistics.
_PART = 1000


def to_data(chains: config.Chains, dataset: str) -> config.Chains:
  """The same network and workers, on another data set in the same form.

  Args:
    chains: where the predictor is from, with all of its data.
    dataset: a name of `jdist.data`, with as many classes.
  """
  options = dataclasses.replace(chains.options, dataset=dataset)
  other = type(chains)(options, chains.variants)
  mine, found = chains.workload.train, other.workload
  if found.train.num_classes != mine.num_classes:
    raise SystemExit(
      f"`other_dataset` must have {mine.num_classes} classes as {mine.name}, "
      f"got {dataset} with {found.train.num_classes}."
    )
  images = in_form(found.train.images, mine.input_shape)
  mean, std = measure(images)
  train = dataclasses.replace(found.train, images=images, mean=mean, std=std)
  test = dataclasses.replace(
    found.test,
    images=in_form(found.test.images, mine.input_shape),
    mean=mean,
    std=std,
  )
  workload = dataclasses.replace(
    found,
    train=train,
    test=test,
    model=lambda seed: other.build(train, seed),
  )
  return type(chains)(options, chains.variants, workload)


def to_workers(chains: config.Chains, workers: int) -> config.Chains:
  """The same on another number of workers, each with as many images.

  With as many in a step of all it would be the same run.
  """
  options = chains.options
  images = options.batch_size // options.workers
  options = dataclasses.replace(
    options, workers=workers, batch_size=images * workers
  )
  return type(chains)(options, chains.variants)


def in_form(
  images: np.ndarray, input_shape: tuple[int, int, int]
) -> np.ndarray:
  """Brings images to a shape: their middle, or zeros around them.

  Colors become gray by their mean, and gray ones three equal colors.

  Args:
    images: uint8 [n, height, width, channels].
    input_shape: (height, width, channels).

  Raises:
    ValueError: if neither the one nor the other number of channels is 1.

  >>> in_form(np.full((1, 3, 1, 2), 7, np.uint8), (1, 3, 1)).ravel().tolist()
  [0, 7, 0]
  """
  *sizes, num_channels = input_shape
  for axis, size in enumerate(sizes, 1):
    more = size - images.shape[axis]
    if more < 0:
      first = -more // 2
      images = np.take(images, range(first, first + size), axis)
    else:
      around = [(0, 0)] * images.ndim
      around[axis] = (more // 2, more - more // 2)
      images = np.pad(images, around)
  found = images.shape[-1]
  if found == num_channels:
    return images
  if num_channels == 1:
    total = images.sum(-1, keepdims=True, dtype=np.uint16)
    return ((total + found // 2) // found).astype(images.dtype)
  if found == 1:
    return np.repeat(images, num_channels, -1)
  raise ValueError(
    f"`images` must have {num_channels} channels or 1, got {found}. Take "
    "another data set."
  )


def measure(
  images: np.ndarray,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Mean and standard deviation of each channel, in raw units.

  >>> measure(np.array([1, 3], np.uint8).reshape(2, 1, 1, 1))
  ((2.0,), (1.0,))
  """
  total = squares = np.zeros(images.shape[-1])
  for first in range(0, len(images), _PART):
    part = images[first : first + _PART].astype(np.float64)
    total = total + part.sum((0, 1, 2))
    squares = squares + (part**2).sum((0, 1, 2))
  size = images[..., 0].size
  mean = total / size
  std = np.sqrt(squares / size - mean**2)
  return tuple(mean.tolist()), tuple(std.tolist())
