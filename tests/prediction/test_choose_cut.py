"""The cut chosen by what is predicted well behind it."""

import dataclasses

import jax
import numpy as np
import pytest

from jdist import prediction
from jdist.prediction import _choose_cut
from tests import _refusals
from tests.prediction import _tiny
from tests.prediction._fits import FIT, model, normalize


def collected(folder, seed, num_samples=8):
  """Parameters near the first ones, cut at both depths."""
  steps = tuple(range(1, num_samples + 1))
  cuts = [_tiny.cut(1), _tiny.cut(2)]
  collect = prediction.Collector(folder, _tiny.alone(), cuts, steps)
  rng = np.random.default_rng(seed)
  for step in steps:
    state = _tiny.state(step, model().params)
    near = jax.tree.map(
      lambda x: x + 0.01 * rng.standard_normal(x.shape), model().params
    )
    params = jax.tree.map(lambda x: np.asarray(x[None], np.float32), near)
    collect(state._replace(params=params))
  return prediction.ParameterSet(folder)


def scored(accuracy, pushed_bytes, untrained=0.1):
  predictor = prediction.predictor(_tiny.cut())
  return _choose_cut.ScoredCut(predictor, {}, accuracy, untrained, pushed_bytes)


@pytest.mark.slow
def test_score_of_a_cut_is_its_predictors_accuracy(tmp_path):
  train, test = _tiny.digits("train"), _tiny.digits("test")
  sets = [collected(tmp_path / str(seed), seed) for seed in (0, 1)]
  predictors = [prediction.predictor(_tiny.cut(depth)) for depth in (1, 2)]
  scores = prediction.score_cuts(
    predictors,
    model(),
    sets[0].fronts,
    train.images,
    train.labels,
    held_out=sets[1].fronts,
    test_images=test.images,
    test_labels=test.labels,
    fit=dataclasses.replace(FIT, num_epochs=1),
    normalize=normalize,
    directory=tmp_path / "fits",
  )
  assert sorted(p.name for p in (tmp_path / "fits").iterdir()) == ["00", "01"]
  for score, predictor in zip(scores, predictors, strict=True):
    cut = predictor.cut
    found = prediction.evaluate_predictor(
      predictor,
      score.params,
      model(),
      np.asarray(sets[1].fronts(cut)),
      test.images,
      test.labels,
      normalize=normalize,
      samples_per_batch=FIT.samples_per_batch,  # The program of the fit.
    )
    assert score.accuracy == pytest.approx(found.mean(), abs=1e-6)
    assert score.accuracy >= score.untrained
    assert score.pushed_bytes == 4 * cut.num_front


def test_cheapest_accurate_cut_is_chosen():
  scores = [scored(0.90, 100), scored(0.95, 200), scored(0.955, 400)]
  assert prediction.choose_cut(scores) is scores[1]
  assert prediction.choose_cut(scores, max_lost=0.0) is scores[2]
  assert prediction.choose_cut(scores, max_lost=0.1) is scores[0]
  # Of those that send alike the best.
  again = scored(0.953, 200)
  assert prediction.choose_cut([*scores, again]) is again


def test_invalid_accuracy_raises():
  for at in (0, 1):
    scores = [scored(0.9, 10), scored(0.8, 5)]
    scores[at] = scored(np.nan, 5)
    with pytest.raises(ValueError, match=r"accuracy` must be a fin.*got nan"):
      prediction.choose_cut(scores)


def test_invalid_arguments_raise(tmp_path):
  for wrong in (2, -0.1, np.nan, "a", None, True, [0.1]):
    with pytest.raises(
      ValueError, match=r"`max_lost` must be (a finite|in \[0, 1\])"
    ):
      prediction.choose_cut([scored(0.5, 1)], max_lost=wrong)
  with _refusals.refused("scores", "0.100 at best and no gain"):
    prediction.choose_cut([scored(0.1, 1), scored(0.1, 2)])
  train = _tiny.digits("train")
  parameters = collected(tmp_path, 0, 1)
  given = {
    "held_out": parameters.fronts, "test_images": train.images,
    "test_labels": train.labels,
  }  # fmt: skip
  data = (parameters.fronts, train.images, train.labels)
  other = prediction.predictor(_tiny.cut(1, hidden_sizes=(7, 5)))
  with pytest.raises(ValueError, match=r"dense.*\[64, 7\]"):
    prediction.score_cuts([other], model(), *data, **given)
