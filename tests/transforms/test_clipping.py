"""Clipping a worker's own gradients."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import transforms


def clipped(clip, *workers):
  def one(g):
    return clip.update(g, clip.init(g))[0]

  rows = jax.tree.map(lambda *x: jnp.stack(x), *workers)
  return jax.jit(jax.vmap(one, axis_name="worker"))(rows)


def test_each_worker_has_its_share_of_the_norm():
  # Among four, half of the threshold.
  clip = transforms.clip_local(10.0, "worker")
  long = {"a": jnp.array([6.0, 0.0]), "b": jnp.array([[8.0]])}
  short = jax.tree.map(lambda x: x / 4, long)
  found = clipped(clip, long, short, long, short)
  np.testing.assert_allclose(found["a"][0], [3.0, 0.0], 1e-6)
  np.testing.assert_allclose(found["b"][0], [[4.0]], 1e-6)
  assert found["a"][1].tolist() == [1.5, 0.0]


def test_single_worker_clips_as_optax():
  g = {"a": jnp.array([3.0, 1.0]), "b": jnp.array([[8.0]])}
  clip, other = transforms.clip_local(2.0, None), optax.clip_by_global_norm(2.0)
  found = clip.update(g, clip.init(g))[0]
  wanted = other.update(g, other.init(g))[0]
  chex.assert_trees_all_close(found, wanted, rtol=1e-6)


def test_nonfinite_gradients_pass_unchanged():
  clip = transforms.clip_local(2.0, None)
  g = jnp.array([3.0, jnp.nan])
  np.testing.assert_array_equal(clip.update(g, clip.init(g))[0], g)
  assert clip.update({}, clip.init({}))[0] == {}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64])
@pytest.mark.parametrize("size", [1e-28, 1e-22, 1e15, 1e20, 3e38])
def test_norm_whose_squares_are_out_of_range_is_clipped(size, dtype):
  clip = transforms.clip_local(size / 1e8, None)
  g = {"a": jnp.array([size, -size], dtype), "b": jnp.array([[size]], dtype)}
  found = clip.update(g, clip.init(g))[0]
  wanted = size / 1e8 / np.sqrt(3)
  for x, sign in ((found["a"][0], 1), (found["a"][1], -1), (found["b"], 1)):
    assert x.dtype == dtype
    value = np.asarray(x).astype(complex).real
    rtol = 1e-2 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(value, sign * wanted, rtol)


def test_one_power_suits_leaves_of_any_size():
  g = {"a": jnp.array([1e-30]), "b": jnp.array([-1e30])}
  clip = transforms.clip_local(2.0, None)
  found = clip.update(g, clip.init(g))[0]
  np.testing.assert_allclose(found["b"], [-2.0], 1e-6)
  assert found["a"].item() == 0.0


def test_each_leaf_has_its_own_deviation():
  clip = transforms.clip_deviations(2.5)
  wild = np.r_[np.tile([1.0, -1.0], 50), 90.0].astype(np.float32)
  g = {"a": jnp.asarray(wild), "b": jnp.array(7.0), "c": jnp.array([7.0])}
  found = clip.update(g, clip.init(g))[0]
  np.testing.assert_allclose(
    found["a"][-1], 2.5 * np.sqrt((wild**2).mean()), 1e-5
  )
  np.testing.assert_array_equal(found["a"][:-1], wild[:-1])
  assert found["b"].item() == 7.0 and found["c"].tolist() == [7.0]


@pytest.mark.parametrize("size", [1e-34, 1e-22, 1e20, 1e36])
def test_deviations_do_not_depend_on_scale(size):
  clip = transforms.clip_deviations(2.5)
  g = np.r_[np.tile([1.0, -1.0], 50), 90.0].astype(np.float32)
  wanted = clip.update(jnp.asarray(g), optax.EmptyState())[0]
  found = clip.update(jnp.asarray(size * g), optax.EmptyState())[0]
  np.testing.assert_allclose(found, size * wanted, 1e-5)
  np.testing.assert_array_equal(found[:-1], np.float32(size) * g[:-1])


REJECTED = {
  "threshold": (
    lambda: transforms.clip_local(0.0, None),
    r"`threshold` must be in \(0, inf\], got 0.0",
  ),
  "axis": (lambda: transforms.clip_local(1.0, 3), "`axis` must be .*, got 3"),
  "deviations": (
    lambda: transforms.clip_deviations(-1.0),
    r"`deviations` must be in \(0, inf\], got -1.0",
  ),
  "complex": (
    lambda: transforms.clip_deviations(1.0).init(
      {"a": jnp.ones(2, "complex64")}
    ),
    "`params` must be real for `clip_deviations`, got complex64 at 'a'",
  ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_invalid_arguments_raise(name):
  call, message = REJECTED[name]
  with pytest.raises(ValueError, match=message):
    call()


def test_complex_entries_count_by_their_absolute_values():
  clip = transforms.clip_local(2.0, None)
  g = jnp.array([3j, 4.0], jnp.complex64)
  np.testing.assert_allclose(
    clip.update(g, clip.init(g))[0], [1.2j, 1.6], rtol=1e-6
  )


def test_gradient_that_is_not_finite_is_left_alone():
  clip = transforms.clip_local(1.0, None)
  gradient = {"a": jnp.array([jnp.inf, 4.0]), "b": jnp.array(3.0)}
  found, _ = clip.update(gradient, clip.init(gradient))
  jax.tree.map(np.testing.assert_array_equal, found, gradient)
