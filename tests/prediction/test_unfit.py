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
  options = {"input_shape": (8, 8, 1), "num_classes": 10}
  batch = models.build("resnet8", **options)
  ours = prediction.predictor(prediction.cut(batch, 2))
  with _refusals.refused("model", "have no state"):
    prediction.evaluate_predictor(
      ours, {}, batch, fronts(3), np.zeros(0), np.zeros(0)
    )


def test_settings_that_do_not_fit_the_data_are_refused():
  # As JSON can hold it.
  fit = prediction.PredictorFit(learning_rate=np.float32(0.5), mixup=0)
  assert (type(fit.learning_rate), fit.learning_rate) == (float, 0.5)
  many = dataclasses.replace(FIT, samples_per_batch=9)
  with _refusals.refused("samples_per_batch", "an int from 1 to 8"):
    fit_predictor(many)
  many = dataclasses.replace(FIT, image_batches=1000)
  with _refusals.refused("image_batches", "times"):
    fit_predictor(many)


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
  with _refusals.refused("images", "that `normalize` makes inputs"):
    fit_predictor(normalize=lambda images: images + "text")
  evaluate = functools.partial(
    prediction.evaluate_predictor, predictor(), {}, model()
  )
  for samples, images, labels, rule in (
    (fronts(3), train.images, train.labels[:-1], f"{n - 1} for {n}"),
    (fronts(3), train.images[:0], train.labels[:0], "at least one image"),
    (fronts(3), np.float32(1), train.labels, "at least one image"),
  ):
    with pytest.raises(ValueError, match=rule):
      evaluate(samples, images, labels)
