"""Refusals of codecs: an argument and its rule."""

import jax
import jax.numpy as jnp

from jdist import codecs
from tests import _refusals

EIGHT = jnp.ones(8)
INTEGERS = jnp.ones(8, int)
LONG = jax.ShapeDtypeStruct((1 << 30,), jnp.float32)
DRAWN = codecs.Cast(rounding="stochastic")


@_refusals.table(
  *(
    (
      "width",
      lambda width=width: codecs.pack(EIGHT.astype(jnp.uint8), width),
      f"an int from 1 to 32, got {width!r}",
    )
    for width in (0, 33, "a")
  ),
  ("dtype", lambda: codecs.Cast("float8"), "'bfloat16' or 'float16'"),
  (
    "rounding",
    lambda: codecs.Cast(rounding="odd"),
    "'nearest' or 'stochastic'",
  ),
  (
    "rounding",
    lambda: codecs.Cast("float16", rounding="stochastic"),
    "`dtype='bfloat16'`",
  ),
  ("bits", lambda: codecs.Quantize(0), "an int from 1 to 16, got 0"),
  ("bits", lambda: codecs.Quantize(17), "`Dense`"),
  ("bits", lambda: codecs.Quantize(8.0), "an int"),
  ("block", lambda: codecs.Quantize(4, 3), "a multiple of 2"),
  ("block", lambda: codecs.Quantize(3, 20), "24"),
  ("block", lambda: codecs.Quantize(block=0), "an int >= 1, got 0"),
  (
    "range",
    lambda: codecs.Quantize(range="max"),
    "'max_abs', 'min_max' or 'norm'",
  ),
  (
    "rounding",
    lambda: codecs.Quantize(rounding="up"),
    "'nearest' or 'stochastic'",
  ),
  ("bits", lambda: codecs.Quantize(1, range="norm"), "at least 2 for `range="),
  ("block", lambda: codecs.Sign(block=12), "16"),
  ("scale", lambda: codecs.Sign(scale="mean"), "'mean_abs'"),
  ("block", lambda: codecs.Ternary(block=-1), "an int"),
  ("rounding", lambda: codecs.Ternary(rounding="down"), "'nearest'"),
  ("ratio", lambda: codecs.TopK(0.0), "in (0, 1], got 0.0"),
  ("ratio", lambda: codecs.TopK(1.1), "in (0, 1]"),
  ("ratio", lambda: codecs.TopK(0.1, k=3), "`k` are given both"),
  ("k", lambda: codecs.TopK(k=0), "an int >= 1"),
  ("chunk", lambda: codecs.TopK(chunk=0), "an int >= 1"),
  ("k", lambda: codecs.TopK(k=9, chunk=8), "int from 1 to 8"),
  ("values", lambda: codecs.TopK(values=codecs.TopK()), "a codec of all"),
  ("values", lambda: codecs.TopK(values=0.1), "a codec, got 0.1"),
  ("sample", lambda: codecs.SampledTopK(sample=2.0), "in (0, 1]"),
  ("k", lambda: codecs.TopK(k=9).check(EIGHT), "an int from 1 to 8, got 9"),
  ("k", lambda: codecs.TopK(k=9).encode(EIGHT), "an int from 1 to 8, got 9"),
  ("like", lambda: codecs.TopK().check(INTEGERS), "of a float"),
  ("like", lambda: codecs.TopK().check(LONG), "fewer than"),
  ("ratio", lambda: codecs.RandomK(1.5), "in (0, 1]"),
  ("ratio", lambda: codecs.RandomK(0.5, k=1), "`k` are given both"),
  ("shared", lambda: codecs.RandomK(shared="yes"), "True or False"),
  ("values", lambda: codecs.RandomK(values=DRAWN), "no random numbers"),
  ("k", lambda: codecs.RandomK(k=9).check(EIGHT), "from 1 to 8, got 9"),
  ("key", lambda: codecs.RandomK().encode(EIGHT), "a typed PRNG key"),
  ("chunk", lambda: codecs.DCTTopK(0), "an int >= 1"),
  ("k", lambda: codecs.DCTTopK(2, k=5), "int from 1 to 4"),
  ("ratio", lambda: codecs.DCTTopK(ratio=0.0), "in (0, 1]"),
  ("ratio", lambda: codecs.DCTTopK(k=3, ratio=0.1), "`k` are given both"),
  ("like", lambda: codecs.DCTTopK().check(INTEGERS), "of a float"),
)
def test_invalid_arguments_raise(argument, call, rule):
  _refusals.check(argument, call, rule)
