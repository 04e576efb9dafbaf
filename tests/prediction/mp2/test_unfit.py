"""What does not suit the training of a predictor is refused by name."""

import dataclasses
import functools

import numpy as np
import pytest

from jdist import models, prediction
from tests import _refusals
from tests.prediction import _tiny
from tests.prediction._fits import (
  FIT,
  fit_predictor,
  fronts,
  model,
  predictor,
)


def test_networks_that_cannot_be_assembled_are_refused():
  deep = model(hidden_sizes=(6, 5, 4))
  with _refusals.refused("model", "of Cut"):
    prediction.evaluate_predictor(
      predictor(), {}, deep, fronts(3), np.zeros(0), np.zeros(0)
    )
  options = {"input_shape": (8, 8, 1), "num_classes": 10}
  batch = models.build("resnet8", **options)
  ours = prediction.predictor(prediction.cut(batch, 2))
  with _refusals.refused("model", "have no state"):
    prediction.evaluate_predictor(
      ours, {}, batch, fronts(3), np.zeros(0), np.zeros(0)
    )


def test_arguments_of_another_kind_are_refused_by_name(tmp_path):
  cut = _tiny.cut()
  for name, wrong, rule in (
    ("of", cut, r"`predictor` must be of `prediction\.predictor\(cut\)`, got"),
    ("fit", {}, r"`fit` must be a `PredictorFit` or None, got \{\}"),
    ("normalize", None, "`normalize` must be a function of images.*got None"),
    ("on_epoch", 3, "`on_epoch` must be a function of .*or None, got 3"),
    ("samples", fronts(8).tolist(), r"`samples` must be \[.*got a list"),
    ("held_out", None, r"`held_out` must be \[.*got None"),
  ):
    with pytest.raises(ValueError, match=rule):
      fit_predictor(**{name: wrong})
  given = ({}, fronts(3), np.zeros(0), np.zeros(0))
  with _refusals.refused("predictor", "of"):
    prediction.evaluate_predictor(cut, given[0], model(), *given[1:])
  with _refusals.refused("model", "a network"):
    prediction.evaluate_predictor(
      predictor(), given[0], model().params, *given[1:]
    )
  with _refusals.refused("predictor", "of"):
    prediction.save_predictor(tmp_path / "none", cut, {})
  assert not (tmp_path / "none").exists()


def test_samples_and_settings_that_do_not_fit_are_refused():
  for name in ("samples", "held_out"):
    text = fronts(8).astype(str)
    cut = (fronts(8)[:, 1:], fronts(8)[:0], fronts(8)[0])
    for wrong in (*cut, text, fronts(8).astype(np.complex64)):
      with _refusals.refused(name, "[samples,"):
        fit_predictor(**{name: wrong})
  for name, value, rule in (
    ("num_epochs", 0, "int >= 1"),
    ("samples_per_batch", 0, "int >= 1"),
    ("sample_batches", 0, "int >= 1"),
    ("images_per_batch", 2.0, "int >= 1"),
    ("image_batches", True, "int >= 1"),
    ("learning_rate", 0, r"in \(0, inf\]"),
    ("learning_rate", "x", "number, got 'x'"),
    ("learning_rate", "1e-3", "finite number"),
    ("learning_rate", np.inf, "finite"),
    ("mixup", -1, r"in \[0"),
    ("mixup", None, "number, got None"),
    ("mixup", np.inf, "finite"),
    ("mixup", np.nan, "finite"),
    ("mixup", 10**400, "finite"),
    ("seed", -1, "from 0"),
    ("seed", "a", "from 0"),
    ("seed", 2**63, "from 0 to"),
  ):
    with pytest.raises(ValueError, match=f"`{name}` must be.*{rule}"):
      prediction.PredictorFit(**{name: value})
  # As JSON can hold it.
  fit = prediction.PredictorFit(learning_rate=np.float32(0.5), mixup=0)
  assert (type(fit.learning_rate), fit.learning_rate) == (float, 0.5)
  many = dataclasses.replace(FIT, samples_per_batch=9)
  with _refusals.refused("samples_per_batch", "at most 8"):
    fit_predictor(many)
  many = dataclasses.replace(FIT, image_batches=1000)
  with _refusals.refused("image_batches", "times"):
    fit_predictor(many)
  with _refusals.refused("save_every", "an int >= 1"):
    fit_predictor(save_every=0)
  with _refusals.refused("save_every", "left out without"):
    fit_predictor(save_every=1)


def test_images_and_labels_that_do_not_belong_together_are_refused():
  train = _tiny.digits("train")
  n = len(train.images)
  for prefix in ("", "test_"):
    labels = _tiny.digits("test" if prefix else "train").labels
    for wrong, rule in (
      (labels[:-1], f"one label for each of `{prefix}images`"),
      (np.tile(labels, 2), f"one label for each of `{prefix}images`"),
      (np.eye(10)[labels], r"integers \[images\].*float64.*argmax"),
      (np.float32(labels), r"integers \[images\].*float32"),
      (labels + 1, "from 0 to 9.*got 1 to 10"),
      (labels.astype(int) - 1, "from 0 to 9.*got -1 to 8"),
    ):
      with pytest.raises(ValueError, match=f"`{prefix}labels` must.*{rule}"):
        fit_predictor(**{f"{prefix}labels": wrong})
    with pytest.raises(ValueError, match=f"`{prefix}images` must hold at le"):
      fit_predictor(
        **{f"{prefix}images": train.images[:0], f"{prefix}labels": labels[:0]}
      )
    with pytest.raises(
      ValueError, match=rf"`{prefix}images` must be im.*\[batch, 8, 8"
    ):
      fit_predictor(**{f"{prefix}images": np.zeros((len(labels), 4, 8, 1))})
  bad = np.float32(train.images)
  bad[7, 0] = np.nan
  for name, value, row in (
    ("samples", np.where(np.arange(8)[:, None] == 5, np.inf, fronts(8)), 5),
    ("held_out", np.full_like(fronts(3), np.nan), 0),
    ("images", bad, 7),
  ):
    with pytest.raises(ValueError, match=f"`{name}` must be finite.*row {row}"):
      fit_predictor(**{name: value})
  evaluate = functools.partial(
    prediction.evaluate_predictor, predictor(), {}, model()
  )
  for samples, images, labels, rule in (
    (fronts(3), train.images, train.labels[:-1], f"{n - 1} for {n}"),
    (fronts(3), train.images[:0], train.labels[:0], "at least one image"),
    (fronts(3) * np.nan, train.images, train.labels, "`samples` must be fin"),
  ):
    with pytest.raises(ValueError, match=rule):
      evaluate(samples, images, labels)
  for name in ("samples_per_batch", "images_per_batch"):
    with _refusals.refused(name, "an int >= 1"):
      evaluate(fronts(3), train.images, train.labels, **{name: 0})
