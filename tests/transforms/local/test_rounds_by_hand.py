"""Parts of rounds that few options need, on numbers to follow by hand."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import collectives, reducers, transforms
from jdist.transforms.local import _iterates, _late_mean
from tests.reducers import _small_codecs as small
from tests.transforms import _rounds

RATE = 0.1
PLAIN = transforms.Control()
RULES = {
  "average": None,
  "outer": transforms.outer_sgd(0.7, 0.9),
  "elastic": transforms.Elastic(0.5),
  "pulled anchor": transforms.PulledAnchor(0.6, 0.5),
  "control variates": transforms.ControlVariates(RATE, 0.8),
  "slow momentum": transforms.SlowMomentum(RATE, 0.8, 0.5),
}


@pytest.mark.parametrize("name", RULES)
def test_rule_moves_alike_by_positions_and_by_differences(name):
  """A compression sends differences from the anchor."""
  targets = _rounds.random_targets(5, 2, 3)
  found = []
  for compression in (None, reducers.Compression(reducers.Exact())):
    optimizer = transforms.local_steps(
      optax.sgd(RATE), 2, axis="worker", rule=RULES[name],
      compression=compression,
    )  # fmt: skip
    params, state = _rounds.train(optimizer, targets, start=2.0)
    found.append((params, state.anchor))
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-6), *found
  )


def test_average_buffers_are_the_mean_of_momenta():
  rule = transforms.SlowMomentum(RATE, buffers="average")
  optimizer = transforms.local_steps(
    optax.sgd(RATE, momentum=0.5), 2, axis="worker", rule=rule
  )
  targets = np.float32([[3, -1], [5, -7], [0, 0]])
  params, state = _rounds.train(optimizer, targets)
  trace = np.asarray(state.inner[0].trace)
  np.testing.assert_array_equal(trace[0], [-3, 1])
  # w = 0.3 and -0.1; traces -1.5 + 0.3 - 5 = -6.2 and 0.5 - 0.1 + 7 = 7.4.
  np.testing.assert_allclose(trace[1], [0.6, 0.6], rtol=1e-5)
  # The next step of both begins on the anchor, with that momentum.
  w = params[1, 0]
  np.testing.assert_allclose(trace[2], [0.3 + w, 0.3 + w], rtol=1e-5)


def train(optimizer, targets, controls):
  """Takes a step of two workers on each target, with its control."""
  team = collectives.workers(2, substrate="vmap")

  def step(w, state, x, control):
    updates, state = optimizer.update(w - x, state, w, control=control)
    return transforms.apply_updates(w, updates, state), state

  @functools.cache
  def program(control):
    return team.jit(functools.partial(step, control=control))

  w = team.replicate(jnp.zeros(targets.shape[2:]))
  state = team.jit(optimizer.init)(w)
  for x, control in zip(targets, controls, strict=True):
    w, state = program(control)(w, state, team.place(x))
  return w, state


def test_host_ends_the_rounds_of_one_fragment():
  optimizer = transforms.fragment_steps(optax.sgd(1.0), 4, 2, axis=None)
  w = {"a": jnp.array(0.0), "b": jnp.array(0.0)}
  state = optimizer.init(w)
  anchors = []
  for ends in ((True, False), (False, False), (False, True), (True, True)):
    each = tuple(transforms.Control(round_ends=end) for end in ends)
    updates, state = optimizer.update(
      {"a": jnp.array(1.0), "b": jnp.array(2.0)}, state, w,
      control=transforms.Control(fragments=each),
    )  # fmt: skip
    w = transforms.apply_updates(w, updates, state)
    anchors.append((state.anchor["a"].item(), state.anchor["b"].item()))
  assert anchors == [(-1.0, 0.0), (-1.0, 0.0), (-1.0, -6.0), (-4.0, -8.0)]


def test_unknown_part_of_a_mean_is_lost():
  """A host that ends a round before all was sent gets NaN."""
  optimizer = transforms.local_steps(
    optax.sgd(RATE), 4, axis="worker",
    overlap=transforms.Delayed(steps=2, stream=transforms.Stream(max_bytes=8)),
  )  # fmt: skip
  targets = np.ones((5, 2, 8), np.float32)
  for steps in (1, 4):  # Of a fifth, in which the mean arrives.
    ends, arrives = (
      transforms.Control(round_ends=e, arrives=not e, stream_steps=steps)
      for e in (True, False)
    )
    begun = [
      transforms.Control(round_ends=False, arrives=False, stream_steps=1)
    ] * 3
    w, _ = train(optimizer, targets, [*begun, ends, arrives])
    assert bool(np.isnan(w).any()) == (steps == 4)


def test_drain_without_feedback_loses_what_a_codec_has_lost():
  """Received rows keep the codec's values, and the others are sent exactly."""
  parts = reducers.Chunked(
    reducers.compressed(small.Rounded(levels=1)), max_bytes=32, multiple=2
  )
  optimizer = transforms.local_steps(
    optax.sgd(1.0), 2, axis="worker",
    overlap=transforms.Delayed(stream=transforms.Stream()),
    compression=reducers.Compression(parts),
  )  # fmt: skip
  x = np.broadcast_to(np.arange(1, 17, dtype=np.float32), (3, 2, 16)) / 16
  control = transforms.Control(stream_steps=2)
  w, state = train(optimizer, x, [control] * 3)
  team = collectives.workers(2, substrate="vmap")
  w, _ = team.jit(lambda w, s: transforms.drain(optimizer, s, w))(w, state)
  # All of the first round's progress, x, was made in its first step.
  sent = np.round(x[0, 0, :8] * 2) / 2
  np.testing.assert_allclose(w[0, :8], sent, atol=1e-6)
  np.testing.assert_allclose(w[0, 8:], x[0, 0, 8:], atol=1e-6)


def test_drain_averages_iterates_within_a_round():
  free = optax.contrib.schedule_free_sgd(RATE)
  optimizer = jdist.local_sgd(free, 4, axis="worker")
  targets = np.float32([[-3, 5]] * 6)
  team = collectives.workers(2, substrate="vmap")
  w, state = train(optimizer, targets, [PLAIN] * 6)
  z = np.asarray(state.inner.z)
  assert abs(z[0] - z[1]) > 0.1
  drained, new = team.jit(lambda w, s: transforms.drain(optimizer, s, w))(
    w, state
  )
  np.testing.assert_allclose(new.inner.z, [z.mean()] * 2, rtol=1e-6)
  np.testing.assert_allclose(drained, [np.mean(w)] * 2, rtol=1e-6)


def test_streamed_iterates_are_those_of_the_simple_form():
  free = optax.contrib.schedule_free_sgd(RATE)
  targets = np.tile(np.float32([[[-3, 1], [5, 2]]]), (8, 1, 1))
  found = []
  for stream in (None, transforms.Stream(max_bytes=8)):
    optimizer = transforms.local_steps(
      free, 2, axis="worker", overlap=transforms.Delayed(stream=stream)
    )
    params, state = _rounds.train(optimizer, targets)
    found.append((params, state.inner.z))
  jax.tree.map(np.testing.assert_array_equal, *found)
  assert np.ptp(np.asarray(found[0][1]), 1).max() > 0.1


def test_only_known_workers_fold_their_keys():
  """`Workers.replicate` folds the keys of a state that was made alone."""
  state = {"key": jax.random.key(3), "count": jnp.array(0)}
  assert _iterates.own_keys(state, "worker") is state
  assert _iterates.own_keys(state, None) is state
  plain = {"count": jnp.array(0)}
  assert _iterates.own_keys(plain, "worker") is plain


def test_rounds_before_a_delay_send_their_own_message():
  """With a stream the host sends them whole, as the simple form does."""
  targets = _rounds.random_targets(8, 2, 16)
  found = []
  for stream in (None, transforms.Stream()):
    optimizer = transforms.local_steps(
      optax.sgd(RATE), 2, axis="worker",
      overlap=transforms.Delayed(after_step=4, stream=stream),
      compression=reducers.Compression(
        reducers.Chunked(
          reducers.compressed(small.Rounded(levels=3)), max_bytes=32, multiple=2
        ),
        reducers.ErrorFeedback(),
      ),
    )  # fmt: skip
    at_once = transforms.Control(stream_steps=None)
    parts = transforms.Control(stream_steps=2)
    controls = [at_once] * 6 + [parts] * 2 if stream else [PLAIN] * 8
    w, state = train(optimizer, targets, controls)
    found.append((w, state.anchor, state.sync.compression.feedback))
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-6), *found
  )


@pytest.mark.parametrize("stream", [None, transforms.Stream(max_bytes=8)])
def test_drain_takes_the_mean_of_a_message_that_was_not_sent_whole(stream):
  """At a rate of 1 a worker is where its last target was."""
  optimizer = transforms.local_steps(
    optax.sgd(1.0), 2, axis="worker", overlap=transforms.Delayed(stream=stream)
  )
  x = _rounds.random_targets(3, 2, 5)
  w, state = train(optimizer, x, [PLAIN] * 3)
  np.testing.assert_allclose(w, x[2], atol=1e-6)
  team = collectives.workers(2, substrate="vmap")
  w, state = team.jit(lambda w, s: transforms.drain(optimizer, s, w))(w, state)
  np.testing.assert_allclose(w, [x[2].mean(0)] * 2, atol=1e-6)
  np.testing.assert_allclose(state.anchor, w, atol=1e-6)


@pytest.mark.parametrize(("steps", "multiple"), [(None, 16), (3, 3)])
def test_message_is_cut_for_all_usual_numbers_of_steps(steps, multiple):
  """A host may choose 1, 2, 4, 8 or 16 where the number of steps varies."""
  stream = transforms.Stream(max_bytes=64)
  whole = reducers.Compression(reducers.compressed(small.Rounded()))
  found = stream.chunks(whole, steps)
  assert (found.reducer.multiple, found.reducer.max_bytes) == (multiple, 64)
  assert stream.chunks(found, None) is found


def test_drained_stream_keeps_the_feedback_of_the_simple_form():
  """A momentum takes each message once, and not what was added to it."""
  x = _rounds.random_targets(7, 2, 16)
  team, found = collectives.workers(2, substrate="vmap"), []
  for stream in (None, transforms.Stream()):
    optimizer = transforms.local_steps(
      optax.sgd(RATE), 2, axis="worker",
      overlap=transforms.Delayed(stream=stream),
      compression=reducers.Compression(
        reducers.Chunked(
          reducers.compressed(small.Largest(2)), max_bytes=32, multiple=2
        ),
        reducers.MomentumCorrection(0.5),
      ),
    )  # fmt: skip
    control = transforms.Control(stream_steps=2) if stream else PLAIN
    # After six steps nothing of the third round's message is sent.
    w, state = train(optimizer, x[:6], [control] * 6)
    drain = team.jit(lambda w, s, o=optimizer: transforms.drain(o, s, w))
    w, state = drain(w, state)
    found.append((w, state.sync.compression.feedback))
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-6), *found
  )
  assert np.abs(found[0][1].momentum[0]).max() > 0.01


class _End(NamedTuple):
  anchor: Any
  memory: Any = ()
  inner: Any = ()
  rest: int = 7


def test_change_of_a_round_stays_a_conditional_for_many_workers():
  """A selection would run both branches in every step."""

  def one(x):
    def change(end):
      return end._replace(anchor=end.anchor + 1, rest=8)

    return _late_mean.change_if(x > 0, _End(x), change, "worker")

  many = jax.vmap(one, axis_name="worker")
  program = str(jax.make_jaxpr(many)(jnp.ones(2)))
  assert "cond[" in program and "select_n" not in program
  found = many(jnp.float32([1.0, 2.0]))
  # What is no part of the agreement stays.
  assert found.anchor.tolist() == [2.0, 3.0]
  assert many(jnp.float32([-1.0, -2.0])).anchor.tolist() == [-1.0, -2.0]


def test_leaf_of_a_state_belongs_to_the_longest_path_of_its_shape():
  known = [
    (("w",), jnp.ones(2)), (("a", "w"), jnp.ones(2)), (("b", "w"), jnp.ones(3))
  ]  # fmt: skip

  def fit(path, size):
    return _iterates._fit(path, jnp.ones(size), known)

  assert fit(("z", "a", "w"), 2) == 1 and fit(("z", "w"), 2) == 0
  assert fit(("a", "w"), 3) == fit(("w",), 3) == fit(("v",), 2) == -1
  assert fit(("b", "w"), 3) == 2 and fit(("b", "w"), 2) == 0


def test_mean_within_a_round_is_taken_apart_from_the_step(monkeypatch):
  arrive, given = _late_mean.LateMean.arrive, []

  def noted(self, end, state, steps, found=None):
    given.append(found is not None)
    return arrive(self, end, state, steps, found)

  monkeypatch.setattr(_late_mean.LateMean, "arrive", noted)
  optimizer = transforms.local_steps(
    optax.sgd(RATE), 3, axis=None, overlap=transforms.Delayed(steps=2)
  )
  params = jnp.ones(2)
  state = optimizer.init(params)
  for control in (PLAIN, transforms.Control(round_ends=False, arrives=True)):

    def update(grads, control=control):
      return optimizer.update(grads, state, params, control=control)

    jax.eval_shape(update, params)
  # A host that knows when needs no conditional.
  assert given == [True, False]


def test_worker_on_a_spring_stays_apart_while_its_mean_is_late():
  optimizer = transforms.local_steps(
    optax.sgd(1.0), 2, axis=None, rule=transforms.Elastic(0.5),
    overlap=transforms.Delayed(1),
  )  # fmt: skip
  update = jax.jit(optimizer.update)
  w, found = jnp.zeros(()), []
  state = optimizer.init(w)
  for _ in range(5):
    updates, state = update(jnp.float32(-1.0), state, w)
    w = jdist.apply_updates(w, updates, state)
    found.append((float(w), float(state.anchor)))
  # It sends its position, 2 and then 2.5, and is in place a step later, where
  # half of its distance then, 3 and 2.5, is undone.
  assert found == [(1, 0), (2, 0), (1.5, 1), (2.5, 1), (2.25, 1.75)]
