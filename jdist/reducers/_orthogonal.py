"""Orthonormal columns of many tall matrices at once."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

# What is added to the diagonal of a Gram matrix whose own is 1, so that its
# Cholesky factor exists: above what float32 loses in a sum of many products
# in the first pass, and far below what the first pass leaves in the second.
_SHIFTS = (1e-5, 1e-6)


def orthogonalize(matrices: Sequence[jax.Array]) -> list[jax.Array]:
  r"""Gives each matrix orthonormal columns that span the same space.

  Cholesky's QR, twice, on columns of length 1:

  .. math::
    G = P^\top P + \epsilon I = L L^\top, \quad P \leftarrow P L^{-\top}

  Its work is products of tall matrices, and what is done one column after
  another is done on r x r matrices, for all of them in one batch.  LAPACK's
  Householder is a call for each matrix, and from rank 6 or so on one with
  threads, which wait for each other where devices share a busy CPU.

  The columns are orthonormal to about 1e-5 up to a condition of 1e3, whatever
  their scales.  A direction that float32 can hardly tell from the others comes
  out with a length below 1: as a projection this takes less, and never too
  much.  A column of zeros becomes a unit vector.  A NaN or an infinity makes
  its matrix NaN.

  Args:
    matrices: float32 [n, r] with n >= r, the same r for all.

  Returns:
    As many, of the same shapes.

  Reference: Yamamoto et al. 2015 (CholeskyQR2) and Fukaya et al. 2020 (the
  shift), doi 10.1553/etna_vol44s306 and 10.1137/18M1218212.
  """
  if not matrices:
    return []
  found = [_unit_columns(p) for p in matrices]
  for shift in _SHIFTS:
    gram = jnp.stack([_product(p.T, p) for p in found])
    identity = jnp.broadcast_to(
      jnp.eye(gram.shape[-1], dtype=gram.dtype), gram.shape
    )
    lower = jnp.linalg.cholesky(gram + shift * identity)
    inverse = jax.lax.linalg.triangular_solve(
      lower, identity, left_side=True, lower=True
    )
    found = [
      _product(p, part.T) for p, part in zip(found, inverse, strict=True)
    ]
  return found


def _unit_columns(p: jax.Array) -> jax.Array:
  """Columns of length 1, in a way that no square can overflow."""
  highest = jnp.max(jnp.abs(p), axis=0)
  is_zero = highest == 0
  p = p / jnp.where(is_zero, 1.0, highest)
  p = jnp.where(is_zero, jnp.eye(p.shape[0], p.shape[1], dtype=p.dtype), p)
  return p / jnp.sqrt(jnp.sum(p * p, axis=0))


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
  # In full: a GPU would take ten bits of mantissa.
  return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
