"""Images changed at random, inside the step and on the device.

Each function returns an `augment(images, key)` that keeps shape and type. The
change of image i depends on the key and on i alone, so that it is equal to the
bit on every device and substrate, whatever the batch size.

Augment raw pixels, before `Dataset.normalize`: they have a quarter of the
bytes. Pixels outside of an image are zero (black).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jdist import checks

# (images [batch, height, width, channels], key) -> images
Augment = Callable[[jax.Array, jax.Array], jax.Array]


def random_crop(padding: int = 4) -> Augment:
  """Shifts each image by up to `padding` pixels in both directions.

  The image gets a border of zeros, and a window of its size is cut out at one
  of `(2 * padding + 1)**2` places with equal probability.

  Args:
    padding: The border in pixels, >= 1. The default 4 is usual for images of
      32x32 pixels.

  >>> import numpy as np
  >>> images = np.ones((100, 3, 3, 1), np.float32)
  >>> cropped = jax.jit(random_crop(1))(images, jax.random.key(0))
  >>> sorted({float(image.sum()) for image in np.asarray(cropped)})
  [4.0, 6.0, 9.0]

  References:
    He, Zhang, Ren and Sun, "Deep residual learning for image recognition",
    2015, arXiv:1512.03385, section 4.2, with `random_flip`.
  """
  checks.check_int("padding", padding, 1)

  def crop(image: jax.Array, key: jax.Array) -> jax.Array:
    # The window has a static size and a dynamic place, as XLA requires.
    around = ((padding, padding), (padding, padding), (0, 0))
    top, left = jax.random.randint(key, (2,), 0, 2 * padding + 1)
    zero = jnp.zeros_like(top)
    return jax.lax.dynamic_slice(
      jnp.pad(image, around), (top, left, zero), image.shape
    )

  return _for_each(crop)


def random_flip(probability: float = 0.5) -> Augment:
  """Mirrors each image left to right, or leaves it.

  Classes whose mirror image is another class, such as digits, must not be
  flipped.

  Args:
    probability: The probability that an image is mirrored, in [0, 1].

  >>> images = jnp.array([[[[1], [2]]]])
  >>> jax.jit(random_flip(1.0))(images, jax.random.key(0)).tolist()
  [[[[2], [1]]]]
  """
  checks.check_number("probability", probability, high=1)

  def flip(image: jax.Array, key: jax.Array) -> jax.Array:
    flipped = jax.random.bernoulli(key, probability)
    return jnp.where(flipped, image[:, ::-1], image)

  return _for_each(flip)


def compose(*augments: Augment) -> Augment:
  """Applies augmentations one after the other, each with its own key.

  >>> augment = compose(random_crop(4), random_flip())
  >>> images = jnp.zeros((8, 32, 32, 3), jnp.uint8)
  >>> jax.eval_shape(augment, images, jax.random.key(0))
  ShapeDtypeStruct(shape=(8, 32, 32, 3), dtype=uint8)
  """
  for one in augments:
    checks.check_function("augments", one, "images and a key", 2)

  def augment(images: jax.Array, key: jax.Array) -> jax.Array:
    for i, one in enumerate(augments):
      images = one(images, jax.random.fold_in(key, i))
    return images

  return augment


def _for_each(change: Callable[[jax.Array, jax.Array], jax.Array]) -> Augment:
  """Maps a change over a batch; an image's key depends on its place in it."""

  def augment(images: jax.Array, key: jax.Array) -> jax.Array:
    if images.ndim != 4:
      raise ValueError(
        "`images` must be [batch, height, width, channels], got shape "
        f"{images.shape}. A worker's step sees its own images, without the "
        "axis of workers."
      )
    # `split` would give other keys for another batch size; `fold_in` does not.
    places = jnp.arange(len(images))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, places)
    return jax.vmap(change)(images, keys)

  return augment
