"""A tree in few bytes, and what the sender keeps."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import codecs, reducers, states
from jdist.server.gradients import _gradient_messages

CODECS = {
  "bfloat16": codecs.Cast("bfloat16"),
  "int8": codecs.Quantize(8),
  "int4 stochastic": codecs.Quantize(4, 64, rounding="stochastic"),
  "sign": codecs.Sign(),
  "top-k": codecs.TopK(0.1),
  "random-k": codecs.RandomK(0.1, shared=False, scaled=False),
  "dct": codecs.DCTTopK(ratio=0.1),
}
_RANDOM = np.random.default_rng(0)
TREE = {
  "a": jax.device_put(_RANDOM.normal(size=(40, 30)).astype(np.float32)),
  "b": {"c": jax.device_put(_RANDOM.normal(size=70).astype(jnp.bfloat16))},
}


@pytest.mark.parametrize("name", CODECS)
def test_message_and_residual_sum_to_the_input(name):
  message = reducers.MessageCodec(CODECS[name], reducers.ErrorFeedback())
  state = message.init(TREE)
  encode, decode = jax.jit(message.encode), jax.jit(message.decode)
  wanted = jax.tree.map(jnp.zeros_like, state.feedback.residual)
  received = wanted
  for step in range(3):
    tree = jax.tree.map(lambda x, s=step: x * (s + 1), TREE)
    sent, state = encode(tree, state)
    carried = _gradient_messages.tree_bytes(sent)
    assert carried.nbytes == message.num_bytes(TREE)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    kinds = message.kinds(TREE)
    sent = _gradient_messages.tree_of_bytes(carried, kinds)
    found = decode(sent, wide)
    wanted = jax.tree.map(jnp.add, wanted, wide)
    received = jax.tree.map(jnp.add, received, found)
  total = jax.tree.map(jnp.add, received, state.feedback.residual)
  chex.assert_trees_all_close(total, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", CODECS)
def test_without_feedback_each_leaf_is_its_decoded_payload(name):
  codec = CODECS[name]
  message = reducers.MessageCodec(codec)
  sent, _ = jax.jit(message.encode)(TREE, message.init(TREE))
  key = jax.random.fold_in(jax.random.key(0), 0)
  own = None if codec.key == "none" else jax.random.fold_in(key, 0)
  x = TREE["a"]
  payload, state = jax.jit(codec.encode)(x, codec.init(x), own)
  found = jax.jit(message.decode)(sent, TREE)
  chex.assert_trees_all_close(
    found["a"], jax.jit(codec.decode)(payload, state, x), rtol=1e-6
  )
  assert found["b"]["c"].dtype == jnp.bfloat16


def test_message_has_the_bytes_of_its_codec():
  message = reducers.MessageCodec(codecs.Quantize(4, 64))
  sizes = [codecs.Quantize(4, 64).num_bits(x) for x in jax.tree.leaves(TREE)]
  # Two bytes say that both leaves are finite.
  assert message.num_bytes(TREE) == sum(-(-x // 8) for x in sizes) + 2


@pytest.mark.parametrize("bad", (np.nan, np.inf))
def test_receiver_sees_nan_where_a_leaf_is_not_finite(bad):
  message = reducers.MessageCodec(codecs.Quantize(8), reducers.ErrorFeedback())
  tree = TREE | {"a": TREE["a"].at[3, 4].set(bad)}
  sent, state = message.encode(tree, message.init(tree))
  found = message.decode(sent, tree)
  assert jnp.isnan(found["a"]).all()
  assert jnp.isfinite(found["b"]["c"].astype(jnp.float32)).all()
  for x in jax.tree.leaves(state.feedback.residual):
    assert jnp.isfinite(x).all()


def test_part_of_a_codec_draws_the_numbers_of_the_whole():
  codec = reducers.MessageCodec(codecs.Quantize(4, rounding="stochastic"))
  leaves = [jnp.linspace(-1.0, 1.0, 64) * (i + 1) for i in range(3)]
  whole, _ = codec.encode(leaves, codec.init(leaves))
  wanted = codec.decode(whole, leaves)
  for first, end in ((0, 1), (1, 3), (2, 3)):
    part, own = codec.part(0, 3).part(first, end), leaves[first:end]
    found, _ = part.encode(own, part.init(own))
    chex.assert_trees_all_equal(part.decode(found, own), wanted[first:end])


def test_part_of_a_part_keeps_the_numbers_of_its_leaves():
  whole = reducers.MessageCodec(codecs.Quantize(4, 64, rounding="stochastic"))
  assert whole.part(2, 6).part(1, 3) == whole.part(3, 5)


@pytest.mark.parametrize("jit", [False, True])
def test_chunks_are_encoded_in_place_of_leaves(jit):
  """Six entries are two rows of three, of which the largest is sent."""
  chunks = reducers.Chunked(reducers.Exact(), max_bytes=12)
  message = reducers.MessageCodec(
    codecs.TopK(1 / 3), reducers.ErrorFeedback(), chunks=chunks
  )
  tree = {
    "a": jnp.array([[1.0, -2.0], [3.0, 4.0]]),
    "b": jnp.array([5.0, 6.0], jnp.bfloat16),
  }
  encode = jax.jit(message.encode) if jit else message.encode
  sent, state = encode(tree, message.init(tree))
  found = message.decode(sent, tree)
  assert jax.tree.map(lambda x: (str(x.dtype), x.tolist()), found) == {
    "a": ("float32", [[0.0, 0.0], [3.0, 0.0]]),
    "b": ("bfloat16", [0.0, 6.0]),
  }
  residual = jax.tree.map(lambda x: x.tolist(), state.feedback.residual)
  assert residual == {"a": [[1.0, -2.0], [0.0, 4.0]], "b": [5.0, 0.0]}
  # Two values of four bytes, places of two bits in a byte, and two flags.
  assert message.num_bytes(tree) == 2 * 4 + 2 * 1 + 2
  # A value that is not finite spoils its own chunk only.
  bad = tree | {"b": jnp.array([jnp.nan, 6.0], jnp.bfloat16)}
  found = message.decode(encode(bad, message.init(bad))[0], bad)
  assert np.isnan([found["a"][1, 1], *found["b"].astype(np.float32)]).all()
  assert found["a"].reshape(-1)[:3].tolist() == [0.0, 0.0, 3.0]


def test_servers_cannot_divide_chunks():
  chunks = reducers.Chunked(reducers.Exact())
  message = reducers.MessageCodec(codecs.Sign(), chunks=chunks)
  with pytest.raises(ValueError, match="`chunks` must be None where servers"):
    message.part(0, 1)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_bytes_hold_typed_keys(impl):
  key = jax.random.key(3, impl=impl)
  tree = {"w": jnp.ones(2), "key": key, "more": jax.random.split(key, (2, 3))}
  payload = _gradient_messages.tree_bytes(tree)
  for like in (tree, jax.eval_shape(lambda: tree)):
    found = _gradient_messages.tree_of_bytes(payload, like)
    for name, leaf in tree.items():
      assert found[name].dtype == leaf.dtype
      np.testing.assert_array_equal(*map(states.key_words, (found[name], leaf)))
