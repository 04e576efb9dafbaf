"""What was not sent is fed into what is sent next."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import codecs, methods, reducers, transforms
from tests.reducers._averages import average, gradients, run
from tests.transforms import _reducers

FEEDBACKS = {
  "error": reducers.ErrorFeedback(),
  "decayed": reducers.ErrorFeedback(0.5),
  "ef21": reducers.EF21(),
  "momentum": reducers.MomentumCorrection(0.9),
  "nesterov": reducers.MomentumCorrection(0.9, nesterov=True),
  "unmasked": reducers.MomentumCorrection(0.9, mask=False),
  "smoothing": reducers.Smoothing(0.5),
}
LARGEST = _reducers.Largest(1)


def by_hand(reducer, feedback, xs):
  """One worker and one leaf of numbers: what comes out, and the states."""
  outputs, _ = run(average(reducer, feedback), np.array(xs)[:, None], "none")
  return outputs[:, 0].tolist()


def test_error_feedback_by_hand():
  xs = [[4.0, 1.0, 2.0], [0.0, 1.0, 1.0], [0.0, 1.0, 0.0]]
  # Residuals [0, 1, 2]; [0, 2, 0] after sending 3; then 3 is sent of entry 1.
  wanted = [[4.0, 0.0, 0.0], [0.0, 0.0, 3.0], [0.0, 3.0, 0.0]]
  assert by_hand(LARGEST, reducers.ErrorFeedback(), xs) == wanted


def test_decayed_residual_by_hand():
  xs = [[4.0, 2.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
  # 2 is left, of it 1 is sent with the next 1.
  wanted = [[4.0, 0.0], [0.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
  assert by_hand(LARGEST, reducers.ErrorFeedback(0.5), xs) == wanted


def test_ef21_by_hand():
  xs = [[4.0, 1.0], [4.0, 1.0], [3.0, 2.0], [3.0, 2.0]]
  # Known: [4, 0], [4, 1]; then both are 1 off and the first one goes.
  wanted = [[4.0, 0.0], [4.0, 1.0], [3.0, 1.0], [3.0, 2.0]]
  assert by_hand(LARGEST, reducers.EF21(), xs) == wanted


def test_momentum_correction_by_hand():
  xs = [[4.0, 2.0], [0.0, 1.0], [1.0, 0.0]]
  # u = [4, 2], v the same: 4 goes, u = [0, 2], v = [0, 2].
  # u = [0, 2], v = [0, 4]: 4 goes, u = [0, 0].  Then u = [1, 0].
  # The last v has one number, and is sent whole.
  wanted = [[4.0, 0.0], [0.0, 4.0], [1.0, 0.0]]
  assert by_hand(LARGEST, reducers.MomentumCorrection(0.5), xs) == wanted


def test_nesterov_momentum_correction_by_hand():
  xs = [[4.0, 2.0], [0.0, 2.0]]
  # u = [2, 1], v = u + x = [6, 3]: 6 goes, u = [0, 1].
  # u = [0, 1.5], v = [0, 3 + 1.5 + 2].
  wanted = [[6.0, 0.0], [0.0, 6.5]]
  found = by_hand(LARGEST, reducers.MomentumCorrection(0.5, nesterov=True), xs)
  assert found == wanted


def test_momentum_is_masked_where_it_was_sent_only():
  xs = [[4.0, 2.0], [2.0, 1.0]]
  unmasked = reducers.MomentumCorrection(0.5, mask=False)
  # Without the mask u is [4, 2] still: u = [4, 2], v = [4, 4].
  assert by_hand(LARGEST, unmasked, xs) == [[4.0, 0.0], [4.0, 0.0]]
  masked = reducers.MomentumCorrection(0.5)
  # u = [2, 2], v = [2, 4].
  assert by_hand(LARGEST, masked, xs) == [[4.0, 0.0], [0.0, 4.0]]


@pytest.mark.parametrize("nesterov", [False, True])
def test_sent_whole_momentum_correction_is_momentum(nesterov):
  xs = gradients(20)
  found, _ = run(
    average(_reducers.Plain(), reducers.MomentumCorrection(0.9, nesterov)),
    xs,
  )

  def momentum(axis):
    return optax.chain(
      transforms.average_gradients(axis), optax.trace(0.9, nesterov)
    )

  wanted, _ = run(momentum, xs)
  chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("substrate", ["vmap", "shard_map"])
@pytest.mark.parametrize("reducer", [LARGEST, _reducers.Owned()], ids=repr)
def test_nothing_is_lost(reducer, substrate):
  """What went in is N times what came out, and what the residuals hold."""
  xs = gradients(30)
  outputs, states = run(
    average(reducer, reducers.ErrorFeedback()), xs, substrate
  )
  held = states.feedback.residual
  if isinstance(reducer, _reducers.Owned):
    a, b = states.reducer.residual
    held = {"a": held["a"] + a, "b": held["b"] + b}
  for name, x in xs.items():
    # All numbers are eighths or fourths of them: sums are exact.
    out = outputs[name].sum(1).cumsum(0)
    np.testing.assert_allclose(
      x.sum(1).cumsum(0), out + held[name].sum(1), 1e-6, 1e-6
    )
    assert np.abs(held[name]).max() > 0.1


def test_decayed_residual_loses_its_decay():
  xs = gradients(10)
  outputs, states = run(average(LARGEST, reducers.ErrorFeedback(0.5)), xs)
  residual = states.feedback.residual["a"]
  gone = np.concatenate([np.zeros_like(residual[:1]), residual[:-1]]) / 2
  np.testing.assert_allclose(
    xs["a"].sum(1), outputs["a"].sum(1) + (residual - gone).sum(1), 1e-6, 1e-6
  )


def test_ef21_keeps_mean_of_estimates():
  xs = gradients(12)
  outputs, states = run(average(LARGEST, reducers.EF21()), xs)
  own, mean = states.feedback.own, states.feedback.mean
  for name in xs:
    np.testing.assert_array_equal(outputs[name], mean[name])
    np.testing.assert_allclose(
      own[name].mean(1, keepdims=True) + 0 * mean[name], mean[name], 1e-5, 1e-5
    )


def test_ef21_converges_to_mean_of_constant_gradients():
  xs = jax.tree.map(lambda x: np.repeat(x, 12, 0), gradients(1))
  outputs, _ = run(average(LARGEST, reducers.EF21()), xs)
  for name, x in xs.items():
    np.testing.assert_allclose(outputs[name][-1][0], x[-1].mean(0), 1e-6, 1e-6)


@pytest.mark.smoke
@pytest.mark.parametrize("feedback", [None, reducers.ErrorFeedback()])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_exact_compression_equals_plain_averaging(feedback, dtype):
  xs = gradients(8, dtype=dtype)
  if feedback is not None:
    # The mean of what is kept in float32, rounded once.
    xs = jax.tree.map(lambda x: x.astype(np.float32), xs)
  found, _ = run(average(_reducers.Plain(), feedback), xs)
  wanted, _ = run(transforms.average_gradients, xs)
  chex.assert_trees_all_equal(found, wanted)


def test_average_without_compression_keeps_no_state():
  optimizer = transforms.average_gradients("worker")
  state = optimizer.init(jnp.ones(3))
  assert state == ()
  program = jax.make_jaxpr(
    jax.vmap(lambda g: optimizer.update(g, state)[0], axis_name="worker")
  )(jnp.ones((2, 3)))
  assert len(program.eqns) <= 4 and "random" not in str(program)


@pytest.mark.parametrize("name", FEEDBACKS)
def test_nan_at_one_worker_is_reported_and_does_not_stay(name):
  xs = gradients(6)
  for t, worker, bad in ((1, 2, np.nan), (3, 0, np.inf)):
    xs["a"][t, worker, 1] = bad
  outputs, states = run(average(LARGEST, FEEDBACKS[name]), xs)
  memory = jax.tree.leaves(states.feedback)
  assert all(np.isfinite(x).all() for x in memory)
  # The gradient that was lost is seen in the mean of that step.
  finite = [np.isfinite(x).all() for x in outputs["a"]]
  if name != "ef21":  # Which stays where it was.
    assert finite == [True, False, True, False, True, True]
  counts = transforms.nonfinite_rounds(jax.tree.map(lambda x: x[-1], states))
  # All workers see what was not finite in the mean, which EF21 keeps.
  assert counts.tolist() == ([2] * 4 if name == "ef21" else [1, 0, 1, 0])


def test_entry_that_is_not_finite_moves_no_estimate_of_ef21():
  feedback = reducers.EF21()
  state = feedback.init(jnp.zeros(3))
  mean, own = jnp.array([jnp.nan, jnp.inf, 2.0]), jnp.array([1.0, 1.0, 3.0])
  output, state = feedback.finish(mean, own, own, state)
  assert output.tolist() == state.mean.tolist() == [0.0, 0.0, 2.0]
  assert state.own.tolist() == [0.0, 0.0, 3.0]
  assert state.nonfinite == 1
  # Nor does a share that is not finite, in a mean that is.
  own = jnp.array([jnp.nan, 1.0, 1.0])
  _, state = feedback.finish(jnp.ones(3), own, own, state)
  assert state.own.tolist() == [0.0, 1.0, 4.0]


def test_rounds_are_only_counted_by_feedbacks():
  state = methods.ssgd(optax.sgd(0.1), axis=None).init(jnp.ones(2))
  assert transforms.nonfinite_rounds(state) == 0


@pytest.mark.parametrize("name", FEEDBACKS)
def test_memories_are_float32_and_outputs_are_like_gradients(name):
  xs = gradients(3, dtype=jnp.bfloat16)
  outputs, states = run(average(LARGEST, FEEDBACKS[name]), xs)
  assert {x.dtype.name for x in jax.tree.leaves(outputs)} == {"bfloat16"}
  kept = {x.dtype.name for x in jax.tree.leaves(states.feedback)}
  assert kept == {"float32", "int32"}
  assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(states))


@pytest.mark.parametrize("name", FEEDBACKS)
@pytest.mark.parametrize("substrate", ["vmap", "shard_map"])
def test_labels_say_what_is_equal(name, substrate):
  outputs, states = run(
    average(_reducers.Owned(), FEEDBACKS[name]), gradients(5), substrate
  )
  told = transforms.sharing(states)
  assert told.params is True

  def rows_equal(x):
    return (x == x[:, :1]).all()

  assert all(map(rows_equal, jax.tree.leaves(outputs)))
  jax.tree.map(lambda x, s: rows_equal(x) or not s, states, told.state)
  labels = jax.tree.leaves(told.state)
  for x, shared in zip(jax.tree.leaves(states), labels, strict=True):
    assert rows_equal(x) or not shared
  assert told.state.reducer.seen is True
  assert told.state.reducer.mine is False
  # Behind another average a worker's own stays its own.
  chain = (transforms.average_gradients(None).init(states), states)
  assert transforms.sharing(chain).state[1] == told.state


@pytest.mark.parametrize("reducer", [LARGEST, _reducers.Owned()], ids=repr)
@pytest.mark.parametrize("name", FEEDBACKS)
def test_substrates_agree(name, reducer):
  xs = gradients(8)
  vmapped, mapped = (
    run(average(reducer, FEEDBACKS[name]), xs, substrate)
    for substrate in ("vmap", "shard_map")
  )
  chex.assert_trees_all_close(vmapped, mapped, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FEEDBACKS)
def test_absorbed_residuals_are_in_the_next_message(name):
  feedback = FEEDBACKS[name]
  random = np.random.default_rng(0)
  x, held = (
    {"w": jnp.asarray(random.normal(size=5), jnp.float32)} for _ in "ab"
  )
  state = jax.tree.map(
    lambda z: jnp.asarray(random.normal(size=z.shape)).astype(z.dtype),
    feedback.init(x),
  )
  new = feedback.absorb(held, state)
  if name == "smoothing":
    assert new is None
    return
  wanted, later = (feedback.prepare(x, s)[0]["w"] for s in (state, new))
  if name == "ef21":  # Nothing is sent again; all know better what it was.
    np.testing.assert_array_equal(later, wanted)
    wanted, later = state.mean["w"], new.mean["w"]
    np.testing.assert_array_equal(state.own["w"], new.own["w"])
  np.testing.assert_allclose(later, wanted + held["w"], rtol=1e-5, atol=1e-6)
  assert reducers.ErrorFeedback(0.0).absorb(held, feedback.init(x)) is None


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
@pytest.mark.parametrize("name", ("error", "nesterov"))
def test_cast_error_of_mean_is_kept(name, dtype):
  """In + nothing = N times the means + residuals, though means are narrow."""
  num_workers, num_steps = 2, 40
  # Their mean lies between two numbers of bfloat16, of float16 their sum.
  one = {jnp.bfloat16: (1.0, 1.0078125), jnp.float16: (1.0, 1.0009766)}[dtype]
  xs = {"a": jnp.stack([jnp.full((num_steps, 5), x, dtype) for x in one], 1)}
  feedback = (
    reducers.ErrorFeedback()
    if name == "error"
    else reducers.MomentumCorrection(0.0, mask=False)
  )
  reducer = reducers.compressed(
    codecs.Quantize(8, 64), owner_feedback="own_share"
  )
  outputs, states = run(average(reducer, feedback), xs)
  assert outputs["a"].dtype == dtype
  went_in = np.asarray(xs["a"], np.float64).sum((0, 1))
  came_out = num_workers * outputs["a"][:, 0].astype(np.float64).sum(0)
  left = states.feedback.residual["a"][-1].astype(np.float64).sum(0)
  assert np.abs(came_out + left - went_in).max() < 1e-4 * num_steps
  # And it does come out: no residual grows.
  assert np.abs(left).max() < 0.1


EXACT = reducers.Exact()
OF_COMPLEX = {
  "exact": EXACT,
  "by leaf": reducers.PerLeaf(()),
  "chunks": reducers.Chunked(EXACT),
  "phases": reducers.Scheduled(((2, EXACT), (None, reducers.PerLeaf(())))),
}


@pytest.mark.parametrize("name", OF_COMPLEX)
@pytest.mark.parametrize("feedback", ["error", "ef21", "momentum"])
def test_complex_residual_excludes_sent_part(name, feedback):
  if feedback == "momentum":
    feedback = reducers.MomentumCorrection(0.0)
  else:
    feedback = FEEDBACKS[feedback]
  xs = np.array([[[1 + 2j, 3j], [3 - 2j, 1j]]] * 3, np.complex64)
  outputs, _ = run(average(OF_COMPLEX[name], feedback), xs)
  np.testing.assert_allclose(outputs, np.full((3, 2, 2), [2, 2j]), 1e-6)


def test_complex_shares_are_kept_between_hosts():
  reducer = reducers.Hierarchical(EXACT, EXACT)

  def one(x):
    state = reducer.init(x, ("near", "far"))
    key = jax.random.key(0)
    return reducer.reduce(x, state, key, ("near", "far"))[:2]

  xs = jnp.array([[[1 + 2j], [3 - 2j]], [[2j], [4 + 2j]]])
  means, shares = jax.vmap(jax.vmap(one, axis_name="near"), axis_name="far")(xs)
  np.testing.assert_allclose(means, np.full_like(xs, 2 + 1j))
  np.testing.assert_allclose(shares, xs)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_leaf_that_is_sent_whole_in_float32_keeps_its_momentum(dtype):
  # Found by the oracle's combination 5131: codecs send float32 for float64.
  feedback = reducers.MomentumCorrection(0.5)
  with jax.enable_x64(True):
    wanted = jnp.array([0.1, 0.3], dtype)
    state = feedback.init(wanted)._replace(momentum=wanted)
    whole = wanted.astype("float32").astype(dtype)
    for sent, kept in (
      (whole, [0.1, 0.3]),
      (whole.at[1].set(0.0), [0.0, 0.3]),
      (whole.at[1].mul(1 + 2e-7), [0.0, 0.0]),
    ):
      _, new = feedback.finish(sent, sent, wanted, state)
      np.testing.assert_allclose(new.momentum, kept, rtol=1e-6)


@pytest.mark.parametrize("bad", ["mean", "share"])
def test_estimate_skips_an_entry_that_one_side_lacks(bad):
  feedback, good = reducers.EF21(), jnp.array([1.0, 2.0])
  wrong = jnp.array([jnp.nan, 2.0])
  mean, share = (wrong, good) if bad == "mean" else (good, wrong)
  _, state = feedback.finish(mean, share, good, feedback.init(good))
  assert state.nonfinite == 1
  assert state.own.tolist() == [0.0, 2.0]
