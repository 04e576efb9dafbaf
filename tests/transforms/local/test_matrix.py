"""Every sync rule with every overlap and compression: what all must keep."""

import functools
import itertools

import chex
import jax
import numpy as np
import optax
import pytest

import jdist
from jdist import codecs, collectives, reducers, transforms
from tests import _thinned
from tests.transforms.local.test_streaming import data, params

INTERVAL, NUM_STEPS, NUM_WORKERS = 4, 12, 4
# One step of the last round is done, and some of what was sent has arrived.
UNDER_WAY = 9
# Large enough for a codec: smaller leaves are sent exactly.
SHAPES = {"a": (32, 25), "b": {"c": (1000,)}}
# Small integers, and rates that are powers of two: nothing is rounded, and two
# forms of a round have the same bits whatever their programs are.  Of other
# numbers the last place differs, where LLVM merges a product and a sum in one
# program and not in the other.
RATE = 0.5
INNER = optax.sgd(RATE)
FEEDBACK = reducers.ErrorFeedback()
PARTS = transforms.Stream(max_bytes=4000)
LATE = transforms.Delayed

RULES = {
  "average": None,
  "outer step": transforms.OuterStep(
    optax.sgd(0.5, momentum=0.5, nesterov=True)
  ),
  "elastic": transforms.Elastic(0.5),
  "pulled anchor": transforms.PulledAnchor(0.5, 0.5),
  "control variates": transforms.ControlVariates(RATE, 0.5),
  "slow momentum": transforms.SlowMomentum(RATE, 0.5, 0.5),
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
      updates, state = optimizer.update(target, state, w, control=control)
      return jdist.apply_updates(w, updates, state), state

    @functools.cache
    def program(control):
      return team.jit(functools.partial(step, control=control))

    drain = team.jit(lambda w, state: transforms.drain(optimizer, state, w))
    now = team.replicate(integers(params(SHAPES)))
    now = now, team.jit(optimizer.init)(now)
    self.steps, self.drained, self.controls = [], [], set()
    for target in integers(data(NUM_STEPS, NUM_WORKERS, SHAPES)[0]):
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


def integers(tree):
  """Small integers of random numbers."""
  return jax.tree.map(lambda x: np.round(2 * x), tree)


def few_or_all(few_bytes, parts=None, bits=4):
  """A compression, of a whole message or of parts, or none."""
  if not few_bytes:
    return None
  reducer = reducers.compressed(codecs.Quantize(bits))
  if parts is not None:
    reducer = reducers.Chunked(reducer, PARTS.max_bytes, multiple=parts)
  return reducers.Compression(reducer, FEEDBACK)


def build(rule, overlap, compression):
  return transforms.local_steps(
    INNER, INTERVAL, axis="worker", rule=RULES[rule], overlap=overlap,
    compression=compression,
  )  # fmt: skip


same = chex.assert_trees_all_equal


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
    *map(jax.tree.leaves, (state.anchor, integers(params(SHAPES)))), strict=True
  ):
    assert np.mean(np.abs(anchor - start)) > 0.05
  if state.sync.compression != ():  # By few bytes indeed.
    for left in jax.tree.leaves(state.sync.compression.feedback.residual):
      assert np.median(np.abs(left)) > 1e-4
  for w, state in run.drained:
    same(w, on_all(state.anchor))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(w))
    flight = state.sync.flight
    assert flight == () or not flight.in_flight.any()


# In few bytes a rule that is late in few bytes below is for the slow set, but
# for that of two messages.
@pytest.mark.parametrize(
  ("rule", "few_bytes"),
  _thinned.some(
    list(itertools.product(RULES, (False, True))),
    [
      *((rule, False) for rule in RULES),
      *((x, True) for x in ("elastic", "control variates", "slow momentum")),
    ],
  ),
)
def test_a_mean_at_the_end_of_its_round(rule, few_bytes):
  check(Run(build(rule, None, few_or_all(few_bytes))))


# Two programs or more each.  Here every rule is late, half in few bytes, and
# `_thinned` has a third of these in the default set.  A host's programs are
# the most to compile, and are tried with a rule that moves the anchor, one off
# it and one of two messages (these compile the longest in few bytes).
OFTEN = [
  ("average", True, None),
  ("outer step", True, None),
  ("elastic", False, None),
  ("pulled anchor", True, None),
  ("control variates", False, None),
  ("slow momentum", False, None),
  ("outer step", True, 2),
  ("elastic", False, 2),
  ("control variates", False, 2),
]


@pytest.mark.parametrize(
  ("rule", "few_bytes", "steps"),
  _thinned.some([*itertools.product(RULES, (False, True), (None, 2))], OFTEN),
)
def test_streamed_late_mean_equals_late_mean(rule, few_bytes, steps):
  by_host = steps is not None
  # A code of two bits is -1, 0 or 1, and no product with it is rounded.  With
  # four bits a processor may fuse products and sums in one of the programs.
  whole = few_or_all(few_bytes, steps or INTERVAL, 2)
  simple = Run(build(rule, LATE(steps), whole))
  streamed = Run(
    build(rule, LATE(steps, stream=PARTS), few_or_all(few_bytes, None, 2)),
    by_host,
  )
  assert len(streamed.controls) == (4 if by_host else 1)
  check(simple)
  check(streamed)
  for (w, state), (other_w, other) in zip(
    simple.steps, streamed.steps, strict=True
  ):
    same(w, other_w)
    for name in ("clock", "anchor", "memory", "kept"):
      same(getattr(state.sync, name), getattr(other.sync, name))
    if state.clock.synchronized[0]:
      same(state.sync.compression, other.sync.compression)
  # What has been sent of a message is not brought in twice.
  held = streamed.steps[UNDER_WAY - 1][1].sync.flight.held
  assert all((x > 0).all() for x in held.position)
  for (w, _), (other_w, _) in zip(
    simple.drained, streamed.drained, strict=True
  ):
    if few_bytes and not by_host:
      chex.assert_trees_all_close(w, other_w, rtol=1e-5, atol=1e-5)
    else:
      same(w, other_w)


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
    "`after_step` must be 0 for `Elastic`.* from the anchor .* got 4",
  ),
  "a pull after a warm-up": (
    lambda: refuse(RULES["pulled anchor"], LATE(2, after_step=4)),
    "`after_step` must be 0 for `PulledAnchor`.* from the anchor .* got 4",
  ),
  "variates after a warm-up, late by steps": (
    lambda: refuse(RULES["control variates"], LATE(2, after_step=4)),
    "`after_step` must be 0 for `ControlVariates` with `steps`, got 4",
  ),
  "a stream of nothing late": (
    lambda: refuse(None, LATE(0, mix=0.5, stream=PARTS)),
    "`stream` splits a late message, and `steps` must be at least 1",
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
def test_incompatible_arguments_raise(name):
  call, message = REFUSED[name]
  with pytest.raises(ValueError, match=f"(?s){message}"):
    call()
