"""Local steps: by hand, against NumPy, and what they count."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import collectives, methods, transforms
from jdist.transforms import intervals
from tests.transforms import _chains
from tests.transforms._rounds import plain_apply, random_targets, train

NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
RATE = 0.1


def state_of(optimizer, w):
  return optimizer.init(jnp.asarray(w, jnp.float32))


@pytest.mark.smoke
def test_two_workers_average_their_parameters_after_two_steps():
  optimizer = methods.local_sgd(optax.sgd(0.5), 2, axis="worker")
  targets = np.array([[1.0, 3.0]] * 2, np.float32)
  params, states = train(optimizer, targets)
  # 0 -> 0.5 -> 0.75 and 0 -> 1.5 -> 2.25, whose mean is 1.5.
  assert params.tolist() == [[0.5, 1.5], [1.5, 1.5]]
  assert states.anchor.tolist() == [[0.0, 0.0], [1.5, 1.5]]
  assert states.clock.synchronized.tolist() == [[False] * 2, [True] * 2]
  assert states.clock.round.tolist() == [[0, 0], [1, 1]]
  assert states.clock.round_step.tolist() == [[1, 1], [0, 0]]
  assert states.clock.step.tolist() == [[1, 1], [2, 2]]


def test_two_workers_move_the_anchor_by_outer_nesterov():
  outer = optax.sgd(0.5, momentum=0.5, nesterov=True)
  optimizer = transforms.local_steps(
    optax.sgd(0.5), 1, axis="worker", rule=outer
  )
  targets = np.array([[2.0, 6.0], [2.25, 6.25]], np.float32)
  params, states = train(optimizer, targets)
  # Delta = 0 - mean(1, 3) = -2, m = -2; a = 0 - 0.5 (0.5 * -2 - 2) = 1.5.
  # Then 1.875 and 3.875: Delta = -1.375, m = -2.375, a = 1.5 + 0.5 * 2.5625.
  assert states.anchor.tolist() == [[1.5, 1.5], [2.78125, 2.78125]]
  np.testing.assert_array_equal(params, states.anchor)


def test_late_mean_is_applied_one_round_later():
  optimizer = transforms.local_steps(
    optax.sgd(0.5), 1, axis="worker", overlap=transforms.Delayed(carry=0.5)
  )
  targets = np.array([[2.0, 6.0], [2.0, 6.0]], np.float32)
  params, states = train(optimizer, targets)
  # Progress -1 and -3, of which the workers keep half; the anchor waits.
  assert params[0].tolist() == [0.5, 1.5]
  assert states.anchor[0].tolist() == [0.0, 0.0]
  assert states.sync.flight.held.message[0].tolist() == [-1.0, -3.0]
  # The mean -2 arrives; new progress -0.75 and -2.25.
  assert states.anchor[1].tolist() == [2.0, 2.0]
  assert states.sync.flight.held.message[1].tolist() == [-0.75, -2.25]
  assert params[1].tolist() == [2.375, 3.125]


def test_carry_none_keeps_own_share_of_pending_mean():
  # Two workers: half, as above.
  optimizer = methods.msdpu(
    optax.sgd(0.5),
    intervals.fixed(1),
    0.5,
    axis="worker",
    correction=0.0,
    overlap=transforms.Delayed(carry=None),
  )
  targets = np.array([[2.0, 6.0], [2.0, 6.0]], np.float32)
  params, _ = train(optimizer, targets)
  assert params.tolist() == [[0.5, 1.5], [2.375, 3.125]]
  # One worker knows all of the mean, so that nothing is late.
  optimizer = methods.msdpu(
    optax.sgd(0.5),
    intervals.fixed(1),
    0.5,
    axis=None,
    overlap=transforms.Delayed(carry=None),
  )
  w = jnp.array(0.0)
  updates, _ = optimizer.update(w - 2.0, optimizer.init(w), w)
  assert updates.item() == 1.0


def test_by_default_msdpu_is_synchronous_until_its_rounds_grow():
  def rate(t):
    return jnp.where(t < 6, 0.1, 0.02)  # (0.1 / 3 / 0.02)^2 = 2.8.

  sgd = optax.sgd(rate, momentum=0.9, nesterov=True)
  targets = random_targets(20)
  wanted, _ = train(methods.ssgd(sgd, axis="worker"), targets)
  params, states = train(methods.msdpu(sgd, 16, rate, axis="worker"), targets)
  np.testing.assert_allclose(params[:6], wanted[:6], 1e-5, 1e-6)
  # Round 5 begins at step 5, the first of two steps at step 6.
  rounds = states.clock.round[:, 0]
  assert rounds[:7].tolist() == [1, 2, 3, 4, 5, 6, 6]
  # Its mean comes after the first step of the next round, and so do all others.
  flying = states.sync.flight.in_flight[:, 0]
  assert flying.tolist() == [False] * 7 + [True, False] * 6 + [True]
  # The same, put together by hand.
  parts = methods.msdpu(
    sgd,
    intervals.post_local(6, intervals.fixed(2)),
    rate,
    axis="worker",
    overlap=transforms.Delayed(1, carry=1 / 4, after_step=6),
  )
  np.testing.assert_allclose(params, train(parts, targets)[0], 1e-5, 1e-6)


def reference(x, interval, late, carry, rate, mu, warmup):
  """SGD on (w - x)^2 / 2 in rounds; yields (w, anchor) after each."""
  (steps, n), a, m, pending, t = x.shape, 0.0, 0.0, None, 0
  w = np.zeros(n)
  while t < steps:
    begun, delayed = w.copy(), late and t >= warmup
    for _ in range(1 if t < warmup else interval):
      w, t = w - RATE * (w - x[t]), t + 1
    progress = begun - w
    sent = pending if delayed else progress
    if sent is not None:
      m = mu * m + sent.mean()
      a = a - rate * (mu * m + sent.mean())
    pending = progress if delayed else None
    w = a - carry * progress if delayed else np.full(n, a)
    yield t, w, a


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("outer", [None, NESTEROV])
@pytest.mark.parametrize("carry", [None, 0.0, 0.5, 1.0])
def test_rounds_match_formulas(carry, outer, warmup):
  late = carry is not None
  targets = random_targets(steps=3 + 5 * 3 if warmup else 18)
  optimizer = transforms.local_steps(
    optax.sgd(RATE),
    intervals.post_local(warmup, 3),
    axis="worker",
    overlap=transforms.Delayed(carry=carry, after_step=warmup)
    if late
    else None,
    rule=outer,
  )
  params, states = train(optimizer, targets)
  rate, mu = (1.0, 0.0) if outer is None else (0.7, 0.9)
  rounds = list(reference(targets, 3, late, carry, rate, mu, warmup))
  assert len(rounds) == states.clock.round[-1, 0] >= 6
  for t, w, a in rounds:
    np.testing.assert_allclose(states.anchor[t - 1], [a] * 4, 1e-5, 1e-6)
    np.testing.assert_allclose(params[t - 1], w, 1e-5, 1e-6)


def msdpu_reference(x, losses, h0, beta, rho, warmup, h_max, rate):
  """The formulas of the reconstruction; yields (w, anchor, H) a round."""
  w, a, pending, f0, f, t = np.zeros(x.shape[1]), 0.0, None, None, None, 0
  known = None  # The last round's loss, which travels with its progress.
  hs = [1 if warmup > r else h0 for r in range(2)]
  while t + hs[0] <= len(x):
    begin, begun, h = t, w.copy(), hs.pop(0)
    for _ in range(h):
      pull = beta / (h * rate(t)) * (w - a)
      w, t = w - rate(t) * (w - x[t] + pull), t + 1
    delta = begun - w
    arrived = pending if begin >= warmup else delta
    a = a if arrived is None else a - arrived.mean()
    w = a - rho * delta if begin >= warmup else np.full_like(w, a)
    pending = delta if begin >= warmup else None
    if begin >= warmup:
      if known is not None:
        f = known if f is None else 0.9 * f + 0.1 * known
        f0 = f0 or f
      known = losses[begin:t].mean()
    after = t + hs[0]
    grown = h0 * np.sqrt(rate(0) / rate(after) * (f / f0 if f else 1.0))
    h = 1 if after < warmup else h0 if f is None else np.ceil(grown)
    hs.append(int(np.clip(h, 1, h_max)))
    yield t, w, a, h


@pytest.mark.smoke
@pytest.mark.parametrize("warmup", [0, 4])
def test_msdpu_is_what_its_formulas_say(warmup):
  targets = random_targets(60)
  random = np.random.default_rng(2)
  fall = np.exp(-np.arange(60) / 10)[:, None] + 0.05
  losses = (fall * random.uniform(1, 2, (60, 4))).astype(np.float32)

  def rate(t):
    return 0.2 / (1 + 0.002 * jnp.float32(t))

  optimizer = methods.msdpu(
    optax.sgd(rate),
    intervals.msdpu(5, rate, max_interval=6),
    rate,
    axis="worker",
    correction=0.3,
    warmup_steps=warmup,
    overlap=transforms.Delayed(carry=0.8),
  )
  params, states = train(optimizer, targets, losses)
  rounds = list(msdpu_reference(targets, losses, 5, 0.3, 0.8, warmup, 6, rate))
  assert len({h for *_, h in rounds}) >= 3  # The interval did adapt.
  for number, (t, w, a, _) in enumerate(rounds):
    assert states.clock.round[t - 1].tolist() == [number + 1] * 4
    np.testing.assert_allclose(states.anchor[t - 1], [a] * 4, 1e-5, 1e-6)
    np.testing.assert_allclose(params[t - 1], w, 1e-5, 1e-6)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("carry", [0.3, 1.0])
def test_nothing_is_lost(late, carry):
  # All that went in as gradients is in the anchor or on its way to it.
  targets = random_targets(12)
  overlap = transforms.Delayed(carry=carry) if late else None
  optimizer = transforms.local_steps(
    optax.sgd(RATE), 3, axis="worker", overlap=overlap
  )
  params, states = train(optimizer, targets)
  before = np.concatenate([np.zeros((1, 4)), params[:-1]])
  went_in = RATE * (before - targets).sum(0)
  pending = np.asarray(
    states.sync.flight.held.message[-1] if late else np.zeros(4)
  )
  anchor = float(states.anchor[-1, 0])
  np.testing.assert_allclose(
    went_in.sum(), 4 * (0.0 - anchor) + pending.sum(), rtol=1e-5, atol=1e-6
  )


def test_nothing_is_lost_when_the_carry_changes():
  # What a round began with is not what the next one will keep.
  optimizer = optax.inject_hyperparams(_chains.late, static_args=("interval",))(
    optax.sgd(RATE),
    3,
    axis="worker",
    carry=lambda step: 1.0 / (1.0 + jnp.float32(step)),
  )
  targets = random_targets(12)
  params, states = train(optimizer, targets)
  before = np.concatenate([np.zeros((1, 4)), params[:-1]])
  went_in = RATE * (before - targets).sum(0)
  local = states.inner_state
  held = np.asarray(local.sync.flight.held.message[-1] - local.anchor[-1])
  np.testing.assert_allclose(went_in.sum(), held.sum(), rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("late", [False, True])
def test_a_round_ends_on_the_anchor_to_the_bit(dtype, late):
  targets = random_targets(9, 4, 257).astype(dtype)
  # A late mean without carry ends there too.
  overlap = transforms.Delayed(carry=0.0) if late else None
  optimizer = transforms.local_steps(
    optax.sgd(RATE), 3, axis="worker", overlap=overlap
  )
  params, states = train(optimizer, targets)
  rounded, others = train(optimizer, targets, apply=plain_apply)
  for t in (2, 5, 8):
    np.testing.assert_array_equal(params[t], states.anchor[t].astype(dtype))
    close = rounded[t].astype(jnp.float32) - others.anchor[t]
    assert 0 < np.abs(close).max() < (1e-6 if dtype == np.float32 else 0.02)


def test_inner_schedules_count_steps_and_outer_schedules_rounds():
  inner = optax.sgd(optax.exponential_decay(1.0, 1, 0.5))
  outer = optax.sgd(lambda round_: jnp.where(round_ == 0, 1.0, 10.0))
  optimizer = transforms.local_steps(inner, 2, axis=None, rule=outer)
  w = jnp.zeros(())
  state = optimizer.init(w)
  anchors = []
  for _ in range(4):
    updates, state = optimizer.update(jnp.ones(()), state, w)
    w = jdist.apply_updates(w, updates, state)
    anchors.append(state.anchor.item())
  # -(1 + 1/2) times 1, then -(1/4 + 1/8) times 10.
  assert anchors == [0.0, -1.5, -1.5, -5.25]


def test_accumulation_around_local_steps_counts_neither():
  # MultiSteps outside: a local step is `every_k_schedule` micro-steps.
  local = methods.local_sgd(optax.sgd(0.5), 2, axis="worker")
  optimizer = optax.MultiSteps(local, 2)
  targets = np.repeat(random_targets(8), 2, axis=0)
  with jax.numpy_dtype_promotion("standard"):  # MultiSteps scales by bools.
    params, states = train(optimizer, targets)
  wanted, reference = train(local, targets[::2])
  np.testing.assert_allclose(params[1::2], wanted, 1e-6)
  inner = states.inner_opt_state
  assert inner.clock.step[:, 0].tolist() == [t // 2 for t in range(1, 17)]
  np.testing.assert_array_equal(inner.clock.round[1::2], reference.clock.round)
  # The flag stays up until the next local step is complete.
  assert inner.clock.synchronized[:8, 0].tolist() == [True] + [False] * 2 + [
    True, True, False, False, True
  ]  # fmt: skip


def test_accumulation_inside_local_steps_counts_micro_steps():
  # The wrong way round: the interval counts micro-steps then.
  inner = optax.MultiSteps(optax.sgd(0.5), 2)
  optimizer = methods.local_sgd(
    inner.gradient_transformation(), 2, axis="worker"
  )
  with jax.numpy_dtype_promotion("standard"):
    _, states = train(optimizer, random_targets(4))
  assert states.clock.round[:, 0].tolist() == [0, 1, 1, 2]


def test_pull_adds_distance_from_anchor():
  # By hand: beta / (H rate) (w - a) with H = 2, besides a gradient of 1.
  inner = optax.chain(transforms.pull_to_anchor(0.5, 0.1), optax.sgd(1.0))
  optimizer = transforms.local_steps(inner, 2, axis=None)
  w, state = jnp.array(3.0), state_of(optimizer, 1.0)
  updates, state = optimizer.update(jnp.array(1.0), state, w)
  assert updates.item() == pytest.approx(-(1 + 0.5 / (2 * 0.1) * 2))


def test_pull_is_zero_where_rate_is_zero():
  pull = transforms.pull_to_anchor(0.5, optax.linear_schedule(1.0, 0.0, 1))
  w = jnp.array(3.0)
  state = pull.init(w)
  found = []
  for _ in range(2):
    updates, state = pull.update(
      jnp.array(1.0), state, w, anchor=jnp.array(1.0), interval_steps=4
    )
    found.append(updates.item())
  assert found == [1.25, 1.0]


def test_a_pull_takes_beta_of_the_drift_in_a_round():
  pull = transforms.pull_to_anchor(0.5, 0.1)
  inner = optax.chain(pull, optax.sgd(0.1))
  w, state = jnp.array(2.0), state_of(inner, 2.0)
  for _ in range(100):
    updates, state = inner.update(
      jnp.array(0.0), state, w, anchor=jnp.array(1.0), interval_steps=100
    )
    w = optax.apply_updates(w, updates)
  assert w.item() - 1.0 == pytest.approx(np.exp(-0.5), rel=2e-3)


def test_gradients_of_k_steps_ago_are_used():
  # Nothing happens before one has arrived: the schedule waits too.
  rate = optax.exponential_decay(1.0, 1, 0.5)
  optimizer = transforms.delay_gradients(
    methods.ssgd(optax.sgd(rate, momentum=0.5), axis="worker"), 2
  )
  params, states = train(optimizer, np.array([[1.0, 3.0]] * 4, np.float32))
  # Gradients -1 and -3 of step 0 arrive in step 2, those of step 1 in step 3.
  assert params[:, 0].tolist() == [0.0, 0.0, 2.0, 3.5]
  np.testing.assert_array_equal(params[:, 0], params[:, 1])
  assert states.inner[1][0].trace[:, 0].tolist() == [0.0, 0.0, -2.0, -3.0]


def test_no_delay_is_the_optimizer_itself():
  targets = random_targets()
  plain = methods.ssgd(optax.sgd(RATE, momentum=0.9), axis="worker")
  delayed = transforms.delay_gradients(plain, 0)
  np.testing.assert_array_equal(
    train(delayed, targets)[0], train(plain, targets)[0]
  )


def test_gradients_are_averaged():
  optimizer = transforms.average_gradients("worker")
  found = jax.vmap(
    lambda g: optimizer.update(g, optimizer.init(g))[0], axis_name="worker"
  )({"w": jnp.array([[1.0, 2.0], [3.0, 6.0]])})
  assert found["w"].tolist() == [[2.0, 4.0], [2.0, 4.0]]


def test_shared_parameters_are_refused():
  # Their gradients are already summed over the workers: in a `shard_map` of
  # one's own, which checks what varies. `Workers.jit` gives each its own ones.
  team = collectives.workers(8, substrate="shard_map")
  spec = jax.sharding.PartitionSpec("worker")
  for optimizer in (
    transforms.average_gradients("worker"),
    methods.local_sgd(optax.sgd(0.1), 2, axis="worker"),
  ):

    def step(x, optimizer=optimizer):
      w = jnp.ones(())
      gradient = jax.grad(lambda w, x=x: w * x[0])(w)
      return optimizer.update(gradient, optimizer.init(w), w)[0]

    with pytest.raises(ValueError, match="`updates` must be each worker's own"):
      spmd = jax.shard_map(step, mesh=team.mesh, in_specs=spec, out_specs=spec)
      jax.eval_shape(spmd, jnp.ones(8))


@pytest.mark.parametrize(
  "term", [transforms.proximal(2.0), transforms.pull_to_anchor(0.4, 0.1)]
)
@pytest.mark.parametrize("partitioned", [False, True])
def test_term_of_some_leaves_leaves_the_others_alone(term, partitioned):
  """A wrapper masks gradients and parameters, but not the anchor."""
  chosen = {"a": True, "b": False}
  inner = optax.chain(optax.masked(term, chosen), optax.sgd(0.1))
  if partitioned:
    labels = {"a": "pulled", "b": "plain"}
    parts = {"pulled": optax.chain(term, optax.sgd(0.1))}
    inner = optax.partition(parts | {"plain": optax.sgd(0.1)}, labels)
  optimizer = methods.local_sgd(inner, 2, axis=None)
  zero = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
  away = jax.tree.map(lambda x: x + 3.0, zero)
  # Both terms are 2 (w - a): beta / (H eta) is 0.4 / (2 * 0.1).
  updates, _ = optimizer.update(zero, optimizer.init(zero), away)
  np.testing.assert_allclose(updates["a"], [-0.6] * 2, rtol=1e-6)
  assert updates["b"].tolist() == [0.0, 0.0]
