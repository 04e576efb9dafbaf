"""Intervals by hand, and when a loss may change them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import methods, transforms
from jdist.transforms import intervals
from jdist.transforms.intervals import _policy
from jdist.transforms.local import _round
from tests import _refusals


def unfold(policy, losses, num_steps=10**6):
  """The intervals of rounds whose mean losses are given, by the contract.

  `losses[r]` is given at the end of round r, where round r + 2 is decided.
  """
  state = policy.init()
  first, state = policy.next(state, jnp.int32(0), None)
  second, state = policy.next(state, first, None)
  found, end = [int(first), int(second)], int(first)
  for r, loss in enumerate(losses):
    start = end + found[r + 1]
    if end >= num_steps:
      break
    steps, state = policy.next(state, jnp.int32(start), jnp.float32(loss))
    assert steps.dtype == jnp.int32 and steps.shape == ()
    found.append(int(steps))
    end = start
  return found


def train(policy, losses, axis=None):
  """(interval, next_interval, round) after every step, losses [steps, ...]."""
  optimizer = methods.local_sgd(optax.sgd(0.1), policy, axis=axis)

  def one(losses):
    w = jnp.zeros(())

    def body(state, loss):
      _, state = optimizer.update(jnp.ones(()), state, w, loss=loss)
      return state, (
        state.clock.interval,
        state.clock.next_interval,
        state.clock.round,
      )

    return jax.lax.scan(body, optimizer.init(w), losses)[1]

  if axis is not None:
    one = jax.vmap(one, 1, 1, axis_name=axis)
  return jax.tree.map(np.asarray, jax.jit(one)(losses.astype(np.float32)))


@pytest.mark.smoke
def test_fixed_intervals():
  assert unfold(intervals.fixed(3), [1.0] * 3) == [3] * 5
  assert unfold(_policy.as_policy(2), [1.0]) == [2] * 3


def test_scheduled_intervals_see_the_first_step_of_their_round():
  policy = intervals.scheduled(lambda t: 1 + t // 2)
  # Rounds begin at 0, 1, 2, 4, 7.
  assert unfold(policy, [1.0] * 3) == [1, 1, 2, 3, 4]
  floats = intervals.scheduled(optax.linear_schedule(0.0, 3.9, 4))
  assert unfold(floats, [1.0] * 5) == [1, 1, 1, 2, 3, 3, 3]


def test_post_local_intervals_begin_at_the_switch():
  assert unfold(intervals.post_local(3, 4), [1.0] * 4) == [1, 1, 1, 4, 4, 4]
  # A round that began before the switch is not cut short.
  late = intervals.post_local(3, intervals.scheduled(lambda t: t))
  assert unfold(late, [1.0] * 4) == [1, 1, 1, 3, 6, 12]


def test_post_local_hides_the_warm_up_from_its_policy():
  policy = intervals.post_local(2, intervals.msdpu(4, decay=0.0))
  # Rounds 0 and 1 are the warm-up, whose high losses are not F_0.
  losses = [100.0, 100.0, 1.0, 1.0, 0.25]
  assert unfold(policy, losses) == [1, 1, 4, 4, 4, 4, 2]


def test_last_round_ends_with_the_training():
  assert unfold(intervals.ending_at(10, 4), [1.0] * 3, 10)[:3] == [4, 4, 2]
  assert unfold(intervals.ending_at(8, 4), [1.0] * 3, 8)[:2] == [4, 4]
  both = intervals.ending_at(7, intervals.post_local(2, 3))
  assert unfold(both, [1.0] * 4, 7)[:5] == [1, 1, 3, 2, 3]


def test_qsr_grows_with_the_square_of_the_inverse_rate():
  def rate(t):
    return jnp.where(t < 4, 0.2, 0.1)

  assert unfold(intervals.qsr(rate, 0.4, 2), [1.0] * 2) == [4, 16, 16, 16]
  assert unfold(intervals.qsr(rate, 0.1, 2), [1.0]) == [2] * 3
  # Whole numbers are not missed by a rounding.
  assert unfold(intervals.qsr(0.04 / 3, 0.04, 1), []) == [9, 9]
  limited = intervals.qsr(rate, 0.4, 2, max_interval=10)
  assert unfold(limited, [1.0]) == [4, 10, 10]


def test_growth_begins_with_one_step_and_follows_the_square_of_the_rate():
  def rate(t):
    return jnp.select([t < 2, t < 4, t < 6], [0.1, 0.8, 0.4], 0.2)

  # The highest rate is 0.8 from step 2 on; before that it is 0.1.
  half = intervals.growth(rate, start=0.5)
  assert unfold(half, [1.0] * 6) == [1, 1, 1, 1, 1, 1, 4, 4]
  whole = intervals.growth(rate, start=1.0, max_interval=10)
  assert unfold(whole, [1.0] * 3) == [1, 1, 1, 1, 4]
  assert unfold(whole, [1.0] * 5)[-2:] == [10, 10]


def test_qsr_sizes_rounds_of_a_warmup_by_the_rate_after_it():
  rate = optax.warmup_cosine_decay_schedule(0.001, 0.1, 6, 40, 0.01)
  rule = intervals.qsr(rate, 0.2, 2, warmup_steps=6)
  starts, step = [], 0
  while step < 12:
    length = int(rule.next((), jnp.array(step), None)[0])
    starts.append((step, length))
    step += length
  assert starts[0] == (0, 4) and starts[1] == (4, 4) and starts[2][1] >= 4
  # After it each round has the rate of its own first step.
  falls = intervals.qsr(
    lambda t: jnp.where(t < 10, 0.1, 0.05), 0.2, 2, warmup_steps=6
  )
  for step, length in ((0, 4), (8, 4), (9, 4), (10, 16)):
    assert int(falls.next((), jnp.array(step), None)[0]) == length
  # By the warm-up's own rate it would have been one round of 40,000 steps.
  naive = intervals.qsr(rate, 0.2, 2, warmup_steps=0)
  assert int(naive.next((), jnp.array(0), None)[0]) > 10_000
  with pytest.raises(ValueError, match="`warmup_steps` must be given"):
    intervals.qsr(rate, 0.2, 2)


def test_rate_of_zero_is_the_longest_round():
  def zero(t):
    return jnp.where(t < 1, 0.1, 0.0)

  assert unfold(intervals.qsr(zero, 0.1, 1), [])[1] == 2**30
  capped = intervals.adacomm(4, 1, zero, form="capped", max_interval=8)
  assert unfold(capped, [1.0] * 3)[-1] == 8
  # The reconstruction keeps what it had.
  assert unfold(intervals.msdpu(4, zero), [1.0] * 2) == [4] * 4


def test_adacomm_halves_where_the_rule_does_not_shrink():
  policy = intervals.adacomm(8, 8)
  # Decided at the starts 16, 24 and 32, of 28 nothing: F_0 = 4, then
  # ceil(8 sqrt(1 / 4)) = 4, then 4 again, which is not smaller.
  assert unfold(policy, [4.0, 1.0, 1.0, 1.0]) == [8, 8, 8, 4, 4, 2]


def test_adacomm_ends_at_single_steps_and_begins_at_its_maximum():
  # Two halves to one, of which there is no half.
  assert unfold(intervals.adacomm(2, 1), [1.0] * 4) == [2, 2, 2, 1, 1, 1]
  # Half of an odd interval is rounded down.
  assert unfold(intervals.adacomm(5, 1), [1.0] * 4) == [5, 5, 5, 2, 1, 1]
  # A value between half of the interval and the interval is taken.
  assert unfold(intervals.adacomm(8, 8), [4.0, 2.25]) == [8, 8, 8, 6]
  capped = intervals.adacomm(20, 1, form="capped")
  assert unfold(capped, [])[:2] == [16, 16]


def test_loss_below_zero_gives_single_steps():
  policy = intervals.msdpu(4, decay=0.0)
  assert unfold(policy, [1.0, -1.0]) == [4, 4, 4, 1]
  # Two that are below zero have no ratio.
  assert unfold(policy, [-1.0, -4.0]) == [4, 4, 1, 1]


def test_adacomm_averages_over_a_period():
  policy = intervals.adacomm(4, 8, form="capped")
  # Decided at the starts 8 and 16: F_0 = 2, then sqrt(4 * mean(0, 9) / 2).
  assert unfold(policy, [2.0, 0.0, 9.0]) == [4, 4, 4, 4, 3]


def test_adacomm_capped_puts_the_first_interval_into_the_root():
  policy = intervals.adacomm(9, 1, form="capped", max_interval=4)
  # ceil(sqrt(9 F / F_0)): 3 at F_0, 2 at a quarter, 6 at four times.
  assert unfold(policy, [1.0, 1.0, 0.25, 4.0])[3:] == [3, 2, 4]


def test_msdpu_follows_the_square_root_of_the_averaged_loss():
  policy = intervals.msdpu(8, decay=0.5, max_interval=10)
  # F: 4, then 0.5 * 4 + 0.5 * 0 = 2: 8 sqrt(1/2) = 5.7; then 9: 12, cut.
  assert unfold(policy, [4.0, 0.0, 16.0]) == [8, 8, 8, 6, 10]


def test_falling_rate_lengthens_the_rounds():
  def rate(t):
    return jnp.where(t < 8, 0.4, 0.1)

  for policy in (
    intervals.msdpu(4, rate),
    intervals.adacomm(16, 1, rate, form="capped"),
  ):
    assert unfold(policy, [1.0] * 4)[-1] == 8


@pytest.mark.parametrize(
  "policy",
  [
    lambda rate: intervals.adacomm(4, 1, rate, form="capped"),
    lambda rate: intervals.growth(rate, start=1.0),
    lambda rate: intervals.msdpu(4, rate),
    lambda rate: intervals.qsr(rate, 2.0, 1),
  ],
  ids=["adacomm", "growth", "msdpu", "qsr"],
)
def test_round_has_the_rate_of_its_very_first_step(policy):
  def at(step, rate):
    rule = policy(rate)
    _, state = rule.next(rule.init(), jnp.int32(1), jnp.float32(1.0))
    return int(rule.next(state, jnp.int32(step), jnp.float32(1.0))[0])

  def falls(t):
    return jnp.where(t < 8, 1.0, 0.25)

  assert at(7, falls) == at(7, lambda t: jnp.float32(1.0)) < at(8, falls)


def test_rate_that_warms_up_from_zero_does_not_shorten_the_rounds():
  warmup = optax.linear_schedule(0.0, 0.1, 8)
  assert unfold(intervals.msdpu(4, warmup), [1.0] * 4) == [4] * 6
  capped = intervals.adacomm(9, 1, warmup, form="capped")
  assert unfold(capped, [1.0] * 4)[-1] == 3


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_loss_that_is_not_finite_changes_nothing(bad):
  for policy in (
    intervals.msdpu(8, decay=0.5),
    intervals.adacomm(8, 1, form="capped"),
  ):
    state = policy.init()
    for loss in (bad, 4.0, bad):
      _, state = policy.next(state, jnp.int32(9), jnp.float32(loss))
    assert state.first_loss == 4.0
  # F stays 4 until 1 makes it 2.5: ceil(8 sqrt(2.5 / 4)) = 7.
  policy = intervals.msdpu(8, decay=0.5)
  assert unfold(policy, [4.0, bad, bad, 1.0]) == [8] * 5 + [7]


def test_policy_receives_the_mean_over_steps_and_workers():
  # Rounds of 1, 2, 3, ... steps; the last loss is kept as the state.
  policy = intervals.IntervalPolicy(
    lambda: (jnp.int32(0), jnp.float32(-1.0)),
    lambda state, start, loss: (
      state[0] + 1,
      (state[0] + 1, state[1] if loss is None else loss),
    ),
    needs_loss=True,
  )
  optimizer = methods.local_sgd(optax.sgd(0.1), policy, axis="worker")
  w = jnp.zeros(2)
  state = jax.vmap(optimizer.init)(w)
  told = []
  for step in range(6):
    loss = jnp.array([step, 10.0 + step])
    _, state = jax.vmap(
      lambda g, s, w, x: optimizer.update(g, s, w, loss=x), axis_name="worker"
    )(w, state, w, loss)
    told.append(state.clock.interval_state[1][0].item())
  # Steps 0; 1 and 2; 3, 4 and 5.
  assert told == [5.0, 5.0, 6.5, 6.5, 6.5, 9.0]


def test_clock_tells_losses_to_policies_that_need_them():
  """A round that is cut short tells none, and its mean is over its steps."""
  for needs in (True, False):
    told = []

    def note(state, start, loss, told=told):
      told.append(loss)
      return jnp.int32(8), state

    policy = intervals.IntervalPolicy(lambda: (), note, needs_loss=needs)
    clock = _round.start_clock(policy)
    for loss in (1.0, 3.0):
      clock = clock.advance(loss)
    del told[:]
    if needs:
      assert clock.mean_loss() == 2.0
    clock.end(policy, jnp.float32(2.0))
    clock.cut_short(policy)
    assert told == [2.0 if needs else None, None]


def test_round_cut_short_takes_the_next_interval():
  """By a policy that counts how often it was asked; a round may be empty."""
  policy = intervals.IntervalPolicy(
    lambda: jnp.int32(0),
    lambda asked, start, loss: (10 * (asked + 1) + start, asked + 1),
  )
  found = []
  for clock in (start := _round.start_clock(policy), start.advance(None)):
    cut = clock.cut_short(policy)
    found.append(
      (cut.round, cut.interval, cut.next_interval, cut.interval_state)
    )
  # Rounds of 10 and 30 steps; the one after them begins at step 1 + 30.
  assert found == [(0, 10, 30, 2), (1, 30, 61, 3)]


ADAPTIVE = {
  "msdpu": intervals.msdpu(4, decay=0.0),
  "adacomm": intervals.adacomm(9, 1, form="capped"),
  "post_local": intervals.post_local(2, intervals.msdpu(4, decay=0.0)),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", ADAPTIVE)
def test_loss_changes_the_interval_two_rounds_later(name):
  # The interval of round r + 1 comes from losses up to round r - 1.
  steps = 60
  calm = np.ones(steps)
  lengths, _, rounds = train(ADAPTIVE[name], calm)
  before = np.concatenate([[0], rounds[:-1]])  # The round of each step.
  for r in (5, 6):
    shaken = calm.copy()
    shaken[before == r] = 0.01
    other, other_coming, other_rounds = train(ADAPTIVE[name], shaken)

    def length(lengths, rounds, which):
      return lengths[np.flatnonzero(rounds == which)[0]]

    for which in range(1, r + 2):
      assert length(other, other_rounds, which) == length(
        lengths, rounds, which
      )
    assert length(other, other_rounds, r + 2) == 1
    # It was known when round r + 1 began, a whole round before.
    assert length(other_coming, other_rounds, r + 1) == 1


@pytest.mark.smoke
@pytest.mark.parametrize("name", ADAPTIVE)
def test_next_interval_is_known_a_round_before(name):
  losses = np.random.default_rng(0).uniform(0.1, 2, (60, 4))
  lengths, coming, rounds = train(ADAPTIVE[name], losses, "worker")
  assert len(np.unique(lengths)) >= 2
  # The same on all workers, whose losses differ.
  for x in (lengths, coming, rounds):
    assert (x == x[:, :1]).all()
  lengths, coming, rounds = lengths[:, 0], coming[:, 0], rounds[:, 0]
  begins = np.flatnonzero(np.diff(rounds, prepend=0))
  assert lengths[begins[1:]].tolist() == coming[begins[:-1]].tolist()
  # A round has as many steps as its policy returned.
  assert np.diff(begins).tolist() == lengths[begins[:-1]].tolist()


REJECTED = {
  "schedule": (
    lambda: intervals.scheduled(3),
    "`schedule` must be a function of the local step, got 3",
  ),
  "total_steps": (
    lambda: intervals.ending_at(0, 2),
    "`total_steps` must be an int >= 1, got 0",
  ),
  "alpha": (
    lambda: intervals.qsr(0.1, 0.0, 2),
    r"`alpha` must be in \(0, inf\], got 0.0",
  ),
  "base_interval": (
    lambda: intervals.qsr(0.1, 0.1, 0),
    "`base_interval` must be an int >= 1, got 0",
  ),
  "growth's start": (
    lambda: intervals.growth(0.1, start=0.0),
    r"`start` must be in \(0, inf\], got 0.0",
  ),
  "qsr's max_interval": (
    lambda: intervals.qsr(0.1, 0.1, 4, max_interval=3),
    "`max_interval` must be an int >= 4, got 3",
  ),
  "initial_interval": (
    lambda: intervals.adacomm(0, 1),
    "`initial_interval` must be an int >= 1, got 0",
  ),
  "initial_interval above the highest": (
    lambda: intervals.msdpu(17),
    "`initial_interval` must be an int from 1 to 16, got 17",
  ),
  "adacomm's initial_interval above the highest": (
    lambda: intervals.adacomm(17, 1),
    "`initial_interval` must be an int from 1 to 16, got 17",
  ),
  "period_steps": (
    lambda: intervals.adacomm(1, 0),
    "`period_steps` must be an int >= 1, got 0",
  ),
  "form": (
    lambda: intervals.adacomm(1, 1, form="root"),
    "`form` must be 'halving' or 'capped', got 'root'",
  ),
  "decay": (
    lambda: intervals.msdpu(1, decay=1.0),
    "`decay` must be in .0, 1., got 1.0",
  ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", REJECTED)
def test_argument_out_of_range_is_refused(name):
  make, message = REJECTED[name]
  with pytest.raises(ValueError, match=message):
    make()


def policy(first=0, then=lambda state: (jnp.int32(2), state), **others):
  return intervals.IntervalPolicy(
    lambda: first, lambda state, step, loss: then(state), **others
  )


@pytest.mark.parametrize(
  ("argument", "make", "rule"),
  [
    ("interval.next", lambda: policy(then=lambda s: None), "steps, state"),
    ("interval.next", lambda: policy(then=lambda s: jnp.ones(2)), "steps, st"),
    ("interval.next", lambda: policy(then=lambda s: (None, s)), "int32 scalar"),
    ("interval.next", lambda: policy(then=lambda s: ("2", s)), "int32 scalar"),
    (
      "interval.next",
      lambda: policy(then=lambda s: (jnp.ones(2), s)),
      "int32 scalar as the steps, got float32[2]",
    ),
    ("interval.next", lambda: policy(then=lambda s: (2, s + 0.5)), "its leaf"),
    (
      "interval.next",
      lambda: policy(then=lambda s: (2, (s, s))),
      "its leaf is missing",
    ),
    ("interval.init()", lambda: policy(first="a"), "a tree of arrays"),
    ("interval.constant", lambda: policy(constant=2.5), "an int >= 1"),
    ("interval.constant", lambda: policy(constant=0), "an int >= 1"),
    (
      "interval.next",
      lambda: intervals.IntervalPolicy(lambda: (), lambda state: (2, state)),
      "a function of state, step, loss",
    ),
    ("schedule", lambda: intervals.scheduled(lambda: 1), "the local step"),
    ("schedule", lambda: intervals.scheduled(lambda t: "a"), "give a number"),
    (
      "schedule",
      lambda: intervals.scheduled(lambda t: (t, t)),
      "give a number",
    ),
    (
      "learning_rate",
      lambda: intervals.qsr(lambda t: jnp.ones(2), 1.0, 2),
      "give a number for each step",
    ),
    ("learning_rate", lambda: intervals.msdpu(2, lambda: 1.0), "the step"),
  ],
)
def test_policy_that_returns_something_else_raises(argument, make, rule):
  with _refusals.refused(argument, rule):
    transforms.local_steps(optax.sgd(0.1), make(), axis=None).init(jnp.ones(2))


def test_policy_may_return_any_number():
  for steps in (2, 2.5, np.int8(2), jnp.bfloat16(2)):
    own = policy(then=lambda state, steps=steps: (steps, state))
    found = transforms.local_steps(optax.sgd(0.1), own, axis=None)
    clock = found.init(jnp.ones(2)).sync.clock
    assert clock.interval == 2 and clock.interval.dtype == jnp.int32


def test_rate_that_is_known_at_run_time_alone_may_rise():
  """As under `optax.inject_hyperparams`; a constant never does."""

  @jax.jit
  def first(peak):
    rule = intervals.qsr(lambda step: peak * (1 + step), 0.4, 2)
    return rule.next((), jnp.array(0), None)[0]

  assert int(first(0.1)) == 16
  assert int(intervals.qsr(0.1, 0.4, 2).next((), jnp.array(0), None)[0]) == 16


@pytest.mark.parametrize(
  "wrap", [lambda x: intervals.ending_at(20, x), lambda x: x], ids=["end", "-"]
)
def test_wrapped_policy_still_asks_for_the_loss(wrap):
  assert wrap(intervals.adacomm(4, period_steps=2)).needs_loss
  assert not wrap(intervals.fixed(4)).needs_loss
