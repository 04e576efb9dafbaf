"""Every sync rule with every overlap and compression: what all must keep."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import codecs, collectives, reducers, transforms
from tests.transforms.local.test_streaming import data, params

INTERVAL, NUM_STEPS, NUM_WORKERS = 3, 12, 4
# One step of the last round is done, and some of what was sent has arrived.
UNDER_WAY = 10
# Large enough for a codec: smaller leaves go with every bit.
SHAPES = {"a": (32, 25), "b": {"c": (1000,)}}
RATE = 0.1
INNER = optax.sgd(RATE, momentum=0.9)
INT4 = codecs.Quantize(4)
FEEDBACK = reducers.ErrorFeedback()
PARTS = transforms.Stream(max_bytes=4000)
LATE = transforms.Delayed

RULES = {
  "average": transforms.Average(),
  "outer step": transforms.OuterStep(
    optax.sgd(0.7, momentum=0.9, nesterov=True)
  ),
  "elastic": transforms.Elastic(0.8),
  "pulled anchor": transforms.PulledAnchor(0.6, 0.5),
  "control variates": transforms.ControlVariates(RATE, 0.9),
  "slow momentum": transforms.SlowMomentum(RATE, 0.9, 0.5),
}
every_rule = pytest.mark.parametrize("rule", RULES)
both_ways = pytest.mark.parametrize("few_bytes", [False, True], ids=str)


class Run:
  """Twelve steps of four workers, and what a drain makes of them.

  Attributes:
    steps: parameters and state after every step.
    drained: the same, drained under way and at the end.
  """

  def __init__(self, optimizer, by_host=False):
    team = collectives.workers(NUM_WORKERS, substrate="vmap")

    def step(w, state, target, *, control):
      gradient = jax.tree.map(jnp.subtract, w, target)
      updates, state = optimizer.update(gradient, state, w, control=control)
      return jdist.apply_updates(w, updates, state), state

    @functools.cache
    def program(control):
      return team.jit(functools.partial(step, control=control))

    drain = team.jit(lambda w, state: transforms.drain(optimizer, state, w))
    now = team.replicate(params(SHAPES))
    now = now, team.jit(optimizer.init)(now)
    self.steps, self.drained, self.controls = [], [], set()
    for target in data(NUM_STEPS, NUM_WORKERS, SHAPES)[0]:
      control = said(now[1]) if by_host else transforms.Control()
      self.controls.add(control)
      now = program(control)(*now, team.place(target))
      self.steps.append(team.gather(now))
      if len(self.steps) in (UNDER_WAY, NUM_STEPS):
        drained = drain(*now)
        self.drained.append(team.gather(drained))
        same(drained[0], drain(*drained)[0])


def said(state):
  """What a host says that sends in two steps, as a trainer does."""
  window, offset, interval = transforms.rounds_ahead(state)[0, 0].tolist()
  return transforms.Control(
    round_ends=offset + 1 == interval,
    arrives=offset + 1 == window,
    stream_steps=2 if offset < 2 <= window else None,
  )


def few_or_all(few_bytes, parts=None):
  """A compression, of a whole message or of parts, or none."""
  if not few_bytes:
    return None
  reducer = reducers.compressed(INT4)
  if parts is not None:
    reducer = reducers.Chunked(reducer, PARTS.max_bytes, multiple=parts)
  return reducers.Compression(reducer, FEEDBACK)


def build(rule, overlap, compression):
  return transforms.local_steps(
    INNER, INTERVAL, axis="worker", rule=RULES[rule], overlap=overlap,
    compression=compression,
  )  # fmt: skip


def same(one, other):
  jax.tree.map(np.testing.assert_array_equal, one, other)


def close(one, other):
  """Within roundings of each other, of what is largest in a leaf.

  A host's rounds are other programs than the device's, and LLVM merges a
  product and a sum in one of them and not in the other.
  """
  for x, y in zip(*map(jax.tree.leaves, (one, other)), strict=True):
    if np.issubdtype(x.dtype, np.floating):
      np.testing.assert_allclose(
        x, y, rtol=0, atol=1e-5 * (1e-9 + abs(y).max())
      )
    else:
      np.testing.assert_array_equal(x, y)


def on_all(tree):
  """Each worker's tree were it that of the first."""
  return jax.tree.map(lambda x: np.stack(NUM_WORKERS * [x[0]]), tree)


def check(run):
  """What holds for every rule, overlap and compression."""
  for w, state in run.steps:
    same(state.anchor, on_all(state.anchor))
    for x in jax.tree.leaves((w, state.anchor)):
      assert np.isfinite(x).all()
  w, state = run.steps[-1]
  assert state.clock.round.tolist() == [NUM_STEPS // INTERVAL] * NUM_WORKERS
  for anchor, start in zip(
    *map(jax.tree.leaves, (state.anchor, params(SHAPES))), strict=True
  ):
    assert np.median(np.abs(anchor - start)) > 0.05
  if state.sync.compression != ():  # By few bytes indeed.
    for left in jax.tree.leaves(state.sync.compression.feedback.residual):
      assert np.median(np.abs(left)) > 1e-4
  for w, state in run.drained:
    same(w, on_all(state.anchor))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(w))
    flight = state.sync.flight
    assert flight == () or not flight.in_flight.any()


@every_rule
@both_ways
def test_a_mean_at_the_end_of_its_round(rule, few_bytes):
  check(Run(build(rule, None, few_or_all(few_bytes))))


@every_rule
@both_ways
@pytest.mark.parametrize("steps", [None, 2])
def test_a_late_mean_streamed_or_not(rule, few_bytes, steps):
  by_host = steps is not None
  simple = Run(
    build(rule, LATE(steps), few_or_all(few_bytes, steps or INTERVAL))
  )
  streamed = Run(
    build(rule, LATE(steps, stream=PARTS), few_or_all(few_bytes)), by_host
  )
  assert len(streamed.controls) == (4 if by_host else 1)
  check(simple)
  check(streamed)
  agree = close if by_host else same
  for (w, state), (other_w, other) in zip(
    simple.steps, streamed.steps, strict=True
  ):
    agree(w, other_w)
    for name in ("clock", "anchor", "memory", "kept"):
      agree(getattr(state.sync, name), getattr(other.sync, name))
    if state.clock.synchronized[0]:
      agree(state.sync.compression, other.sync.compression)
  # What has been sent of a message is not brought in twice.
  held = streamed.steps[UNDER_WAY - 1][1].sync.flight.held
  assert all((x > 0).all() for x in held.position.values())
  for (w, _), (other_w, _) in zip(
    simple.drained, streamed.drained, strict=True
  ):
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-5), w, other_w
    )


def refuse(rule, overlap, compression=None, control=None):
  optimizer = transforms.local_steps(
    INNER, INTERVAL, axis=None, rule=rule, overlap=overlap,
    compression=compression,
  )  # fmt: skip
  if control is not None:
    w = params(SHAPES)
    optimizer.update(w, optimizer.init(w), w, control=control)


MOMENTA = transforms.SlowMomentum(RATE, buffers="average")
REFUSED = {
  "momenta that are averaged, a round late": (
    lambda: refuse(MOMENTA, LATE()),
    "`overlap` must be None for `SlowMomentum`.* `buffers='average'`",
  ),
  "momenta that are averaged, streamed": (
    lambda: refuse(MOMENTA, LATE(2, stream=PARTS)),
    "`overlap` must be None for `SlowMomentum`.* `buffers='average'`",
  ),
  "momenta that fragments share": (
    lambda: transforms.fragment_steps(
      INNER,
      4,
      2,
      axis=None,
      rule=transforms.SlowMomentum(RATE, buffers="reset"),
    ),
    "`buffers` must be 'maintain' with fragments.* got 'reset'",
  ),
  "springs after a warm-up": (
    lambda: refuse(RULES["elastic"], LATE(after_step=4)),
    "`after_step` must be 0 for `Elastic`.* beside .* got 4",
  ),
  "a pull after a warm-up": (
    lambda: refuse(RULES["pulled anchor"], LATE(2, after_step=4)),
    "`after_step` must be 0 for `PulledAnchor`.* beside .* got 4",
  ),
  "variates after a warm-up, late by steps": (
    lambda: refuse(RULES["control variates"], LATE(2, after_step=4)),
    "`after_step` must be 0 for `ControlVariates` with `steps`, got 4",
  ),
  "a stream of nothing late": (
    lambda: refuse(None, LATE(0, mix=0.5, stream=PARTS)),
    "`stream` splits what is late, and `steps` must be at least 1",
  ),
  "a stream of low ranks": (
    lambda: refuse(
      None,
      LATE(stream=PARTS),
      reducers.Compression(reducers.PowerSGD(2), FEEDBACK),
    ),
    "`reducer` must be one for shards and chunks",
  ),
  "parts of nothing that is streamed": (
    lambda: refuse(None, LATE(), control=transforms.Control(stream_steps=2)),
    "`stream_steps` must be left out .* got 2",
  ),
  "parts of a mean at the round's end": (
    lambda: refuse(None, None, control=transforms.Control(stream_steps=2)),
    "`stream_steps` must be left out .* got 2",
  ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused(name):
  call, message = REFUSED[name]
  with pytest.raises(ValueError, match=f"(?s){message}"):
    call()
