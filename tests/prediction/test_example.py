"""The example of the experiment is run as it stands there."""

import pathlib
import runpy

import chex
import jax
import pytest

from jdist import prediction

EXAMPLE = pathlib.Path(__file__).parents[2] / "experiments/mp2/example.py"


@pytest.mark.slow
def test_example_of_experiment_runs(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  # Optax's Adam mixes dtypes in a way that the strict mode of the tests
  # refuses; a reader's program has the ordinary mode.
  with jax.numpy_dtype_promotion("standard"):
    scope = runpy.run_path(str(EXAMPLE))
  assert [point.epoch for point in scope["fitted"].curve] == [0, 1, 2]
  assert prediction.ParameterSet("run-1").done == 20
  # Where the run ends, the rest is what the predictor makes of the front.
  params = jax.tree.map(lambda x: x[0], scope["state"].params)
  cut, predictor = scope["cut"], scope["predictor"]
  front, rear = cut.split(params)
  predicted = predictor.apply(scope["params"], front)
  chex.assert_trees_all_close(predicted, rear, rtol=1e-4, atol=1e-5)
