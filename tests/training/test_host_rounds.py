"""Rounds that the host ends, in place of a conditional on the device."""

import functools
import math
import re

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
  training,
  transforms,
)
from jdist.training.loop import _programs
from jdist.transforms import intervals
from tests import _refusals
from tests.training import _tiny

NUM_STEPS = 29
# Of the adaptive interval's messages; not all intervals are among them.
SENT_IN = (1, 2, 4)
# Nine programs, each compiled: not in the default set.
_MANY = "streamed MSDPU, grown"


def chains(axis):
  grown = intervals.scheduled(lambda step: 1 + (step % 5))
  sgd = optax.sgd(0.05, momentum=0.9)
  int4 = reducers.compressed(codecs.Quantize(4, 4))
  parts = transforms.Stream(max_bytes=16)
  return {
    "local SGD": methods.local_sgd(sgd, 4, axis=axis),
    "DiLoCo, grown, int4": methods.diloco(
      sgd,
      grown,
      axis=axis,
      compression=reducers.Compression(int4, reducers.ErrorFeedback()),
    ),
    "MSDPU, adaptive": methods.msdpu(
      sgd,
      intervals.msdpu(4, 0.05),
      0.05,
      axis=axis,
      warmup_steps=3,
      overlap=transforms.Delayed(carry=None),
    ),
    "streamed": transforms.local_steps(
      sgd, 4, axis=axis, overlap=transforms.Delayed(stream=parts)
    ),
    "streamed, int4": transforms.local_steps(
      sgd,
      4,
      axis=axis,
      compression=reducers.Compression(int4, reducers.ErrorFeedback()),
      overlap=transforms.Delayed(stream=parts),
    ),
    "streamed MSDPU, grown": methods.msdpu(
      sgd,
      grown,
      0.05,
      axis=axis,
      warmup_steps=3,
      overlap=transforms.Delayed(carry=None, stream=parts),
    ),
  }


def growing(axis):
  """MSDPU whose delay begins with the first round of two steps."""

  def falling(step):
    return 0.05 * jnp.maximum(1.0 - jnp.float32(step) / 30, 0.02)

  sgd = optax.sgd(falling, momentum=0.9)
  parts = transforms.Stream(max_bytes=16)
  late = transforms.Delayed(carry=None, after_step=None, stream=parts)
  return {
    "growing": methods.msdpu(sgd, 4, falling, axis=axis),
    "growing, streamed": methods.msdpu(
      sgd, 4, falling, axis=axis, overlap=late
    ),
  }


def params():
  """In float32: in bfloat16 XLA rounds where a program's fusions end."""
  return jax.tree.map(lambda x: np.asarray(x, np.float32), _tiny.params())


@functools.cache
def trained(name, host):
  """A trainer, its chain and what it has traced: compiled once for all runs."""
  team, traces = _tiny.team("vmap"), []
  chain = (chains(team.axis) | growing(team.axis))[name]
  plain = training.make_step(_tiny.loss_fn, chain, axis=team.axis)

  def step(state, batch, control=_programs.DEVICE):
    traces.append((control.stream_steps, control.round_ends))
    return plain(state, batch, control)

  steps = SENT_IN if name in (_MANY, "growing, streamed") else ()
  trainer = training.Trainer(team, step, stream_steps=steps, host_rounds=host)
  return trainer, chain, traces


def fit(name, *, host, num_steps=NUM_STEPS, **options):
  trainer, chain, _ = trained(name, host)
  team = _tiny.team("vmap")
  state = training.init_state(team, chain, params())
  state, records = trainer.fit(state, _tiny.batches(team), num_steps, **options)
  return state, records[-1]


@functools.cache
def whole(name, host):
  """An undisturbed run, and the programs that it traced."""
  return *fit(name, host=host), tuple(trained(name, host)[2])


def check_alike(state, wanted):
  """Other programs: the last place of a float may differ, and nothing else."""

  def exact(tree):
    found = jax.tree.leaves(tree)
    return [x for x in found if not jnp.issubdtype(x.dtype, jnp.floating)]

  chex.assert_trees_all_equal(exact(state), exact(wanted))
  chex.assert_trees_all_close(state, wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=pytest.mark.slow) if name == _MANY else name
    for name in chains(None)
  ],
)
def test_host_ends_rounds_where_the_device_would(name):
  wanted, told, _ = whole(name, host=False)
  state, record, traces = whole(name, host=True)
  check_alike(state, wanted)
  assert record.rounds == told.rounds > 3
  assert record.sent_bytes == told.sent_bytes
  # Each program is traced to run and to count, and never again.
  assert all(traces.count(trace) == 2 for trace in traces)
  sent_in = {None, *SENT_IN} if name == _MANY else {"fixed"}
  expected = {(steps, ends) for steps in sent_in for ends in (False, True)}
  if len(sent_in) > 1:
    expected.add((None, None))  # The device ends what is not delayed.
    expected.remove((1, False))  # What goes in one step is due in that step.
  assert set(traces) == expected


@pytest.mark.parametrize(
  "name",
  ["growing", pytest.param("growing, streamed", marks=pytest.mark.slow)],
)
def test_host_begins_a_delay_where_the_device_would(name):
  wanted, told, _ = whole(name, host=False)
  state, record, traces = whole(name, host=True)
  check_alike(state, wanted)
  assert record.rounds == told.rounds < NUM_STEPS
  # The device counts a message when its round ends, the host when its mean is
  # taken: the last one is under way.
  message_bytes = told.sent_bytes / told.rounds
  assert told.sent_bytes - record.sent_bytes in (0, message_bytes)
  # The device ends the rounds before, the host those after it.
  assert {ends for _, ends in traces} == {None, False, True}


def test_no_program_is_compiled_during_a_run():
  """The first mean of a delay arrives many steps after the run's start."""
  trainer, chain, traces = trained.__wrapped__("growing", True)
  team = _tiny.team("vmap")
  state = training.init_state(team, chain, params())
  known = []

  def counted(seed):
    for batch in _tiny.batches(team)(seed):
      known.append(len(traces))
      yield batch

  trainer.fit(state, counted, NUM_STEPS)
  assert known[0] == 0 < len(traces)
  assert set(known[3:]) == {len(traces)}


def test_only_the_program_of_a_rounds_end_sends_without_conditional():
  team = _tiny.team("shard_map")
  chain = chains(team.axis)["local SGD"]
  step = training.make_step(_tiny.loss_fn, chain, axis=team.axis)
  state = training.init_state(team, chain, params())
  batch = team.place(next(_tiny.batches(team)(0)))
  sent = {}
  for ends in (False, True):
    program = team.jit(
      lambda state, batch, ends=ends: step(
        state, batch, transforms.Control(round_ends=ends)
      )
    )
    text = program.lower(state, batch).compile().as_text()
    assert " conditional(" not in text
    sent[ends] = len(profiling.read_collectives(text))
  assert sent[False] == 0 < sent[True]


def copied_bytes(chain, team, **told):
  """What a step's program copies from one float32 array to another."""

  def loss_fn(params, model_state, batch, key):
    del key
    hidden = jnp.tanh(batch @ params["a"])
    return jnp.mean((hidden @ params["b"]) ** 2), (model_state, {})

  weights = {"a": np.ones((64, 256)), "b": np.ones((256, 64))}
  weights = jax.tree.map(lambda x: x.astype(np.float32), weights)
  step = training.make_step(loss_fn, chain, axis=team.axis)
  program = team.jit(
    lambda state, batch: step(state, batch, transforms.Control(**told)),
    donate_argnums=0,
  )
  state = training.init_state(team, chain, weights)
  batch = team.place(np.ones((team.num_workers, 8, 64), np.float32))
  text = program.lower(state, batch).compile().as_text()
  shapes = re.findall(r"= f32\[([\d,]*)\]\S* copy\(", text)
  return 4 * sum(
    math.prod(int(n) for n in shape.split(",") if n) for shape in shapes
  )


def test_step_within_a_round_copies_as_much_as_a_plain_step():
  team = collectives.workers(1, substrate="none")
  sgd = optax.sgd(0.05, momentum=0.9)
  plain = copied_bytes(sgd, team)
  for chain in (
    methods.local_sgd(sgd, 4, axis=None),
    methods.diloco(sgd, 4, axis=None),
    transforms.local_steps(sgd, 4, axis=None, overlap=transforms.Delayed()),
    transforms.local_steps(
      sgd, 4, axis=None, overlap=transforms.Delayed(stream=transforms.Stream())
    ),
  ):
    assert copied_bytes(chain, team, round_ends=False) <= plain
  # The last one, with the conditional, and where it ends a round.
  assert copied_bytes(chain, team) > copied_bytes(chain, team, round_ends=True)
  assert copied_bytes(chain, team, round_ends=True) > plain


def test_late_mean_moves_the_anchor_after_the_gradients():
  team = collectives.workers(1, substrate="none")
  late = transforms.Delayed()
  chain = transforms.local_steps(optax.sgd(0.05), 4, axis=None, overlap=late)

  def loss_fn(params, model_state, batch, key):
    del key
    for layer in params:
      batch = jnp.tanh(batch @ layer)
    return jnp.mean(batch**2), (model_state, {})

  layers = [np.ones((64, 64), np.float32)] * 3
  step = training.make_step(loss_fn, chain, axis=None)
  program = team.jit(
    lambda state, batch: step(state, batch, transforms.Control(round_ends=True))
  )
  state = training.init_state(team, chain, layers)
  batch = team.place(np.ones((1, 8, 64), np.float32))
  text = program.lower(state, batch).compile().as_text()
  # In XLA's order, of which a CPU's threads run what waits for nothing.
  lines = text[text.index("ENTRY") :].splitlines()
  gradients = [i for i, line in enumerate(lines) if " dot(" in line]
  moved = [i for i, line in enumerate(lines) if " conditional(" in line]
  assert len(gradients) >= 3
  assert len(moved) == 1
  assert moved[0] > gradients[-1]


@pytest.mark.parametrize("name", ["DiLoCo, grown, int4", "streamed, int4"])
def test_run_resumes_in_the_middle_of_a_round(name, tmp_path):
  team = _tiny.team("vmap")
  wanted, told, _ = whole(name, host=True)
  offsets = []
  for last in (14, NUM_STEPS):
    with training.Checkpoints(tmp_path, team) as checkpoints:
      state, record = fit(
        name, host=True, num_steps=last, checkpoints=checkpoints
      )
    offsets.append(int(state.opt_state.clock.round_step[0]))
  assert offsets[0] > 0
  _tiny.assert_same_bits(state, wanted)
  assert record.sent_bytes == told.sent_bytes


def test_control_overrides_the_device():
  optimizer = transforms.local_steps(optax.sgd(1.0), 3, axis=None)
  w = np.float32(4.0)
  state = optimizer.init(w)
  for ends in (False, False, False, True, True):
    before = int(state.clock.round)
    _, state = optimizer.update(
      w, state, w, control=transforms.Control(round_ends=ends)
    )
    assert int(state.clock.round) == before + ends
    assert bool(state.clock.synchronized) == ends
  assert int(state.clock.step) == 5 and int(state.clock.round_step) == 0


@pytest.mark.parametrize("steps", [3, 2])
def test_partial_mean_is_not_applied(steps):
  stream = transforms.Stream(max_bytes=8)
  optimizer = transforms.local_steps(
    optax.sgd(0.1), 3, axis=None, overlap=transforms.Delayed(stream=stream)
  )
  w = np.arange(6, dtype=np.float32)
  state = optimizer.init(w)
  for number in range(2 * 3):
    # Nothing of the second message is sent in the second round's first step.
    sent = 3 if number != 3 else {3: 3, 2: None}[steps]
    ends = number % 3 == 2
    _, state = optimizer.update(
      w,
      state,
      w,
      control=transforms.Control(round_ends=ends, stream_steps=sent),
    )
  assert np.isfinite(state.anchor).all() == (steps == 3)


def moving_mean_loss(params, moving_mean, batch, key):
  """Keeps a statistic of its batches, which differ between the workers."""
  loss, _ = _tiny.loss_fn(params, (), batch, key)
  return loss, (0.5 * moving_mean + 0.5 * batch["x"].mean(0), {})


def test_statistics_are_averaged_where_the_host_ends_a_round():
  team = _tiny.team("vmap")
  chain = chains(team.axis)["local SGD"]
  step = training.make_step(moving_mean_loss, chain, axis=team.axis)
  found = {}
  for host in (False, True):
    trainer = training.Trainer(team, step, host_rounds=host)
    state = training.init_state(
      team, chain, params(), np.zeros(6, np.float32), seed=0
    )
    alike = []
    for last in range(1, 7):
      state, _ = trainer.fit(state, _tiny.batches(team), last)
      rows = np.asarray(state.model_state)
      alike.append(bool((rows == rows[0]).all()))
    found[host] = rows
    assert alike == [n % 4 == 0 for n in range(1, 7)]
  np.testing.assert_allclose(found[True], found[False], rtol=1e-6)


def update(optimizer, **options):
  w = np.float32(1.0)
  return optimizer.update(w, optimizer.init(w), w, **options)


def test_invalid_controls_raise():
  team = _tiny.team("vmap")
  plain = transforms.local_steps(optax.sgd(1.0), 3, axis=None)
  with _refusals.refused("round_ends", "must be True, False or None"):
    update(plain, control=transforms.Control(round_ends=1))
  chain = methods.ssgd(optax.sgd(0.1), axis=team.axis)
  step = training.make_step(_tiny.loss_fn, chain, axis=team.axis)
  state = training.init_state(team, chain, params())
  trainer = training.Trainer(team, step, host_rounds=True)
  with _refusals.refused("host_rounds", "False for an"):
    trainer.fit(state, _tiny.batches(team), 2)
