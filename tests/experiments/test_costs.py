"""The costs for the methods' pages are of all methods, each as it is used."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from jdist import methods, models, prediction, training
from tests.experiments import _loading


@pytest.fixture(name="costs")
def _costs(monkeypatch):
  _loading.enter("advise", monkeypatch)
  return _loading.load("advise_costs", "advise/costs.py", monkeypatch)


def test_each_method_is_recorded_here_or_with_the_predictions(costs):
  known = {x.split()[0] for x in costs.run.CHAINS}
  assert sorted([*costs.names("cnn", 24), *known]) == sorted(methods.registry)
  assert set(costs.names("cnn", 24)) - set(costs.names("mlp", 128)) == {"mp2"}
  assert costs.names("lenet", 96) == ["mp2"]


def test_each_method_has_rows_of_each_of_its_nets(costs):
  rows = training.read_rows(costs.ROWS)
  for net in {*costs.NETS, *costs.PREDICTED}:
    assert costs.left(rows, *net) == []


def test_methods_are_recorded_as_they_are_used(costs):
  params = models.build("lenet", input_shape=(28, 28, 1), num_classes=10).params
  for name in costs.names("cnn", 24):
    make, interval = costs.chain(name, params)
    make("worker")
    assert (interval > 1) == methods.registry[name].in_rounds
    if name == "mp2":
      given = make(None).init(params).predictor
      size = sum(x.size for x in jax.tree.leaves(given))
      published = prediction.predictor(prediction.published_cut("lenet"))
      assert size == published.num_params


def test_rounds_begin_with_the_first_step(costs):
  # By default the first half of a run has rounds of one step.
  make, interval = costs.chain("post_local_sgd", None)
  state = make(None).init({"w": jnp.ones(3)})
  assert state.sync.clock.interval == interval == 8


def test_rows_that_are_there_are_not_made_again(costs):
  everything = costs.left([], "mlp", 128)
  assert list(itertools.chain(*everything)) == costs.names("mlp", 128)
  rows = [
    {"config": {"model": "mlp", "batch_size": 128}, "method": name}
    for name in everything[0]
  ]
  assert costs.left(rows, "mlp", 128) == everything[1:]
  assert costs.left(rows, "mlp", 64) == []
