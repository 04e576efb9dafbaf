"""A workload's parts, of eight images and of a text."""

import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import collectives, data, models, training
from jdist.training import comparison
from jdist.training.comparison import _workload

_IMAGES = data.Dataset(
  name="mine", split="train", num_classes=3, mean=(7.5,), std=(4.0,),
  images=np.arange(32, dtype=np.uint8).reshape(8, 2, 2, 1),
  labels=np.arange(8, dtype=np.int32) % 3,
)  # fmt: skip
_TEXT = data.TextDataset("mine", "train", np.arange(40).reshape(5, 8))


def _of(train=_IMAGES, workers=None, batch_size=4, **options):
  workers = workers or collectives.workers(2, substrate="vmap")
  return comparison.Workload(
    workers, train, train, lambda seed: f"model {seed}", batch_size, **options
  )


def test_epochs_are_whole_steps_and_one_at_least():
  workload = _of(batch_size=6)
  assert workload.steps_per_epoch == pytest.approx(8 / 6)
  found = [workload.steps(epochs) for epochs in (0.1, 1.0, 3.0, 4.5)]
  assert found == [1, 1, 4, 6]


@pytest.mark.parametrize(
  ("fraction", "number"), [(0.1, 1), (0.25, 2), (0.3, 2), (0.5, 4)]
)
def test_part_of_the_training_set_is_held_out(fraction, number):
  whole = _of(alpha=0.5)
  part = whole.hold_out(fraction)
  assert (len(part.train), len(part.test)) == (8 - number, number)
  kept, held = (x.images[:, 0, 0, 0] // 4 for x in (part.train, part.test))
  assert {*kept, *held} == {*range(8)} and list(kept) == sorted(kept)
  assert part.alpha == 0.5 and part.train.mean == whole.train.mean
  again = whole.hold_out(fraction).test.labels
  np.testing.assert_array_equal(again, part.test.labels)
  others = {
    tuple(whole.hold_out(fraction, seed=seed).test.images.ravel())
    for seed in range(8)
  }
  assert len(others) > 1
  with pytest.raises(ValueError, match="`fraction` must leave samples"):
    whole.hold_out(1.0)


def test_batches_are_divided_over_the_workers_of_this_process():
  team = collectives.workers(4, substrate="vmap")
  workload = _of(workers=team, batch_size=8, alpha=0.5)
  found = workload.batches(3)
  wanted = data.Batches(
    _IMAGES, 4, 2, seed=3, alpha=0.5, worker_ids=team.local_workers
  )
  for one, other in zip(found[0].values(), wanted[0].values(), strict=True):
    np.testing.assert_array_equal(one, other)
  assert found[0]["image"].shape == (4, 2, 2, 2, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inputs_are_normalized_in_the_dtype_of_the_model(dtype):
  batch = _IMAGES.batch(np.arange(3))
  x = _of(dtype=dtype).inputs()(batch, jax.random.key(0))
  assert x.dtype == dtype
  wanted = (np.float32(batch["image"]) - 7.5) / 4.0
  np.testing.assert_allclose(np.float32(x), wanted, rtol=1e-2)
  text = _TEXT.batch(np.arange(3))
  tokens = _of(_TEXT, dtype=dtype).inputs()(text, jax.random.key(0))
  np.testing.assert_array_equal(tokens, text["tokens"])


def test_loss_computes_in_the_dtype_of_the_model():
  seen = []

  def apply(params, state, x, *, train):
    seen.append((params.dtype, x.dtype, train))
    return jnp.zeros((len(x), 3)) + params.astype(jnp.float32), state

  loss_fn = _of(dtype="bfloat16").loss(apply)
  batch = _IMAGES.batch(np.arange(2))
  loss, _ = loss_fn(jnp.zeros(3), {}, batch, jax.random.key(0))
  assert seen == [("bfloat16", "bfloat16", True)]
  assert float(loss) == pytest.approx(math.log(3))


@pytest.fixture
def made(monkeypatch):
  """Notes what the parts of a variant are made of."""
  found = {}

  def note(module, name):
    def make(*given, **more):
      found[name] = (given, more)
      return name

    monkeypatch.setattr(module, name, make)

  note(_workload._gradient, "make_gradient")
  note(_workload._step, "step_by")
  note(_workload._evaluation, "Evaluator")
  note(_workload.loop, "Trainer")
  note(_workload._train_state, "init_state")
  monkeypatch.setattr(
    comparison.Workload, "loss", lambda self, apply: f"loss of {apply}"
  )
  return found


@pytest.mark.parametrize("more", [{}, {"independent": True}])
def test_programs_of_a_variant_are_made_once(more, made):
  workload = _of(batch_size=6, accumulate=3, evaluation_batch=5)
  found = workload.programs("chain", "apply", max_shapes=7, **more)
  assert made["make_gradient"] == (("loss of apply",), {"accumulate": 3})
  axis = workload.workers.axis
  independent = {"axis": axis, "independent": more.get("independent", False)}
  assert made["step_by"] == (("make_gradient", "chain"), independent)
  trainer = (workload.workers, "step_by"), {"max_shapes": 7, **more}
  assert made["Trainer"] == trainer
  (team, apply, batches), given = made["Evaluator"]
  assert (team, apply) == (workload.workers, "apply")
  # Messages in flight are applied before a model is measured.
  assert given.pop("optimizer") == "chain"
  assert given["compute_dtype"] == jnp.float32 and "normalize" in given
  (first, *_) = batches
  assert first["image"].shape[:2] == (2, 5)
  parts = found.workload, found.optimizer, found.step
  assert parts == (workload, "chain", "step_by")
  assert (found.trainer, found.evaluate) == ("Trainer", "Evaluator")
  workload.evaluator("apply")
  assert made["Evaluator"][1]["optimizer"] is None


def test_run_begins_with_the_parameters_and_batches_of_its_seed(made):
  model = models.Model({"w": jnp.ones(2)}, {"m": jnp.ones(1)}, None)
  workload = dataclasses.replace(_of(), model=lambda seed: [model][seed - 4])
  given = {}

  def fit(state, batches, num_steps, **options):
    given.update(options, first=next(batches(0)), state=state)
    return "state", num_steps

  programs = _workload.VariantPrograms(
    workload, "chain", "step", types.SimpleNamespace(fit=fit), "evaluate"
  )
  assert programs.run(4, 9, label="x") == ("state", 9)
  assert made["init_state"] == (
    (workload.workers, "chain", model.params, model.state), {"seed": 4}
  )  # fmt: skip
  assert given["state"] == "init_state" and given["label"] == "x"
  assert given["evaluate"] == "evaluate"
  wanted = next(workload.batches(4).iterate(0))
  np.testing.assert_array_equal(given["first"]["image"], wanted["image"])
  others = next(workload.batches(5).iterate(0))
  assert (others["image"] != wanted["image"]).any()


def test_row_of_a_run_has_its_last_record_and_its_curve():
  first = training.Record(
    step=2, rounds=1, sent_bytes=8.0, train_loss=1.5, train_s=0.5,
    samples_per_s=math.nan, metrics={"accuracy": 0.25, "loss": 2.0, "x": 7.0},
  )  # fmt: skip
  last = first._replace(
    step=4, rounds=2, sent_bytes=16.0, train_loss=1.25, train_s=1.0,
    samples_per_s=30.0, metrics={"accuracy": 0.5, "loss": 1.0, "x": 8.0},
    diverged=True, skipped=3, clock="virtual",
  )  # fmt: skip
  found = comparison.summarize([first, last])
  curve = found.pop("curve")
  assert found == {
    "accuracy": 0.5, "test_loss": 1.0, "x": 8.0, "rounds": 2,
    "sent_bytes": 16.0, "train_s": 1.0, "train_loss": 1.25, "steps": 4,
    "samples_per_s": 30.0, "clock": "virtual", "diverged": True, "skipped": 3,
  }  # fmt: skip
  assert curve[0] == {
    "step": 2, "rounds": 1, "sent_bytes": 8.0, "train_s": 0.5,
    "train_loss": 1.5, "accuracy": 0.25, "loss": 2.0, "x": 7.0,
  }  # fmt: skip
  assert [x["step"] for x in curve] == [2, 4]
  assert comparison.summarize([first])["samples_per_s"] is None
  # The record keeps its metrics.
  assert first.metrics == {"accuracy": 0.25, "loss": 2.0, "x": 7.0}
