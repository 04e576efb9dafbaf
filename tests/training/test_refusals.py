"""Refusals of steps, losses and runs: an argument and its rule."""

import tempfile

import optax

from jdist import training
from jdist.training.loop import _programs
from tests import _refusals
from tests.training import _tiny

NAN = float("nan")


def step(accumulate):
  return training.make_step(
    _tiny.loss_fn, optax.sgd(0.1), axis=None, accumulate=accumulate
  )


def gradient(accumulate):
  return training.make_gradient(_tiny.loss_fn, accumulate=accumulate)


def evaluator(batches):
  return training.Evaluator(_tiny.team("none"), None, batches)


def kept(number):
  return training.Checkpoints("nowhere", _tiny.team("none"), keep=number)


def save(step):
  team = _tiny.team("vmap")
  state = _tiny.init(team, "momentum")
  with (
    tempfile.TemporaryDirectory() as folder,
    training.Checkpoints(folder, team) as checkpoints,
  ):
    checkpoints.save(step, state, training.shared_leaves(state))


@_refusals.table(
  ("accumulate", lambda: step(0), "an int >= 1"),
  ("accumulate", lambda: gradient(0), "an int >= 1"),
  ("timeout_s", lambda: training.Watchdog(0), "positive"),
  ("timeout_s", lambda: training.Watchdog(-1), "positive"),
  ("timeout_s", lambda: training.Watchdog(NAN), "positive"),
  ("stream_steps[0]", lambda: _programs.Programs((0,)), "an int >= 1"),
  ("stream_steps[1]", lambda: _programs.Programs((2, -1)), "an int >= 1"),
  ("stream_steps[0]", lambda: _programs.Programs((True,)), "an int >= 1"),
  ("stream_steps[0]", lambda: _programs.Programs((2.0,)), "an int >= 1"),
  ("batches", lambda: evaluator([]), "at least one batch"),
  ("keep", lambda: kept(0), "an int >= 1, got 0"),
  ("step", lambda: save(-1), "an int >= 0"),
)
def test_what_cannot_be_is_refused(argument, call, rule):
  _refusals.check(argument, call, rule)
