"""All codecs of the table have the same properties."""

import dataclasses
import inspect

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jdist import codecs, collectives, conformance
from tests import _thinned
from tests.codecs import _table

TABLE = _table.TABLE
LARGEST = np.finfo(np.float32).max
TINY = np.finfo(np.float32).tiny
QUICK = ("int8", "int4", "bfloat16", "sign")
every_line = pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[pytest.mark.smoke] if name in QUICK else [])
    for name in TABLE
  ],
)
SAMPLES = {
  "normal": _table.normal(),
  "shifted": _table.normal(1) * 3 + 100,
  "with zeros": np.where(np.arange(_table.SIZE) % 3, _table.normal(2), 0),
  "small": _table.normal(3) * 1e-12,
  "uneven": _table.normal(4) ** 9,
  "one in a block": np.eye(1, _table.SIZE, 7)[0],
}


def nbytes(payload):
  return sum(leaf.nbytes for leaf in jax.tree.leaves(payload))


def check_error(name, x):
  bound = TABLE[name].error
  if bound is None:
    return
  found = _table.decoded(name, x).astype(np.float64)
  wrong = np.abs(found - x.astype(np.float64)) - bound(x)
  assert wrong.max(initial=-1) <= TINY, (np.argmax(wrong), wrong.max())


def test_every_public_codec_is_in_the_table():
  public = {
    name
    for name, value in vars(codecs).items()
    if inspect.isclass(value)
    and issubclass(value, codecs.Codec)
    and not inspect.isabstract(value)
  }
  assert public == {line.covers for line in TABLE.values()}


# Each codec compiles two programs: the default set takes one of a kind.
_KINDS = ["int4", "qsgd", "sign", "ternary", "top", "random"]


@pytest.mark.parametrize("name", _thinned.some(list(TABLE), _KINDS, QUICK))
def test_codec_keeps_the_laws(name):
  line = TABLE[name]
  conformance.check(line.codec, sees_all=line.sees_all)


@jax.custom_batching.custom_vmap
def _more_in_batches(x):
  return x


@_more_in_batches.def_vmap
def _(size, batched, x):
  return x + 1, batched[0]


@dataclasses.dataclass(frozen=True)
class Broken(codecs.Dense):
  """Breaks one law."""

  law: str = ""

  def num_bits(self, like):
    return super().num_bits(like) + 8 * (self.law == "bits")

  def decode(self, payload, state, like):
    x = super().decode(payload, state, like)
    if self.law == "dtype":
      return x.astype(jnp.float32)
    if self.law == "finite":
      return x * 2
    if self.law == "vmap":
      return _more_in_batches(x)
    if self.law == "visible at the end" and x.ndim and x.size:
      return x.at[..., -1].set(jnp.nan_to_num(x[..., -1]))
    return jnp.nan_to_num(x) if self.law == "visible" else x


@pytest.mark.parametrize(
  ("law", "told"),
  [
    ("bits", "bytes by `num_bits`"),
    ("dtype", "bfloat16.* is .*float32"),
    ("finite", "entries of 3e38 stay finite: clip them"),
    ("visible", "nan stays visible"),
    ("visible at the end", "nan stays visible"),
    ("vmap", "`vmap` gives the results of a loop"),
  ],
)
def test_broken_law_is_named(law, told):
  conformance.check(Broken())
  with pytest.raises(AssertionError, match=told):
    conformance.check(Broken(law))


def test_part_of_another_kind_is_refused():
  with pytest.raises(ValueError, match="`part` must be of a kind"):
    conformance.check(3)


@every_line
def test_errors_stay_within_the_bound(name):
  for x in SAMPLES.values():
    check_error(name, x.astype(np.float32))


@pytest.mark.parametrize(
  "name", ["dense", "bfloat16", "int4", "int4 stochastic", "uint8"]
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_arrays_are_recovered(name, dtype):
  x = jnp.asarray(_table.normal(), dtype)
  found = _table.decoded(name, x)
  assert found.dtype == dtype
  x, found = np.asarray(x, np.float64), found.astype(np.float64)
  extra = np.abs(found) * 2**-8
  assert np.all(np.abs(found - x) <= TABLE[name].error(x) + extra + 1e-3)
  # The dtype's largest number stays finite, however scales are rounded.
  ends = np.full(_table.SIZE, jnp.finfo(dtype).max, np.float32)
  assert np.all(np.isfinite(_table.decoded(name, jnp.asarray(ends, dtype))))


# One line of each kind that decodes in its own way.
_DECODERS = ["int4", "sign", "top", "top cosines", "random"]
# An array that is sent unchanged has the receiver's dtype.
_OTHERS = [name for name in TABLE if name != "dense"]


@pytest.mark.parametrize("name", _thinned.some(_OTHERS, _DECODERS, QUICK))
def test_finite_entries_stay_finite_in_narrow_arrays(name):
  """A receiver's array may be narrower than what was encoded."""
  codec, like = TABLE[name].codec, jnp.zeros(_table.SIZE, jnp.float16)

  @jax.jit
  def narrowed(x):
    payload, state = codec.encode(x, codec.init(x), jax.random.key(0))
    return codec.decode(payload, state, like)

  found = narrowed(jnp.asarray(1e6 * _table.normal(), jnp.float32))
  assert found.dtype == jnp.float16 and jnp.isfinite(found).all()


@every_line
def test_scalars_and_empty_arrays(name):
  codec = TABLE[name].codec
  check_error(name, np.float32(-2.5).reshape(()))
  _, run = _table.there_and_back(name)
  for shape in [(), (3, 0)]:
    x = jnp.full(shape, 1.5)
    payload, found = run(x, jax.random.key(0))
    assert found.shape == shape and found.dtype == jnp.float32
    assert nbytes(payload) == -(-codec.num_bits(x) // 8)


@every_line
def test_zeros_and_equal_entries(name):
  line = TABLE[name]
  zeros = np.zeros(_table.SIZE, np.float32)
  if line.keeps_zeros:
    np.testing.assert_array_equal(_table.decoded(name, zeros), 0)
  if line.keeps_equal:
    for value in (-3.7, 1e-30, LARGEST):
      equal = np.full(_table.SIZE, value, np.float32)
      np.testing.assert_allclose(_table.decoded(name, equal), equal, 3e-7)


@every_line
def test_denormal_entries_stay_small(name):
  if not TABLE[name].keeps_zeros:
    return
  x = np.float32(1e-40) * _table.normal()
  found = _table.decoded(name, x)
  assert np.all(np.abs(found) <= 3 * TINY)  # A NaN would fail, too.


@every_line
def test_encoding_is_idempotent(name):
  if not TABLE[name].idempotent:
    return
  once = _table.decoded(name, _table.normal())
  twice = _table.decoded(name, once, seed=1)
  np.testing.assert_array_equal(twice, once)


@pytest.mark.parametrize(
  "name",
  ["int4", "qsgd", "sign", "ternary", "top", "sampled top in chunks", "random"],
)
def test_shard_map_equals_a_loop_over_workers(name):
  run, compiled = _table.there_and_back(name)[0], _table.program(name)
  mesh = collectives.make_mesh((2,), ("worker",))
  xs = np.stack([_table.normal(seed) for seed in range(2)])
  keys = jax.random.split(jax.random.key(5), 2)
  split = PartitionSpec("worker")

  def one(x, key):
    return run(x[0], key[0])[1][None]

  mapped = jax.shard_map(one, mesh=mesh, in_specs=split, out_specs=split)
  found = jax.jit(mapped)(xs, keys)
  for i in range(2):
    wanted = compiled(xs[i], keys[i])[1]
    np.testing.assert_allclose(found[i], wanted, 1e-6, 1e-7)


@every_line
def test_unbiased_codecs_have_the_right_mean(name):
  if not TABLE[name].unbiased:
    return
  x = _table.normal(7, 21)
  x[3] = 0
  trials = 4096
  run, _ = _table.there_and_back(name)
  keys = jax.random.split(jax.random.key(1), trials)
  found = jax.jit(jax.vmap(lambda key: run(x, key)[1]))(keys)
  found = np.asarray(found, np.float64)
  deviation = found.std(0) / np.sqrt(trials)
  # The bound is five standard deviations and the error of 16 random bits.
  scale = np.linalg.norm(x)
  assert np.all(np.abs(found.mean(0) - x) <= 5 * deviation + 2e-5 * scale)
  assert found.std(0).max() > 0
  # Over all entries together, because a rounding bias has one direction.
  each = (found - x).mean(1)
  assert abs(each.mean()) <= 5 * each.std() / np.sqrt(trials) + 2e-5 * scale


@every_line
def test_programs_stay_on_the_device(name):
  text = _table.program(name).as_text()
  for word in ("infeed", "outfeed", "callback", "send(", "recv("):
    assert word not in text, word


@every_line
def test_codecs_compare_and_hash_by_settings(name):
  codec = TABLE[name].codec
  assert codec == type(codec)(**vars(codec))
  assert hash(codec) == hash(type(codec)(**vars(codec)))
  assert codec.key in ("none", "worker", "shared")
  with pytest.raises(ValueError, match="must be of a float dtype"):
    codec.check(jax.ShapeDtypeStruct((3,), jnp.int32))
  for dtype in (jnp.int32, jnp.complex64) if name != "dense" else ():
    with pytest.raises(ValueError, match="must be of a float dtype"):
      codec.encode(jnp.ones(3, dtype), (), jax.random.key(0))
  if codec.key != "none":
    remedy = {"worker": "each worker its", "shared": "all workers the same"}
    rule = f"`key` must be a typed PRNG key .* Give {remedy[codec.key]} "
    with pytest.raises(ValueError, match=rule):
      codec.encode(jnp.ones(3), codec.init(jnp.ones(3)))


@pytest.mark.parametrize("name", ["int8", "int3 tensor", "uint8", "float16"])
@hypothesis.settings(max_examples=30)
@hypothesis.given(
  x=hnp.arrays(
    np.float32,
    67,
    elements=st.floats(-(2.0**125), 2.0**125, width=32, allow_subnormal=False),
  )
)
def test_any_array_is_within_the_bound(name, x):
  if name == "float16":
    x = np.clip(x, -6e4, 6e4)
  check_error(name, x)
