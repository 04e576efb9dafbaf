"""Copies trees into the buffers of a plan's messages, and back."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist.collectives import _buckets

PyTree = Any


def pack(plan: _buckets.Plan, tree: PyTree) -> tuple[jax.Array, ...]:
  """Copies a tree into the buffers of a plan's messages.

  Args:
    plan: made by `plan` from a tree of the same shapes and dtypes.
    tree: arrays.

  Returns:
    A buffer for each message: the pieces one after the other in one
    dimension, or a lone piece in its own shape, so that a sharded leaf is
    never reshaped.

  Raises:
    ValueError: when the tree is not the one that was planned for.

  >>> tree = [jnp.array([1, 2]), jnp.array(3), jnp.array([[4, 5], [6, 7]])]
  >>> [x.tolist() for x in pack(_buckets.plan(tree, max_bytes=12), tree)]
  [[1, 2, 3], [[4, 5]], [[6, 7]]]
  """
  leaves = jax.tree.leaves(tree)
  _check_planned(plan, leaves, "tree")
  for leaf, dtype in zip(leaves, plan.dtypes, strict=True):
    if _buckets.dtype_of(leaf).name != dtype:
      raise ValueError(
        f"`tree` must have the dtypes of the plan, got {leaf.dtype} for "
        f"{dtype}. Make the plan from what is sent: its bytes depend on it."
      )

  def cut(piece: _buckets.Piece) -> jax.Array:
    leaf = jnp.asarray(leaves[piece.leaf])
    if piece.shape == leaf.shape:
      return leaf
    return jax.lax.slice(leaf, piece.start, piece.stop)

  buffers = []
  for message in plan.messages:
    parts = [cut(piece) for piece in message.pieces]
    if len(parts) > 1:
      parts = [jnp.concatenate([jnp.ravel(part) for part in parts])]
    buffers += parts
  return tuple(buffers)


def unpack(
  plan: _buckets.Plan, buffers: Sequence[jax.Array], like: PyTree
) -> PyTree:
  """Puts the buffers of a plan's messages together again: `pack` undone.

  Args:
    plan: made by `plan`.
    buffers: one for each message, shaped as `pack` makes them.  They may have
      another dtype, which the leaves then have.
    like: a tree with the structure and shapes of the planned one, arrays or
      `jax.ShapeDtypeStruct`; its values are not used.

  Returns:
    A tree like `like`.

  Raises:
    ValueError: when buffers or `like` do not fit the plan.

  >>> tree = [jnp.array([1, 2]), jnp.array(3), jnp.array([[4, 5], [6, 7]])]
  >>> p = _buckets.plan(tree, max_bytes=12)
  >>> unpack(p, [2 * buffer for buffer in pack(p, tree)], tree)[2].tolist()
  [[8, 10], [12, 14]]
  """
  leaves, treedef = jax.tree.flatten(like)
  _check_planned(plan, leaves, "like")
  if len(buffers) != len(plan.messages):
    raise ValueError(
      f"`buffers` must be one for each of the plan's {len(plan.messages)} "
      f"messages, got {len(buffers)}."
    )
  parts: list[list[tuple[_buckets.Piece, jax.Array]]] = [[] for _ in leaves]
  for i, (message, buffer) in enumerate(
    zip(plan.messages, buffers, strict=True)
  ):
    pieces = message.pieces
    sizes = [math.prod(piece.shape) for piece in pieces]
    shape = pieces[0].shape if len(pieces) == 1 else (sum(sizes),)
    if buffer.shape != shape:
      raise ValueError(
        f"`buffers` must be shaped as `pack` makes them: message {i} has "
        f"shape {shape}, got {buffer.shape}."
      )
    stops = list(itertools.accumulate(sizes))
    for piece, size, stop in zip(pieces, sizes, stops, strict=True):
      part = buffer
      if len(pieces) > 1:
        part = jax.lax.slice(buffer, (stop - size,), (stop,))
        part = part.reshape(piece.shape)
      parts[piece.leaf].append((piece, part))
  whole = [
    # An empty leaf has no part.  If it is an array it is its own value, with
    # the type that it has under `shard_map`.
    _assembled(part, 0) if part else _empty(leaf)
    for part, leaf in zip(parts, leaves, strict=True)
  ]
  return jax.tree.unflatten(treedef, whole)


def _assembled(
  parts: list[tuple[_buckets.Piece, jax.Array]], dim: int
) -> jax.Array:
  """Puts boxes in their order together, from dimension `dim` on."""
  if len(parts) == 1:
    return parts[0][1]
  rows = [
    _assembled(list(row), dim + 1)
    for _, row in itertools.groupby(parts, lambda part: part[0].start[dim])
  ]
  return jnp.concatenate(rows, axis=dim) if len(rows) > 1 else rows[0]


def _empty(leaf: Any) -> jax.Array:
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return jnp.zeros(leaf.shape, leaf.dtype)
  return jnp.asarray(leaf)


def _check_planned(
  plan: _buckets.Plan, leaves: Sequence[Any], what: str
) -> None:
  shapes = tuple(tuple(leaf.shape) for leaf in leaves)
  if shapes != plan.shapes:
    pairs = enumerate(itertools.zip_longest(shapes, plan.shapes))
    leaf, (got, planned) = next((i, p) for i, p in pairs if p[0] != p[1])
    raise ValueError(
      f"`{what}` must have the shapes of the plan: leaf {leaf} was planned as "
      f"{planned or 'no leaf'}, got {got or 'no leaf'}. A plan is made from "
      "one worker's tree, without the axis of workers."
    )
