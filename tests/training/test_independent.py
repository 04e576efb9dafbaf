"""Workers that never communicate cause a warning, unless it is intended."""

import re

import jax
import numpy as np
import optax
import pytest

from jdist import collectives, methods, training
from tests import _refusals
from tests.training import _tiny

_TOLD = re.escape("`independent=True` if that is meant.")


@pytest.fixture(name="team")
def _team():
  return collectives.workers(2, substrate="vmap")


def _fit(team, optimizer, step, **options):
  trainer = training.Trainer(team, step, **options)
  state = training.init_state(team, optimizer, _tiny.params())
  return trainer.fit(state, _tiny.batches(team), 2)


@pytest.mark.parametrize("axis", ["the team's", None])
@pytest.mark.parametrize("method", ["plain", "local_sgd"])
def test_optimizer_that_never_sends_raises(team, axis, method):
  optimizer = optax.sgd(0.1)
  if method == "local_sgd":
    optimizer = methods.local_sgd(optimizer, 2, axis=None)
  step = training.make_step(
    _tiny.loss_fn, optimizer, axis=team.axis if axis else None
  )
  with pytest.raises(ValueError, match=_TOLD):
    _fit(team, optimizer, step)
  meant = training.make_step(
    _tiny.loss_fn,
    optimizer,
    axis=team.axis if axis else None,
    independent=True,
  )
  state, _ = _fit(team, optimizer, meant, independent=True)
  first, second = np.asarray(jax.tree.leaves(state.params)[0])
  assert (first != second).any()


def test_silent_step_in_a_user_loop_raises(team):
  step = training.make_step(_tiny.loss_fn, optax.sgd(0.1), axis=team.axis)
  state = training.init_state(team, optax.sgd(0.1), _tiny.params())
  batch = next(_tiny.batches(team)(0))
  with _refusals.refused("optimizer", "bring the workers"):
    team.jit(step)(state, team.place(batch))


def test_user_transformation_that_sends_is_accepted(team):
  mean = optax.stateless(lambda x, _: collectives.mean(x, team.axis))
  own = optax.chain(mean, optax.sgd(0.1))
  state, _ = _fit(
    team, own, training.make_step(_tiny.loss_fn, own, axis=team.axis)
  )
  first, second = np.asarray(jax.tree.leaves(state.params)[0])
  np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("method", [methods.ssgd, methods.local_sgd])
def test_part_of_the_axis_of_workers_that_share_a_device_raises(method):
  team = _tiny.team("two_on_each")
  options = {"interval": 2} if method is methods.local_sgd else {}
  optimizer = method(optax.sgd(0.1), axis="worker", **options)
  step = training.make_step(_tiny.loss_fn, optimizer, axis=team.axis)
  with _refusals.refused("axis", "share a device, got 'worker'"):
    _fit(team, optimizer, step)
