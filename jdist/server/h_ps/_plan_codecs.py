"""Messages by a plan of bits, and the plans that a gradient allows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist import codecs, reducers, signatures
from jdist.server.h_ps import _bit_plans

_FEW = (16, 8, 4)


def plan_codec(
  plans: _bit_plans.BitPlans, plan: int, *, feedback: bool = True
) -> reducers.MessageCodec:
  """Returns the codec of a plan's messages.

  Integers of 16, 8 or 4 bits with a scale for each block, rounded at random;
  32 bits as they are.

  Args:
    plans: Plans for a tree with the same number of leaves.
    plan: Number of the plan.
    feedback: Whether the sender adds what it has not sent to the next message.
  """
  return reducers.MessageCodec(
    tuple(_codec(bits, plans.block) for bits in plans.bits[plan]),
    reducers.ErrorFeedback() if feedback else None,
  )


def _codec(bits: int, block: int) -> codecs.Codec:
  if bits == 32:
    return codecs.Dense()
  return codecs.Quantize(bits, block, rounding="stochastic")


@signatures.checked
def fit_bit_plans(
  gradient: signatures.Numbers,
  *,
  error_limit: signatures.PositiveFloat = 2e-2,
  block: signatures.PositiveInt = 64,
  seed: signatures.Seed = 0,
) -> _bit_plans.BitPlans:
  r"""Makes the plans that a gradient allows.

  A tensor x takes b of 16, 8 or 4 bits only if

  .. math:: \|x - D(C_b(x))\| \le \epsilon \, \|x\|

  and 16 at least if it has one dimension, or belongs to the first or the last
  layer: to the first or the last of the tree's outermost keys, in whose order
  the layers of `jdist.models` run.  The plans are those of 32, 16, 8 and 4 bits
  in which each tensor has at least the bits that it needs, without repetitions.

  Args:
    gradient: a worker's gradient of one batch.
    error_limit: epsilon, > 0. Rounded at random in blocks of 64, gradients of
      small networks are wrong by 0.8 to 1.6 % in 8 bits and by 14 to 27 % in 4:
      0.02 allows the one and not the other.
    block: Entries that share a scale.
    seed: Seed of the rounding.

  >>> x = jax.random.normal(jax.random.key(0), (64, 64))
  >>> tree = {f"layer{i}": {"bias": x[0], "kernel": x} for i in range(3)}
  >>> for bits in fit_bit_plans(tree).bits:
  ...   print(bits)
  (32, 32, 32, 32, 32, 32)
  (16, 16, 16, 16, 16, 16)
  (16, 16, 16, 8, 16, 16)
  """
  named, _ = jax.tree_util.tree_flatten_with_path(gradient)
  ends = {_outermost(named[0][0]), _outermost(named[-1][0])} if named else set()
  least = []
  for number, (path, leaf) in enumerate(named):
    key = jax.random.fold_in(jax.random.key(seed), number)
    bits = 32
    for fewer in _FEW:
      if _relative_error(_codec(fewer, block), leaf, key) > error_limit:
        break
      bits = fewer
    # Biases and norms are few bytes; the first and the last layer are known to
    # be sensitive to rounding.
    kept = jnp.ndim(leaf) < 2 or _outermost(path) in ends
    least.append(max(bits, 16) if kept else bits)
  plans = dict.fromkeys(
    tuple(max(bits, own) for own in least) for bits in (32, *_FEW)
  )
  sizes = tuple(int(np.size(leaf)) for _, leaf in named)
  return _bit_plans.BitPlans(tuple(plans), sizes, block)


def _outermost(path: tuple[Any, ...]) -> str:
  return jax.tree_util.keystr(path[:1])


@functools.partial(jax.jit, static_argnums=0)
def _relative_error(
  codec: codecs.Codec, leaf: jax.Array, key: jax.Array
) -> jax.Array:
  # In one program: eagerly, each operation of a codec would be compiled alone.
  x = leaf.astype(jnp.float32)
  payload, state = codec.encode(x, codec.init(x), key)
  wrong = jnp.linalg.norm((codec.decode(payload, state, x) - x).ravel())
  return wrong / jnp.maximum(jnp.linalg.norm(x.ravel()), 1e-30)
