"""Runs resume with another number of workers."""

import jax
import numpy as np
import optax
import pytest

from jdist import codecs, collectives, methods, reducers, training, transforms

INT4 = reducers.compressed(codecs.Quantize(4, 16))
FEEDBACK = reducers.ErrorFeedback()


def trained(optimizer, workers, steps, state=None):
  """A state after so many steps on random targets, and what it was."""

  def loss_fn(params, model_state, batch, key):
    del key
    return ((params["w"] - batch) ** 2).sum() / 2, (model_state, {})

  step = workers.jit(training.make_step(loss_fn, optimizer, axis=workers.axis))
  if state is None:
    start = {"w": np.linspace(-1, 1, 400).astype(np.float32)}
    state = training.init_state(workers, optimizer, start)
  for number in range(steps):
    random = np.random.default_rng(number)
    targets = random.normal(size=(workers.num_workers, 400))
    state, _ = step(state, workers.place(targets.astype(np.float32)))
  return state


def team(number):
  return collectives.workers(number, substrate="vmap")


def local(outer=None):
  return transforms.local_steps(
    optax.sgd(0.1, momentum=0.9),
    3,
    axis="worker",
    compression=reducers.Compression(INT4, FEEDBACK),
    rule=outer,
  )


@pytest.mark.parametrize("steps", [6, 8])  # At a round's end, and within one.
def test_resizing_loses_no_mass(steps):
  optimizer = local()
  state = trained(optimizer, team(4), steps)
  rows = jax.tree.map(np.asarray, state)
  kept = rows.opt_state.sync.compression
  assert np.abs(kept.feedback.residual["w"]).max() > 0
  found = training.resize(state, optimizer, team(4), team(2))
  new = jax.tree.map(np.asarray, found)
  assert new.params["w"].shape == (2, 400)
  # All workers on the anchor, which has all that was done and held back:
  # the workers' progress and residuals, and the owners' residuals.
  anchor = rows.opt_state.anchor["w"][0]
  progress = anchor - rows.params["w"]
  missing = (progress + kept.feedback.residual["w"]).mean(0)
  owners = np.concatenate(kept.reducer.residual[0])[:400]
  assert np.abs(owners).max() > 0
  wanted = anchor - missing - owners
  for row in (*new.params["w"], *new.opt_state.anchor["w"]):
    np.testing.assert_allclose(row, wanted, rtol=1e-5, atol=1e-6)
  left = jax.tree.leaves((new.opt_state.sync.compression.feedback,))
  assert not any(x.any() for x in left)
  assert not any(
    x.any() for x in new.opt_state.sync.compression.reducer.residual
  )
  # Momenta are the mean of the old ones, and counters continue.
  for row in new.opt_state.inner[0].trace["w"]:
    np.testing.assert_allclose(
      row, rows.opt_state.inner[0].trace["w"].mean(0), rtol=1e-6, atol=1e-6
    )
  assert new.step.tolist() == [steps, steps]
  # Training continues.
  state = trained(optimizer, team(2), 3, state=found)
  assert np.isfinite(state.params["w"]).all()


def test_diloco_in_four_bits_resumes_with_more_workers():
  optimizer = methods.diloco(
    optax.sgd(0.1),
    3,
    axis="worker",
    compression=reducers.Compression(INT4, FEEDBACK),
  )
  state = trained(optimizer, team(2), 7)
  found = training.resize(state, optimizer, team(2), team(5))
  anchor = np.asarray(found.opt_state.anchor["w"])
  assert (anchor == anchor[0]).all() and anchor.shape == (5, 400)
  np.testing.assert_array_equal(found.params["w"], anchor)
  velocity = np.asarray(found.opt_state.sync.memory[0].trace["w"])
  assert velocity.shape == (5, 400) and velocity.any()


def test_complex_momenta_keep_their_mean():
  optimizer = methods.local_sgd(optax.sgd(0.1, momentum=0.9), 4, axis="worker")
  params = {"w": np.zeros(3, np.complex64)}
  state = training.init_state(team(2), optimizer, params)
  inner, *rest = state.opt_state.inner
  trace = {"w": np.array([[1 + 2j, 0, 4], [3 - 4j, 2j, 0]], np.complex64)}
  inner = (inner._replace(trace=jax.tree.map(team(2).place, trace)), *rest)
  state = state._replace(opt_state=state.opt_state._replace(inner=inner))
  found = training.resize(state, optimizer, team(2), team(3))
  for row in np.asarray(found.opt_state.inner[0].trace["w"]):
    np.testing.assert_array_equal(row, [2 - 1j, 1j, 2])


def test_means_of_large_numbers_keep_their_digits():
  optimizer = methods.local_sgd(optax.sgd(0.1, momentum=0.9), 4, axis="worker")
  state = training.init_state(team(3), optimizer, np.zeros(1, np.float32))
  rows = np.array([[1e8], [1.0], [-1e8]], np.float32)
  inner = (optax.TraceState(team(3).place(rows)), *state.opt_state.inner[1:])
  state = state._replace(opt_state=state.opt_state._replace(inner=inner))
  found = training.resize(state, optimizer, team(3), team(2))
  for row in np.asarray(found.opt_state.inner[0].trace):
    np.testing.assert_allclose(row, 1 / 3, rtol=1e-6)


@pytest.mark.parametrize(
  ("law", "row"), [("iterate", 3), ("counter", 1), ("constant", 1)]
)
def test_given_law_of_a_model_leaf_decides_its_rows(law, row):
  old, params = team(2), {"w": np.zeros(400, np.float32)}
  state = training.init_state(
    old, local(), params, {"mean": np.float32(0.0)}, laws={"mean": law}
  )
  means = old.place(np.array([1.0, 5.0], np.float32))
  state = state._replace(model_state={"mean": means})
  found = training.resize(state, local(), old, team(3))
  assert found.model_state["mean"].tolist() == [row] * 3
  assert found.laws == state.laws != ()


def test_statistics_keep_their_mean_and_workers_draw_apart():
  optimizer, old = local(), team(2)
  model_state = {"mean": np.float32(0.0), "dropout": jax.random.key(0)}
  params = {"w": np.zeros(400, np.float32)}
  state = training.init_state(old, optimizer, params, model_state)
  means = old.place(np.array([1.0, 5.0], np.float32))
  state = state._replace(model_state=state.model_state | {"mean": means})
  found = training.resize(state, optimizer, old, team(3)).model_state
  assert found["mean"].tolist() == [3.0] * 3
  keys = jax.random.key_data(found["dropout"]).tolist()
  assert len({tuple(key) for key in keys}) == 3


def test_residuals_of_gradients_keep_their_mean():
  optimizer = optax.chain(
    transforms.average_gradients(
      "worker",
      reducers.Compression(reducers.compressed(codecs.TopK(0.1)), FEEDBACK),
    ),
    optax.sgd(0.1),
  )
  state = trained(optimizer, team(4), 3)
  found = training.resize(state, optimizer, team(4), team(3))
  before, after = (
    np.asarray(s.opt_state[0].feedback.residual["w"]) for s in (state, found)
  )
  assert np.abs(before).max() > 0
  np.testing.assert_allclose(
    after.mean(0), before.mean(0), rtol=1e-5, atol=1e-6
  )
  np.testing.assert_array_equal(found.params["w"][0], state.params["w"][0])


def owned(state):
  """The owners' residual as it lies in the tree, in units of the mean."""
  return np.concatenate(np.asarray(state.reducer.residual[0]))[:400]


def test_gradients_in_flight_are_not_lost():
  # What came out, and what workers and owners hold, is the gradients' sum.
  optimizer = optax.chain(
    transforms.average_gradients(
      "worker",
      reducers.Compression(INT4, FEEDBACK),
    ),
    optax.scale(-1.0),
  )
  start = np.linspace(-1, 1, 400).astype(np.float32)

  def missing(state, wanted):
    feedback = state.opt_state[0].feedback.residual["w"]
    held = np.asarray(feedback).mean(0) + owned(state.opt_state[0])
    moved = start - np.asarray(state.params["w"][0])
    return np.abs(wanted - moved - held).max()

  def one(state, grad):
    updates, opt_state = optimizer.update(
      {"w": grad}, state.opt_state, state.params
    )
    params = optax.apply_updates(state.params, updates)
    return state._replace(params=params, opt_state=opt_state)

  state = training.init_state(team(4), optimizer, {"w": start})
  wanted = np.zeros(400)
  for workers in (team(4), team(2)):
    step = workers.jit(one)
    for number in range(3):
      random = np.random.default_rng(number)
      grads = random.normal(size=(workers.num_workers, 400))
      state = step(state, workers.place(grads.astype(np.float32)))
      wanted += grads.mean(0)
      assert missing(state, wanted) < 1e-5
    if workers.num_workers == 4:
      assert np.abs(owned(state.opt_state[0])).max() > 1e-3
      state = training.resize(state, optimizer, workers, team(2))
      assert missing(state, wanted) < 1e-5


def test_resizing_that_would_lose_residuals_raises():
  optimizer = optax.chain(
    transforms.average_gradients(
      "worker",
      reducers.Compression(INT4, reducers.Smoothing(0.5)),
    ),
    optax.sgd(0.1),
  )
  state = trained(optimizer, team(4), 3)
  most = np.abs(np.asarray(state.opt_state[0].reducer.residual[0])).max()
  told = f"depends on the number of workers, got up to {most:.3g}\\. .* with 4 "
  # Shapes do not show to as many workers whose part a residual is.
  for number in (2, 4):
    with pytest.raises(ValueError, match=told):
      training.resize(state, optimizer, team(4), team(number))


def test_state_on_several_devices_is_resized_on_one():
  optimizer, four = local(), collectives.workers(4)
  state = trained(optimizer, four, 6)
  assert len(state.params["w"].devices()) == 4
  found = training.resize(state, optimizer, team(4), team(2))
  wanted = training.resize(state, optimizer, four, team(2))
  for one, other in zip(
    jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True
  ):
    np.testing.assert_allclose(
      np.asarray(jax.random.key_data(one) if is_key(one) else one),
      np.asarray(jax.random.key_data(other) if is_key(other) else other),
      rtol=1e-5, atol=1e-6,
    )  # fmt: skip


def is_key(x):
  return jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def test_keys_that_all_workers_share_stay_the_same():
  """Typed keys, which files hold as words, of a model and behind a mean."""
  key, old = jax.random.key(7), team(2)
  noise = optax.add_noise(0.1, 0.5, key)
  optimizer = methods.ssgd(optax.chain(noise, optax.sgd(0.1)), axis="worker")
  state = training.init_state(
    old, optimizer, {"w": np.zeros(3, np.float32)}, {"seed": key, "own": key},
    laws={"seed": "constant"},
  )  # fmt: skip
  found = training.resize(state, optimizer, old, team(3))
  before = state.opt_state[1][0].rng_key
  after = found.opt_state[1][0].rng_key
  assert (after == before[0]).all() and after.shape == (3,)
  assert (found.model_state["seed"] == key).all()
  assert (found.model_state["own"] != key).all()


@pytest.mark.parametrize("options", [{}, {"scatter": True}, {"pending": 0.5}])
def test_update_that_was_pending_is_taken_once(options):
  optimizer = transforms.update_first(
    optax.sgd(0.1, momentum=0.9), axis="worker", **options
  )
  state = trained(optimizer, team(4), 3)
  found = training.resize(state, optimizer, team(4), team(2))
  assert not found.opt_state.in_flight.any()
  plain = methods.ssgd(optax.sgd(0.1, momentum=0.9), axis="worker")
  plain = trained(plain, team(4), 3)
  np.testing.assert_allclose(
    found.params["w"], plain.params["w"][:2], rtol=1e-5, atol=1e-6
  )
