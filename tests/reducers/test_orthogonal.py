"""Orthonormal columns, also of matrices that have hardly any."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.reducers import _orthogonal

orthogonalize = jax.jit(_orthogonal.orthogonalize)


def matrix(n, r, condition=1.0, seed=0):
  """Of a condition number, with columns that are not orthogonal."""
  rng = np.random.default_rng(seed)
  left, _ = np.linalg.qr(rng.standard_normal((n, r)))
  right, _ = np.linalg.qr(rng.standard_normal((r, r)))
  values = condition ** -np.linspace(0, 1, r)
  return (left * values) @ right


@pytest.mark.parametrize("condition", (1.0, 1e2, 1e3))
def test_columns_are_orthonormal_and_span_the_same_space(condition):
  shapes = ((40, 4), (300, 4), (4, 4))
  given = [matrix(*shape, condition, seed=n) for n, shape in enumerate(shapes)]
  found = orthogonalize([jnp.asarray(p, jnp.float32) for p in given])
  for p, q in zip(given, map(np.asarray, found), strict=True):
    np.testing.assert_allclose(q.T @ q, np.eye(4), atol=2e-5)
    np.testing.assert_allclose(q @ (q.T @ p), p, atol=1e-6)


def test_a_direction_that_is_hardly_there_is_too_short_and_not_too_long():
  p = matrix(80, 4, 1e6)
  (found,) = orthogonalize([jnp.asarray(p, jnp.float32)])
  values = np.linalg.svd(found, compute_uv=False)
  assert values[0] <= 1 + 1e-5 and values[2] > 0.99


def test_well_apart_they_are_those_of_qr():
  p = matrix(60, 5, 10.0)
  q, r = np.linalg.qr(p)
  (found,) = orthogonalize([jnp.asarray(p, jnp.float32)])
  np.testing.assert_allclose(found, q * np.sign(np.diag(r)), atol=1e-5)


def test_scales_do_not_matter():
  p = matrix(50, 3)
  scales = (1.0, 1e30, 1e-30)
  (plain,) = orthogonalize([jnp.asarray(p, jnp.float32)])
  (found,) = orthogonalize([jnp.asarray(p * scales, jnp.float32)])
  np.testing.assert_allclose(found, plain, atol=1e-5)


def test_zeros_become_unit_vectors_and_repetitions_nothing_too_long():
  zeros, repeated, one = orthogonalize(
    [
      jnp.zeros((9, 3)),
      jnp.ones((9, 3)),
      jnp.asarray(np.arange(9.0)[:, None] * (1.0, 0.0, 0.0), jnp.float32),
    ]
  )
  np.testing.assert_allclose(zeros, np.eye(9, 3), atol=1e-5)
  for found in (repeated, one):
    # No projection takes more than all.
    assert np.linalg.norm(found, 2) <= 1 + 1e-5
    taken = found @ (found.T @ np.asarray(found[:, 0]))
    np.testing.assert_allclose(taken, found[:, 0], atol=1e-4)
  np.testing.assert_allclose(one.T @ one, np.eye(3), atol=2e-5)


@pytest.mark.parametrize("bad", (np.nan, np.inf))
def test_what_is_not_finite_is_told(bad):
  p = matrix(12, 2)
  p[3, 1] = bad
  found, other = orthogonalize(
    [jnp.asarray(p, jnp.float32), jnp.asarray(matrix(8, 2), jnp.float32)]
  )
  assert not np.isfinite(found).any(0).all()
  assert np.isfinite(other).all()


def test_many_are_done_in_one_batch():
  given = [jnp.ones((n, 2)) for n in range(5, 15)]
  text = str(jax.make_jaxpr(_orthogonal.orthogonalize)(given))
  # Two passes, whatever the number of matrices.
  assert text.count("name=cholesky") == 2
