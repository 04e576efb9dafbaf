"""Augmentations are allowed changes, and depend on the key alone."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jdist import collectives, data

AUGMENTS = {
  "crop": data.random_crop(2),
  "flip": data.random_flip(),
  "all": data.compose(data.random_crop(1), data.random_flip()),
}
# All tests share one program of each, for 8 images of 5x6x2.
JITTED = {name: jax.jit(augment) for name, augment in AUGMENTS.items()}
SHAPE = (8, 5, 6, 2)
each = pytest.mark.parametrize("name", AUGMENTS)
seeds = st.integers(0, 2**32 - 1)
quick = hypothesis.settings(max_examples=30)


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly():
  """Here the time goes into compiling, and arithmetic is on integers."""
  name = "jax_disable_most_optimizations"
  before = jax.config.read(name)
  jax.config.update(name, True)
  yield
  jax.config.update(name, before)


def numbered():
  """Pixels that are all different, and none zero."""
  n = np.prod(SHAPE[1:])
  one = np.arange(1, n + 1, dtype=np.uint8).reshape(SHAPE[1:])
  return np.tile(one, (SHAPE[0], 1, 1, 1))


def windows(image, padding):
  """What cropping may give, in the order of the shifts."""
  around = ((padding, padding), (padding, padding), (0, 0))
  wide = np.pad(image, around)
  height, width, _ = image.shape
  return [
    wide[top : top + height, left : left + width]
    for top in range(2 * padding + 1)
    for left in range(2 * padding + 1)
  ]


ALLOWED = {
  "crop": lambda image: windows(image, 2),
  "flip": lambda image: [image, image[:, ::-1]],
}


@pytest.mark.parametrize("name", ALLOWED)
def test_all_allowed_augmentations_occur(name):
  image = numbered()[0]
  allowed = [x.tobytes() for x in ALLOWED[name](image)]
  seen = []
  for seed in range(200 // SHAPE[0]):
    images = np.asarray(JITTED[name](numbered(), jax.random.key(seed)))
    seen += [allowed.index(x.tobytes()) for x in images]
  assert set(seen) == set(range(len(allowed)))
  # All are equally frequent, by a chi-squared test far out in its tail.
  counts = np.bincount(seen)
  expected = len(seen) / len(allowed)
  chi_squared = np.sum(np.square(counts - expected)) / expected
  degrees = len(allowed) - 1
  assert chi_squared < degrees + 4 * np.sqrt(2 * degrees) + 4


@quick
@hypothesis.given(st.sampled_from(list(AUGMENTS)), seeds)
def test_same_key_gives_the_same_bits_and_type(name, seed):
  for dtype in (np.uint8, np.float32):
    images = numbered().astype(dtype)
    first = JITTED[name](images, jax.random.key(seed))
    again = JITTED[name](images, jax.random.key(seed))
    assert first.shape == SHAPE and first.dtype == dtype
    np.testing.assert_array_equal(first, again)


def test_bytes_and_numbers_are_changed_alike():
  key = jax.random.key(3)
  expected = JITTED["all"](numbered(), key)
  for dtype in (jnp.float32, jnp.bfloat16):
    result = JITTED["all"](numbered().astype(dtype), key)
    np.testing.assert_array_equal(np.asarray(result, np.uint8), expected)


@each
def test_images_and_keys_have_different_augmentations(name):
  images = numbered()
  results = [JITTED[name](images, jax.random.key(seed)) for seed in range(4)]
  patterns = {np.asarray(result).tobytes() for result in results}
  assert len(patterns) == 4
  for result in results:
    assert len({image.tobytes() for image in np.asarray(result)}) > 1


@quick
@hypothesis.given(st.sampled_from(list(AUGMENTS)), seeds)
def test_augmentation_does_not_depend_on_the_batch_size(name, seed):
  key, images = jax.random.key(seed), numbered()
  whole = np.asarray(JITTED[name](images, key))
  np.testing.assert_array_equal(JITTED[name](images[:3], key), whole[:3])


@pytest.mark.parametrize("substrate", ["vmap", "shard_map"])
@each
def test_augmentation_is_equal_on_all_substrates(name, substrate):
  num_workers = 2
  key = np.asarray(jax.random.key_data(jax.random.key(5)))
  keys = np.stack([key + np.uint32(i) for i in range(num_workers)])
  images = np.stack([numbered(), numbered()[::-1, ::-1]])
  expected = [
    np.asarray(JITTED[name](x, jax.random.wrap_key_data(k)))
    for x, k in zip(images, keys, strict=True)
  ]
  workers = collectives.workers(num_workers, substrate=substrate)

  def step(images, key):
    return AUGMENTS[name](images, jax.random.wrap_key_data(key))

  result = workers.jit(step)(*map(workers.place, (images, keys)))
  np.testing.assert_array_equal(np.asarray(result), np.stack(expected))


def test_composed_augmentations_have_different_keys():
  flip = data.random_flip()
  once = jax.jit(flip)
  twice = jax.jit(data.compose(flip, flip))
  key, images = jax.random.key(0), numbered()
  by_hand = once(images, jax.random.fold_in(key, 0))
  by_hand = once(by_hand, jax.random.fold_in(key, 1))
  np.testing.assert_array_equal(twice(images, key), by_hand)
  # Equal keys for both would undo every flip.
  assert (np.asarray(by_hand) != images).any()


def test_empty_composition_is_the_identity():
  images = numbered()
  assert data.compose()(images, jax.random.key(0)) is images


def test_flip_probabilities_one_and_zero():
  images, key = numbered(), jax.random.key(0)
  run = lambda p: np.asarray(jax.jit(data.random_flip(p))(images, key))  # noqa: E731
  np.testing.assert_array_equal(run(1.0), images[:, :, ::-1])
  np.testing.assert_array_equal(run(0.0), images)


def test_gradients_flow_through_kept_pixels():
  images = numbered().astype(np.float32)
  augment = functools.partial(AUGMENTS["all"], key=jax.random.key(0))
  total = jax.jit(jax.grad(lambda images: augment(images).sum()))
  grads = np.asarray(total(images))
  # Each pixel is kept once or not at all.
  assert set(np.unique(grads)) <= {0.0, 1.0} and grads.any()
