"""Evaluation: what counts, and what does not."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import data, training
from tests import _refusals
from tests.training import _tiny


def test_nan_in_padding_is_ignored():
  def apply(params, state, images, train):
    assert not train  # Dropout is off, and statistics are the running ones.
    # Of padding, zeros, this is 0 / 0.
    flat = images.reshape(len(images), -1)
    return flat / jnp.linalg.norm(flat, axis=-1, keepdims=True) @ params, state

  test = data.load("digits", "test").select(np.arange(5))
  team = _tiny.team("vmap")
  batches = data.evaluation_batches(test, team.num_workers, 4)
  params = np.random.default_rng(0).normal(size=(64, 10)).astype(np.float32)
  found = training.Evaluator(team, apply, batches).measure(params)
  logits, _ = apply(params, {}, jnp.float32(test.images), train=False)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, test.labels)
  np.testing.assert_allclose(found["loss"], losses.mean(), rtol=1e-5)
  assert found["accuracy"] == np.mean(np.argmax(logits, -1) == test.labels)
  assert type(found["accuracy"]) is type(found["loss"]) is float


def apply(params, state, tokens, train):
  return params[tokens], state


def test_evaluation_and_training_have_one_formula():
  team = _tiny.team("vmap")
  n = team.num_workers
  rng = np.random.default_rng(0)
  params = rng.normal(size=(5, 6)).astype(np.float32)
  targets = rng.integers(0, 6, (n, 2, 3))
  targets[:, 0, :2] = -100
  texts = {"tokens": rng.integers(0, 5, (n, 2, 3)), "targets": targets}
  mask = np.ones((n, 2), np.float32)
  mask[-1] = 0
  found = training.Evaluator(team, apply, [texts | {"mask": mask}])
  every = {k: x.reshape(2 * n, 3) for k, x in texts.items()}
  every["mask"] = mask.reshape(-1)
  loss, metrics = training.label_loss(params[every["tokens"]], every)
  measured = found.measure(params)
  np.testing.assert_allclose(measured["loss"], loss, rtol=1e-6)
  np.testing.assert_allclose(
    measured["accuracy"], metrics["accuracy"], rtol=1e-6
  )


@pytest.mark.parametrize("wrong", [6, -1])
def test_evaluation_refuses_labels_out_of_range(wrong):
  team = _tiny.team("vmap")
  n = team.num_workers
  texts = {
    "tokens": np.zeros((n, 2, 3), np.int32),
    "targets": np.full((n, 2, 3), wrong),
    "mask": np.ones((n, 2)),
  }
  evaluator = training.Evaluator(team, apply, [texts])
  with _refusals.refused(
    "label", f"an int from 0 to 5, got {wrong}. Label others"
  ):
    evaluator.measure(np.zeros((5, 6), np.float32))


@pytest.mark.parametrize(
  ("argument", "change", "rule"),
  [
    ("batches", lambda x: x[:1], "of 4 workers, got"),
    ("batches", lambda x: np.concatenate([x, x]), "of 4 workers, got"),
    ("batches", lambda x: 1.0, "of 4 workers, got 1.0"),
  ],
)
def test_batches_of_other_workers_raise(argument, change, rule):
  team = _tiny.team("vmap")
  assert team.num_workers == 4
  texts = {"tokens": np.zeros((4, 2, 3), np.int32)}
  texts = {**texts, "targets": np.zeros((4, 2, 3), int)}
  with _refusals.refused(argument, rule):
    training.Evaluator(team, apply, [jax.tree.map(change, texts)])


@pytest.mark.parametrize(
  "labels",
  [np.zeros(3, int), np.eye(5)[:4], np.zeros((4, 1), int), np.zeros(4)],
)
def test_labels_that_are_no_classes_of_the_rows_raise(labels):
  batch = {"label": jnp.asarray(labels)}
  with _refusals.refused("batch", "the number of a class for each row"):
    training.label_loss(jnp.zeros((4, 5)), batch)


@pytest.mark.parametrize("found", [None, jnp.zeros((2, 6)), (1, 2, 3)])
def test_model_that_returns_no_pair_raises(found):
  team = _tiny.team("none")
  batch = {
    "tokens": np.zeros((1, 2), np.int32),
    "targets": np.zeros((1, 2), int),
  }
  evaluator = training.Evaluator(team, lambda *_, train: found, [batch])
  with _refusals.refused("apply", "must return logits, state"):
    evaluator.measure(jnp.zeros(()))
  loss_fn = training.classification_loss(lambda *_, train: found)
  with _refusals.refused("apply", "must return logits, state"):
    loss_fn((), (), {x: y[0] for x, y in batch.items()}, jax.random.key(0))


@pytest.mark.parametrize(
  "given", ["text", {"w": object()}, {"w": jax.ShapeDtypeStruct((), "int32")}]
)
def test_model_that_is_no_tree_of_arrays_raises(given):
  team = _tiny.team("none")
  batch = {
    "tokens": np.zeros((1, 2), np.int32),
    "targets": np.zeros((1, 2), int),
  }
  evaluator = training.Evaluator(team, apply, [batch])
  with _refusals.refused("tree", "must be a tree of arrays, got"):
    evaluator.measure(given)


@pytest.mark.parametrize("label", [-1, -99, 3])
def test_label_that_is_no_class_makes_the_loss_nan(label):
  loss, _ = training.label_loss(
    jnp.zeros((2, 3)), {"label": jnp.array([0, label])}
  )
  assert jnp.isnan(loss)


def test_sums_over_many_batches_are_in_double_precision():
  """In float32 a sample more would not change a sum of 2**24."""
  batches = [np.float32([0, 0, 2**24]), *[np.float32([1, 0, 1])] * 3]
  evaluate = types.SimpleNamespace(
    _batches=batches,
    _totals=lambda params, model_state, batch: batch,
    _workers=types.SimpleNamespace(view=lambda x: x),
    _of_text=False,
  )
  found = training.Evaluator._measure(evaluate, {}, {})
  assert found["accuracy"] == pytest.approx(3 / (2**24 + 3), rel=1e-9, abs=0.0)
