"""Streamed methods in the loop: programs chosen by the host, in time."""

import functools

import chex
import jax
import numpy as np
import optax
import pytest

from jdist import codecs, collectives, methods, reducers, training, transforms
from jdist.training.loop import _programs
from jdist.transforms import intervals
from tests.training import _tiny
from tests.transforms import _waiting

NUM_STEPS = 60
SENT_IN = (1, 2, 4, 8)


def optimizer(axis, *, stream, warmup_steps=4, steps=None, compression=None):
  # Intervals of 1 to 9, most of which no program fits exactly.
  grown = intervals.scheduled(lambda step: 1 + (step % 9))
  return methods.msdpu(
    optax.sgd(0.05, momentum=0.9),
    grown,
    0.05,
    axis=axis,
    warmup_steps=warmup_steps,
    overlap=transforms.Delayed(
      steps=steps,
      carry=None,
      stream=transforms.Stream(max_bytes=16) if stream else None,
    ),
    compression=compression,
  )


def compiled(team, *, stream, **others):
  """A trainer, its chain, and the programs that it traced."""
  chain = optimizer(team.axis, stream=stream, **others)
  traces = []
  plain = training.make_step(_tiny.loss_fn, chain, axis=team.axis)

  def step(state, batch, control=_programs.DEVICE):
    traces.append(control.stream_steps)
    return plain(state, batch, control)

  trainer = training.Trainer(
    team, step, stream_steps=SENT_IN if stream else (), host_rounds=False
  )
  return trainer, chain, traces


@functools.cache
def shared(kind, *, stream, steps=None):
  """Compiled once for all tests: a trainer keeps nothing of a run."""
  team = _tiny.team(kind)
  return team, *compiled(team, stream=stream, steps=steps)


def fit(team, trainer, chain, *, num_steps=NUM_STEPS, **options):
  state = training.init_state(team, chain, _tiny.params())
  return trainer.fit(state, _tiny.batches(team), num_steps, **options)


@pytest.mark.parametrize(
  ("kind", "steps"),
  [
    pytest.param("shard_map", None, marks=pytest.mark.slow),
    pytest.param("shard_map", 4, marks=pytest.mark.slow),
    pytest.param("vmap", None, marks=pytest.mark.slow),
    ("vmap", 4),
  ],
)
@pytest.mark.slow
def test_streamed_run_has_the_bits_of_a_simple_one(kind, steps):
  *plain, _ = shared(kind, stream=False, steps=steps)
  *parts, traces = shared(kind, stream=True, steps=steps)
  simple, records = fit(*plain)
  streamed, others = fit(*parts)
  for name in ("anchor", "inner", "clock"):
    _tiny.assert_same_bits(
      getattr(simple.opt_state, name), getattr(streamed.opt_state, name)
    )
  _tiny.assert_same_bits(simple.params, streamed.params)
  # Each program is traced once to run and once to count, and never again; no
  # program sends in more steps than a mean is late.
  fit_in = [x for x in SENT_IN if steps is None or x <= steps]
  assert sorted(map(str, traces)) == sorted(
    2 * [str(x) for x in (None, *fit_in)]
  )
  # The same rounds, and little more than the same bytes: a message goes in
  # equal parts, the last of which is sent in part twice.
  assert records[-1].rounds == others[-1].rounds
  assert 1.0 <= others[-1].sent_bytes / records[-1].sent_bytes < 1.35


def test_round_whose_message_was_streamed_sends_nothing_at_its_end():
  team, trainer, chain, _ = shared("vmap", stream=True, steps=4)
  record = fit(team, trainer, chain)[1][-1]
  # An all-reduce in a ring, of float32.
  num, entries = team.num_workers, sum(x.size for x in _tiny.params().values())
  message_bytes = 2 * (num - 1) / num * 4 * entries
  sent = record.sent_bytes / (record.rounds * message_bytes)
  # It goes in equal parts, the last of which is sent in part twice.
  assert 0.9 < sent < 1.35


@pytest.mark.slow
def test_sub_tensors_are_encoded():
  team = _tiny.team("vmap")
  codec = reducers.compressed(codecs.TopK(0.5))
  chunked = reducers.Chunked(codec, max_bytes=16, multiple=8)
  others = {
    "compression": reducers.Compression(chunked, reducers.ErrorFeedback())
  }
  simple, records = fit(team, *compiled(team, stream=False, **others)[:2])
  streamed, same = fit(team, *compiled(team, stream=True, **others)[:2])
  for name in ("anchor", "inner", "clock"):
    _tiny.assert_same_bits(
      getattr(simple.opt_state, name), getattr(streamed.opt_state, name)
    )
  held = simple.opt_state.sync.compression.feedback.residual
  assert any(np.asarray(x).any() for x in jax.tree.leaves(held))
  # Each sub-tensor goes once; the last round's are under way, or gone.
  rounds = records[-1].rounds
  assert rounds == same[-1].rounds
  sent = same[-1].sent_bytes / records[-1].sent_bytes
  assert 1 <= sent < 1 + 1 / rounds


@pytest.mark.parametrize(
  ("kind", "steps"),
  [pytest.param("shard_map", None, marks=pytest.mark.slow), ("vmap", 4)],
)
def test_streamed_run_resumes_in_the_middle_of_a_round(kind, steps, tmp_path):
  *parts, _ = shared(kind, stream=True, steps=steps)
  whole, _ = fit(*parts)
  in_rounds = []
  for last in (23, NUM_STEPS):
    with training.Checkpoints(tmp_path, parts[0]) as checkpoints:
      state, _ = fit(*parts, num_steps=last, checkpoints=checkpoints)
      in_rounds.append(int(state.opt_state.clock.round_step[0]))
  assert in_rounds[0] > 0
  _tiny.assert_same_bits(state, whole)


def test_streamed_batch_statistics_match_the_simple_form():
  team = _tiny.team("shard_map")

  def loss_fn(params, model_state, batch, key):
    loss, (_, metrics) = _tiny.loss_fn(params, {}, batch, key)
    mean = 0.9 * model_state["mean"] + 0.1 * batch["x"].mean(0)
    return loss, ({"mean": mean, "count": model_state["count"] + 1}, metrics)

  found = []
  for stream in (False, True):
    chain = transforms.local_steps(
      optax.sgd(0.05),
      3,
      axis=team.axis,
      overlap=transforms.Delayed(
        stream=transforms.Stream() if stream else None
      ),
    )
    step = training.make_step(loss_fn, chain, axis=team.axis)
    state = training.init_state(
      team,
      chain,
      _tiny.params(),
      {"mean": np.zeros(6, np.float32), "count": np.zeros((), np.int32)},
    )
    trainer = training.Trainer(team, step)
    # One step after a round's end.
    state, _ = trainer.fit(state, _tiny.batches(team), 10)
    placed = team.place(_tiny.batch(0, team.local_workers))
    conditional = [
      c.conditional for c in trainer.traffic(state, placed).collectives
    ]
    assert not any(conditional) if stream else all(conditional)
    found.append((state.params, state.model_state))
  (params, statistics), (same, others) = found
  # Not to the bit: in JAX 0.12 programs that also average the batch differ
  # by one unit in the last place. Runs without statistics have the same bits.
  chex.assert_trees_all_close(params, same, rtol=1e-6, atol=1e-7)
  np.testing.assert_array_equal(statistics["count"], others["count"])
  # Never averaged in training: an evaluation does, with the same result.
  means = [np.asarray(x["mean"]).mean(0) for x in (statistics, others)]
  np.testing.assert_allclose(*means, 1e-5, 1e-6)


STREAMED = {
  "fixed": (4, {}, 4),
  "adaptive": (intervals.msdpu(3, 0.05), {}, 2),
  "late by steps": (8, {"steps": 4}, 4),
  "compressed": (
    4,
    {
      "compression": reducers.Compression(
        codecs.TopK(0.5), reducers.ErrorFeedback()
      )
    },
    4,
  ),
}


@pytest.mark.parametrize("name", STREAMED)
def test_no_collective_of_a_streamed_step_waits_for_the_batch(name):
  interval, others, steps = STREAMED[name]

  def loss_fn(params, model_state, batch, key):
    loss, (_, metrics) = _tiny.loss_fn(params, {}, batch, key)
    return loss, ({"mean": batch["x"].mean(0) + model_state["mean"]}, metrics)

  chain = transforms.local_steps(
    optax.sgd(0.05),
    interval,
    axis="worker",
    overlap=transforms.Delayed(
      steps=others.get("steps"), stream=transforms.Stream(max_bytes=16)
    ),
    compression=others.get("compression"),
  )
  step = training.make_step(loss_fn, chain, axis="worker")
  state = training.init_state(
    collectives.workers(1, substrate="none"),
    chain,
    _tiny.params(),
    {"mean": np.zeros(6, np.float32)},
  )
  state, batch = jax.tree.map(lambda x: x[0], (state, _tiny.batch(0, [0])))

  def on_batch(batch, state):
    return step(state, batch, transforms.Control(stream_steps=steps))

  assert not _waiting.waits(on_batch, batch, state)


def test_the_host_knows_the_round_of_each_step():
  team = _tiny.team("vmap")
  chain = optimizer(team.axis, stream=True)
  step = training.make_step(_tiny.loss_fn, chain, axis=team.axis)
  state = training.init_state(team, chain, _tiny.params())
  control = transforms.Control(stream_steps=None)
  program = team.jit(functools.partial(step, control=control))
  said = [transforms.rounds_ahead(state.opt_state)[0, 1]]
  for t in range(40):
    clock = state.opt_state.clock
    late = clock.step[0] - clock.round_step[0] >= 4
    interval, offset = int(clock.interval[0]), int(clock.round_step[0])
    # As it was said a step earlier, and as it is said now.
    now = [interval if late else -1, offset, interval]
    places = transforms.rounds_ahead(state.opt_state)
    assert places[0, 0].tolist() == now
    if t:
      assert said[-1].tolist() == now
    said.append(places[0, 1])
    batch = team.place(_tiny.batch(t, team.local_workers))
    state, _ = program(state, batch)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
  "delay",
  [
    {"after_step": None},
    {"after_step": None, "steps": 1},
    {"after_step": None, "steps": 3},
    {"after_step": 5, "steps": 1},
    {"carry": None, "steps": 2},
  ],
)
def test_resumed_host_chooses_the_same_programs(delay, stream):
  # What is said of an update one before it, and right before it: the programs
  # of both are the same, so that a resumed run has the same bits.
  team = _tiny.team("vmap")
  given = {"stream": transforms.Stream(max_bytes=16)} if stream else {}
  chain = transforms.local_steps(
    optax.sgd(0.05),
    intervals.scheduled(lambda step: 1 + step // 6),
    axis=team.axis,
    overlap=transforms.Delayed(**delay, **given),
  )

  def step(w, state):
    control = transforms.Control(stream_steps=None)
    updates, state = chain.update(w, state, w, control=control)
    return transforms.apply_updates(w, updates, state), state

  program = team.jit(step)
  w = team.replicate(np.ones(9, np.float32))
  state = team.jit(chain.init)(w)
  said = None
  for _ in range(30):
    places = transforms.rounds_ahead(state)[0]
    if said is not None:
      assert places[0].tolist() == said
    said = places[1].tolist()
    w, state = program(w, state)


@pytest.mark.parametrize(
  ("options", "reason"),
  [
    ({"interval": intervals.scheduled(lambda step: 2)}, "is not one number"),
    ({"interval": intervals.ending_at(20, 4)}, "is not one number"),
    ({"after_step": 4}, "the first 4 steps are not delayed"),
    ({"steps": 2}, "arrives 2 steps into a longer round"),
  ],
)
def test_stream_without_effect_raises(options, reason):
  options = dict(options)
  team = _tiny.team("vmap")
  interval = options.pop("interval", 4)
  overlap = transforms.Delayed(stream=transforms.Stream(), **options)
  chain = transforms.local_steps(
    optax.sgd(0.1), interval, axis=team.axis, overlap=overlap
  )
  step = training.make_step(_tiny.loss_fn, chain, axis=team.axis)
  state = training.init_state(team, chain, _tiny.params())
  with pytest.raises(ValueError, match=f"`stream_steps` must be .*{reason}"):
    training.Trainer(team, step).fit(state, _tiny.batches(team), 2)
  # What is said is done, also that nothing is to be streamed.
  state = training.init_state(team, chain, _tiny.params())
  batch = team.place(_tiny.batch(0, team.local_workers))
  control = transforms.Control(stream_steps=None)
  team.jit(functools.partial(step, control=control))(state, batch)


@pytest.mark.parametrize("stream", [False, True])
def test_evaluation_applies_messages_in_flight(stream):
  team, trainer, chain, _ = shared("vmap", stream=stream, steps=4)
  state, _ = fit(team, trainer, chain, num_steps=31)
  seen = []

  def apply(params, model_state, images, *, train):
    del train
    seen.append(params)
    return images @ params["kernel"], model_state

  batch = {
    "image": np.ones((4, 2, 6), np.float32),
    "label": np.zeros((4, 2), np.int32),
    "mask": np.ones((4, 2), np.float32),
  }
  drained, _ = team.jit(
    lambda w, s: transforms.drain(chain, s, w)
  )(state.params, state.opt_state)  # fmt: skip
  losses = []
  for given in (None, chain):
    evaluate = training.Evaluator(team, apply, [batch], optimizer=given)
    losses.append(evaluate(state)["loss"])
  logits = np.asarray(team.view(drained)["kernel"]).sum(0)
  wanted = np.log(np.exp(logits).sum()) - logits[0]
  assert losses[1] == pytest.approx(wanted, rel=1e-5)
  assert losses[0] != losses[1]
  jax.tree.map(np.asarray, state)  # It was not given up.
