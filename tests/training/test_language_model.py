"""Language models: their loss, what is said of them, and a run on a text."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import collectives, data, methods, models, training
from jdist.training import comparison
from tests import _refusals

_VOCABULARY = 5


def batch_of(shape, seed=0):
  rng = np.random.default_rng(seed)
  tokens, targets = rng.integers(0, _VOCABULARY, (2, *shape)).astype(np.int32)
  return {"tokens": tokens, "targets": targets}


def apply(params, state, tokens, train, mask=None):
  """A bigram model: a row of logits for each token."""
  del train, mask
  return params[tokens], state


def bigrams(seed=1):
  rng = np.random.default_rng(seed)
  return rng.normal(size=(_VOCABULARY, _VOCABULARY)).astype(np.float32)


def by_hand(table, batch):
  logits = np.asarray(table, np.float64)[batch["tokens"]]
  logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  losses = -np.take_along_axis(logs, batch["targets"][..., None], -1)[..., 0]
  return losses, logits.argmax(-1) == batch["targets"]


@pytest.mark.parametrize("masked", ["", "samples", "tokens"])
def test_text_loss_is_the_mean_over_unmasked_tokens(masked):
  batch, table = batch_of((3, 4)), bigrams()
  losses, hits = by_hand(table, batch)
  inside = np.ones((3, 4), bool)
  if masked == "samples":
    batch["mask"] = np.array([1.0, 0.0, 1.0], np.float32)
    inside[1] = False
  elif masked == "tokens":
    inside = np.random.default_rng(2).random((3, 4)) < 0.5
    batch["mask"] = inside.astype(np.float32)
  loss_fn = training.classification_loss(apply)
  loss, (_, metrics) = loss_fn(jnp.asarray(table), {}, batch, None)
  np.testing.assert_allclose(loss, losses[inside].mean(), rtol=1e-5)
  np.testing.assert_allclose(metrics["accuracy"], hits[inside].mean())


def test_loss_is_float32_for_every_compute_dtype():
  seen = []

  def told(params, state, tokens, train):
    seen.append((params.dtype, tokens.dtype))
    return apply(params, state, tokens, train)

  loss_fn = training.classification_loss(told, compute_dtype=jnp.bfloat16)
  batch = batch_of((3, 4))
  loss, _ = loss_fn(jnp.asarray(bigrams()), {}, batch, None)
  assert seen == [(jnp.bfloat16, np.int32)] and loss.dtype == jnp.float32
  np.testing.assert_allclose(
    loss, by_hand(bigrams(), batch)[0].mean(), rtol=0.02
  )


def test_evaluation_counts_all_tokens_but_no_padding():
  windows = np.random.default_rng(3).integers(0, _VOCABULARY, (11, 5))
  text = data.TextDataset("mine", "test", windows, _VOCABULARY)
  team = collectives.workers(2, substrate="vmap")
  evaluate = training.Evaluator(
    team, apply, data.evaluation_batches(text, 2, 3)
  )
  found = evaluate.measure(bigrams())
  losses, hits = by_hand(bigrams(), text.batch(np.arange(11)))
  assert found["loss"] == pytest.approx(losses.mean(), rel=1e-5)
  assert found["accuracy"] == pytest.approx(hits.mean())
  assert found["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-5)
  assert found["bits_per_token"] == pytest.approx(
    losses.mean() / math.log(2), rel=1e-5
  )
  uniform = evaluate.measure(np.zeros_like(bigrams()))
  assert uniform["perplexity"] == pytest.approx(_VOCABULARY)
  infinite = evaluate.measure(np.float32(1e6) * bigrams())
  assert infinite["perplexity"] == math.inf


@pytest.fixture
def workload(tmp_path):
  file = tmp_path / "mine.txt"
  # The next letter is known from the two before it, not from one.
  file.write_bytes(b"abacbc" * 100)
  train, test = (
    data.load_text(file, split, window_length=12) for split in ("train", "test")
  )

  def model(seed):
    return models.build(
      "transformer",
      input_shape=train.input_shape,
      num_classes=train.num_classes,
      seed=seed,
      num_layers=1,
      width=16,
      num_heads=2,
    )

  team = collectives.workers(2, substrate="vmap")
  return comparison.Workload(team, train, test, model, 16, evaluation_batch=8)


def test_transformer_learns_a_text(workload):
  optimizer = methods.ssgd(optax.adam(0.02), axis=workload.workers.axis)
  with jax.numpy_dtype_promotion("standard"):  # Of Optax's Adam.
    programs = workload.programs(optimizer, workload.model(0).apply)
    _, records = programs.run(0, 60, evaluate_every=30)
  row = comparison.summarize(records)
  # One byte alone says the next in two of three cases at most.
  assert row["accuracy"] > 0.85 and row["bits_per_token"] < 0.5
  assert row["perplexity"] == pytest.approx(math.exp(row["test_loss"]))
  assert [point["loss"] for point in row["curve"]][-1] == row["test_loss"]


def test_text_is_held_out_in_windows(workload):
  tuning = workload.hold_out(0.2)
  both = np.concatenate([tuning.train.windows, tuning.test.windows])
  assert len(tuning.test) == int(0.2 * len(workload.train))
  assert sorted(map(bytes, both)) == sorted(map(bytes, workload.train.windows))


def test_augmented_text_raises(workload):
  with _refusals.refused("augment", "False for a text"):
    comparison.Workload(
      workload.workers,
      workload.train,
      workload.test,
      workload.model,
      16,
      augment=True,
    )
