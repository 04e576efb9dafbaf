"""The costs for the methods' pages are of all methods, each as it is used."""

import itertools

import jax.numpy as jnp
import pytest

from jdist import methods
from tests.experiments import _loading


@pytest.fixture(name="costs")
def _costs(monkeypatch):
  _loading.enter("advise", monkeypatch)
  return _loading.load("advise_costs", "advise/costs.py", monkeypatch)


def test_each_method_is_recorded_here_or_with_the_predictions(costs):
  known = {x.split()[0] for x in costs.run.CHAINS}
  assert sorted([*costs.names(), *known, "mp2"]) == sorted(methods.registry)


def test_methods_are_recorded_as_they_are_used(costs):
  for name in costs.names():
    make, interval = costs.chain(name)
    make("worker")
    assert (interval > 1) == methods.registry[name].in_rounds


def test_rounds_begin_with_the_first_step(costs):
  # By default the first half of a run has rounds of one step.
  make, interval = costs.chain("post_local_sgd")
  state = make(None).init({"w": jnp.ones(3)})
  assert state.sync.clock.interval == interval == 8


def test_rows_that_are_there_are_not_made_again(costs):
  everything = costs.left([], "cnn", 24)
  assert list(itertools.chain(*everything)) == costs.names()
  rows = [
    {"config": {"model": "cnn", "batch_size": 24}, "method": name}
    for name in everything[0]
  ]
  assert costs.left(rows, "cnn", 24) == everything[1:]
  assert costs.left(rows, "mlp", 128) == everything
