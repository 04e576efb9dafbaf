"""Sub-tensors through a reducer: the simple form's bits, sent in parts."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import codecs, collectives, profiling, reducers, transforms
from jdist.transforms import intervals
from tests import _thinned
from tests.transforms import _reducers
from tests.transforms.local.test_streaming import (
  data,
  holding,
  Host,
  largest,
  params,
)

INT4 = reducers.compressed(codecs.Quantize(4, 4))
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
FEEDBACK = reducers.ErrorFeedback()
# 252 entries: 8 parts of 32, in which each of 4 workers owns two blocks.
SHAPES = {"a": (13, 17), "b": {"c": (30,), "d": ()}}


def build(
  axis, reducer, interval=4, *, streamed=True, multiple=8, carry=1.0,
  feedback=None, seed=None, inner=None, rule=None, after_step=0,
):  # fmt: skip
  parts = reducers.Chunked(reducer, max_bytes=128, multiple=multiple)
  return transforms.local_steps(
    optax.sgd(0.1, momentum=0.9) if inner is None else inner,
    interval,
    axis=axis,
    rule=rule,
    overlap=transforms.Delayed(
      carry=carry,
      after_step=after_step,
      stream=transforms.Stream() if streamed else None,
    ),
    compression=reducers.Compression(parts, feedback, seed=seed),
  )


CASES = {
  "int4": {"reducer": INT4, "feedback": FEEDBACK, "rule": NESTEROV},
  "stochastic int8, drawn anew": {
    "reducer": reducers.compressed(
      codecs.Quantize(8, 4, rounding="stochastic")
    ),
    "seed": 3,
    "carry": 0.5,
  },
  "top-k, DGC": {
    "reducer": reducers.compressed(codecs.TopK(0.4)),
    "feedback": reducers.MomentumCorrection(0.5),
    "rule": optax.sgd(1.0),
    "interval": intervals.post_local(5, intervals.msdpu(8, max_interval=8)),
    "after_step": 5,
  },
  "sign, EF21": {
    "reducer": reducers.compressed(codecs.Sign(block=8)),
    "feedback": reducers.EF21(),
    "interval": intervals.msdpu(8, max_interval=8),
    "carry": None,
  },
  "cast": {"reducer": reducers.compressed(codecs.Cast("bfloat16"))},
}
QUICK = ("top-k, DGC",)


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in CASES
  ],
)
@pytest.mark.slow
def test_streamed_mean_equals_late_mean_to_the_bit(name):
  team = collectives.workers(4, substrate="shard_map")
  streamed = Host(build(team.axis, **CASES[name]), team, SHAPES)
  simple = Host(build(team.axis, streamed=False, **CASES[name]), team, SHAPES)
  num_steps = 84
  with jax.numpy_dtype_promotion("standard"):
    pairs = zip(
      simple.run(*data(num_steps, 4, SHAPES), lambda place: None),
      streamed.run(*data(num_steps, 4, SHAPES), largest),
      strict=True,
    )
    for (w, state), (same_w, same) in pairs:
      chex.assert_trees_all_equal(w, same_w)
      chex.assert_trees_all_equal(state.anchor, same.anchor)
      if state.clock.synchronized[0]:
        chex.assert_trees_all_equal(
          state.sync.compression, same.sync.compression
        )
  adaptive = "interval" in CASES[name]  # Of up to 8 steps.
  assert state.sync.compression.step[0] >= (8 if adaptive else 20)
  jax.tree.map(
    lambda a: np.testing.assert_array_equal(a, np.stack(4 * [a[0]])),
    state.anchor,
  )
  assert set(streamed.sent_in) - {None}


def hand_over(place):
  """A host that errs: too slow, too fast, not at all, and changing."""
  del place
  hand_over.turn += 1
  return (8, 8, None, 4, 8)[hand_over.turn % 5]


@pytest.mark.parametrize(
  "choose", _thinned.some([hand_over, largest], [hand_over])
)
def test_nothing_is_lost(choose):
  team = collectives.workers(4, substrate="vmap")
  hand_over.turn = 0
  optimizer = build(
    team.axis, INT4, 3 if choose is hand_over else 4, feedback=FEEDBACK,
    inner=optax.sgd(0.1), carry=1.0,
  )  # fmt: skip
  host = Host(optimizer, team, SHAPES)
  targets, losses = data(45, 4, SHAPES)
  went_in = jax.tree.map(np.zeros_like, targets[0])
  w = team.gather(host.w)
  for target, now in zip(
    targets, host.run(targets, losses, choose), strict=True
  ):
    went_in = jax.tree.map(
      lambda g, x, t: g + np.float32(0.1) * (x - t), went_in, w, target
    )
    w, state = now
    position = int(state.sync.flight.held.position[0][0])
    if state.clock.step[0] > 30 and 0 < position < 8:
      break  # In the middle of a round, with some of its parts sent.
  assert 0 < position < 8
  # Drained, the anchor has moved by the mean of all that went in: what was
  # sent, what the workers hold back and what the owners do.
  drain = team.jit(
    lambda w, state: transforms.drain(optimizer, state, w, residuals=True)
  )
  drained, after = drain(host.w, host.state)
  jax.tree.map(
    lambda a, start, g: np.testing.assert_allclose(
      a[0], start - g.mean(0), rtol=1e-4, atol=2e-5
    ),
    team.gather(drained),
    params(SHAPES),
    went_in,
  )
  assert state.clock.round[0] >= 5
  held = jax.tree.leaves(state.sync.compression.feedback.residual)
  assert max(np.abs(x).max() for x in held) > 0.01
  for x in jax.tree.leaves(
    (after.sync.compression.reducer, after.sync.compression.feedback)
  ):
    assert not np.asarray(x).any()


@pytest.mark.parametrize(
  "reducer", [INT4, reducers.compressed(codecs.TopK(0.4))]
)
def test_no_collective_waits_for_the_step_or_a_conditional(reducer):
  team = collectives.workers(4, substrate="shard_map")
  optimizer = build(team.axis, reducer, feedback=FEEDBACK)
  host = Host(optimizer, team, SHAPES)
  target, losses = (x[0] for x in data(1, 4, SHAPES))
  found = {}
  for steps in ("fixed", None):
    program = host.program(steps).lower(
      host.w, host.state, *team.place((target, losses))
    )
    found[steps] = profiling.read_collectives(program.compile())
  assert all(c.conditional for c in found[None])
  assert not any(c.conditional for c in found["fixed"])
  # Eight parts of 32 entries in four steps, each as the codec counts it.
  bits = reducer.num_bits(jax.ShapeDtypeStruct((32,), "float32"), 4)
  assert sum(c.wire_bytes for c in found["fixed"]) * 8 == 2 * bits.sent
  parts = reducers.Chunked(reducer, max_bytes=128, multiple=8)
  assert parts.num_bits(params(SHAPES), 4).sent == 8 * bits.sent


@pytest.mark.smoke
def test_received_means_depend_on_the_state_only():
  optimizer = build(None, INT4, feedback=FEEDBACK)
  w = jax.tree.map(jnp.asarray, params(SHAPES))
  state = optimizer.init(w)

  @jax.jit
  def arrived(gradient, state):
    _, state = optimizer.update(gradient, state, w)
    return state.sync.flight.held.arrived["float32"]

  none, some = jax.tree.map(jnp.zeros_like, w), jax.tree.map(jnp.ones_like, w)
  sent = jax.tree.map(jnp.ones_like, state.sync.flight.held.sent)
  changed = holding(state, state.sync.flight.held._replace(sent=sent))
  np.testing.assert_array_equal(arrived(none, state), arrived(some, state))
  assert arrived(none, changed).sum() == 64  # Two parts of 32.


def test_first_late_round_changes_no_state():
  """A reducer that sends something of nothing: it is not applied."""
  team = collectives.workers(2, substrate="vmap")
  optimizer = build(team.axis, _reducers.Owned(0.25), feedback=reducers.EF21())
  host = Host(optimizer, team, SHAPES)
  states = [state for _, state in host.run(*data(8, 2, SHAPES), largest)]
  for x in jax.tree.leaves(states[3].sync.compression):
    assert not x.any()
  assert states[7].sync.compression.step.tolist() == [1, 1]


def test_exact_chunks_equal_plain_streaming():
  team = collectives.workers(4, substrate="vmap")
  plain = transforms.local_steps(
    optax.sgd(0.1),
    4,
    axis=team.axis,
    overlap=transforms.Delayed(stream=transforms.Stream(128)),
  )
  same = build(team.axis, reducers.Exact(), inner=optax.sgd(0.1))
  runs = [
    list(
      Host(optimizer, team, SHAPES).run(*data(20, 4, SHAPES), lambda place: 4)
    )
    for optimizer in (plain, same)
  ]
  for (w, state), (same_w, other) in zip(*runs, strict=True):
    chex.assert_trees_all_equal(w, same_w)
    chex.assert_trees_all_equal(state.anchor, other.anchor)


def test_the_stream_cuts_for_a_reducer():
  optimizer = transforms.local_steps(
    optax.sgd(0.1),
    3,
    axis=None,
    compression=reducers.Compression(INT4),
    overlap=transforms.Delayed(stream=transforms.Stream(max_bytes=128)),
  )
  state = optimizer.init(params(SHAPES))
  assert state.sync.flight.held.sent["float32"].shape == (9, 28)
  told = transforms.sharing(state).state
  assert told.sync.flight.held.arrived == {"float32": True}
  assert told.sync.flight.held.sent == {"float32": False}


def update(reducer, steps):
  optimizer = build(None, reducer)
  w = jax.tree.map(jnp.asarray, params(SHAPES))
  return optimizer.update(
    w, optimizer.init(w), w, control=transforms.Control(stream_steps=steps)
  )


REJECTED = {
  "low rank": (
    lambda: build(None, reducers.PowerSGD(2)),
    "`reducer` must be one for .*chunks .* of a vector it has no directions",
  ),
  "by leaf": (
    lambda: build(None, reducers.PerLeaf((reducers.Rule(INT4, min_ndim=2),))),
    "`reducer` must be one for chunks(.|\n)* its rules go by",
  ),
  "scheduled": (
    lambda: build(None, reducers.Scheduled(((None, INT4),))),
    "`reducer` must be one for chunks .* branches of a conditional",
  ),
  "nested": (
    lambda: build(None, reducers.Chunked(INT4)),
    "`reducer` must be one for chunks .* it splits the tree itself",
  ),
  "specs": (
    lambda: transforms.local_steps(
      optax.sgd(0.1),
      4,
      axis=None,
      compression=reducers.Compression(INT4),
      overlap=transforms.Delayed(
        stream=transforms.Stream(specs=jax.sharding.PartitionSpec())
      ),
    ),
    "`specs` must be None where a compressed message is streamed",
  ),
  "steps": (
    lambda: update(INT4, 3),
    "`stream_steps` must divide the number of sub-tensors.* got 3 for 8",
  ),
  "max_bytes": (
    lambda: reducers.Chunked(INT4, max_bytes=7),
    "`max_bytes` must be an int >= 8, got 7",
  ),
  "multiple": (
    lambda: reducers.Chunked(INT4, multiple=0),
    "`multiple` must be an int >= 1, got 0",
  ),
  "reducer": (
    lambda: reducers.Chunked(codecs.Quantize(4)),
    "`reducer` must be a `Reducer`",
  ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_invalid_arguments_raise(name):
  call, message = REJECTED[name]
  with pytest.raises(ValueError, match=message):
    call()


@pytest.mark.parametrize(
  ("codec", "same"),
  [
    (None, True),
    (codecs.Cast("bfloat16"), True),
    (codecs.Quantize(4), False),
    (codecs.TopK(0.1), False),
  ],
)
def test_stream_encodes_its_parts_in_place_of_leaves(codec, same):
  """docs/methods.md and `--help` say where a stream changes the result."""
  team = collectives.workers(2, substrate="vmap")
  rng = np.random.default_rng(0)
  shapes = {"a": (2, 33, 20), "b": (2, 17), "c": (2, 20, 45)}
  targets = {k: rng.normal(size=s).astype("f4") for k, s in shapes.items()}

  def trained(stream):
    optimizer = transforms.local_steps(
      optax.sgd(0.1),
      4,
      axis=team.axis,
      overlap=transforms.Delayed(stream=stream),
      compression=codec and reducers.Compression(reducers.compressed(codec)),
    )

    def step(params, state, targets):
      grads = jax.tree.map(jnp.subtract, params, targets)
      updates, state = optimizer.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    run, params = team.jit(step), jax.tree.map(np.zeros_like, targets)
    params = team.place(params)
    state = team.jit(optimizer.init)(params)
    for _ in range(12):
      params, state = run(params, state, team.place(targets))
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(state.anchor)])

  simple, streamed = trained(None), trained(transforms.Stream())
  assert np.array_equal(simple, streamed) == same


@pytest.mark.parametrize("steps", [None, 4])
def test_chunk_has_its_own_random_numbers_however_it_is_sent(steps):
  """In parts, or all at the end of the round: rounded as in one message."""
  team = collectives.workers(2, substrate="vmap")
  codec = codecs.Quantize(2, 4, rounding="stochastic")
  options = {"inner": optax.sgd(0.1), "seed": 3}
  runs = [
    Host(
      build(
        team.axis, reducers.compressed(codec), streamed=streamed, **options
      ),
      team,
      SHAPES,
    )
    for streamed in (True, False)
  ]
  for (_, state), (_, same) in zip(
    runs[0].run(*data(9, 2, SHAPES), lambda place: steps),
    runs[1].run(*data(9, 2, SHAPES), lambda place: None),
    strict=True,
  ):
    chex.assert_trees_all_equal(state.anchor, same.anchor)
  assert state.clock.round[0] == 2
