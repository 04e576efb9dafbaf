"""Normalization by hand, against Flax, and with padding."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdist import models
from jdist.models import _normalization


def inputs(*shape):
  # NumPy draws them, as JAX would compile a program for each shape.
  rng = np.random.default_rng(0)
  return jnp.asarray(3 + 2 * rng.standard_normal(shape, np.float32))


def run(norm, x, mask=None, *, train=True, params=None, state=None):
  """Gives the output and the new state, from one compiled program."""
  model = models.functional(norm)

  @jax.jit
  def apply(params, state, x, mask):
    return model.apply(params, state, x, train=train, mask=mask)

  params = model.params if params is None else params
  state = model.state if state is None else state
  return apply(params, state, x, mask)


def test_one_batch_matches_hand_computation():
  norm = models.BatchNorm(1, momentum=0.75, epsilon=0.0)
  # The mean is 4 and the variance (9 + 1 + 1 + 9) / 4 = 5.
  y, state = run(norm, jnp.array([[1.0], [3.0], [5.0], [7.0]]))
  expected = np.array([[-3.0], [-1.0], [1.0], [3.0]]) / np.sqrt(5)
  np.testing.assert_allclose(y, expected, rtol=1e-6)
  assert state["mean"].tolist() == [1.0]  # 0.75 * 0 + 0.25 * 4
  assert state["var"].tolist() == [2.0]  # 0.75 * 1 + 0.25 * 5
  # One sample counts, too.
  _, state = run(norm, jnp.array([[2.0], [9.0]]), jnp.array([1, 0]))
  assert state["mean"].tolist() == [0.5]


def test_evaluation_uses_the_running_statistics():
  norm = models.BatchNorm(1, epsilon=0.0)
  state = {"mean": jnp.array([4.0]), "var": jnp.array([5.0])}
  x = jnp.array([[4.0], [9.0]])
  y, after = run(norm, x, train=False, state=state)
  np.testing.assert_allclose(y, [[0.0], [np.sqrt(5)]], rtol=1e-6)
  chex.assert_trees_all_equal(after, state)


def test_batch_norm_equals_that_of_flax():
  ours = models.BatchNorm(5)
  flax = nnx.BatchNorm(5, momentum=0.9, epsilon=1e-5, rngs=nnx.Rngs(0))
  params = {"scale": jnp.arange(1.0, 6.0), "bias": jnp.arange(5.0)}
  state = {"mean": jnp.arange(2.0, 7.0), "var": jnp.arange(3.0, 8.0)}
  x = inputs(7, 3, 4, 5) / 500  # So that epsilon counts.
  for train in (True, False):
    results = [
      run(norm, x, train=train, params=params, state=state)
      for norm in (ours, flax)
    ]
    chex.assert_trees_all_close(*results, rtol=1e-4, atol=1e-4)


def test_group_norm_equals_that_of_flax():
  ours = _normalization.GroupNorm(6, num_groups=3)
  flax = nnx.GroupNorm(6, num_groups=3, epsilon=1e-5, rngs=nnx.Rngs(0))
  params = {"scale": jnp.arange(1.0, 7.0), "bias": jnp.arange(6.0)}
  x = inputs(7, 3, 4, 6) / 500
  y, _ = run(ours, x, params=params)
  expected, _ = run(flax, x, params=params)
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_layer_norm_equals_that_of_flax():
  ours = _normalization.LayerNorm(6)
  flax = nnx.LayerNorm(6, epsilon=1e-5, rngs=nnx.Rngs(0))
  params = {"scale": jnp.arange(1.0, 7.0), "bias": jnp.arange(6.0)}
  x = inputs(7, 3, 6) / 500
  y, _ = run(ours, x, params=params)
  expected, _ = run(flax, x, params=params)
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_epsilon_of_groups_is_the_given_one():
  norm = _normalization.GroupNorm(2, num_groups=1, epsilon=3.0)
  # The variance is 1, and the deviation 2 with epsilon.
  assert norm(jnp.array([[3.0, 5.0]])).tolist() == [[-0.5, 0.5]]


def test_type_of_inputs_and_parameters_is_promoted():
  half = jnp.ones((1, 2), jnp.bfloat16)
  norm = _normalization.LayerNorm(2)
  with jax.numpy_dtype_promotion("standard"):
    assert norm(half).dtype == jnp.float32
    norm.scale, norm.bias = nnx.Param(half[0]), nnx.Param(half[0])
    assert norm(half).dtype == jnp.bfloat16
    assert norm(half.astype(jnp.float32)).dtype == jnp.float32


def test_group_norm_keeps_samples_independent():
  norm = _normalization.GroupNorm(6, num_groups=2)
  x = inputs(4, 3, 3, 6)
  together, alone = run(norm, x)[0], run(norm, x[:1])[0]
  np.testing.assert_allclose(together[:1], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask_type", [np.float32, np.int32, np.bool_])
def test_padding_at_any_place_does_not_count(mask_type):
  x = np.asarray(inputs(4, 3, 3, 2))
  rows = [0, 3, 5, 6]
  padded = np.full((8, 3, 3, 2), np.nan, np.float32)
  padded[rows] = x
  mask = np.isin(np.arange(8), rows).astype(mask_type)
  expected, state = run(models.BatchNorm(2), x)
  y, masked_state = run(models.BatchNorm(2), padded, mask)
  np.testing.assert_allclose(y[np.array(rows)], expected, rtol=1e-5, atol=1e-5)
  chex.assert_trees_all_close(masked_state, state, rtol=1e-5)


@pytest.mark.parametrize("mask", [None, np.ones(256)])
def test_variance_is_exact_with_a_large_mean(mask):
  # E[x**2] - E[x]**2 in float32 would leave nothing of a variance of 1 here.
  x = 1e4 + jax.random.normal(jax.random.key(0), (256, 1))
  y, _ = run(models.BatchNorm(1), x, mask)
  assert abs(float(y.std()) - 1) < 0.01


def test_half_precision_is_summed_in_float32():
  # 4,096 ones in bfloat16 sum to 256, where adding one more changes nothing.
  norm = models.BatchNorm(1, momentum=0.0)
  params = {
    "scale": jnp.ones(1, jnp.bfloat16),
    "bias": jnp.ones(1, jnp.bfloat16),
  }
  x = jnp.ones((4096, 1), jnp.bfloat16)
  y, state = run(norm, x, np.ones(4096), params=params)
  assert state["mean"].tolist() == [1.0]
  assert state["mean"].dtype == jnp.float32
  assert y.dtype == jnp.bfloat16
  # A state in half precision stays so.
  half = {"mean": jnp.zeros(1, x.dtype), "var": jnp.ones(1, x.dtype)}
  _, state = run(norm, x, params=params, state=half)
  assert {x.dtype for x in state.values()} == {jnp.dtype(jnp.bfloat16)}
