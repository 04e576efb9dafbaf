"""A kernel for NVIDIA GPUs that finds the largest entries of rows.

XLA sorts short rows at a thirtieth of the memory's speed, and has no operation
that keeps some entries in their order.  `_largest` has the plain forms.
"""

from typing import Any

import jax
import jax.numpy as jnp

# The entries of a program, and of one of its warps.
_BLOCK, _PER_WARP = 4096, 1024


def choose(*operands: Any, plain: Any, cuda: Any) -> Any:
  """Returns the result of `plain`, on NVIDIA GPUs that of `cuda`."""
  # A kernel can be compiled only on a machine that has the GPU.
  if jax.default_backend() != "gpu":
    return plain(*operands)
  return jax.lax.platform_dependent(*operands, cuda=cuda, default=plain)


def places(
  x: jax.Array, capacity: int, keys_of: Any, threshold: Any = None
) -> tuple[jax.Array, jax.Array]:
  """Returns the places of the largest entries of rows, ascending, and counts.

  Each row of `x`, float32 [rows, length], has `capacity` slots; entries beyond
  are left out, and slots without an entry hold any number.  `keys_of` maps
  entries to int32 keys >= 0, larger for larger entries.  `threshold` is a key
  and the last place at which an entry of this key counts, int32 [rows]; None,
  for short rows, fills all slots.  Without a GPU the kernel is interpreted.
  """
  from jax.experimental import pallas
  from jax.experimental.pallas import triton

  rows, length = x.shape
  width = _BLOCK if threshold else max(16, 1 << (length - 1).bit_length())
  height, blocks = max(1, _BLOCK // width), -(-length // width)
  arrays, count = [x.reshape(-1)], jnp.full(rows, capacity)
  if threshold:
    key, last = (one[:, None] for one in threshold)
    beyond = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) > last
    reached = keys_of(x) >= key + beyond.astype(jnp.int32)
    reached = jnp.pad(reached, ((0, 0), (0, -length % width)))
    found = reached.reshape(rows, blocks, width).sum(2, dtype=jnp.int32)
    ends = jnp.cumsum(found, 1)
    # The first slot of each block; a block beyond the capacity has none.
    first = jnp.minimum(ends - found, capacity)
    arrays, count = [*arrays, *threshold, first.reshape(-1)], ends[:, -1]

  def largest(keys: jax.Array) -> jax.Array:
    def add_bit(i: jax.Array, key: jax.Array) -> jax.Array:
      higher = key | jax.lax.shift_left(jnp.int32(1), jnp.int32(30) - i)
      reached = (keys >= higher).astype(jnp.int32).sum(1, keepdims=True)
      return jnp.where(reached >= capacity, higher, key)

    key = keys.max(1, keepdims=True)
    if capacity > 1:
      key = jax.lax.fori_loop(jnp.int32(0), jnp.int32(31), add_bit, key * 0)
    over, ties = (keys > key).astype(jnp.int32), (keys == key).astype(jnp.int32)
    room = capacity - over.sum(1, keepdims=True)
    # Equal keys of which one is too many are rare, and sums along rows slow.
    some = lambda: jnp.where(jnp.cumsum(ties, 1) <= room, ties, 0)  # noqa: E731
    tied = jnp.max(ties.sum(1, keepdims=True) - room) > 0
    return over + jax.lax.cond(tied, some, lambda: ties)

  def kernel(x_ref: Any, *refs: Any) -> None:
    number = pallas.program_id(0)
    part, place = (
      jax.lax.broadcasted_iota(jnp.int32, (height, width), i) for i in range(2)
    )
    part += number * height
    row, place = part // blocks, place + part % blocks * width
    inside = (row < rows) & (place < length)
    x = triton.load(x_ref.at[row * length + place], mask=inside, other=0.0)
    keys = jnp.where(inside, keys_of(x), -1)
    if threshold is None:
      chosen, slot = largest(keys), row * capacity
    else:
      key, last = (ref[number // blocks] for ref in refs[:2])
      beyond = (place > last).astype(jnp.int32)
      chosen = (keys >= key + beyond).astype(jnp.int32)
      slot = row * capacity + refs[2][number]
    slot += jnp.cumsum(chosen, 1) - 1
    kept = (chosen > 0) & inside & (slot < (row + 1) * capacity)
    # The interpreter ignores the mask: other entries go past the end.
    slot = jnp.where(kept, slot, rows * capacity)
    triton.store(refs[-1].at[slot], place, mask=kept)

  warps = max(1, height * width // _PER_WARP)
  out = pallas.pallas_call(
    kernel, jax.ShapeDtypeStruct((rows * capacity,), jnp.int32),
    grid=(-(-rows * blocks // height),),
    compiler_params=triton.CompilerParams(num_warps=warps),
    interpret=jax.default_backend() != "gpu",
  )(*arrays)  # fmt: skip
  return out.reshape(rows, capacity), count
