"""Means that arrive within the next round, some steps after they were sent."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import codecs, methods, reducers, transforms
from jdist.transforms import intervals
from tests import _thinned
from tests.reducers import _small_codecs
from tests.transforms import _chains
from tests.transforms._rounds import plain_apply, random_targets, train

NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
RATE = 0.1


@pytest.mark.smoke
def test_mean_is_applied_after_one_step_of_two():
  optimizer = transforms.local_steps(
    optax.sgd(0.5), 2, axis="worker", overlap=transforms.Delayed(steps=1)
  )
  targets = np.array([[2.0, 6.0]] * 4, np.float32)
  params, states = train(optimizer, targets)
  # The first round's progress is -1.5 and -4.5, and all of it is kept.
  assert params[1].tolist() == [1.5, 4.5]
  assert states.anchor[1].tolist() == [0.0, 0.0]
  # One step later, at 1.75 and 5.25, the mean -3 arrives, and what was done
  # since it was sent stays: 0.25 and 0.75.
  assert states.anchor[2].tolist() == [3.0, 3.0]
  assert params[2].tolist() == [3.25, 3.75]
  assert states.sync.flight.in_flight[:, 0].tolist() == [
    False,
    True,
    False,
    True,
  ]
  # The second round's progress counts from there: 2.625 - 3, 4.875 - 3.
  assert params[3].tolist() == [2.625, 4.875]
  assert states.sync.flight.held.message[3].tolist() == [0.375, -1.875]
  assert states.clock.round[:, 0].tolist() == [0, 1, 1, 2]
  assert states.clock.synchronized[:, 0].tolist() == [False, True, False, True]


def reference(x, interval, delay, carry, rate, mu, warmup):
  """SGD on (w - x)^2 / 2; yields (w, anchor) after every step."""
  w, a, m, t = np.zeros(x.shape[1]), 0.0, 0.0, 0
  start, pending = w.copy(), None  # Where the round's progress counts from.

  def outer(a, m, progress):
    m = mu * m + progress.mean()
    return a - rate * (mu * m + progress.mean()), m

  while t < len(x):
    late = t >= warmup
    steps = interval if late else 1
    for step in range(steps):
      w, t = w - RATE * (w - x[t]), t + 1
      if pending is not None and step + 1 >= min(delay, steps):
        a, m = outer(a, m, pending)
        w, start, pending = a - (start - w), a, None
      if step + 1 == steps:
        progress = start - w
        if late:
          pending = progress
          w = start = a - carry * progress
        else:
          a, m = outer(a, m, progress)
          w = start = np.full(x.shape[1], a)
      yield w, a
      if t == len(x):
        return


@pytest.mark.parametrize(
  ("carry", "delay", "outer", "warmup"),
  _thinned.thinned(
    [0.0, 0.5, 1.0], [1, 2, 3, 5], [None, NESTEROV], [0, 3], rounds=3
  ),
)
def test_steps_match_formulas(carry, delay, outer, warmup):
  targets = random_targets(steps=23)
  optimizer = transforms.local_steps(
    optax.sgd(RATE),
    intervals.post_local(warmup, 4),
    axis="worker",
    overlap=transforms.Delayed(steps=delay, carry=carry, after_step=warmup),
    rule=outer,
  )
  params, states = train(optimizer, targets)
  rate, mu = (1.0, 0.0) if outer is None else (0.7, 0.9)
  wanted = list(reference(targets, 4, delay, carry, rate, mu, warmup))
  np.testing.assert_allclose(params, [w for w, _ in wanted], 1e-5, 1e-6)
  np.testing.assert_allclose(
    states.anchor[:, 0], [a for _, a in wanted], 1e-5, 1e-6
  )


@pytest.mark.parametrize(("steps", "long"), [(1, 2), (2, 6), (None, 2)])
def test_delay_begins_with_first_round_of_which_it_is_a_third(steps, long):
  growing = intervals.scheduled(
    lambda t: jnp.where(t < 10, long - 1, long + t // 15)
  )
  runs = []
  for after_step in (10, None):
    late = transforms.Delayed(steps, carry=0.5, after_step=after_step)
    optimizer = transforms.local_steps(
      optax.sgd(RATE, momentum=0.9), growing, axis="worker", overlap=late
    )
    runs.append(train(optimizer, random_targets(30)))
  (w, states), (same, others) = runs
  # Where a mean arrives within the round it is there before the round's end.
  in_flight = others.sync.flight.in_flight[:, 0]
  assert not in_flight[: 9 + long].any() and in_flight[9 + long]
  np.testing.assert_array_equal(in_flight, states.sync.flight.in_flight[:, 0])
  np.testing.assert_array_equal(w, same)
  np.testing.assert_array_equal(states.anchor, others.anchor)


def test_delay_begins_at_once_if_first_round_is_long():
  runs = [
    train(
      transforms.local_steps(
        optax.sgd(RATE), 2, axis="worker",
        overlap=transforms.Delayed(1, after_step=after_step),
      ),
      random_targets(6),
    )[0]
    for after_step in (0, None)
  ]  # fmt: skip
  np.testing.assert_array_equal(*runs)


@pytest.mark.parametrize(
  ("mix", "delay", "interval"), [(0.25, 1, 4), (0.5, 3, 4), (0.0, 2, 3)]
)
def test_late_mean_is_mixed_with_the_workers_own(mix, delay, interval):
  targets = random_targets(3 * interval + delay)
  optimizer = transforms.local_steps(
    optax.sgd(RATE), interval, axis="worker",
    overlap=transforms.Delayed(delay, mix=mix),
  )  # fmt: skip
  found, states = train(optimizer, targets)
  w, sent, anchor = np.zeros(targets.shape[1:]), None, 0.0
  for step, target in enumerate(targets):
    w = w - RATE * (w - target)
    # A message of a round's end arrives some steps later.
    if sent is not None and step % interval == delay - 1:
      anchor = sent
      w = mix * w + (1 - mix) * anchor
    if step % interval == interval - 1:
      sent = w.mean(0)
    np.testing.assert_allclose(found[step], w, 1e-5, 1e-6)
    np.testing.assert_allclose(states.anchor[step, 0], anchor, 1e-5, 1e-6)


def test_nothing_is_mixed_before_the_delay_begins():
  targets, inner = random_targets(14), optax.sgd(RATE)

  def run(overlap, targets, start=0.0):
    optimizer = transforms.local_steps(inner, 2, axis="worker", overlap=overlap)
    return train(optimizer, targets, start=start)

  late = functools.partial(transforms.Delayed, 1, mix=0.25)
  w, states = run(late(after_step=6), targets)
  plain, _ = run(None, targets[:6])
  np.testing.assert_allclose(w[:6], plain, 1e-5, 1e-6)
  assert not states.sync.kept[:6].any() and states.sync.kept[7].all()
  # From there on it is as if it began there.
  start = states.anchor[5, 0]
  np.testing.assert_array_equal(w[5], [start] * 4)
  begun, _ = run(late(), targets[6:], start)
  np.testing.assert_allclose(w[6:], begun, 1e-5, 1e-6)


def falling(steps):
  """Losses of four workers, by which an adaptive interval shrinks."""
  return np.geomspace(4.0, 0.1, 4 * steps, dtype=np.float32).reshape(steps, 4)


@pytest.mark.parametrize("carry", [None, 1.0])
def test_delay_of_whole_round_equals_round_late(carry):
  # Adaptive, so that losses arrive as well, and with a warm-up.
  targets, losses = random_targets(70), falling(70)
  runs = []
  for delay in (None, 16):
    optimizer = methods.msdpu(
      optax.sgd(RATE, momentum=0.9),
      intervals.msdpu(6, RATE),
      RATE,
      axis="worker",
      warmup_steps=4,
      overlap=transforms.Delayed(steps=delay, carry=carry),
      rule=NESTEROV,
    )
    runs.append(train(optimizer, targets, losses))
  (w, states), (same, others) = runs
  np.testing.assert_array_equal(states.clock.interval, others.clock.interval)
  assert len(set(states.clock.interval[:, 0].tolist())) >= 3
  np.testing.assert_allclose(states.anchor, others.anchor, 1e-5, 1e-6)
  np.testing.assert_allclose(w, same, 1e-5, 1e-6)


def test_loss_within_round_gives_same_intervals():
  intervals_of = []
  for delay in (None, 1):
    optimizer = transforms.local_steps(
      optax.sgd(RATE),
      intervals.msdpu(6, RATE),
      axis="worker",
      overlap=transforms.Delayed(steps=delay),
    )
    _, states = train(optimizer, random_targets(70), falling(70))
    intervals_of.append(states.clock.interval)
  np.testing.assert_array_equal(*intervals_of)


# Rounds of two steps; the last loss is kept as the state.
TOLD = intervals.IntervalPolicy(
  lambda: jnp.float32(0.0),
  lambda told, start, loss: (jnp.int32(2), told if loss is None else loss),
  needs_loss=True,
)


@pytest.mark.parametrize("delay", [None, 1])
def test_first_delayed_round_has_no_loss(delay):
  """The loss of the round before was received when that one ended."""
  late = transforms.Delayed(steps=delay, after_step=4)
  optimizer = transforms.local_steps(
    optax.sgd(RATE), TOLD, axis="worker", overlap=late
  )
  losses = np.repeat(np.arange(12, dtype=np.float32)[:, None], 4, 1)
  _, states = train(optimizer, random_targets(12), losses)
  told = states.clock.interval_state[1::2, 0]
  np.testing.assert_array_equal(told, [0.5, 2.5, np.nan, 4.5, 6.5, 8.5])


def test_round_after_a_drain_has_no_loss():
  """The next round does not count again what an earlier one received."""
  optimizer = transforms.local_steps(
    optax.sgd(RATE), TOLD, axis=None, overlap=transforms.Delayed(steps=1)
  )

  @jax.jit
  def told():
    w, state = jnp.zeros(()), optimizer.init(jnp.zeros(()))
    for loss in (1.0, 3.0, 7.0):
      updates, state = optimizer.update(w, state, w, loss=jnp.float32(loss))
      w = w + updates
    before = state.sync.flight.arrived_loss
    w, state = transforms.drain(optimizer, state, w)
    for loss in (9.0, 9.0):
      updates, state = optimizer.update(w, state, w, loss=jnp.float32(loss))
      w = w + updates
    return before, state.clock.interval_state

  before, after = told()
  assert before == 2.0 and np.isnan(after)


def test_empty_message_leaves_no_residual():
  """A codec of signs sends something for zeros, too."""
  compression = reducers.Compression(
    reducers.compressed(_small_codecs.Signs()), reducers.ErrorFeedback()
  )
  optimizer = transforms.local_steps(
    optax.sgd(RATE), 2, axis="worker", overlap=transforms.Delayed(),
    compression=compression,
  )  # fmt: skip
  _, states = train(optimizer, random_targets(4, 4, 64))
  memory = jax.tree.leaves(states.sync.compression)
  left = [[np.abs(x[t]).max() > 0 for x in memory] for t in (0, 1, 3)]
  assert not any(left[0] + left[1]) and any(left[2])


def run_streamed(optimizer, targets, chosen):
  """All steps, with `stream_steps` of `chosen` in turn: a program for each."""

  def step(w, state, x, *, steps):
    updates, state = optimizer.update(
      w - x, state, w, control=transforms.Control(stream_steps=steps)
    )
    return transforms.apply_updates(w, updates, state), state

  programs = {
    steps: jax.jit(
      jax.vmap(functools.partial(step, steps=steps), axis_name="worker")
    )
    for steps in chosen
  }
  w, found = jnp.zeros((4, 5)), []
  state = jax.vmap(optimizer.init, axis_name="worker")(w)
  for t, x in enumerate(targets[..., None] + np.arange(5, dtype=np.float32)):
    w, state = programs[chosen[t % len(chosen)]](w, state, x)
    found.append((w, state.anchor, state.clock.round))

  def drain(w, state):
    return transforms.drain(optimizer, state, w)[0]

  return found, jax.jit(jax.vmap(drain, axis_name="worker"))(w, state)


@pytest.mark.parametrize(
  ("outer", "carry"),
  [
    (NESTEROV, None),
    (None, 1.0),
    pytest.param(NESTEROV, 1.0, marks=pytest.mark.slow),
    pytest.param(None, None, marks=pytest.mark.slow),
  ],
)
def test_streamed_mean_equals_late_mean_to_the_bit(outer, carry):
  build = functools.partial(
    _chains.late, optax.sgd(RATE, momentum=0.9), 5, axis="worker",
    rule=outer, steps=2, carry=carry,
  )  # fmt: skip
  targets = random_targets(17)
  parts = transforms.Stream(max_bytes=8)
  # Sent in two steps, and in one; nothing after that; and all when it is due.
  found = [
    run_streamed(build(stream=stream), targets, chosen)
    for stream, chosen in (
      (None, (None,)),
      (parts, (2, 2, None, None, None)),
      (parts, (1, None, None, None, None)),
      (parts, (None,)),
    )
  ]
  for other, _ in found[1:]:
    chex.assert_trees_all_equal(found[0][0], other)


def test_sub_tensors_go_through_a_codec():
  chunked = reducers.Chunked(
    reducers.compressed(codecs.TopK(0.3)), max_bytes=16, multiple=2
  )
  build = functools.partial(
    _chains.late,
    optax.sgd(RATE),
    5,
    carry=1.0,
    axis="worker",
    steps=2,
    compression=reducers.Compression(chunked, reducers.ErrorFeedback()),
  )
  targets, parts = random_targets(17), transforms.Stream(max_bytes=16)
  simple, _ = run_streamed(build(), targets, (None,))
  exact, _ = run_streamed(
    transforms.local_steps(
      optax.sgd(RATE), 5, axis="worker", overlap=transforms.Delayed(steps=2)
    ),
    targets,
    (None,),
  )
  assert np.abs(simple[-1][1] - exact[-1][1]).max() > 1e-4
  for chosen in ((2, 2, None, None, None), (1, None, None, None, None)):
    streamed, _ = run_streamed(build(stream=parts), targets, chosen)
    chex.assert_trees_all_equal(simple, streamed)


@pytest.mark.parametrize("chosen", [(8, 1, 2, None, 4), (4,), (9,)])
def test_a_slow_host_makes_rounds_longer_and_loses_nothing(chosen):
  optimizer = transforms.local_steps(
    optax.sgd(RATE),
    3,
    axis="worker",
    overlap=transforms.Delayed(steps=2, stream=transforms.Stream(max_bytes=8)),
  )
  targets = random_targets(29)
  found, drained = run_streamed(optimizer, targets, chosen)
  w = np.stack([np.zeros((4, 5))] + [np.asarray(w) for w, _, _ in found])
  x = targets[..., None] + np.arange(5.0)
  # The anchor has moved by the mean of all that went in.
  moved = -RATE * (w[:-1] - x).sum(0).mean(0)
  np.testing.assert_allclose(drained, [moved] * 4, rtol=1e-5, atol=1e-5)
  rounds = int(found[-1][2][0])
  assert rounds < 29 // 3 if chosen == (9,) else rounds >= 6


def test_host_controls_arrival_and_round_end():
  optimizer = transforms.local_steps(
    optax.sgd(RATE), 3, axis="worker", overlap=transforms.Delayed(steps=2)
  )
  targets = random_targets(13)[..., None] + np.arange(5, dtype=np.float32)

  def step(w, state, x, *, control):
    updates, state = optimizer.update(w - x, state, w, control=control)
    return transforms.apply_updates(w, updates, state), state

  @functools.cache
  def program(control):
    one = functools.partial(step, control=control)
    return jax.jit(jax.vmap(one, axis_name="worker"))

  def run(choose):
    w, found = jnp.zeros((4, 5)), []
    state = jax.vmap(optimizer.init, axis_name="worker")(w)
    for x in targets:
      w, state = program(choose(state))(w, state, x)
      found.append((w, state.anchor, state.clock.round))
    return found

  def said(state):
    window, offset, interval = transforms.rounds_ahead(state)[0, 0].tolist()
    return transforms.Control(
      round_ends=offset + 1 == interval, arrives=offset + 1 == window
    )

  by_device = run(lambda state: transforms.Control())
  chex.assert_trees_all_close(by_device, run(said), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"steps": 0}, "`steps` must be an int >= 1"),
    ({"mix": 0.5}, "`mix` .*needs `steps`"),
    ({"steps": 2, "mix": 1.5}, r"`mix` must be in \[0, 1\]"),
    ({"carry": -0.1}, r"`carry` must be in \[0, 1\]"),
    ({"after_step": -1}, "`after_step` must be an int >= 0"),
    ({"stream": True}, "`stream` must be a `transforms.Stream`"),
  ],
)
def test_a_delay_out_of_range_is_refused(options, message):
  with pytest.raises(ValueError, match=message):
    transforms.Delayed(**options)


def test_host_must_give_both_controls():
  optimizer = transforms.local_steps(
    optax.sgd(RATE), 3, axis=None, overlap=transforms.Delayed(steps=2)
  )
  w = jnp.ones(3)
  with pytest.raises(ValueError, match="both `round_ends` and `arrives`"):
    optimizer.update(
      w, optimizer.init(w), w, control=transforms.Control(round_ends=False)
    )


def test_updates_before_the_delay_lead_to_the_anchor():
  """By Optax's sum, too, which knows no anchor."""
  optimizer = transforms.local_steps(
    optax.sgd(RATE), 2, axis="worker",
    overlap=transforms.Delayed(1, mix=0.25, after_step=6),
  )  # fmt: skip
  w, states = train(optimizer, random_targets(6), apply=plain_apply)
  np.testing.assert_allclose(w[1::2], states.anchor[1::2], 1e-5, 1e-6)
