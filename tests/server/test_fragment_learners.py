"""Both sides of Decoupled DiLoCo, one message at a time, by hand."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import codecs, reducers, server, training, transforms
from jdist.server.decoupled import _merged_model
from jdist.server.gradients import _gradient_messages, _merge

FOUR_BITS = reducers.MessageCodec(
  codecs.Quantize(4, rounding="stochastic"), reducers.ErrorFeedback()
)


class Numbers:
  """Batches of the numbers of their samples."""

  shared = True

  def batch(self, worker, start, count, *, size=None):
    rows = np.arange(size or count)
    return {
      "x": np.float32(start + rows), "mask": np.float32(rows < count),
    }  # fmt: skip


def loss(params, model_state, batch, key):
  """Its gradient is the mean of the samples."""
  mean = training.masked_mean(batch["x"], batch["mask"])
  return params["w"].sum() * mean, (model_state, {})


def constant(params, model_state, batch, key):
  return 0.0 * params["w"].sum() + 2.0, (model_state, {})


def runner(loss_fn=loss, optimizer=None, w=8.0, **options):
  return server.FragmentRunner(
    loss_fn, optimizer or optax.sgd(1.0), {"w": jnp.asarray(w)}, Numbers(),
    number=0, num_workers=1, **options,
  )  # fmt: skip


def begun(learner, model_state=None):
  """A learner at its first state."""
  learner._state = learner.first_state(
    learner._anchor, {} if model_state is None else model_state
  )
  return learner


def syncer(w=8.0, workers="a", **options):
  params = {"w": jnp.asarray(w)}
  return server.FragmentSyncer(params, workers=list(workers), **options)


def merge(found, task, progress, *, worker="a", weight=1.0, fragment=0):
  """Gives a task, and merges progress under it."""
  found.reply(server.Reply(worker, task, 0, 8, 4, fragment=fragment))
  found._pushes[task] = _merge.Pushed([jnp.asarray(progress)], {})
  found._losses[task] = 0.0
  found._steps[found.tasks[task].worker] += 4
  found.apply(server.Apply((task,), (weight,), (0,)))


def header(task, *, start=0, samples=2, passes=1, pulled=(), **more):
  more = {"start": start, "settled": [-1], "steps": 0} | more
  return {
    "task": task, "fragment": 0, "samples": samples, "passes": passes,
    "pulled": pulled, "more": more,
  }  # fmt: skip


# -- The server ---------------------------------------------------------------


def test_without_an_outer_optimizer_it_is_dilocos():
  """Nesterov's momentum of 0.9 at a rate of 0.7, step by step."""
  found, w, trace = syncer(), 8.0, 0.0
  for task, progress in enumerate((1.0, 2.0)):
    merge(found, task, progress)
    trace = progress + 0.9 * trace
    w -= 0.7 * (progress + 0.9 * trace)
    assert found.model.params["w"].item() == pytest.approx(w, rel=1e-6)


def test_outer_optimizer_is_given_the_anchor():
  outer = optax.chain(optax.add_decayed_weights(0.5), optax.scale(-1.0))
  found = syncer(outer=outer)
  merge(found, 0, 1.0)
  assert found.model.params["w"].item() == 8.0 - (1.0 + 0.5 * 8.0)


def test_outer_optimizer_with_a_state_in_another_form_is_refused():
  outer = optax.GradientTransformation(
    lambda _: jnp.zeros(()), lambda updates, state, params=None: (updates, ())
  )
  with pytest.raises(ValueError, match=r"`outer\.update` must keep"):
    syncer(outer=outer)


def test_anchor_is_wide_and_sent_models_are_as_they_were():
  w = jnp.full(2, 8.0, jnp.bfloat16)
  found = syncer(w, outer=optax.sgd(1.0))
  merge(found, 0, jnp.full(2, 2.0**-12))
  assert found.anchor[0].dtype == jnp.float32
  np.testing.assert_array_equal(found.anchor[0], 8.0 - 2.0**-12)
  assert found.model.params["w"].dtype == jnp.bfloat16
  learner = runner(w=w)
  state = learner.first_state(found.anchor, {})
  assert state.params["w"].dtype == jnp.bfloat16
  assert state.base[0].dtype == state.anchor[0].dtype == jnp.float32


def test_server_keeps_arrays_that_the_caller_deletes():
  w = jnp.ones(4)
  found = server.FragmentSyncer({"w": w}, workers=["a"])
  assert found.model.model_state == {}
  w.delete()
  np.testing.assert_array_equal(found.anchor[0], 1.0)


def test_parts_are_sizes_of_fragments():
  params = {"a": jnp.ones((2, 3)), "b": jnp.ones(2)}
  found = server.FragmentSyncer(params, workers=["a"], fragments=2)
  assert sorted(found.parts) == [2.0, 6.0]


def test_joiner_is_sent_the_statistics_and_the_steps_of_the_run():
  found = syncer(workers="ab", model_state={"mean": jnp.array(3.0)})
  merge_statistics = _merge.Pushed([jnp.array(1.0)], {"mean": jnp.array(5.0)})
  found.reply(server.Reply("a", 0, 0, 8, 4))
  found._pushes[0], found._losses[0] = merge_statistics, 0.0
  found._steps[0] += 4
  found.apply(server.Apply((0,), (1.0,), (0,)))
  more, (anchor, statistics) = found.reply(server.Reply("b", 1, 1, 8, 4))
  assert (more["steps"], statistics["mean"].item()) == (4, 5.0)
  # Only what a member lacks is sent later, and nothing where that is nothing.
  lacking = server.Reply("b", 2, 1, 8, 4, pulled=(0,))
  (part,) = found.reply(lacking)[1]
  np.testing.assert_array_equal(part[0], anchor[0])
  nothing = lacking._replace(task=3, pull_plan=None, pulled=())
  assert found.reply(nothing)[1] is None


def test_checkpoint_has_the_positions_of_learners():
  found = syncer(workers="ab", shared=False)
  merge(found, 0, 1.0)
  again = syncer(workers="ab", shared=False)
  again.load(*found.save())
  for worker, task, start in (("a", 1, 8), ("b", 2, 0)):
    reply = server.Reply(worker, task, 1, 8, 4)
    more = again.reply(reply)[0]
    assert more == found.reply(reply)[0]
    assert (more["start"], more["steps"]) == (start, 4)
    assert more["settled"] == [0 if worker == "a" else -1]


# -- The learner ---------------------------------------------------------------


def test_steps_of_a_task_take_its_samples_in_turn():
  """Each has a random key of its own, in the next task another."""
  learner, noted, keys = begun(runner()), [], set()

  def step(state, samples, key):
    noted.append(samples)
    keys.add(tuple(jax.random.key_data(key).tolist()))
    return state, jnp.float32(1.0)

  learner._local_step = step
  for task in range(2):
    learner.compute(header(task, start=10, samples=5, passes=2))
  assert noted == [(10, 2, 3), (12, 3, 3)] * 2 and len(keys) == 4


@pytest.mark.parametrize(
  ("name", "wanted"), [("value", 2.0), ("anchor", 3.0), ("interval_steps", 6.0)]
)
def test_inner_optimizer_is_given_the_losss_context(name, wanted):
  def update(updates, state, params=None, **context):
    found = context[name]
    if name == "anchor":
      found = found["w"] - params["w"]
    return {"w": jnp.full_like(params["w"], found)}, state

  inner = optax.GradientTransformationExtraArgs(lambda _: (), update)
  learner = begun(runner(constant, inner, interval=6))
  state = learner._state._replace(params={"w": jnp.array(5.0)})
  state, value = learner._local_step(state, (0, 1, 1), jax.random.key(0))
  assert (state.params["w"].item(), value.item()) == (5.0 + wanted, 2.0)


def test_keys_of_a_model_draw_other_numbers_in_each_step():
  def noisy(params, model_state, batch, key):
    noise = jax.random.uniform(model_state["key"])
    return noise + 0.0 * params["w"], (model_state, {})

  first = {"key": jax.random.key(3)}
  learner = begun(runner(noisy, model_state=first), first)
  found = {
    learner._local_step(learner._state, (0, 1, 1), jax.random.key(x))[1].item()
    for x in range(3)
  }
  assert len(found) == 3


SCHEDULES = {
  "a schedule": (
    optax.scale_by_schedule(lambda step: 1.0 / (1 + step)),
    lambda state: state.count,
  ),
  "an injected one": (
    optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(1.0, 0.5, 9)),
    lambda state: state.count,
  ),
  "a pull": (
    transforms.pull_to_anchor(0.1, lambda step: 1.0 / (1 + step)),
    lambda state: state.step,
  ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_continue_at_the_steps_of_the_run(name):
  inner, position = SCHEDULES[name]
  learner = runner(optimizer=inner)
  for steps in (0, 7):
    state = learner.first_state(learner._anchor, {}, steps).opt_state
    assert position(state).item() == steps


def pushed(learner, task):
  """Sends one task's progress: the mean of samples 0 and 1, which is 1/2."""
  return learner.compute(header(task))[1]


def test_beginning_forgets_pushes_and_takes_statistics():
  statistics = {"mean": jnp.array(0.0)}
  learner = begun(runner(model_state=statistics), statistics)
  pushed(learner, 0)
  message = [jnp.array(4.0)], {"mean": jnp.array(3.0)}
  learner.receive(header(1, pulled=None), message)
  assert learner._state.params["w"].item() == 4.0
  assert learner._state.model_state["mean"].item() == 3.0
  # The push before it is not taken off what is merged later.
  learner.receive(header(2, pulled=(0,)), [[jnp.array(2.0)]])
  assert learner._state.params["w"].item() == 2.0
  np.testing.assert_array_equal(learner._state.anchor[0], 2.0)


def test_fragment_without_numbers_is_received_without_bytes():
  learner = begun(runner(w=np.zeros(0, np.float32)))
  learner.receive(header(2, pulled=(0,)), None)
  assert learner._state.params["w"].shape == (0,)


@pytest.mark.parametrize("settled", (-1, 0, 1))
def test_pushes_stay_until_they_are_merged(settled):
  learner = begun(runner())
  for task in range(2):
    pushed(learner, task)
  assert learner._state.params["w"].item() == 7.0
  message = [[jnp.array(4.0)]]
  learner.receive(header(2, pulled=(0,), settled=[settled]), message)
  # The pushes of 1/2 that are not settled are kept on top.
  assert learner._state.params["w"].item() == 4.0 - 0.5 * (1 - settled)


def test_restart_forgets_pushes_and_a_lost_process_its_feedback():
  learner = begun(
    runner(w=np.arange(8.0, dtype=np.float32), push_codec=FOUR_BITS)
  )
  first = list(learner._push_states)
  pushed(learner, 0)
  kept = list(learner._push_states)
  assert kept[0].step == first[0].step + 1
  learner.restart()
  assert learner._state is None and not any(learner._unmerged.values())
  chex.assert_trees_all_equal(learner._push_states, kept)
  learner.restart(lost=True)
  chex.assert_trees_all_equal(learner._push_states, first)


def test_compiling_leaves_the_feedback_as_it_was():
  learner = runner(w=np.arange(8.0, dtype=np.float32), push_codec=FOUR_BITS)
  first = jax.tree.map(np.asarray, learner._push_states)
  learner.prepare()
  chex.assert_trees_all_equal(learner._push_states, first)


def test_whole_checkpoint_of_a_learner_that_has_not_begun():
  again = runner()
  again.load(*runner().save(whole=True))
  assert again._state is None and not any(again._unmerged.values())


def test_whole_checkpoint_continues_a_learner():
  learner = begun(runner())
  pushed(learner, 0)
  again = runner()
  again.load(*learner.save(whole=True))
  for each in (learner, again):
    # Another's progress of 1 was merged, its own of 1/2 was not.
    each.receive(header(1, pulled=(0,)), [[jnp.array(7.0)]])
    assert each._state.params["w"].item() == 6.5
  chex.assert_trees_all_equal(again._state, learner._state)


def test_progress_survives_the_rounding_of_narrow_parameters():
  """256 - 0.5 is 256 in bfloat16; the half is part of the next push."""
  learner = begun(runner(w=jnp.asarray(1.0, jnp.bfloat16)))
  params = {"w": jnp.asarray(0.5, jnp.bfloat16)}
  state = learner._state._replace(params=params)
  state = learner.merged(state, {0: [jnp.array(256.0)]}, {0: []})
  assert state.params["w"].astype(jnp.float32) == 256.0
  assert learner.push_of(state, 0)[2][0].item() == 0.5


def test_mixture_replaces_what_was_not_pushed():
  learner = begun(runner(mix=0.25))
  state = learner._state._replace(params={"w": jnp.array(6.0)})
  state = learner.merged(state, {0: [jnp.array(5.0)]}, {0: [[jnp.array(1.0)]]})
  # The merge without its unmerged push is 4: a quarter of 6, and the rest of 4.
  assert state.params["w"].item() == 4.5
  assert learner.push_of(state, 0)[2][0].item() == 4.0 - 4.5


def test_codec_and_message_are_counted_from_the_last_push():
  learner = begun(runner())
  for task in range(2):
    message = _gradient_messages.bytes_of(pushed(learner, task))
    assert message.view(np.float32)[0] == 0.5


@pytest.mark.parametrize(
  ("change", "named"),
  [
    ({"model_state": {"mask": jnp.array(-jnp.inf)}}, "model_state"),
    ({"optimizer": optax.contrib.schedule_free_sgd(0.1)}, "optimizer"),
  ],
)
def test_learner_refuses_what_a_server_cannot_keep(change, named):
  with pytest.raises(ValueError, match=f"`{named}` must"):
    runner(**change)


def test_both_sides_begin_as_they_are_told():
  found = syncer(model_state={"mean": jnp.array(3.0)})
  assert found.model.model_state["mean"] == 3.0
  learner = runner(optimizer=optax.sgd(lambda count: 1.0))
  counts = jax.tree.leaves(begun(learner)._state.opt_state)
  assert [int(x) for x in counts] == [0]


def test_learners_of_every_seed_round_by_numbers_of_their_own():
  steps = [
    int(
      server.FragmentRunner(
        loss, optax.sgd(1.0), {"w": jnp.zeros(8)}, Numbers(), number=number,
        num_workers=3, seed=seed, push_codec=FOUR_BITS,
      )._push_states[0].step
    )
    for number in range(3)
    for seed in range(5)
  ]  # fmt: skip
  assert len(set(steps)) == len(steps)


def test_models_merge_where_jax_has_no_cpu(monkeypatch):
  def none(backend):
    raise RuntimeError(f"Unknown backend {backend}")

  monkeypatch.setattr(jax, "local_devices", none)
  with _merged_model._on_cpu():
    assert jnp.ones(2).sum() == 2
