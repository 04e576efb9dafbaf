"""Table of codecs, with a line for each, which all have the same properties."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jdist import codecs

# This makes a full block of 256 and a short one, and is no multiple of 5 or 8.
SIZE = 283


@dataclasses.dataclass(frozen=True)
class Line:
  """One codec.

  Attributes:
    codec: as it is built.
    error: from an array [n] of float32, the largest error of each entry, or
      of all of them, after one encoding; None where there is no bound.
    unbiased: whether the mean over the keys is the array.
    idempotent: whether what was decoded encodes to itself.
    keeps_zeros: whether an array of zeros decodes to zeros.
    keeps_equal: whether an array of equal entries decodes to itself.
    sees_all: whether what is not finite is seen wherever it is.
    covers: the public names that this line tests.
  """

  codec: codecs.Codec
  error: Callable[[np.ndarray], np.ndarray | float] | None
  unbiased: bool = False
  idempotent: bool = False
  keeps_zeros: bool = True
  keeps_equal: bool = False
  sees_all: bool = True

  @property
  def covers(self) -> str:
    return type(self.codec).__name__


def blocks(x, block):
  """Starts of blocks, and the blocks."""
  block = block or max(x.size, 1)
  return [x[i : i + block] for i in range(0, x.size, block)]


def spread(of, block):
  """A number for each block, given to each of its entries."""

  def error(x):
    parts = blocks(np.asarray(x, np.float64).reshape(-1), block)
    each = [np.full(p.size, of(p)) for p in parts]
    return np.concatenate(each).reshape(np.shape(x))

  return error


def max_abs(part):
  return np.abs(part).max()


def half_steps(levels, block):
  """Half a step of a symmetric range, and float32's own rounding."""
  return spread(lambda p: max_abs(p) * (0.5 / levels + 1e-6), block)


def steps(levels, block, of=max_abs):
  return spread(lambda p: of(p) * (1 / levels + 1e-6), block)


def affine(levels, block):
  def of(part):
    width = part.max() - part.min()
    return 0.5 * width / levels + 1e-6 * max_abs(part)

  return spread(of, block)


def nothing(x):
  return 0.0


def relative(share, least=0.0):
  return lambda x: share * np.abs(np.asarray(x, np.float64)) + least


def line(codec, error, unbiased=False, **properties):
  return Line(codec, error, unbiased, **properties)


TABLE = {
  "dense": line(codecs.Dense(), nothing, idempotent=True, keeps_equal=True),
  "bfloat16": line(codecs.Cast(), relative(2**-8), idempotent=True),
  "bfloat16 stochastic": line(
    codecs.Cast(rounding="stochastic"),
    relative(2**-7),
    unbiased=True,
    idempotent=True,
  ),
  "float16": line(
    codecs.Cast("float16"), relative(2**-11, 6.2e-5), idempotent=True
  ),
  "int8": line(
    codecs.Quantize(), half_steps(127, 256), idempotent=True, keeps_equal=True
  ),
  "int4": line(
    codecs.Quantize(4), half_steps(7, 256), idempotent=True, keeps_equal=True
  ),
  "int3 tensor": line(
    codecs.Quantize(3, None),
    half_steps(3, None),
    idempotent=True,
    keeps_equal=True,
  ),
  "int2 in eights": line(
    codecs.Quantize(2, 8), half_steps(1, 8), idempotent=True, keeps_equal=True
  ),
  "int1": line(
    codecs.Quantize(1, 64), steps(1, 64), idempotent=True, keeps_equal=True
  ),
  "int1 stochastic": line(
    codecs.Quantize(1, None, rounding="stochastic"),
    steps(0.5, None),
    unbiased=True,
  ),
  "int16": line(codecs.Quantize(16), half_steps(32767, 256), keeps_equal=True),
  "int8 stochastic": line(
    codecs.Quantize(rounding="stochastic"), steps(127, 256), unbiased=True
  ),
  "int4 stochastic": line(
    codecs.Quantize(4, 64, rounding="stochastic"),
    steps(6.9, 64),
    unbiased=True,
  ),
  "uint8": line(
    codecs.Quantize(8, 256, "min_max"), affine(255, 256), keeps_equal=True
  ),
  "uint4 stochastic": line(
    codecs.Quantize(4, 64, "min_max", "stochastic"),
    lambda x: 2 * affine(15, 64)(x),
    unbiased=True,
    keeps_equal=True,
  ),
  "uint1 tensor": line(
    codecs.Quantize(1, None, "min_max"), affine(1, None), keeps_equal=True
  ),
  "qsgd": line(
    codecs.Quantize(4, 64, "norm", "stochastic"),
    steps(7, 64, np.linalg.norm),
    unbiased=True,
  ),
  "qsgd tensor": line(
    codecs.Quantize(4, None, "norm", "stochastic"),
    steps(7, None, np.linalg.norm),
    unbiased=True,
  ),
  "sign": line(codecs.Sign(), steps(0.5, None), keeps_equal=True),
  "sign in blocks": line(
    codecs.Sign(64, "max_abs"),
    steps(1, 64),
    idempotent=True,
    keeps_equal=True,
  ),
  "sign l2": line(codecs.Sign(64, "l2"), steps(0.5, 64), keeps_equal=True),
  "sign alone": line(
    codecs.Sign(scale="one"),
    lambda x: 1 + np.abs(x),
    idempotent=True,
    keeps_zeros=False,
  ),
  "ternary": line(
    codecs.Ternary(), steps(1, None), unbiased=True, keeps_equal=True
  ),
  "ternary nearest": line(
    codecs.Ternary(64, "nearest"),
    half_steps(1, 64),
    idempotent=True,
    keeps_equal=True,
  ),
  "top": line(codecs.TopK(), relative(1), idempotent=True),
  "top bfloat16 in chunks": line(
    codecs.TopK(0.1, chunk=64, values=codecs.Cast()),
    relative(1),
    idempotent=True,
  ),
  "top int4 stochastic": line(
    codecs.TopK(0.2, values=codecs.Quantize(4, 16, rounding="stochastic")),
    None,
  ),
  "sampled top in chunks": line(
    codecs.SampledTopK(0.05, chunk=128), relative(1), idempotent=True
  ),
  "top cosines": line(codecs.DCTTopK(8, k=3), None),
  "random": line(codecs.RandomK(0.3), None, unbiased=True, sees_all=False),
  "random of its own": line(
    codecs.RandomK(
      0.3,
      shared=False,
      values=codecs.Quantize(8, 16, rounding="stochastic"),
    ),
    None,
    unbiased=True,
    sees_all=False,
  ),
}


@functools.cache
def there_and_back(name, dtype=jnp.float32):
  """From an array and a key to the payload and the array; and compiled."""
  codec = TABLE[name].codec

  def run(x, key):
    like = jax.ShapeDtypeStruct(x.shape, dtype)
    payload, state = codec.encode(x, codec.init(like), key)
    return payload, codec.decode(payload, state, like)

  return run, jax.jit(run)


@functools.cache
def program(name):
  """The compiled program for what most tests encode: SIZE float32s."""
  _, compiled = there_and_back(name)
  return compiled.lower(jnp.zeros(SIZE), jax.random.key(0)).compile()


def decoded(name, x, seed=0):
  """What an array is after one encoding, as NumPy."""
  x = jnp.asarray(x)
  if x.shape == (SIZE,) and x.dtype == jnp.float32:
    run = program(name)
  else:
    _, run = there_and_back(name, x.dtype)
  return np.asarray(run(x, jax.random.key(seed))[1])


def normal(seed=0, size=SIZE):
  return np.random.default_rng(seed).normal(size=size).astype(np.float32)
