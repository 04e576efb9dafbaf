"""Wrong functions, states and results that a user hands over: one clear error.

The tables of `test_wrong_calls` replace arguments; here the argument is of the
right kind, and what it takes, returns or was made for is wrong.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import (
  channel,
  cluster,
  codecs,
  collectives,
  data,
  elastic,
  models,
  pipeline,
  reducers,
  server,
  training,
  transforms,
)
from jdist.storage import hashes
from jdist.training import comparison
from tests import _refusals
from tests import test_wrong_calls as calls
from tests import test_wrong_constructors as doors

SGD, TEAM, PARAMS = calls.SGD, calls.TEAM, calls.PARAMS
BUCKETS = collectives.Buckets.of(PARAMS)
TRACE = cluster.Trace([cluster.Span("a", "b", 0.0, 1.0)])
COMPRESSION = jdist.Compression(codecs.Quantize(4), reducers.ErrorFeedback())
STEP = training.make_step(calls.loss_fn, calls.DILOCO, axis=TEAM.axis)


def fit(change):
  """Trains by a step whose results are changed."""
  state = training.init_state(TEAM, calls.DILOCO, PARAMS)
  trainer = training.Trainer(TEAM, lambda *given: change(*STEP(*given)))
  batch = {"x": np.ones((2, 3), np.float32)}
  return trainer.fit(state, lambda step: iter([batch] * 2), 2)


def simulate(found):
  """Runs a protocol on the clock whose actions are changed."""

  @dataclasses.dataclass(frozen=True)
  class Own(server.ASP):
    def receive(self, *given):
      return found

  machines = cluster.workers([1.0] * 2)
  simulation = server.Simulation(machines, Own(), cluster.Profile(0.01))
  simulation.run(seconds=1.0)


def resized():
  state = training.init_state(TEAM, calls.DILOCO, PARAMS)
  other = jdist.ssgd(optax.adam(0.1), axis=TEAM.axis)
  training.resize(state, calls.DILOCO, TEAM, TEAM, other)


@_refusals.table(
  ("data", lambda: hashes.hash_bytes(None), "an array"),
  ("tree", lambda: BUCKETS.pack("text"), "the shapes of the buckets"),
  ("buffers", lambda: BUCKETS.unpack(None, PARAMS), "each of the 1 buckets"),
  ("buffers", lambda: BUCKETS.unpack((1,), PARAMS), "as `pack` makes them"),
  ("like", lambda: BUCKETS.unpack((1,), [1]), "the shapes of the buckets"),
  ("step", lambda: training.Trainer(TEAM, lambda state: state), "a batch"),
  ("step(...)[1]", lambda: fit(lambda s, m: (s, m | {3: 1.0})), "names as"),
  ("protocol.receive", lambda: simulate(None), "a list of actions, got None"),
  ("protocol.receive", lambda: simulate([3]), "a list of actions, got 3"),
  ("new_optimizer", resized, "the method that made `state`"),
  ("number", lambda: own_loop(number=2), "from 0 to 1"),
  ("name", lambda: pipeline.table_options("x"), "'1f1b'"),
  ("num_workers", lambda: reducers.Bits.in_ring(8, 0), "an int >= 1"),
  ("kind", lambda: collectives.Collective("x", 1, 2), "'all-reduce'"),
  ("num_workers", lambda: traffic(lambda x: x, 0), "an int >= 1"),
  ("step", lambda: traffic(lambda: 1, 2), "a function of its arguments"),
  ("function", lambda: collectives.communicates(3), "its arguments"),
  ("names", lambda: collectives.make_mesh((1, 1), "aa"), "a list of strings"),
  ("names", lambda: collectives.make_mesh((1, 1), ["a"] * 2), "names once"),
  ("order", lambda: first(lambda: 1), "a function of a leaf's path"),
  ("optimizer", lambda: transforms.only_floats(None), "an Optax trans"),
  ("dtype", lambda: training.cast(PARAMS, "int8"), "a dtype of floats"),
  ("values", lambda: training.masked_mean("text", jnp.ones(1)), "an array"),
  ("augments", lambda: data.compose(lambda x: x), "images and a key"),
  ("port", lambda: channel.listen(port=99_999), "from 0 to 65535"),
  (
    "value",
    lambda: comparison.mean([{"a": 1}], lambda row: "a"),
    "a number, got 'a'",
  ),
  ("hidden_sizes", lambda: mlp("ab"), "a list of ints"),
  ("params", lambda: training.save_model("model", None), "a filled array"),
  ("path's suffix", lambda: plot("x.what"), "'png'"),
)
def test_wrong_part_is_named(argument, call, rule, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  _refusals.check(argument, call, rule)


def own_loop(**options):
  given = {"number": 0, "num_workers": 2} | options
  return elastic.OwnLoop(doors.server_loss, SGD, PARAMS, None, **given)


def traffic(step, num_workers):
  x = jnp.ones(2)
  return collectives.traffic(step, x, axis="worker", num_workers=num_workers)


def first(order):
  return transforms.update_first(SGD, axis=None, order=order)


def mlp(sizes):
  kind = {"input_shape": (8, 8, 1), "num_classes": 10}
  return models.build("mlp", hidden_sizes=sizes, **kind)


def plot(path, **options):
  return cluster.plot_trace(TRACE, path, **options)


def test_right_parts_of_other_kinds_are_taken(tmp_path):
  spans = (cluster.Span("a", "task", i, i + 1) for i in range(2))
  assert len(cluster.Trace(spans)) == 2
  # A machine that has done nothing has a row, too.
  plot(tmp_path / "x.PNG", resources=["idle", *TRACE.resources])
  plot(tmp_path / "without")
  assert len(list(tmp_path.iterdir())) == 2
  for value in (math.inf, np.float32(np.inf), 3, np.int64(3)):
    assert comparison.mean([{"a": value}] * 2, "a") == value
  assert math.isnan(comparison.mean([{"a": math.nan}], "a"))


_LATE = transforms.Delayed(1)
_METHODS = {
  "rounds": transforms.local_steps(SGD, 2, axis=None),
  "late": transforms.local_steps(SGD, 4, axis=None, overlap=_LATE),
  "fragments": transforms.fragment_steps(SGD, 2, 2, axis=None),
  "ssgd": jdist.ssgd(SGD, axis=None),
  "compressed": transforms.average_gradients(None, COMPRESSION),
  "delayed": transforms.delay_gradients(SGD, 1),
  "predicted": transforms.predict_weights(optax.sgd(0.1, 0.9), 1),
  "first": transforms.update_first(SGD, axis=None),
}


@pytest.mark.parametrize("name", _METHODS)
def test_state_of_another_optimizer_is_named(name):
  optimizer = _METHODS[name]
  own = optimizer.init(PARAMS)
  optimizer.update(PARAMS, own, PARAMS)
  for state in (None, "text", optax.adamw(0.1).init(PARAMS), (own,) * 3):
    rule = "a tree of arrays" if state == "text" else "what `init` of this"
    with _refusals.refused("state", rule):
      optimizer.update(PARAMS, state, PARAMS)


def test_error_of_a_users_optimizer_stays():
  def update(updates, state, params=None):
    raise TypeError("no such luck")

  inner = optax.GradientTransformation(SGD.init, update)
  optimizer = transforms.local_steps(inner, 2, axis=None)
  state = jax.eval_shape(optimizer.init, PARAMS)
  with pytest.raises(TypeError, match="no such luck"):
    optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)
  assert jax.tree.structure(state) == jax.tree.structure(optimizer.init(PARAMS))
