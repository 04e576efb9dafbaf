"""Models that are one function, cut where one array is passed on."""

import dataclasses

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import frozen_dict

import jdist
from jdist import models, pipeline, states, training
from jdist.pipeline.planning import _model_cuts
from jdist.pipeline.runtime import _stages
from tests import _refusals
from tests.pipeline.runtime import _training

_NUMBERS = np.random.default_rng(0)
_TOKENS = {
  name: _NUMBERS.integers(0, 32, (4, 8)).astype("int32")
  for name in ("tokens", "targets")
}
_IMAGES = {
  "image": _NUMBERS.normal(size=(4, 8, 8, 3)).astype("float32"),
  "label": _NUMBERS.integers(0, 10, 4).astype("int32"),
}


class _Block(nnx.Module):
  def __init__(self, rngs):
    self.norm = nnx.LayerNorm(16, rngs=rngs)
    self.dense = nnx.Linear(16, 16, rngs=rngs)

  def __call__(self, x):
    x = x + nnx.dot_product_attention(*3 * [self.norm(x)[:, :, None]])[:, :, 0]
    return x + self.dense(nnx.gelu(x))


class _NNX(nnx.Module):
  def __init__(self, rngs):
    self.table = nnx.Embed(32, 16, rngs=rngs)
    self.blocks = nnx.List([_Block(rngs) for _ in range(3)])

  def __call__(self, tokens):
    x = self.table(tokens)
    for block in self.blocks:
      x = block(x)
    return self.table.attend(x)


class _ResNet(nn.Module):
  @nn.compact
  def __call__(self, x, train):
    kind = {"use_running_average": not train, "momentum": 0.9}
    x = nn.Conv(4, (3, 3))(x)
    for _ in range(2):
      y = nn.relu(nn.BatchNorm(**kind)(nn.Conv(4, (3, 3))(x)))
      x = x + nn.BatchNorm(**kind)(nn.Conv(4, (3, 3))(y))
    return nn.Dense(10)(x.mean((1, 2)))


class _Equinox(eqx.Module):
  table: eqx.nn.Embedding
  dense: list
  head: jax.Array

  def __init__(self, key):
    first, *keys = jax.random.split(key, 4)
    self.table = eqx.nn.Embedding(32, 16, key=first)
    self.dense = [eqx.nn.Linear(16, 16, key=key) for key in keys]
    self.head = self.table.weight  # One array at two places.

  def __call__(self, tokens):
    x = jax.vmap(self.table)(tokens)
    for dense in self.dense:
      x = x + jax.nn.gelu(jax.vmap(dense)(x))
    return x @ self.head.T


class _Dropped(nnx.Module):
  """Each layer has a count of keys, which no input moves."""

  def __init__(self, rngs):
    self.dense = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(3)])
    self.dropout = nnx.List([nnx.Dropout(0.5, rngs=rngs) for _ in range(3)])

  def __call__(self, tokens):
    x = jax.nn.one_hot(tokens, 32)
    for dense, dropout in zip(self.dense, self.dropout, strict=True):
      x = x + dropout(jnp.tanh(dense(x)))
    return x


class _Shared(nnx.Module):
  """All layers draw by one count."""

  def __init__(self, rngs):
    self.dense = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(4)])
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, tokens):
    x = jax.nn.one_hot(tokens, 32)
    for dense in self.dense:
      x = x + self.dropout(jnp.tanh(dense(x)))
    return x


class _DroppedLinen(nn.Module):
  """All layers draw from one key."""

  @nn.compact
  def __call__(self, tokens, deterministic):
    x = jax.nn.one_hot(tokens, 32)
    for _ in range(4):
      y = nn.Dropout(0.5)(jnp.tanh(nn.Dense(32)(x)), deterministic)
      x = x + y
    return x


def _dropped_linen():
  keys, module = {"dropout": jax.random.key(7)}, _DroppedLinen()
  variables = module.init(jax.random.key(0), _TOKENS["tokens"], True)
  return models.functional(module.bind(variables, rngs=keys))


class _Spectral(nn.Module):
  @nn.compact
  def __call__(self, tokens, train):
    x = jax.nn.one_hot(tokens, 32)
    for _ in range(3):
      x = x + nn.SpectralNorm(nn.Dense(32))(x, update_stats=train)
    return x


def _spectral():
  variables = _Spectral().init(jax.random.key(0), _TOKENS["tokens"], True)
  return models.functional(_Spectral().bind(variables))


def _linen():
  init = jax.jit(_ResNet().init, static_argnums=2)
  variables = init(jax.random.key(0), _IMAGES["image"], True)
  return models.functional(_ResNet().bind(variables))


def _equinox():
  return models.functional(_Equinox(jax.random.key(0)))


def _plain():
  params = {
    x: jnp.asarray(_NUMBERS.normal(size=(32, 32)) / 6, "float32") for x in "abc"
  }

  def apply(params, state, x, *, train):
    del train
    x = jax.nn.one_hot(x, 32)
    for name in "abca":
      x = x + jnp.tanh(x @ params[name])
    return x, state

  return models.Model(params, {}, apply)


_MODELS = {
  "nnx": (lambda: models.functional(_NNX(nnx.Rngs(0))), _TOKENS),
  "linen": (_linen, _IMAGES),
  "equinox": (_equinox, _TOKENS),
  "plain": (_plain, _TOKENS),
  "dropout": (lambda: models.functional(_Dropped(nnx.Rngs(0))), _TOKENS),
  "shared dropout": (lambda: models.functional(_Shared(nnx.Rngs(0))), _TOKENS),
  "linen dropout": (_dropped_linen, _TOKENS),
  "spectral": (_spectral, _TOKENS),
}


def _cut(name, number=3, samples=2):
  made, batch = _MODELS[name]
  model, (inputs, _) = made(), batch
  microbatch = jax.tree.map(lambda x: x[:samples], batch)
  stages = pipeline.cut(model, number, microbatch[inputs])
  return model, stages, inputs, batch, microbatch


@pytest.mark.parametrize(
  "name",
  [
    # These take long to compile.
    pytest.param(x, marks=pytest.mark.slow) if x in ("linen", "nnx") else x
    for x in _MODELS
  ],
)
def test_stages_compute_the_model_and_its_gradients(name):
  model, stages, inputs, _, batch = _cut(name)
  trees = [_stages.merge([getattr(s, x) for s in stages])
           for x in ("params", "state")]  # fmt: skip

  def loss(run):
    def of(params):
      y, state = run(params)
      return training.label_loss(y, batch)[0], state

    return jax.jit(jax.value_and_grad(of, has_aux=True))

  def chained(params):
    x, state = batch[inputs], trees[1]
    for stage in stages:
      own = _stages.pick(trees[1], stage.state)  # Each stage holds its own.
      x, new = stage.apply(
        _stages.pick(params, stage.params), own, x, train=True
      )
      state = _stages.merge([state, new]) if new else state
    return x, state

  found = loss(chained)(trees[0])
  wanted = loss(lambda p: model.apply(p, trees[1], batch[inputs], train=True))(
    trees[0]
  )
  for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
    a, b = map(states.key_words, (a, b))
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  # Embeddings and the first matrix are tied over the ends of their models.
  tied = _stages.shared_paths(stages)
  ties = name in ("nnx", "equinox", "plain")
  assert list(tied.values()) == [(0, 2)] * ties


def _gradient(model, inputs):
  """Returns the gradient of the unsplit model, of two micro-batches."""

  def loss(params, state, batch, key):
    del key
    y, state = model.apply(params, state, batch[inputs], train=True)
    value, metrics = training.label_loss(y, batch)
    return value, (state, metrics)

  return jax.jit(training.make_gradient(loss, accumulate=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", _MODELS)
def test_twenty_steps_are_those_of_the_unsplit_model(name):
  model, stages, inputs, batch, microbatch = _cut(name)
  table = pipeline.make_table("zb_h1", 3, 2)
  pipe = pipeline.OneProgram(
    stages, training.label_loss, table, microbatch, inputs=inputs
  )
  optimizer = optax.sgd(0.05)
  start = pipe.split(*pipe.join())
  state, losses = _training.train(
    pipe,
    lambda axis: jdist.ssgd(optimizer, axis=axis),
    [jax.tree.map(lambda x: x[None], batch)] * 20,
  )

  gradient = _gradient(model, inputs)
  params, own = start
  wanted = []
  for _ in range(20):
    found = gradient(params, own, batch, jax.random.key(0))
    own = found.model_state
    params = jax.tree.map(lambda p, g: p - 0.05 * g, params, found.grads)
    wanted.append(float(found.loss))
  assert wanted[-1] < 0.95 * wanted[0]
  np.testing.assert_allclose(losses[:, 0], wanted, rtol=1e-5)
  both = _training.split(pipe, state), (params, own)
  for a, b in zip(*map(jax.tree.leaves, both), strict=True):
    a, b = map(states.key_words, (a, b))
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recompute", ["none", "layers"])
@pytest.mark.parametrize("name", ["shared dropout", "linen dropout"])
def test_shared_keys_draw_as_in_the_unsplit_model(name, recompute):
  """Each stage has a copy, and one of four layers in three stages shares it."""
  model, stages, inputs, batch, microbatch = _cut(name)
  table = pipeline.make_table("interleaved", 1, 2, num_chunks=3)
  process = pipeline.StageProcess(
    stages, training.label_loss, table, microbatch, inputs=inputs,
    recompute=recompute,
  )  # fmt: skip
  state, _ = process.run(process.init_state(optax.sgd(0.05)), [batch] * 3)

  gradient = _gradient(model, inputs)
  params, own = model.params, model.state
  for _ in range(3):
    found = gradient(params, own, batch, jax.random.key(0))
    own = found.model_state
    params = jax.tree.map(lambda p, g: p - 0.05 * g, params, found.grads)
  both = process.gather(state), (params, own)
  for a, b in zip(*map(jax.tree.leaves, both), strict=True):
    np.testing.assert_allclose(*map(states.key_words, (a, b)), atol=1e-6)


def _scanned(params, state, x, *, train):
  del train
  x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])
  return x, state


def _counted(params, state, x, *, train):
  del train
  for name in "ab":
    x = jnp.tanh(x @ params[name]) * state["n"]
    state = {"n": state["n"] + x.mean()}
  return x, state


@pytest.mark.parametrize(
  ("model", "told"),
  [
    (
      models.Model({"w": jnp.ones((3, 4, 4))}, {}, _scanned),
      "have 2 layers between which one array is passed on, got 1. A scan",
    ),
    (
      models.Model(
        {x: jnp.eye(4) for x in "ab"}, {"n": jnp.ones(())}, _counted
      ),
      "which each layer updates its own part, got ['n'] in several layers",
    ),
  ],
  ids=["scan", "shared state"],
)
def test_models_that_cannot_be_cut_are_refused(model, told):
  with _refusals.refused("model", told):
    pipeline.cut(model, 2, jnp.ones((2, 4)))


def test_a_state_of_another_form_is_refused():
  model = models.Model(
    {"w": jnp.eye(4)}, {}, lambda p, s, x, *, train: (x @ p["w"], {"n": 1.0})
  )
  with _refusals.refused("model.apply", "leaf n is float32[] and not missing"):
    pipeline.cut(model, 1, jnp.ones((2, 4)))


def test_a_micro_batch_of_another_size_is_refused():
  _, stages, *_ = _cut("plain")
  with _refusals.refused("microbatch", "got [(3, 8)] for [(2, 8)]"):
    stages[0].apply(stages[0].params, {}, jnp.ones((3, 8), int), train=True)


def test_evaluation_by_stages_is_refused():
  _, stages, *_ = _cut("plain")
  with _refusals.refused("microbatch", "in training"):
    stages[0].apply(stages[0].params, {}, jnp.ones((2, 8), int), train=False)


def test_a_mask_is_refused():
  """The trace had none: the samples that it leaves out would count."""
  _, stages, _, batch, _ = _cut("plain")
  with _refusals.refused("microbatch", "and without a mask"):
    stages[0].apply(
      stages[0].params, {}, batch["tokens"][:2], train=True, mask=jnp.ones(2)
    )


def test_inputs_and_outputs_may_be_trees():
  def apply(params, state, x, *, train):
    del train
    y = jnp.tanh(x["a"] * params["w"] + x["b"])
    return {"sum": y * params["v"], "parts": (y, -y)}, state

  model = models.Model({"v": jnp.float32(3.0), "w": jnp.ones(())}, {}, apply)
  inputs = {"a": jnp.ones(2), "b": jnp.zeros(2)}
  x = inputs
  for stage in pipeline.cut(model, 2, inputs):
    x, _ = stage.apply(stage.params, {}, x, train=True)
  wanted, _ = model.apply(model.params, {}, inputs, train=True)
  assert jax.tree.structure(x) == jax.tree.structure(wanted)
  chex.assert_trees_all_close(x, wanted, rtol=1e-6)


def _chain(sizes):
  """Returns a model that multiplies by matrices of these sizes in turn."""

  def apply(params, state, x, *, train):
    del train
    for name in sorted(params):
      x = jnp.tanh(x @ params[name])
    return x, state

  params = {name: jnp.ones(size) / 8 for name, size in sizes.items()}
  return models.Model(params, {}, apply)


@pytest.mark.parametrize(
  ("sizes", "wanted"),
  [
    (dict.fromkeys("abcd", (8, 8)), ["ab", "cd"]),
    # The first two layers have eight times as many operations.
    ({"a": (8, 64), "b": (64, 8), "c": (8, 8), "d": (8, 8)}, ["a", "bcd"]),
    ({"a": (8, 8), "b": (8, 8), "c": (8, 64), "d": (64, 8)}, ["abc", "d"]),
  ],
)
def test_stages_have_about_equally_many_operations(sizes, wanted):
  stages = pipeline.cut(_chain(sizes), 2, jnp.ones((4, 8)))
  assert ["".join(sorted(x.params)) for x in stages] == wanted


def test_parameters_may_be_a_frozen_dict():
  model = _chain(dict.fromkeys("ab", (8, 8)))
  model = dataclasses.replace(model, params=frozen_dict.freeze(model.params))
  first, last = pipeline.cut(model, 2, jnp.ones((4, 8)))
  assert [list(x.params) for x in (first, last)] == [["a"], ["b"]]
  x, _ = first.apply(first.params, {}, jnp.ones((4, 8)), train=True)
  x, _ = last.apply(last.params, {}, x, train=True)
  wanted, _ = model.apply(model.params, {}, jnp.ones((4, 8)), train=True)
  np.testing.assert_allclose(x, wanted, rtol=1e-6)


def test_leaves_that_no_layer_reads_stay_with_the_first():
  def apply(params, state, x, *, train):
    for name in "abc":
      x = jnp.tanh(x @ params[name])
    return x, state

  params = {name: jnp.eye(2) for name in "abcz"}
  model = models.Model(params, {"s": {"unread": jnp.ones(3)}}, apply)
  inputs = jnp.ones((4, 2))
  first, *others = pipeline.cut(model, 3, inputs)
  assert list(first.params) == ["a", "z"] and list(first.state) == ["s"]
  assert [list(x.params) for x in others] == [["b"], ["c"]]
  assert [x.state for x in others] == [{}, {}]
  _, state = first.apply(first.params, first.state, inputs, train=True)
  assert (state["s"]["unread"] == 1.0).all()


def test_value_is_passed_on_alone_once_all_results_before_were_read():
  def model(w, x):
    a, b = jax.lax.split(x, (1, 1))
    return jnp.cos(jnp.sin(a + w) * b)

  jaxpr = jax.make_jaxpr(model)(jnp.ones(1), jnp.ones(2)).jaxpr
  split, _, _, product, _ = eqns = jaxpr.eqns
  w, x = jaxpr.invars
  reads, ends, moving = _model_cuts._passed_on(
    eqns, [x], jaxpr.outvars, {"w": w}
  )
  # The second half waits for the first one's layers.
  assert ends == {4: product.outvars[0]}
  assert reads == [set(), {"w"}, set(), set(), set()]
  assert {*split.outvars} < moving and w not in moving
