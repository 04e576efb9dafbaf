"""Transformers of three frameworks on tiny_shakespeare, cut and unsplit.

Each is written as its framework's users write it, with tied embeddings, and
made a function by `models.functional` alone.  `TINY_SHAKESPEARE` may name the
text's file where the set is not prepared.
"""

import os

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jdist
from jdist import data, models, pipeline, training
from tests.pipeline.processes._threads import in_threads
from tests.pipeline.runtime import _training

_WIDTH, _HEADS, _BLOCKS, _LENGTH, _COUNT = 32, 4, 3, 32, 2
_RATE, _STEPS = 0.1, 20


class _NNXBlock(nnx.Module):
  def __init__(self, rngs):
    self.norms = nnx.List([nnx.LayerNorm(_WIDTH, rngs=rngs) for _ in range(2)])
    self.attention = nnx.MultiHeadAttention(
      _HEADS, _WIDTH, rngs=rngs, decode=False
    )
    self.up = nnx.Linear(_WIDTH, 4 * _WIDTH, rngs=rngs)
    self.down = nnx.Linear(4 * _WIDTH, _WIDTH, rngs=rngs)

  def __call__(self, x):
    mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
    x = x + self.attention(self.norms[0](x), mask=mask)
    return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class _NNX(nnx.Module):
  def __init__(self, rngs):
    self.table = nnx.Embed(256, _WIDTH, rngs=rngs)
    self.places = nnx.Embed(_LENGTH, _WIDTH, rngs=rngs)
    self.blocks = nnx.List([_NNXBlock(rngs) for _ in range(_BLOCKS)])
    self.norm = nnx.LayerNorm(_WIDTH, rngs=rngs)

  def __call__(self, tokens):
    x = self.table(tokens) + self.places(jnp.arange(_LENGTH))
    for block in self.blocks:
      x = block(x)
    return self.table.attend(self.norm(x))


class _Linen(nn.Module):
  @nn.compact
  def __call__(self, tokens):
    table = nn.Embed(256, _WIDTH)
    x = table(tokens) + nn.Embed(_LENGTH, _WIDTH)(jnp.arange(_LENGTH))
    mask = nn.make_causal_mask(tokens)
    for _ in range(_BLOCKS):
      x = x + nn.MultiHeadDotProductAttention(_HEADS)(
        nn.LayerNorm()(x), mask=mask
      )
      y = nn.Dense(4 * _WIDTH)(nn.LayerNorm()(x))
      x = x + nn.Dense(_WIDTH)(nn.gelu(y))
    return table.attend(nn.LayerNorm()(x))


class _EquinoxBlock(eqx.Module):
  norms: list
  attention: eqx.nn.MultiheadAttention
  up: eqx.nn.Linear
  down: eqx.nn.Linear

  def __init__(self, key):
    keys = jax.random.split(key, 3)
    self.norms = [eqx.nn.LayerNorm(_WIDTH) for _ in range(2)]
    self.attention = eqx.nn.MultiheadAttention(_HEADS, _WIDTH, key=keys[0])
    self.up = eqx.nn.Linear(_WIDTH, 4 * _WIDTH, key=keys[1])
    self.down = eqx.nn.Linear(4 * _WIDTH, _WIDTH, key=keys[2])

  def __call__(self, x):
    mask = jnp.tril(jnp.ones((_LENGTH, _LENGTH), bool))
    y = jax.vmap(self.norms[0])(x)
    x = x + self.attention(y, y, y, mask=mask)
    y = jax.vmap(self.up)(jax.vmap(self.norms[1])(x))
    return x + jax.vmap(self.down)(jax.nn.gelu(y))


class _Equinox(eqx.Module):
  table: eqx.nn.Embedding
  places: jax.Array
  blocks: list
  norm: eqx.nn.LayerNorm

  def __init__(self, key):
    first, second, *keys = jax.random.split(key, 2 + _BLOCKS)
    self.table = eqx.nn.Embedding(256, _WIDTH, key=first)
    self.places = jax.random.normal(second, (_LENGTH, _WIDTH))
    self.blocks = list(map(_EquinoxBlock, keys))
    self.norm = eqx.nn.LayerNorm(_WIDTH)

  def __call__(self, tokens):  # One sample's.
    x = jax.vmap(self.table)(tokens) + self.places
    for block in self.blocks:
      x = block(x)
    x = jax.vmap(self.norm)(x) / _WIDTH**0.5
    return x @ self.table.weight.T


def _linen():
  tokens = jnp.zeros((1, _LENGTH), int)
  return _Linen().bind(_Linen().init(jax.random.key(0), tokens))


_MODULES = {
  "nnx": lambda: _NNX(nnx.Rngs(0)),
  "linen": _linen,
  "equinox": lambda: _Equinox(jax.random.key(0)),
}


def _text():
  source = os.environ.get("TINY_SHAKESPEARE", "tiny_shakespeare")
  try:
    return data.load_text(source, window_length=_LENGTH)
  except FileNotFoundError:
    pytest.skip("tiny_shakespeare is not prepared on this machine")


def _batches(text):
  windows = text.windows[: _STEPS * 8].reshape(_STEPS, 8, -1).astype("int32")
  return [{"tokens": x[:, :-1], "targets": x[:, 1:]} for x in windows]


def _unsplit(model, batches):
  """Returns the losses of the whole model by optax, and its parameters."""

  def loss(params, state, batch, key):
    del key
    y, state = model.apply(params, state, batch["tokens"], train=True)
    value, metrics = training.label_loss(y, batch)
    return value, (state, metrics)

  gradient = jax.jit(training.make_gradient(loss, accumulate=_COUNT))
  params, losses = model.params, []
  for batch in batches:
    found = gradient(params, {}, batch, jax.random.key(0))
    params = jax.tree.map(lambda p, g: p - _RATE * g, params, found.grads)
    losses.append(float(found.loss))
  return losses, params


@pytest.mark.slow
@pytest.mark.parametrize("name", _MODULES)
def test_shakespeare_is_learned_as_by_the_unsplit_model(name):
  batches = _batches(_text())
  model = models.functional(_MODULES[name]())
  wanted, params = _unsplit(model, batches)
  assert wanted[-1] < wanted[0] - 0.3
  microbatch = jax.tree.map(lambda x: x[: 8 // _COUNT], batches[0])
  stages = pipeline.cut(model, 3, microbatch["tokens"])
  given = stages, training.label_loss
  pipe = pipeline.OneProgram(
    *given, pipeline.make_table("1f1b", 3, _COUNT), microbatch, inputs="tokens"
  )
  state, losses = _training.train(
    pipe,
    lambda axis: jdist.ssgd(optax.sgd(_RATE), axis=axis),
    [jax.tree.map(lambda x: x[None], batch) for batch in batches],
  )
  np.testing.assert_allclose(losses[:, 0], wanted, rtol=1e-5)
  found, _ = _training.split(pipe, state)
  for a, b in zip(*map(jax.tree.leaves, (found, params)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
  table = pipeline.make_table("zb_h2", 3, _COUNT, num_iterations=_STEPS)

  def work(peers):
    process = pipeline.StageProcess(
      *given, table, microbatch, peers=peers, inputs="tokens"
    )
    state = process.init_state(optax.sgd(_RATE))
    state, metrics = process.run(state, batches)
    return [x["loss"] for x in metrics], process.gather(state)[0]

  losses, found = in_threads(3, work)[0]
  np.testing.assert_allclose(losses, wanted, rtol=1e-5)
  for a, b in zip(*map(jax.tree.leaves, (found, params)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
