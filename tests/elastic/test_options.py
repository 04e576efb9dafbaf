"""Each option of `Rounds` reaches the part that it is for."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import codecs, elastic, methods, reducers, server, transforms
from jdist.elastic import _rounds

NAMES = ("a", "b", "c")
PARAMS = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}
STATISTICS = {"mean": np.ones(2, np.float32)}
SGD = optax.sgd(0.1, momentum=0.9)
METHOD = methods.streaming_diloco(
  SGD, 4, 2, axis=None, delay_steps=2, mix=0.25,
  compression=reducers.Compression(
    codecs.Quantize(4), reducers.ErrorFeedback(), seed=5
  ),
)  # fmt: skip


def rounds(method=METHOD, **options):
  return elastic.Rounds(
    method, PARAMS, workers=NAMES, model_state=STATISTICS, seed=7, **options
  )


def noted(*given, **options):
  return given, options


def test_protocol_has_the_options_of_rounds():
  found = rounds(samples=5, quorum=0.75, grace=0.25, timeout_s=3.0).protocol
  assert (found.quorum, found.grace, found.timeout_s) == (0.75, 0.25, 3.0)
  assert (found.interval, found.fragments, found.weights) == (4, 2, "samples")
  assert found.batches.sizes([None]) == (5,)


def test_runner_has_the_parts_of_the_method():
  found = rounds(samples=5)
  params = {"a": jnp.ones(2), "b": jnp.ones(2)}
  given, options = found.runner("b", "loss", None, params=params, kind=noted)
  assert given == ("loss", METHOD.parts.optimizer, params, None)
  assert given[2] is params
  common = dict(options)
  np.testing.assert_array_equal(
    common.pop("model_state")["mean"], STATISTICS["mean"]
  )
  assert common == {
    "number": 1, "num_workers": 3, "sizes": (5,), "seed": 7, "interval": 4,
    "mix": 0.25, "fragments": METHOD.fragments,
    "push_codec": reducers.MessageCodec(
      codecs.Quantize(4), reducers.ErrorFeedback(), seed=5
    ),
  }  # fmt: skip
  given, _ = found.runner("b", "loss", None, kind=noted)
  assert given[2] is found._params


@pytest.mark.parametrize("shared", (True, False))
def test_server_has_the_parts_of_the_method(shared, monkeypatch):
  monkeypatch.setattr(server, "FragmentSyncer", noted)
  monkeypatch.setattr(server, "LiveServer", noted)
  monkeypatch.setattr(server, "LiveSession", noted)
  found = rounds()
  (params,), options = found.syncer(shared=shared)
  assert params is found._params and options["outer"] is METHOD.outer
  assert (options["workers"], options["shared"]) == (NAMES, shared)
  assert options["fragments"] == METHOD.fragments
  assert options["push_codec"].feedback == reducers.ErrorFeedback()
  np.testing.assert_array_equal(options["model_state"]["mean"], 1.0)
  given, options = found.session(
    "engine", noted, record="messages", shared=shared, model="model"
  )
  engine, serve, works, plan = given
  assert (engine, plan.record, plan.workers) == ("engine", "messages", NAMES)
  assert options == {"survive": True, "model": "model"}
  assert tuple(works) == NAMES
  (protocol, (_, learner), same), _ = serve(plan)
  assert protocol is found.protocol and same is plan
  assert learner["shared"] == shared


@pytest.mark.parametrize(
  ("interval", "overlap", "late"),
  [
    (4, None, False),
    (4, transforms.Delayed(), True),
    (4, transforms.Delayed(steps=4), True),
    # A delay of a whole round begins with the first one that is longer.
    (4, transforms.Delayed(after_step=None), True),
    (1, transforms.Delayed(steps=1), True),
  ],
)
def test_late_rounds_are_in_step_and_two_tasks_ahead(interval, overlap, late):
  method = methods.diloco(SGD, interval, axis=None, overlap=overlap)
  found = rounds(method).protocol
  assert (found.in_step, found.ahead) == (late, 2 * late)


def test_mixture_is_that_of_means_at_once_too():
  method = methods.diloco(
    SGD, 4, axis=None, overlap=transforms.Delayed(steps=0, mix=0.25)
  )
  _, options = rounds(method).runner("a", "loss", None, kind=noted)
  assert options["mix"] == 0.25


def own_loop():
  loop = rounds().runner("a", noted, None, kind=_rounds.OwnLoop)
  loop.connect(None, "a", 1)
  return loop


def test_own_step_replaces_the_state_and_gives_its_loss():
  loop = own_loop()
  state = loop.first_state([jnp.zeros(2)] * 2, STATISTICS)
  loop.advance({"a": 1, "b": 2}, "optimizer", 0.5)
  after, loss = loop._local_step(state, (0, 1, 1), jax.random.key(0))
  assert (after.params, after.opt_state) == ({"a": 1, "b": 2}, "optimizer")
  assert after.model_state is STATISTICS and loss == 0.5
  assert after.base is state.base and after.anchor is state.anchor


def test_leaving_an_own_loop_ends_its_thread():
  loop, ended = own_loop(), threading.Event()

  def run():
    try:
      state = loop.first_state([jnp.zeros(2)] * 2, {})
      loop._local_step(state, (0, 1, 1), jax.random.key(0))
    finally:
      ended.set()

  loop._loop.run = run
  states = iter(loop)
  next(states)
  states.close()
  assert ended.wait(60.0)


@pytest.mark.parametrize("calls", [0, 2])
def test_own_loop_refuses_a_step_that_did_not_advance_once(calls):
  loop = own_loop()

  def run():
    loop._asked.put("a state")

  loop._loop.run = run
  states = iter(loop)
  assert next(states) == "a state"
  for _ in range(calls):
    loop.advance({"a": 1, "b": 2}, "optimizer", 0.5)
  with pytest.raises(ValueError, match="`advance` must be called once"):
    next(states)


@pytest.mark.parametrize(
  ("params", "loss"),
  [
    ({"a": 1}, 0.5),
    ([1, 2], 0.5),
    ({"a": 1, "b": 2}, jnp.ones(2)),
    ({"a": 1, "b": 2}, None),
  ],
)
def test_own_step_of_another_form_is_refused(params, loss):
  loop = own_loop()
  with pytest.raises(ValueError, match="`params` must be a tree as the"):
    loop.advance(params, "optimizer", loss)
