"""Decoupled DiLoCo on real workers: the same bits again, as on the clock."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import cluster, codecs, data, reducers, server
from jdist.server.gradients import _gradient_messages, _merge
from tests.server import _fragment_pair, _live_runs
from tests.server import test_live_gradients as live

pytest.importorskip("simpy")

INNER, OUTER = optax.sgd(0.1, momentum=0.9), optax.sgd(0.7)
FOUR_BITS = reducers.MessageCodec(codecs.Quantize(4), reducers.ErrorFeedback())
STEPS, EACH = 4, 16


def protocol(**options):
  return server.DecoupledDiLoCo(
    batches=server.FixedBatches(EACH), interval=STEPS, **options
  )


def syncer(fragments=1, push_codec=None):
  return server.FragmentSyncer(
    live.MODEL.params, workers=live.NAMES, outer=OUTER, fragments=fragments,
    push_codec=push_codec, shared=False,
  )  # fmt: skip


def runner(number, fragments=1, push_codec=None):
  return server.FragmentRunner(
    live.LOSS, INNER, live.MODEL.params, samples(), number=number,
    num_workers=2, sizes=[EACH], fragments=fragments, push_codec=push_codec,
  )  # fmt: skip


def samples():
  return data.SampleStream(live.DIGITS, 2, seed=0, owned=True)


def run(rule, codec, path, updates=8):
  engine = server.ThreadEngine()

  def work(name, channel):
    learner = runner(live.NAMES.index(name), rule.fragments, codec)
    learner.prepare()
    server.WorkerLoop(channel, name, learner, depth=rule.depth).run()

  try:
    return _live_runs.run(
      engine,
      lambda plan: server.LiveServer(rule, syncer(rule.fragments, codec), plan),
      {name: functools.partial(work, name) for name in live.NAMES},
      updates,
      plan=server.LivePlan(workers=live.NAMES, record=str(path)),
    )
  finally:
    engine.stop()


TOGETHER = {"quorum": 1.0, "grace": 0.0, "ahead": 0}
CASES = {
  "a window": (protocol(quorum=0.5, grace=0.2), None),
  "two fragments in four bits": (
    protocol(fragments=2, quorum=0.5, grace=0.2, ahead=2), FOUR_BITS,
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_replayed_run_ends_with_the_same_bits(name, tmp_path):
  rule, codec = CASES[name]
  result = run(rule, codec, tmp_path / "run")
  learner = syncer(rule.fragments, codec)
  delivery = server.replay(tmp_path / "run", rule, learner)
  assert delivery.state.version == result.summary["updates"] == 8
  np.testing.assert_array_equal(learner.save()[1], result.payload)


@pytest.mark.parametrize("codec", (None, FOUR_BITS))
def test_full_quorum_trains_as_on_the_clock(codec, tmp_path):
  rule = protocol(fragments=2, **TOGETHER)
  run(rule, codec, tmp_path / "run", updates=6)
  real = syncer(2, codec)
  server.replay(tmp_path / "run", rule, real)
  machines = cluster.workers([1.0, 1.0])
  virtual = _fragment_pair.fragment_pair(
    live.LOSS, INNER, live.MODEL.params, samples(), workers=machines.names,
    outer=OUTER, fragments=2, push_codec=codec,
  )  # fmt: skip
  costs = cluster.Profile(seconds_per_sample=1.0)
  server.Simulation(machines, rule, costs, learner=virtual).run(updates=6)
  chex.assert_trees_all_close(
    real.model.params, virtual.model.params, rtol=1e-5, atol=1e-6
  )


def give(learner, task, fragment, pulled, plan=0):
  """A task's header and payload, as a worker gets them."""
  reply = server.Reply(
    live.NAMES[0], task, 0, STEPS * EACH, STEPS, 0, plan, fragment, pulled
  )
  more, payload = learner.reply(reply)
  return reply._asdict() | {"more": more}, payload


def compute(worker, header, payload):
  worker.receive(header, payload)
  more, found = worker.compute(header)
  return more, _gradient_messages.bytes_of(found)


def test_learner_keeps_its_unmerged_pushes_by_hand():
  """It has done D, Theta has moved on without it: it stands at Theta - D."""
  server_side, worker = syncer(), runner(0)
  worker.prepare()
  more, first = compute(worker, *give(server_side, 0, 0, None))
  server_side.push(0, more, first)
  progress = server_side._pushes[0].grads
  before = server_side.part(0)
  # Another's push is merged, of minus one everywhere.
  others = jax.tree.map(lambda x: -np.ones_like(x), progress)
  server_side.reply(server.Reply(live.NAMES[1], 9, 0, EACH))
  server_side._pushes[9] = _merge.Pushed(others, {})
  server_side._losses[9] = 0.0
  server_side.apply(server.Apply((9,), (1.0,), (0,)))
  header, payload = give(server_side, 1, 0, (0,))
  assert header["more"]["settled"] == [-1]
  worker.receive(header, payload)
  state = worker._state
  for now, base, done in zip(
    jax.tree.leaves(state.params), before, progress, strict=True
  ):
    np.testing.assert_allclose(now, base + 0.7 - done, rtol=1e-5, atol=1e-6)
  # Once it is merged, too, nothing is left to keep.
  server_side.apply(server.Apply((0,), (1.0,), (0,)))
  header, payload = give(server_side, 2, 0, (0,))
  assert header["more"]["settled"] == [0]
  worker.receive(header, payload)
  state = worker._state
  chex.assert_trees_all_close(
    state.params, server_side.model.params, rtol=1e-5, atol=1e-6
  )


def test_unpushed_progress_is_part_of_the_next_push():
  worker = runner(0)
  first = [jnp.asarray(x) for x in jax.tree.leaves(live.MODEL.params)]
  state = worker.first_state(first, {})
  params = jax.tree.map(lambda w: w - 0.25, state.params)
  arrived = [x + 1.0 for x in first]
  state = worker.merged(state._replace(params=params), {0: arrived}, {})
  chex.assert_trees_all_close(
    jax.tree.leaves(state.params), [x + 0.75 for x in first], rtol=1e-6
  )
  _, _, progress, _ = worker.push_of(state, 0)
  chex.assert_trees_all_close(
    progress, [jnp.full_like(x, 0.25) for x in first], rtol=1e-5
  )


def test_schedules_continue_in_a_new_process():
  server_side = syncer()
  worker = runner(0)
  more, payload = compute(worker, *give(server_side, 0, 0, None))
  server_side.push(0, more, payload)
  header, _ = give(server_side, 1, 0, None)
  assert header["more"]["steps"] == STEPS


def test_checkpoint_has_pushes_that_are_not_merged():
  server_side, worker = syncer(2), runner(0, 2)
  for task, fragment in ((0, 0), (1, 1)):
    more, payload = compute(worker, *give(server_side, task, fragment, None))
    server_side.push(task, more, payload)
  server_side.apply(server.Apply((0,), (1.0,), (0,)))
  again = syncer(2)
  again.load(*server_side.save())
  assert again.samples == STEPS * EACH
  for each in (server_side, again):
    each.apply(server.Apply((1,), (1.0,), (0,)))
  np.testing.assert_array_equal(again.save()[1], server_side.save()[1])
  # The worker's part is its feedback.
  kept = runner(0, 2, FOUR_BITS)
  compute(kept, *give(server_side, 2, 1, None))
  other = runner(0, 2, FOUR_BITS)
  assert not np.array_equal(other.save()[1], kept.save()[1])
  other.load(*kept.save())
  np.testing.assert_array_equal(other.save()[1], kept.save()[1])


def test_unusable_pushes_are_refused():
  server_side, worker = syncer(), runner(0)
  more, payload = compute(worker, *give(server_side, 0, 0, None))
  for told, pushed, reason in (
    (more, payload[:-1], "shape"),
    ({"loss": float("nan")}, payload, "nan"),
    (more, np.full_like(payload, 255), "nan"),
  ):
    with pytest.raises(server.RefusedError) as error:
      server_side.push(0, told, pushed)
    assert error.value.reason == reason
  with pytest.raises(ValueError, match="`fragments` must be as many"):
    give(server_side, 3, 1, None)
