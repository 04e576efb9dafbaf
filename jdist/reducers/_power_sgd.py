"""Means of matrices by low-rank factors."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist import checks, codecs, collectives, states
from jdist.reducers import _all_to_all, _reducer
from jdist.states import PyTree

# They are added to the diagonal of a Gram matrix, which is 1, so that its
# Cholesky factor exists.  The first is larger than the rounding error of a long
# sum of products in float32, and the second far smaller than the entries that
# the first pass leaves.
_SHIFTS = (1e-5, 1e-6)


@states.declare(shared=("q",))
class PowerSGDState(NamedTuple):
  """State of `PowerSGD`; equal on all workers.

  Attributes:
    q: The start of the next power iteration, float32 [m, rank] for each
      compressed leaf, in the tree's order.
  """

  q: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class PowerSGD(_reducer.Reducer):
  r"""Sends rank-r approximations, by one step of power iteration.

  Every leaf of two dimensions or more is reshaped to a matrix :math:`M_i` of
  n x m, where m is its **last** dimension (in Flax the output channels of dense
  and convolution kernels) and n the product of all others.  With Q of m x r
  from the last round, equal on all workers:

  .. math::
    P &= \frac1N \sum_i M_i Q, \quad \hat P = \mathrm{orthogonalize}(P) \\
    Q_i &= M_i^\top \hat P, \quad Q \leftarrow \frac1N \sum_i Q_i \\
    \mathrm{mean} &= \hat P Q^\top, \quad
    \mathrm{own\_share}_i = \hat P Q_i^\top

  The mean is the projection of the exact mean onto the span of :math:`\hat P`.
  Because the projection is linear, the law holds within rounding.

  Any tree takes **two all-reduces**: one of all P and of all leaves that are
  not compressed, in one float32 buffer, and one of all Q.  A leaf is
  compressed if that sends less: (n + m) r < n m.

  **Compressed factors** (an extension): with
  `factors=compressed(codecs.Quantize(8), owner_feedback="own_share")` both
  means are taken by that reducer, with a quarter of the bytes.  An error in P
  does not break the law, because only its span matters, and one in :math:`Q_i`
  is in the own share: :math:`\mathrm{own\_share}_i = \hat P\,
  \mathrm{own\_share}(Q_i)^\top`.

  Each worker orthogonalizes by itself, so that results are equal to the bit if
  all workers have the same kind of device.  A NaN or an infinity at one worker
  makes the mean of its leaf NaN on all, and with `factors` that of leaves whose
  factors share a block with it; Q then stays as it was.

  Args:
    rank: r, 1 or more.  The paper uses 2, the default, for ResNet-18 on
      CIFAR-10, and 4 for its language model.
    seed: The seed of the first Q, normal random numbers.
    factors: The reducer of P (with the leaves that are not compressed) and of
      Q; None, the default, takes two exact all-reduces.

  Raises:
    ValueError: If built, for a rank below 1 or factors that are not a
      reducer; at `init`, for leaves without floats, and for a reducer with a
      state, which would be in terms of an old :math:`\hat P`.

  Reference: Vogels et al. 2019, PowerSGD (arXiv:1905.13727), algorithm 1.
  Departures: the paper's matrices are transposed ([output channels, rest]),
  so that P and Q change places.  Orthogonalization is by Cholesky's QR, for all
  matrices at once, and not by Gram-Schmidt; it returns unit columns also for a
  matrix of zeros, from which Gram-Schmidt never recovers.  Leaves that would
  grow are sent exactly, as vectors are in the paper.  Error feedback and
  momentum (algorithm 2) are around the reducer, not in it.
  """

  rank: int = 2
  seed: int = 0
  factors: _reducer.Reducer | None = None

  def __post_init__(self) -> None:
    checks.set_structural(self, "rank", minimum=1)
    checks.set_structural(self, "seed", minimum=0, maximum=2**63 - 1)
    if self.factors is not None:
      _reducer.check_reducer("factors", self.factors)

  def init(self, like: PyTree, axis: collectives.Axis) -> PyTree:
    """Returns random directions for each matrix, equal on all workers."""
    _reducer.check_leaves(self, like, codecs.Dense().check)
    likes = jax.tree.leaves(like)
    if self.factors is not None:
      for sent in self._messages(likes):
        if jax.tree.leaves(self.factors.init(sent, axis)):
          raise ValueError(
            "`factors` must keep no state between rounds (it would refer "
            "to factors that have changed since), got "
            f"{self.factors}. For a quantized all-to-all use "
            "`owner_feedback='own_share'`."
          )
    key = jax.random.key(self.seed)
    q = tuple(
      jax.random.normal(
        jax.random.fold_in(key, i), (x.shape[-1], self.rank), jnp.float32
      )
      for i, x in zip(_all_to_all.leaf_numbers(like), likes, strict=True)
      if self.compresses(x)
    )
    if not q:
      return ()
    return collectives.varying(PowerSGDState(q), axis)

  def reduce(
    self, tree: PyTree, state: PyTree, key: jax.Array, axis: collectives.Axis
  ) -> _reducer.Reduced:
    leaves, treedef = jax.tree.flatten(tree)
    wide = [x.astype(jnp.float32) for x in leaves]
    low = [i for i, x in enumerate(leaves) if self.compresses(x)]
    rest = [i for i in range(len(leaves)) if i not in set(low)]
    old = state.q if low else ()
    matrices = [wide[i].reshape(-1, wide[i].shape[-1]) for i in low]
    products = [m @ q for m, q in zip(matrices, old, strict=True)]
    first = [*products, *(wide[i] for i in rest)]
    fused, sent = self._mean(first, key, 0, axis)
    # If a product is not finite at any worker, no worker has a share in the
    # mean of that leaf, which is NaN, and feedback keeps all of it.
    usable = [jnp.isfinite(p).all() for p in fused[: len(low)]]
    spanned = zip(usable, orthogonalize(fused[: len(low)]), strict=True)
    bases = [jnp.where(good, p, 0.0) for good, p in spanned]
    own = [m.T @ p for m, p in zip(matrices, bases, strict=True)]
    new, own_factors = self._mean(own, key, 1, axis)
    means, shares = list(leaves), list(wide)
    for i, mean, share in zip(
      rest, fused[len(low) :], sent[len(low) :], strict=True
    ):
      means[i] = mean.astype(leaves[i].dtype)
      shares[i] = share
    for i, good, p, q_own, q in zip(
      low, usable, bases, own_factors, new, strict=True
    ):
      shape, dtype = leaves[i].shape, leaves[i].dtype
      mean = jnp.where(good, p @ q.T, jnp.nan)
      means[i] = mean.reshape(shape).astype(dtype)
      shares[i] = (p @ q_own.T).reshape(shape)
    if low:
      # A NaN in Q would stay there for all later rounds.
      state = PowerSGDState(
        tuple(
          jnp.where(good & jnp.isfinite(q).all(), q, before)
          for good, q, before in zip(usable, new, old, strict=True)
        )
      )
    mean, share = (jax.tree.unflatten(treedef, x) for x in (means, shares))
    return _reducer.Reduced(mean, share, state)

  def check_shards(self) -> None:
    reason = "of a vector it has no directions and would send all of it."
    raise _reducer.unsuited(self, "shards and chunks", reason)

  def num_bits(self, like: PyTree, num_workers: int) -> _reducer.Bits:
    """Counts P, Q, and the leaves that are not compressed, in float32."""
    reducer = self.factors or _reducer.Exact()
    return _reducer.Bits.total(
      reducer.num_bits(sent, num_workers)
      for sent in self._messages(jax.tree.leaves(like))
    )

  def compresses(self, like: Any) -> bool:
    """Returns whether a leaf is sent by its factors."""
    if len(like.shape) < 2:
      return False
    n, m = math.prod(like.shape[:-1]), like.shape[-1]
    return (n + m) * self.rank < n * m

  def _messages(self, likes: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the shapes of both messages: P and the rest, and Q."""
    low = [x for x in likes if self.compresses(x)]
    rest = [x.shape for x in likes if not self.compresses(x)]
    p = [(math.prod(x.shape[:-1]), self.rank) for x in low]
    q = [(x.shape[-1], self.rank) for x in low]
    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return list(map(of, [*p, *rest])), list(map(of, q))

  def _mean(
    self,
    arrays: list[jax.Array],
    key: jax.Array,
    number: int,
    axis: collectives.Axis,
  ) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
    """Returns the means, and the own shares in them."""
    if self.factors is None:
      buckets = collectives.Buckets.of(arrays)
      sums = collectives.mean(buckets.pack(arrays), axis)
      return buckets.unpack(sums, arrays), arrays
    key = jax.random.fold_in(key, number)
    # The state has no arrays, as `init` has checked.
    state = self.factors.init(arrays, axis)
    reduced = self.factors.reduce(arrays, state, key, axis)
    return reduced.mean, reduced.own_share


def orthogonalize(matrices: Sequence[jax.Array]) -> list[jax.Array]:
  r"""Gives each matrix orthonormal columns that span the same space.

  Cholesky's QR, twice, on columns of length 1:

  .. math::
    G = P^\top P + \epsilon I = L L^\top, \quad P \leftarrow P L^{-\top}

  The columns are orthonormal to about 1e-5 up to a condition of 1e3.  A
  direction that float32 can hardly distinguish from the others becomes shorter
  than 1, and a column of zeros a unit vector.  A NaN or an infinity makes its
  matrix NaN.  All matrices are float32 [n, r] with n >= r and the same r.

  Reference: Yamamoto et al. 2015 (CholeskyQR2) and Fukaya et al. 2020 (the
  shift), doi 10.1553/etna_vol44s306 and 10.1137/18M1218212.
  """
  if not matrices:
    return []
  # All Gram matrices are factored in one batch.  LAPACK's Householder QR is a
  # call for each matrix, whose threads block each other where devices share a
  # busy CPU.
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
  """Returns columns of length 1."""
  # They are scaled first, so that no square overflows.
  highest = jnp.max(jnp.abs(p), axis=0)
  is_zero = highest == 0
  p = p / jnp.where(is_zero, 1.0, highest)
  p = jnp.where(is_zero, jnp.eye(p.shape[0], p.shape[1], dtype=p.dtype), p)
  return p / jnp.sqrt(jnp.sum(p * p, axis=0))


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
  # By default a GPU would use ten bits of mantissa.
  return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
