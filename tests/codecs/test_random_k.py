"""Random entries are unbiased, and equal for workers that share a key."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.codecs import _cast, _codec, _quantize, _random_k, _sparse

RandomK = _random_k.RandomK


def decode_many(codec, x, trials, seed=0):
  def one(key):
    payload, state = codec.encode(x, codec.init(x), key)
    return codec.decode(payload, state, x)

  keys = jax.random.split(jax.random.key(seed), trials)
  return np.asarray(jax.jit(jax.vmap(one))(keys), np.float64)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("size, k", [(12, 4), (11, 4), (7, 1), (7, 6)])
def test_mean_is_the_array(size, k, shared):
  x = jnp.arange(1.0, size + 1)
  trials = 4096
  found = decode_many(RandomK(k=k, shared=shared), x, trials)
  assert ((found != 0).sum(1) == k).all()
  deviation = found.std(0) / np.sqrt(trials)
  assert (np.abs(found.mean(0) - x) <= 5 * deviation + 1e-6).all()
  assert found.std() > 0


@dataclasses.dataclass(frozen=True)
class Counted(_codec.Dense):
  """All entries; its state counts the arrays that it has encoded."""

  def init(self, like):
    return jnp.zeros((), jnp.int32)

  def encode(self, x, state=(), key=None):
    return x, state + 1

  def decode(self, payload, state, like):
    return payload.reshape(like.shape)


@pytest.mark.parametrize(
  "codec",
  [
    RandomK(k=2, values=Counted()),
    RandomK(k=2, values=Counted(), shared=False),
    _sparse.TopK(k=2, values=Counted()),
  ],
  ids=["shared", "own", "top-k"],
)
def test_state_of_the_values_codec_is_kept(codec):
  x = jnp.ones(6)
  state = codec.init(x)
  for _ in range(2):
    _, state = codec.encode(x, state, jax.random.key(0))
  assert jax.tree.leaves(state)[-1] == 2


def test_strata_match_hand_computation():
  # Eleven entries lie in four strata of 3, 3, 3 and 2, and each sends one.
  x = jnp.ones(11)
  found = decode_many(RandomK(k=4), x, 64)
  starts = [0, 3, 6, 9, 11]
  for start, end in itertools.pairwise(starts):
    part = found[:, start:end]
    assert (np.sort(part, 1)[:, :-1] == 0).all()
    assert (part.max(1) == end - start).all()
    # Every place of the stratum is drawn.
    assert ((part != 0).sum(0) > 0).all()


def test_payloads_of_workers_may_be_summed():
  codec = RandomK(0.25)
  assert codec.linear and codec.key == "shared"
  xs = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32)
  key = jax.random.key(3)
  encode, decode = jax.jit(codec.encode), jax.jit(codec.decode)
  made = [encode(jnp.asarray(x), codec.init(x), key) for x in xs]
  state = made[0][1]
  for _, other in made:
    np.testing.assert_array_equal(other.seed, state.seed)
  total = jax.tree.map(lambda *a: sum(a), *[payload for payload, _ in made])
  wanted = sum(decode(p, s, xs[0]) for p, s in made)
  np.testing.assert_allclose(decode(total, state, xs[0]), wanted, 1e-6)


def test_payload_has_a_seed_for_own_keys():
  codec = RandomK(0.25, shared=False)
  assert not codec.linear and codec.key == "worker"
  x = jnp.arange(1.0, 41.0)
  payload, state = jax.jit(codec.encode)(x, codec.init(x), jax.random.key(1))
  assert state == ()
  assert sum(leaf.nbytes for leaf in jax.tree.leaves(payload)) == 10 * 4 + 8
  assert codec.num_bits(x) == 10 * 32 + 64
  found = jax.jit(codec.decode)(payload, (), x)
  assert (found != 0).sum() == 10
  total = codec.add_to(jnp.ones(40), payload, ())
  np.testing.assert_array_equal(total, found + 1)


def test_unscaled_entries_are_unchanged():
  codec = RandomK(0.5, scaled=False)
  x = np.arange(1.0, 21.0, dtype=np.float32)
  payload, state = codec.encode(jnp.asarray(x), (), jax.random.key(0))
  found = np.asarray(codec.decode(payload, state, x))
  assert ((found == 0) | (found == x)).all() and (found != 0).sum() == 10


@pytest.mark.parametrize("shared", [True, False])
def test_all_entries_are_the_identity(shared):
  codec = RandomK(1.0, shared=shared)
  x = jnp.arange(30.0).reshape(5, 6).astype(jnp.bfloat16)
  payload, state = jax.jit(codec.encode)(x, codec.init(x), jax.random.key(0))
  np.testing.assert_array_equal(jax.jit(codec.decode)(payload, state, x), x)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (3, 5)])
@pytest.mark.parametrize("shared", [True, False])
def test_small_arrays(shape, shared):
  codec = RandomK(0.2, shared=shared)
  x = jnp.full(shape, 2.0)
  payload, state = jax.jit(codec.encode)(x, codec.init(x), jax.random.key(0))
  assert jax.tree.structure(state) == jax.tree.structure(codec.init(x))
  num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(payload))
  assert 8 * num_bytes == codec.num_bits(x)
  found = jax.jit(codec.decode)(payload, state, x)
  assert found.shape == shape
  if shape in [(), (1,)]:
    assert found.item() == 2.0


def test_large_entries_stay_finite():
  largest = jnp.full(100, np.finfo(np.float32).max)
  codec = RandomK(0.1)
  payload, state = codec.encode(largest, (), jax.random.key(0))
  assert jnp.isfinite(codec.decode(payload, state, largest)).all()
  payload, state = codec.encode(largest * jnp.inf, (), jax.random.key(0))
  assert jnp.isinf(codec.decode(payload, state, largest)).sum() == 10


def test_linearity_depends_on_the_values_codec():
  assert RandomK(values=_cast.Cast()).linear
  assert not RandomK(values=_quantize.Quantize(8)).linear


def test_unscaled_entries_are_contractive():
  x = jax.random.normal(jax.random.key(1), (100,))
  for codec in (RandomK(0.1), RandomK(0.1, scaled=False), RandomK(1.0)):
    left = jnp.linalg.norm(x - decode_many(codec, x, 20), axis=1)
    assert codec.contractive == bool((left < jnp.linalg.norm(x)).all())


def test_choice_and_rounding_have_keys_of_their_own():
  """With one key the rounding would depend on which entries were drawn."""
  keys = []

  class Noting(_quantize.Quantize):
    def encode(self, x, state=(), key=None):
      keys.append(key)
      return super().encode(x, state, key)

  codec = RandomK(
    k=4, shared=False, values=Noting(4, None, rounding="stochastic")
  )
  payload, _ = codec.encode(jnp.arange(16.0), (), jax.random.key(0))
  (rounding,) = keys
  seeds = jax.random.bits(rounding, (2,), jnp.uint32)
  assert (payload.seed != seeds).any()
