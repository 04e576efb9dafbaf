"""Scores of cuts by the accuracy of predicted networks, and a choice."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jdist import models, prediction

Fronts = Callable[[prediction.Cut], np.ndarray]


class ScoredCut(NamedTuple):
  """A cut with its trained predictor, at its best epoch.

  Attributes:
    predictor: The predictor of the cut.
    params: The trained parameters of the predictor.
    accuracy: The mean accuracy of networks with held-out fronts and predicted
      rears on the test images.
    untrained: The same accuracy before the training.
    pushed_bytes: The bytes that a worker sends in a round.
  """

  predictor: prediction.Predictor
  params: Any
  accuracy: float
  untrained: float
  pushed_bytes: int


def score_cuts(
  predictors: Sequence[prediction.Predictor],
  model: models.Model,
  samples: Fronts,
  images: Any,
  labels: Any,
  *,
  held_out: Fronts,
  directory: pathlib.Path | None = None,
  **options: Any,
) -> tuple[ScoredCut, ...]:
  """Trains a predictor for each of several cuts and measures their accuracy.

  All have the same budget.  MP² does not say how its cuts were chosen.

  Args:
    predictors: One predictor for each cut, or several with different ranks.
    model: The network, without batch statistics.
    samples: A function from a cut to its fronts, float32 [samples, num_front],
      for instance `ParameterSet.fronts` of a run collected for all these cuts.
    images: The training images, see `fit_predictor`.
    labels: The classes of the images, integers [n] from 0.
    held_out: A function from a cut to fronts of another run.
    directory: A directory that keeps the state of each training in a folder.
    **options: Options of `fit_predictor`: `test_images`, `test_labels`, `fit`,
      `normalize`.

  Returns:
    One score for each predictor, in their order.
  """
  fronts = [(samples(each.cut), held_out(each.cut)) for each in predictors]
  scores = []
  for number, (each, (own, others)) in enumerate(
    zip(predictors, fronts, strict=True)
  ):
    fitted = prediction.fit_predictor(
      each,
      model,
      own,
      images,
      labels,
      held_out=np.asarray(others),
      directory=None if directory is None else directory / f"{number:02}",
      **options,
    )
    accuracy, untrained = fitted.best.accuracy, fitted.curve[0].accuracy
    pushed_bytes = 4 * each.cut.num_front
    scores.append(
      ScoredCut(each, fitted.params, accuracy, untrained, pushed_bytes)
    )
  return tuple(scores)


def choose_cut(
  scores: Sequence[ScoredCut], *, max_lost: float = 0.01
) -> ScoredCut:
  """Chooses the cut with the fewest bytes among the accurate ones.

  Args:
    scores: Scores of `score_cuts`, with the same network and images.
    max_lost: The accuracy that fewer bytes may cost, from 0 to 1; default 0.01,
      a point.

  Returns:
    The score with the fewest bytes and an accuracy of at least the best one
    minus `max_lost`; the most accurate of equals.

  Raises:
    ValueError: If no predictor has learned anything, and no cut is better.
  """
  best = max(score.accuracy for score in scores)
  # Without this check the smallest cut would win among predictors at chance.
  if all(score.accuracy <= score.untrained for score in scores):
    raise ValueError(
      "`scores` must have one that is above its untrained predictor's "
      f"accuracy, got {best:.3f} at best and no gain. Train longer, or with "
      "fronts of more runs."
    )
  good = [score for score in scores if score.accuracy >= best - max_lost]
  return min(good, key=lambda score: (score.pushed_bytes, -score.accuracy))
