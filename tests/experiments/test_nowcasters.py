"""Weight nowcasters: their networks, their training and the jump."""

import dataclasses
import importlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import collectives, methods, transforms
from tests.experiments import _loading


@pytest.fixture(name="nowcasters")
def _nowcasters(monkeypatch):
  _loading.enter("mp2", monkeypatch)
  return importlib.import_module("nowcasters")


@pytest.fixture(name="fitting")
def _fitting(nowcasters):
  return importlib.import_module("nowcaster_fit")


def network(nowcasters):
  """A network whose biases are not zero, so that a test sees their effect."""
  return jax.tree.map(
    lambda x: x + 0.1 * np.sin(np.arange(x.size)).reshape(x.shape).astype("f4"),
    nowcasters.init_nowcasters(jax.random.key(0))["conv"],
  )


def by_hand(params, x):
  """The paper's formulas in NumPy, for one entry."""

  def dense(layer, x):
    return x @ np.float64(layer["kernel"]) + np.float64(layer["bias"])

  def stream(p, x):
    h = dense(p["first"], x)
    z = np.maximum(dense(p["squeeze"], h), 0)
    y = dense(p["offset"], z) + dense(p["gain"], z) * np.exp(
      dense(p["rate"], z) * h
    )
    y = dense(p["last"], y)
    return np.where(y > 0, y, 0.01 * y)

  r = x.max() - x.min() + 1e-8
  s = (x - x[0]) / (r + 1e-5) / 2
  both = [stream(params["values"], s), stream(params["steps"], np.diff(s))]
  out = np.tanh(dense(params["head"], np.concatenate(both))[0])
  return (s[4] + out) * 2 * (r + 1e-5) + x[0]


def histories(rows):
  draw = np.random.default_rng(0)
  return draw.normal(size=(rows, 5)).cumsum(1).astype(np.float32)


def test_network_matches_formulas(nowcasters):
  x, params = histories(7), network(nowcasters)
  found = jax.jit(nowcasters.nowcast_entries)(params, x)
  wanted = [by_hand(params, np.float64(row)) for row in x]
  np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
  assert np.abs(found - x[:, 4]).max() > 0.1
  assert sum(x.size for x in jax.tree.leaves(params)) == 9425


def test_steep_network_does_not_overflow_and_hides_no_nan(nowcasters):
  wild = jax.tree.map(lambda x: 1e4 * x, network(nowcasters))
  x = histories(200)
  assert jnp.isfinite(nowcasters.nowcast_entries(wild, x)).all()
  x[0, 2] = np.nan
  found = nowcasters.nowcast_entries(network(nowcasters), x)
  assert jnp.isnan(found[0]) and jnp.isfinite(found[1:]).all()


def test_each_kind_has_its_network(nowcasters, monkeypatch):
  networks = nowcasters.init_nowcasters(jax.random.key(0))
  tree = {
    "conv": jnp.asarray(histories(18).T.reshape(5, 3, 3, 1, 2)),
    "dense": jnp.asarray(histories(6).T.reshape(5, 2, 3)),
    "bias": jnp.asarray(histories(4).T),
  }
  found = nowcasters.nowcast(tree, networks)
  for kind, leaf in found.items():
    wanted = nowcasters.nowcast_entries(
      networks[kind], jnp.moveaxis(tree[kind], 0, -1)
    )
    np.testing.assert_allclose(leaf, wanted, 1e-5, 1e-6)
  # In chunks that do not divide a leaf evenly.
  monkeypatch.setattr(nowcasters, "_CHUNK", 5)
  chex.assert_trees_all_close(
    nowcasters.nowcast(tree, networks), found, rtol=1e-5, atol=1e-6
  )


def train(optimizer, team, num_steps):
  """Trains on quadratics; returns the parameters after each step."""

  def step(params, state, target):
    updates, state = optimizer.update(params - target, state, params)
    return optax.apply_updates(params, updates), state

  params = team.replicate(jnp.ones((3, 2)))
  state, seen = team.jit(optimizer.init)(params), []
  step, draw = team.jit(step), np.random.default_rng(0)
  for _ in range(num_steps):
    targets = draw.normal(size=(team.num_workers, 3, 2)).astype(np.float32)
    params, state = step(params, state, team.place(targets))
    seen.append(np.asarray(params))
  return seen, state


@pytest.mark.parametrize("substrate", ["vmap", "shard_map"])
def test_jump_follows_every_fifth_epoch(nowcasters, substrate):
  networks = nowcasters.init_nowcasters(jax.random.key(0))
  team = collectives.workers(4, substrate=substrate)
  inner = methods.ssgd(optax.sgd(0.1, momentum=0.9), axis=team.axis)
  jump = nowcasters.nowcast_weights(networks, 2, axis=team.axis)
  seen, state = train(optax.chain(inner, jump), team, 20)
  plain, _ = train(inner, team, 10)
  # Two programs round differently.
  np.testing.assert_allclose(seen[:9], plain[:9], rtol=1e-5, atol=1e-6)
  ends = np.stack([*(seen[i][0] for i in (1, 3, 5, 7)), plain[9][0]])
  wanted = nowcasters.nowcast_entries(
    networks["dense"], np.moveaxis(ends, 0, -1)
  )
  np.testing.assert_allclose(seen[9][0], wanted, rtol=1e-5, atol=1e-6)
  assert np.abs(wanted - ends[4]).max() > 1e-3
  for w in seen:
    assert all(row.tobytes() == w[0].tobytes() for row in w)
  labels = transforms.sharing(state)
  assert labels.params and all(jax.tree.leaves(labels.state))
  history = np.asarray(state[1].history[0])
  np.testing.assert_array_equal(
    history[:4], [seen[i][0] for i in (11, 13, 15, 17)]
  )


def test_history_holds_parameters_in_their_dtype(nowcasters):
  networks = nowcasters.init_nowcasters(jax.random.key(0))
  jump = nowcasters.nowcast_weights(networks, 1, axis=None)
  w = jnp.linspace(0.9, 1.1, 7).astype(jnp.bfloat16)
  updates, state = jump.update(jnp.full(7, 0.0037), jump.init(w), w)
  after = transforms.apply_updates(w, updates)
  np.testing.assert_array_equal(state.history[0], after.astype(jnp.float32))


def relaxing(entries, epochs, seed):
  """Weights that approach their ends, each at its own speed."""
  draw = np.random.default_rng(seed)
  speed = draw.uniform(0.02, 0.3, (entries, 1))
  way = draw.normal(size=(entries, 1))
  start = draw.normal(size=(entries, 1))
  track = start + way * (1 - np.exp(-speed * np.arange(epochs)))
  return track.astype(np.float32)


def test_training_beats_the_last_value_on_held_out_tracks(fitting):
  fit = fitting.NowcastFit(num_steps=60, batch_size=64, evaluate_every=20)
  tracks = {"bias": relaxing(50, 20, 0)}, {"bias": relaxing(20, 20, 1)}
  fitted = fitting.fit_nowcasters(*tracks, fit)["bias"]
  errors = [error for _, error in fitted.curve]
  assert [step for step, _ in fitted.curve] == [0, 20, 40, 60]
  assert fitted.error == min(errors) == dict(fitted.curve)[fitted.step]
  assert fitted.error < 0.7 * fitted.repeat_error < 0.7 * errors[0]
  wild = dataclasses.replace(fit, learning_rate=1e30)
  with pytest.raises(FloatingPointError, match=r"step .*Lower `learning_rate`"):
    fitting.fit_nowcasters(*tracks, wild)
  with pytest.raises(ValueError, match=r"at least 25 epochs.*got 20"):
    fitting.windows([tracks[0]["bias"]], 20)


def test_track_follows_one_entry(fitting):
  params = {"bias": np.arange(7.0), "kernel": np.arange(72.0).reshape(3, 3, -1)}
  tracker = fitting.Tracker(params, entries_per_kind=6)
  for epoch in range(3):
    tracker.record({k: x + 1000 * epoch for k, x in params.items()})
  tracks = tracker.tracks()
  assert {k: t.shape for k, t in tracks.items()} == {
    "conv": (6, 3),
    "bias": (6, 3),
  }
  for track in tracks.values():
    np.testing.assert_array_equal(np.diff(track), 1000)
    assert len(set(track[:, 0])) == 6


def test_networks_are_loaded_as_saved(nowcasters, fitting, tmp_path):
  networks = nowcasters.init_nowcasters(jax.random.key(0))
  del networks["dense"]
  fitting.save_nowcasters(tmp_path, networks)
  chex.assert_trees_all_equal(fitting.load_nowcasters(tmp_path), networks)
