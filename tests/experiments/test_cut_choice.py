"""The cut of a network is chosen by the accuracy of its predictor."""

import dataclasses

import jax
import numpy as np
import pytest

from jdist import prediction
from tests import _refusals
from tests.experiments import _loading
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


@pytest.fixture
def choice(monkeypatch):
  return _loading.load("cut_choice", "mp2/cut_choice.py", monkeypatch)


def scored(choice, accuracy, pushed_bytes, untrained=0.1):
  predictor = prediction.predictor(_tiny.cut())
  return choice.ScoredCut(predictor, {}, accuracy, untrained, pushed_bytes)


@pytest.mark.slow
def test_score_of_a_cut_is_its_predictors_accuracy(choice, tmp_path):
  train, test = _tiny.digits("train"), _tiny.digits("test")
  sets = [collected(tmp_path / str(seed), seed) for seed in (0, 1)]
  predictors = [prediction.predictor(_tiny.cut(depth)) for depth in (1, 2)]
  scores = choice.score_cuts(
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


def test_cheapest_accurate_cut_is_chosen(choice):
  scores = [
    scored(choice, *given) for given in ((0.90, 100), (0.95, 200), (0.955, 400))
  ]
  assert choice.choose_cut(scores) is scores[1]
  assert choice.choose_cut(scores, max_lost=0.0) is scores[2]
  assert choice.choose_cut(scores, max_lost=0.1) is scores[0]
  # The most accurate of those that send as many bytes.
  again = scored(choice, 0.953, 200)
  assert choice.choose_cut([*scores, again]) is again


def test_predictors_without_a_gain_raise(choice):
  with _refusals.refused("scores", "0.100 at best and no gain"):
    choice.choose_cut([scored(choice, 0.1, 1), scored(choice, 0.1, 2)])
