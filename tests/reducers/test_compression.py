"""Means by few bytes: of gradients, and of what local steps have done."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import (
  codecs,
  collectives,
  methods,
  profiling,
  reducers,
  states,
  transforms,
)
from jdist.transforms import intervals
from tests import _refusals
from tests.reducers._averages import average, gradients, run
from tests.transforms import _reducers, _table
from tests.transforms._rounds import random_targets, train

RATE = 0.1
SGD = optax.sgd(RATE)
MOMENTUM = optax.sgd(RATE, momentum=0.9)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
LARGEST = _reducers.Largest(2)
DECAYED = reducers.ErrorFeedback(0.9)


def numpy_largest(x, k):
  kept = np.zeros_like(x)
  for row, out in zip(x, kept, strict=True):
    chosen = np.argsort(-np.abs(row), kind="stable")[:k]
    out[chosen] = row[chosen]
  return kept


class Outer:
  """Nesterov's momentum, or none."""

  def __init__(self, momentum):
    self.momentum, self.trace = momentum, 0.0

  def __call__(self, anchor, gradient):
    if self.momentum is None:
      return anchor - gradient
    self.trace = self.momentum * self.trace + gradient
    return anchor - 0.7 * (self.momentum * self.trace + gradient)


def reference(targets, interval, momentum, decay, *, late, carry=0.5):
  """Anchors after every round; targets [steps, workers, dim]."""
  num_workers, dim = targets.shape[1:]
  w, a = np.zeros((num_workers, dim)), np.zeros(dim)
  residual, pending, kept = np.zeros_like(w), None, 0.0
  outer, anchors = Outer(momentum), []
  for start in range(0, len(targets) - interval + 1, interval):
    begun = w.copy()
    for x in targets[start : start + interval]:
      w = w - RATE * (w - x)
    progress = begun - w
    sending = pending if late else progress
    if sending is not None:
      wanted = sending + decay * residual
      share = numpy_largest(wanted, 2)
      residual = wanted - share
      a = outer(a, share.mean(0))
    kept = carry * progress if late else 0.0
    w, pending = a - kept + 0 * w, progress
    anchors.append(a)
  return np.array(anchors)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("momentum", [None, 0.9])
def test_local_steps_are_those_of_numpy(late, momentum):
  targets = random_targets(15, 4, 5)
  optimizer = transforms.local_steps(
    SGD,
    3,
    axis="worker",
    compression=reducers.Compression(LARGEST, DECAYED),
    overlap=transforms.Delayed(carry=0.5) if late else None,
    rule=None if momentum is None else NESTEROV,
  )
  _, states = train(optimizer, targets)
  wanted = reference(targets, 3, momentum, 0.9, late=late)
  np.testing.assert_allclose(states.anchor[2::3, 0], wanted, 1e-4, 1e-5)
  rows = states.anchor
  np.testing.assert_array_equal(rows, np.repeat(rows[:, :1], 4, 1))


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("interval", [3, intervals.msdpu(2, 0.1)])
def test_feedback_of_exact_means_changes_nothing(late, interval):
  targets = random_targets(12, 4, 5)

  def anchors(compression=None):
    optimizer = transforms.local_steps(
      MOMENTUM,
      interval,
      axis="worker",
      rule=NESTEROV,
      overlap=transforms.Delayed() if late else None,
      compression=compression,
    )
    return train(optimizer, targets)[1].anchor

  every_bit = reducers.Compression(_reducers.Plain(), reducers.ErrorFeedback())
  found = anchors(every_bit)
  if late:
    np.testing.assert_array_equal(found, anchors())
  else:  # A compiler may merge the mean's division with the outer step.
    np.testing.assert_allclose(found, anchors(), 1e-5, 1e-7)


def test_exact_compression_is_parameter_averaging():
  targets = random_targets(12, 4, 5)
  found = transforms.local_steps(
    MOMENTUM,
    3,
    axis="worker",
    compression=reducers.Compression(_reducers.Plain()),
  )
  wanted = methods.local_sgd(MOMENTUM, 3, axis="worker")
  np.testing.assert_allclose(
    train(found, targets)[0], train(wanted, targets)[0], 1e-5, 1e-6
  )


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("reducer", [LARGEST, _reducers.Owned(0.25)], ids=repr)
def test_no_progress_is_lost(late, reducer):
  """The anchor has moved by the mean progress but for what is held."""
  targets = random_targets(18, 4, 5)
  optimizer = transforms.local_steps(
    SGD,
    3,
    axis="worker",
    compression=reducers.Compression(reducer, reducers.ErrorFeedback()),
    overlap=transforms.Delayed(carry=0.0) if late else None,
  )
  params, states = train(optimizer, targets)
  # Every round begins at its anchor, and the step that ends it does not show
  # where it went: take that step again.
  begun = np.concatenate([np.zeros((1, 4, 5)), states.anchor[2:-1:3]])
  before = np.asarray(params[1::3])
  progress = begun - (before - RATE * (before - targets[2::3]))
  went_in = progress.cumsum(0).mean(1)
  if late:
    went_in = np.concatenate([np.zeros((1, 5)), went_in[:-1]])
  memory = states.sync.compression
  held = memory.feedback.residual[2::3].mean(1)
  if isinstance(reducer, _reducers.Owned):
    held = held + memory.reducer.residual[0][2::3, 0]
  np.testing.assert_allclose(went_in, held - states.anchor[2::3, 0], 1e-4, 1e-5)
  assert np.abs(held).max() > 0.01


def test_first_late_round_changes_no_state():
  """A reducer that sends something of nothing: it is not applied."""
  optimizer = transforms.local_steps(
    SGD,
    2,
    axis="worker",
    compression=reducers.Compression(Signs(), reducers.ErrorFeedback()),
    overlap=transforms.Delayed(),
  )
  _, states = train(optimizer, random_targets(4, 4, 3))
  memory = states.sync.compression
  first = jax.tree.map(lambda x: x[1], memory)
  assert not first.feedback.residual.any() and not first.step.any()
  assert memory.step[3].tolist() == [1] * 4


class Signs(_reducers.Plain):
  """A sign of every number, also of zero."""

  def reduce(self, tree, state, key, axis):
    signs = jax.tree.map(lambda x: jnp.where(x < 0, -1.0, 1.0), tree)
    return super().reduce(signs, state, key, axis)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_drain_applies_the_residuals_of_a_feedback(late):
  targets = random_targets(8, 4, 5)  # Two rounds of 3, and two steps.
  optimizer = transforms.local_steps(
    SGD,
    3,
    axis="worker",
    compression=reducers.Compression(LARGEST, reducers.ErrorFeedback()),
    overlap=transforms.Delayed(carry=0.0) if late else None,
  )
  exact = transforms.local_steps(
    SGD,
    3,
    axis="worker",
    overlap=transforms.Delayed(carry=0.0) if late else None,
  )

  def drained(optimizer):
    params, states = train(optimizer, targets)
    last = jax.tree.map(lambda x: x[-1], (params, states))
    drain = jax.vmap(
      lambda w, s: transforms.drain(optimizer, s, w), axis_name="worker"
    )
    return last, drain(*last)

  (w, before), (params, state) = drained(optimizer)
  assert before.sync.compression.feedback.residual.any()
  assert not state.sync.compression.feedback.residual.any()
  held = before.sync.compression.feedback.residual
  progress = before.anchor - w
  if late:
    progress = progress + before.sync.flight.held.message
  wanted = before.anchor - (progress + held).mean(0)
  np.testing.assert_allclose(state.anchor, wanted, 1e-4, 1e-5)
  np.testing.assert_allclose(params, wanted, 1e-4, 1e-5)
  assert drained(exact)[1][0].shape == params.shape


@pytest.mark.parametrize("substrate", ["vmap", "shard_map", "mixed"])
def test_round_ends_under_a_conditional(substrate):
  text = _table.runner("compressed rounds", substrate).compile().as_text()
  assert " conditional(" in text
  assert all(c.conditional for c in profiling.read_collectives(text))


def test_diloco_is_one_line():
  optimizer = methods.diloco(
    SGD,
    3,
    axis="worker",
    compression=reducers.Compression(LARGEST, reducers.ErrorFeedback()),
  )
  _, states = train(optimizer, random_targets(6, 4, 5))
  assert states.sync.compression.step[-1].tolist() == [2] * 4
  told = transforms.sharing(states)
  assert told.state.sync.compression.step is True
  assert told.state.sync.compression.feedback.residual is False
  assert told.params is False


class Drawn(_reducers.Plain):
  """Shows the random numbers that a reducer is given."""

  def reduce(self, tree, state, key, axis):
    own = jax.tree.map(lambda x: jax.random.normal(key, x.shape), tree)
    return reducers.Reduced(collectives.mean(own, axis), own, state)


def test_random_numbers_change_by_step_and_seed_and_not_by_worker():
  xs = gradients(3)
  one, _ = run(average(Drawn(), seed=1), xs)
  again, _ = run(average(Drawn(), seed=1), xs)
  other, _ = run(average(Drawn(), seed=2), xs)
  assert (one["a"] == one["a"][:, :1]).all()
  assert len(np.unique(one["a"][:, 0])) == 15
  np.testing.assert_array_equal(one["a"], again["a"])
  assert not (one["a"] == other["a"]).any()


def test_bits_of_a_reduction_are_told_to_those_who_count():
  compression = reducers.Compression(codecs.Quantize(4, 8))
  x = jnp.zeros(64)

  def mean(x):
    return compression.mean(x, compression.init(x, "worker"), "worker")

  with reducers.reductions() as found:
    jax.eval_shape(jax.vmap(mean, axis_name="worker"), jnp.zeros((4, 64)))
  assert found == [compression.reducer.num_bits(x, 4)]


def test_codec_is_accepted_as_reducer():
  codec = codecs.TopK(k=2)
  found = reducers.Compression(codec).reducer
  assert found == reducers.compressed(codec)


VOTE = reducers.MajorityVote()
EXACT = reducers.Exact()
# A vote, wherever it stands in a reducer.
VOTES = {
  "alone": VOTE,
  "of some leaves": reducers.PerLeaf((reducers.Rule(VOTE, min_ndim=2),)),
  "of factors": reducers.PowerSGD(2, factors=VOTE),
  "between hosts": reducers.Hierarchical(EXACT, VOTE),
  "inside of hosts": reducers.Hierarchical(VOTE, EXACT),
  "after a warm-up": reducers.Scheduled(((3, EXACT), (None, VOTE))),
}


@pytest.mark.parametrize("name", VOTES)
def test_vote_leaves_no_residual(name):
  for feedback in (None, reducers.Smoothing(0.5)):
    assert reducers.Compression(VOTES[name], feedback).feedback is feedback
  for feedback in (
    reducers.ErrorFeedback(),
    reducers.ErrorFeedback(0.5),
    reducers.EF21(),
    reducers.MomentumCorrection(0.9),
  ):
    with pytest.raises(
      ValueError, match=r"`feedback` keeps .*must be `Smoothing\(\)` or None"
    ):
      reducers.Compression(VOTES[name], feedback)


INT8 = reducers.compressed(codecs.Quantize(8))
# Laid out by dtype: a state made of one tree does not suit another's.
LAID_OUT = {
  "rows": INT8,
  "chunks": reducers.Chunked(INT8),
  "phases": reducers.Scheduled(((3, EXACT), (None, INT8))),
}


def large_and_small(dtype):
  return {"a": jnp.ones(5000, dtype), "b": jnp.ones(3, dtype)}


def mean_of_another_dtype(name, held, given, **with_params):
  """Of three steps, the last mean, and the state before and after it."""
  optimizer = transforms.average_gradients(
    "worker", reducers.Compression(LAID_OUT[name])
  )

  def run(x):
    before = optimizer.init(large_and_small(held))
    after = before
    for _ in range(4):
      grads = jax.tree.map(lambda g: g * x, large_and_small(given))
      mean, after = optimizer.update(grads, after, **with_params)
    return mean, before, after

  xs = jnp.array([1.0, 3.0, 1.0, 3.0], given)
  return jax.jit(jax.vmap(run, axis_name="worker"))(xs)


@pytest.mark.parametrize("name", LAID_OUT)
@pytest.mark.parametrize(
  ("held", "given"), [("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_gradients_may_have_another_dtype_than_the_parameters(
  name, held, given
):
  mean, before, after = mean_of_another_dtype(
    name, held, given, params=large_and_small(held)
  )
  assert all(x.dtype == given for x in jax.tree.leaves(mean))
  np.testing.assert_allclose(mean["a"].astype("float32"), 2.0, 0.02)
  shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
  assert shapes(before) == shapes(after)


@pytest.mark.parametrize("name", LAID_OUT)
@pytest.mark.parametrize(
  ("held", "given"), [("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_without_the_parameters_another_dtype_is_refused(name, held, given):
  with _refusals.refused("tree", "for which `state` was made"):
    mean_of_another_dtype(name, held, given)


def test_gradients_of_other_dtype_are_sent_in_it():
  optimizer = transforms.average_gradients(
    "worker", reducers.Compression(EXACT)
  )
  wide, narrow = jnp.zeros(100), jnp.zeros(100, jnp.bfloat16)
  traffic = collectives.traffic(
    lambda w, g: optimizer.update(g, optimizer.init(w), w)[0],
    wide,
    narrow,
    axis="worker",
    num_workers=2,
  )
  assert [c.payload_bytes for c in traffic.collectives] == [200]


def test_flush_hands_over_what_owners_hold_once():
  compression = reducers.Compression(
    reducers.compressed(codecs.Quantize(2, 4)), reducers.ErrorFeedback()
  )
  xs = {"w": jax.random.normal(jax.random.key(0), (2, 64))}

  def one(x):
    state = compression.init(x, "worker")
    sent, state = compression.mean(x, state, "worker")
    rest, state = compression.flush(
      jax.tree.map(jnp.zeros_like, x), state, "worker"
    )
    return sent, rest, state.reducer.residual

  sent, rest, kept = jax.jit(jax.vmap(one, axis_name="worker"))(xs)
  total = jax.tree.map(jnp.add, sent, rest)["w"]
  np.testing.assert_allclose(total[0], xs["w"].mean(0), rtol=1e-4, atol=1e-5)
  assert rest["w"].any() and not kept[0].any()


def test_mean_that_is_not_finite_leaves_no_residual_of_its_cast():
  compression = reducers.Compression(EXACT, reducers.ErrorFeedback())
  like = jnp.zeros(2, jnp.bfloat16)
  state = compression.feedback.init(like)
  mean = jnp.array([1.0 + 2.0**-12, jnp.inf])
  _, state = compression.finish(mean, mean, mean, state, like)
  # The share that was sent leaves nothing, and the cast of the first a little.
  assert state.residual.tolist() == [2.0**-12, 0.0]


def test_without_feedback_owners_keep_their_residuals():
  compression = reducers.Compression(reducers.compressed(codecs.Quantize(4, 4)))
  like = {"w": jnp.ones(8)}
  state = compression.init(like, None)
  assert jax.tree.leaves(state.reducer)
  assert compression.absorb(like, state, None) is state


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg"])
def test_workers_choose_the_same_entries_with_any_generator(kind):
  """Under `vmap` such a generator draws other numbers for each worker."""
  compression = reducers.Compression(codecs.RandomK(0.25, scaled=False))

  def mean(x, state):
    return compression.mean(x, state, "worker")[0]

  rows = jnp.ones((2, 16))
  first = compression.init(rows[0], None)
  states = jax.tree.map(lambda x: jnp.stack([x, x]), first)
  found = []
  for generator in ("threefry2x32", kind):
    with jax.default_prng_impl(generator):
      found.append(jax.vmap(mean, axis_name="worker")(rows, states))
  for x in found:
    assert sorted(x[0].tolist()) == [0.0] * 12 + [1.0] * 4
    np.testing.assert_array_equal(x, found[0])


def test_results_are_typed_as_the_workers_own():
  team = collectives.workers(2, substrate="shard_map")
  compression, types = reducers.Compression(reducers.Exact()), set()

  def mean(x):
    found = compression.mean(x, compression.init(x, team.axis), team.axis)
    types.update(
      jax.typeof(y).manual_axis_type.varying for y in jax.tree.leaves(found)
    )
    return found[0]

  spec = jax.P(team.mesh_axis)
  tracked = jax.shard_map(mean, mesh=team.mesh, in_specs=spec, out_specs=spec)
  jax.eval_shape(tracked, jnp.ones((2, 3)))
  assert types == {frozenset({team.mesh_axis})}


def test_leaves_of_two_dtypes_keep_their_owners_residuals():
  """A feedback sends both as float32, and so in one bucket."""
  compression = reducers.Compression(
    reducers.compressed(codecs.Quantize(4, 8)), reducers.ErrorFeedback()
  )
  random = np.random.default_rng(0)
  tree = {
    "a": jnp.asarray(random.normal(size=(2, 16)), jnp.bfloat16),
    "b": jnp.asarray(random.normal(size=(2, 24)), jnp.float32),
  }

  def round_(tree):
    first = compression.init(tree, "worker")
    _, state = compression.mean(tree, first, "worker")
    held, _ = compression.reducer.flush(
      state.reducer, jax.tree.map(states.wide_like, tree), "worker"
    )
    return first, state, held, compression.absorb(tree, state, "worker")

  program = jax.jit(jax.vmap(round_, axis_name="worker"))
  first, state, held, moved = program(tree)
  chex.assert_trees_all_equal_shapes_and_dtypes(first, state)
  assert any(np.asarray(x).any() for x in jax.tree.leaves(held))
  wanted = jax.tree.map(jnp.add, state.feedback.residual, held)
  chex.assert_trees_all_equal(moved.feedback.residual, wanted)
