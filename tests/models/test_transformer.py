"""The language model is causal and learns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import models
from jdist.models import _transformer

LENGTH, VOCABULARY = 8, 11
positions = pytest.mark.parametrize("positions", ["learned", "rotary"])


def build(**options):
  options = {"num_layers": 2, "width": 16, "num_heads": 2} | options
  return models.build(
    "transformer",
    input_shape=(LENGTH,),
    num_classes=VOCABULARY,
    **options,
  )


def tokens(*shape, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(0, VOCABULARY, shape).astype(np.int32)


def applied(model):
  apply = jax.jit(functools.partial(model.apply, train=False))
  return lambda x: np.asarray(apply(model.params, model.state, x)[0])


@positions
def test_attention_is_causal(positions):
  # There is one layer, because two know an order even without positions: the
  # second one's inputs have seen more or fewer tokens.
  run = applied(build(positions=positions, num_layers=1))
  x = tokens(1, LENGTH)
  logits = run(x)
  for place in range(LENGTH):
    changed = x.copy()
    changed[0, place] = (x[0, place] + 1) % VOCABULARY
    moved = np.abs(run(changed) - logits).max(axis=(0, 2)) > 1e-6
    assert moved.tolist() == [i >= place for i in range(LENGTH)]
  # The order of earlier tokens matters, too.
  swapped = np.concatenate([x[:, 1::-1], x[:, 2:]], axis=1)
  assert x[0, 0] != x[0, 1]
  assert np.abs(run(swapped) - logits)[0, -1].max() > 1e-5


def test_one_layer_matches_hand_computation():
  model = build(num_layers=1, num_heads=1, width=2, hidden_size=3)
  x = tokens(2, 3)
  params = jax.tree.map(np.asarray, model.params)
  layer = params["layer1"]

  def norm(x, p):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(
      x.var(-1, keepdims=True) + 1e-5
    )
    return x * p["scale"] + p["bias"]

  def dense(x, p):
    return x @ p["kernel"] + p["bias"]

  h = params["layer0_tokens"]["table"][x]
  h = h + params["layer0_positions"]["table"][:3]
  q, k, v = np.split(
    dense(norm(h, layer["attend1_norm"]), layer["attend2_qkv"]), 3, axis=-1
  )
  for sample in range(2):
    for place in range(3):
      weights = np.exp(k[sample, : place + 1] @ q[sample, place] / np.sqrt(2))
      mean = weights @ v[sample, : place + 1] / weights.sum()
      h[sample, place] += dense(mean, layer["attend3_out"])
  up = dense(norm(h, layer["dense1_norm"]), layer["dense2_up"])
  # This is the usual approximation of GELU.
  inner = np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)
  h = h + dense(up * (1 + np.tanh(inner)) / 2, layer["dense3_down"])
  expected = norm(h, params["layer2_norm"]) @ params["layer3_dense"]["kernel"]
  np.testing.assert_allclose(applied(model)(x), expected, rtol=1e-4, atol=1e-5)


def test_rotary_positions_count_distances_only():
  x = np.random.default_rng(0).standard_normal((1, 1, 1, 6), np.float32)
  rotate = jax.jit(_transformer._rotate)
  q, k = (
    np.asarray(rotate(np.tile(vector, (1, 9, 1, 1))))[0, :, 0]
    for vector in (x, x[..., ::-1])
  )
  scores = q @ k.T
  for distance in range(-8, 9):
    diagonal = np.diagonal(scores, distance)
    np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-3, atol=1e-4)
  assert np.ptp(scores[0]) > 0.1
  # The first position is not turned.
  np.testing.assert_array_equal(q[0], x[0, 0, 0])


def test_second_of_two_rotary_speeds_is_a_hundredth():
  x = jnp.tile(jnp.array([1.0, 1.0, 0.0, 0.0]), (1, 4, 1, 1))
  place = np.arange(4.0)
  angles = np.stack([place, place / 100], axis=1)
  wanted = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
  found = _transformer._rotate(x)[0, :, 0]
  np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["tokens", "positions"])
def test_embeddings_start_with_the_deviation_of_gpt_2(name):
  table = build(width=64).params[f"layer0_{name}"]["table"]
  # Five relative errors of the deviation of as many draws.
  bound = 5 / (2 * table.size) ** 0.5
  assert abs(np.std(table) / 0.02 - 1) < bound


def test_tied_logits_use_token_embeddings():
  model = build(tied=True, num_layers=1)
  assert not any("dense" in name for name in model.params)
  jac = jax.jit(
    jax.grad(
      lambda params: model.apply(params, {}, tokens(1, 2), train=True)[0].sum()
    )
  )(model.params)
  # Tokens that do not occur have gradients, too.
  assert np.all(np.any(np.asarray(jac["layer0_tokens"]["table"]) != 0, axis=1))
  # They are those of a layer whose matrix is the table.
  untied, table = build(num_layers=1), model.params["layer0_tokens"]["table"]
  params = untied.params | model.params | {"layer3_dense": {"kernel": table.T}}
  expected, _ = untied.apply(params, {}, tokens(1, 2), train=False)
  np.testing.assert_allclose(applied(model)(tokens(1, 2)), expected, rtol=1e-5)


def test_shorter_sequences_are_taken():
  run = applied(build())
  x = tokens(2, LENGTH)
  short = run(x[:, :3])
  assert short.shape == (2, 3, VOCABULARY)
  np.testing.assert_allclose(short, run(x)[:, :3], rtol=1e-4, atol=1e-5)


# A text may be padded by -1, which counts from the end of an array.
@pytest.mark.parametrize("token", [VOCABULARY, -1, -VOCABULARY])
def test_token_outside_the_vocabulary_gives_nan(token):
  x = np.array([[1, token, 2], [1, VOCABULARY - 1, 2]], np.int32)
  logits = applied(build())(x)
  assert np.isnan(logits[0, 1:]).all() and np.isfinite(logits[1]).all()


@pytest.mark.parametrize(
  "shape, dtype, message",
  [
    ((LENGTH,), np.int32, r"`tokens` must be \[batch, length\]"),
    ((2, LENGTH + 1), np.int32, f"from 1 to {LENGTH}"),
    ((2, 0), np.int32, "from 1 to"),
    ((3, 2, LENGTH), np.int32, "without the axis of workers"),
    ((2, LENGTH), np.float32, "`tokens` must be integers"),
  ],
)
def test_invalid_tokens_raise(shape, dtype, message):
  model = build()
  with pytest.raises(ValueError, match=message):
    model.apply(model.params, {}, np.zeros(shape, dtype), train=True)


def test_transformer_overfits_a_few_sequences():
  model = build()
  x = jnp.asarray(tokens(4, LENGTH))
  # The first token identifies the sequence.
  x = x.at[:, 0].set(jnp.arange(4))
  optimizer = optax.adam(0.02)

  def loss(params):
    logits, _ = model.apply(params, {}, x[:, :-1], train=True)
    return optax.softmax_cross_entropy_with_integer_labels(
      logits, x[:, 1:]
    ).mean()

  @jax.jit
  def train(params):
    def step(_, carry):
      params, memory = carry
      updates, memory = optimizer.update(jax.grad(loss)(params), memory)
      return optax.apply_updates(params, updates), memory

    with jax.numpy_dtype_promotion("standard"):
      memory = optimizer.init(params)
      params, _ = jax.lax.fori_loop(0, 100, step, (params, memory))
    return loss(params)

  assert float(train(model.params)) < 0.1
