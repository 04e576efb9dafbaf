"""The exchange: a row of the tree to each worker, who sends its mean to all.

|      | at every worker         | and at the owner of a row            |
|------|-------------------------|--------------------------------------|
| up   | cut, encode, all-to-all | decode, add up, add what was left    |
| down | all-gather, decode, put | encode, keep what is left            |
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jdist import codecs, collectives
from jdist.reducers import _keys, _worker_rows

PyTree: TypeAlias = Any
OwnerFeedback: TypeAlias = bool | Literal["own_share"]


@dataclasses.dataclass(frozen=True)
class Exchange:
  """Means of arrays of floats, none empty, by an exchange; see `compressed`.

  Attributes:
    codec: what is sent.
    owner_feedback: what becomes of what the owners leave out.
  """

  codec: codecs.Codec
  owner_feedback: OwnerFeedback

  def init(
    self, likes: Sequence[Any], axis: collectives.Axis
  ) -> tuple[jax.Array, ...]:
    """The owners' residuals, zeros; raises for a codec with a state."""
    vectors = self.vectors(likes, collectives.size(axis))
    for vector in vectors:
      if vector.way != "exact":
        self._check_row(vector)
    return tuple(
      jnp.zeros(v.row, jnp.float32) for v in vectors if self.remembers(v)
    )

  def reduce(
    self,
    leaves: list[Any],
    residual: tuple[jax.Array, ...],
    key: jax.Array,
    axis: collectives.Axis,
  ) -> tuple[list[Any], list[Any], tuple[jax.Array, ...]]:
    """Returns the means, the own shares and the owners' residuals."""
    num_workers = collectives.size(axis)
    vectors = self.vectors(leaves, num_workers)
    means, shares = list(leaves), list(leaves)  # All are replaced.
    # Up: row j of every vector to worker j.
    payloads, finite, kept = [], [], []
    for i, vector in enumerate(vectors):
      rows = vector.cut(leaves)
      coder = self._coder(vector)
      payload = jax.vmap(coder.encode)(
        rows, _keys.of_rows(self.codec, key, i, axis)
      )
      payloads.append(payload)
      finite.append(jnp.isfinite(rows).all(1))
      kept.append(jax.vmap(coder.decode)(payload))
    sent = (payloads, jnp.stack(finite, 1))
    like = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), sent
    )
    buffers = collectives.all_to_all(
      collectives.pack_bytes(sent, num_leading=1), axis
    )
    rows, told = collectives.unpack_bytes(buffers, like, rows=num_workers)
    told = told.all(0)
    # The owner adds up its row, and encodes the mean for all.
    payloads, finite, residuals = [], [], list(residual)
    new_residuals = []
    for i, vector in enumerate(vectors):
      coder = self._coder(vector)
      total = add_rows(
        jnp.zeros(vector.row, jnp.float32),
        jax.vmap(coder.decode)(rows[i]),
        lambda total, one: total + one,
        axis,
        most_unrolled=16,
      )
      wanted = total / num_workers
      if self.remembers(vector):
        wanted = wanted + residuals.pop(0)
      # As it will be known: in the leaf's dtype.
      narrow = wanted.astype(vector.dtype)
      finite.append(jnp.isfinite(narrow).all() & told[i])
      owner_key = _keys.of_owner(self.codec, key, i, axis)
      payload = coder.encode(narrow, owner_key)
      payloads.append(payload)
      if self._leaves_out(vector):
        known = coder.decode(payload).astype(vector.dtype)
        left = wanted - known.astype(jnp.float32)
        left = jnp.where(finite[-1] & jnp.isfinite(left), left, 0)
        if self.remembers(vector):
          new_residuals.append(left)
        else:
          own = collectives.index(axis)
          kept[i] = kept[i].at[own].add(-num_workers * left)
      vector.put(kept[i], leaves, shares)
    # Down: all rows to all.
    sent = (payloads, jnp.stack(finite))
    buffers = collectives.gather(collectives.pack_bytes(sent), axis)
    rows, told = collectives.unpack_bytes(buffers, like)
    for i, vector in enumerate(vectors):
      known = jax.vmap(self._coder(vector).decode)(rows[i])
      known = jnp.where(told[:, i, None], known, jnp.nan)
      vector.put(known.astype(vector.dtype), leaves, means)
    return means, shares, tuple(new_residuals)

  def release(
    self,
    residual: tuple[jax.Array, ...],
    likes: Sequence[Any],
    axis: collectives.Axis,
  ) -> list[jax.Array]:
    """What all owners hold back, float32 in units of the mean, leaf by leaf."""
    found = [jnp.zeros(x.shape, jnp.float32) for x in likes]
    vectors = self.vectors(likes, collectives.size(axis))
    kept = [vector for vector in vectors if self.remembers(vector)]
    rows = collectives.gather(residual, axis)
    for vector, row in zip(kept, rows, strict=True):
      vector.put(row, likes, found)
    return found

  def payload_bits(self, likes: Sequence[Any], num_workers: int) -> int:
    """Of a worker's rows, each with the byte that tells if it is finite."""
    vectors = self.vectors(likes, num_workers)
    return num_workers * sum(8 + self._row_bits(v) for v in vectors)

  def vectors(
    self, likes: Sequence[Any], num_workers: int
  ) -> tuple[_worker_rows.Vector, ...]:
    """How the leaves are cut."""
    return _worker_rows.cut_leaves(
      likes, num_workers, self.codec.granule(), self.codec.num_bits
    )

  def remembers(self, vector: _worker_rows.Vector) -> bool:
    """Whether owners have a residual."""
    return self.owner_feedback is True and self._leaves_out(vector)

  def _leaves_out(self, vector: _worker_rows.Vector) -> bool:
    """Exact rows of float32 leave nothing out that could be remembered."""
    return bool(self.owner_feedback) and (
      vector.way != "exact" or vector.dtype != "float32"
    )

  def _coder(self, vector: _worker_rows.Vector) -> "_Coder":
    return _Coder(None if vector.way == "exact" else self.codec, vector.like)

  def _row_bits(self, vector: _worker_rows.Vector) -> int:
    if vector.way == "exact":
      return vector.row * np.dtype(vector.dtype).itemsize * 8
    return self.codec.num_bits(vector.like)

  def _check_row(self, vector: _worker_rows.Vector) -> None:
    self.codec.check(vector.like)
    state = jax.eval_shape(
      lambda x, key: self.codec.encode(x, self.codec.init(x), key)[1],
      vector.like,
      jax.eval_shape(lambda: jax.random.key(0)),
    )
    if jax.tree.leaves(state):
      raise ValueError(
        f"`wire` must be {'sum' if self.codec.linear else 'gather'!r} for "
        f"{self.codec}, got 'exchange': it keeps a state, which the owner of "
        "a row would need from every worker to decode."
      )


class _Coder(NamedTuple):
  """Encodes and decodes a row, or leaves it as it is."""

  codec: codecs.Codec | None
  like: jax.ShapeDtypeStruct

  def encode(self, x: jax.Array, key: jax.Array | None) -> PyTree:
    if self.codec is None:
      return x
    return self.codec.encode(x, self.codec.init(self.like), key)[0]

  def decode(self, payload: PyTree) -> jax.Array:
    if self.codec is None:
      return payload.astype(jnp.float32)
    like = jax.ShapeDtypeStruct(self.like.shape, jnp.float32)
    return self.codec.decode(payload, self.codec.init(self.like), like)


def add_rows(
  total: jax.Array,
  rows: PyTree,
  add: Callable[[jax.Array, PyTree], jax.Array],
  axis: collectives.Axis,
  *,
  most_unrolled: int,
) -> jax.Array:
  """Adds every worker's row, in the order of the workers."""
  num_rows = collectives.size(axis)
  if num_rows <= most_unrolled:
    for i in range(num_rows):
      total = add(total, jax.tree.map(lambda x, i=i: x[i], rows))
    return total
  total, _ = jax.lax.scan(
    lambda total, row: (collectives.varying(add(total, row), axis), None),
    collectives.varying_like(collectives.varying(total, axis), rows),
    rows,
  )
  return total
