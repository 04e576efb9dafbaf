"""Convolutions by patches and halving match XLA's own."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdist import models
from jdist.models import _layers, _patches


def _draw(*shape, dtype=jnp.float32):
  entries = np.random.default_rng(0).standard_normal(shape, np.float32)
  return jnp.asarray(entries, dtype)


@pytest.mark.parametrize("vmapped", [False, True])
@pytest.mark.parametrize(
  ("size", "window", "stride", "padding"),
  [
    ((8, 8), (5, 5), 1, "VALID"),
    ((9, 6), (3, 3), 1, "SAME"),
    ((9, 6), (3, 3), 2, "SAME"),
    ((11, 8), (7, 7), 2, ((3, 3), (2, 3))),
    ((5, 7), (1, 1), 2, "VALID"),
    ((7, 9), (3, 2), 2, "VALID"),
  ],
)
def test_values_and_gradients_equal_those_of_xla(
  size, window, stride, padding, vmapped
):
  many = (2,) if vmapped else ()
  images, kernel = _draw(*many, 3, *size, 2), _draw(*many, *window, 2, 4)
  numbers = ("NHWC", "HWIO", "NHWC")

  def run(convolve):
    def loss(images, kernel):
      y = convolve(
        images, kernel, (stride, stride), padding, dimension_numbers=numbers
      )
      return jnp.sum(jnp.sin(y)), y

    gradient = jax.grad(loss, (0, 1), has_aux=True)
    return jax.jit(jax.vmap(gradient) if vmapped else gradient)(images, kernel)

  mine, xla = run(_patches.convolve), run(jax.lax.conv_general_dilated)
  # Up to 98 products of about 1 are summed in another order.
  chex.assert_trees_all_close(mine, xla, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [(6, 5), (9, 4)])
def test_strided_windows_are_those_of_xla(size):
  images, kernel = _draw(1, *size, 1), _draw(3, 3, 1, 2)
  numbers = ("NHWC", "HWIO", "NHWC")
  mine, xla = (
    convolve(images, kernel, (2, 2), "SAME", dimension_numbers=numbers)
    for convolve in (_patches.convolve, jax.lax.conv_general_dilated)
  )
  np.testing.assert_allclose(mine, xla, rtol=1e-4, atol=1e-4)


def test_precision_is_that_of_the_product():
  numbers = ("NHWC", "HWIO", "NHWC")

  def run(images, kernel):
    return _patches.convolve(
      images, kernel, (1, 1), "SAME", precision="highest",
      dimension_numbers=numbers,
    )  # fmt: skip

  program = jax.jit(run).lower(_draw(1, 4, 4, 1), _draw(3, 3, 1, 2)).as_text()
  assert "precision = [HIGHEST, HIGHEST]" in program


def test_bfloat16_stays_bfloat16():
  images, kernel = (
    _draw(*shape, dtype=jnp.bfloat16) for shape in ((2, 6, 6, 3), (3, 3, 3, 4))
  )
  numbers = ("NHWC", "HWIO", "NHWC")
  mine, xla = (
    convolve(images, kernel, (1, 1), "SAME", dimension_numbers=numbers)
    for convolve in (_patches.convolve, jax.lax.conv_general_dilated)
  )
  assert mine.dtype == jnp.bfloat16
  # Sums of the same products are rounded to 8 bits once.
  np.testing.assert_allclose(
    mine.astype(np.float32), xla.astype(np.float32), rtol=2**-6, atol=2**-6
  )


@pytest.mark.parametrize(
  ("platform", "convolutions"), [("cpu", 0), ("cuda", 2)]
)
def test_platform_of_the_compilation_decides(platform, convolutions):
  model = models.build("lenet", input_shape=(32, 32, 3), num_classes=10)

  def predict(params, images):
    return model.apply(params, model.state, images, train=False)[0]

  traced = jax.jit(predict).trace(model.params, _draw(4, 32, 32, 3))
  program = traced.lower(lowering_platforms=(platform,)).as_text()
  assert program.count("stablehlo.convolution") == convolutions


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
@pytest.mark.parametrize("size", [(4, 6), (5, 6), (1, 1)])
def test_halving_is_max_pooling(size, padding):
  images = _draw(2, *size, 3)

  def run(pool):
    def loss(images):
      y = pool(images)
      return jnp.sum(jnp.sin(y)), y

    return jax.grad(loss, has_aux=True)(images)

  mine = run(lambda x: _patches.halve(x, padding=padding))
  xla = run(lambda x: nnx.max_pool(x, (2, 2), strides=(2, 2), padding=padding))
  for one, other in zip(mine, xla, strict=True):
    np.testing.assert_array_equal(one, other)


def test_equal_maxima_share_the_gradient():
  gradient = jax.grad(lambda x: _patches.halve(x)[0, 0, 0, 0])
  np.testing.assert_array_equal(gradient(jnp.ones((1, 2, 2, 1))), 0.25)


@pytest.mark.parametrize("channels", [8, 9])
def test_images_of_at_most_eight_channels_are_convolved_as_patches(channels):
  layer = _layers.conv(channels, 2, 3, rngs=nnx.Rngs(0))
  of_patches = layer.conv_general_dilated is _patches.convolve
  assert of_patches == (channels == 8)
