"""Decoupled DiLoCo: by hand, as DiLoCo, and on clocks of one's own."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import (
  cluster,
  codecs,
  collectives,
  data,
  methods,
  reducers,
  server,
  training,
  transforms,
)
from jdist.server import _messages
from jdist.server.gradients import _merge
from tests import _refusals
from tests.server import _fragment_pair
from tests.server import test_gradients as gradients

pytest.importorskip("simpy")

OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
TOGETHER = {"quorum": 1.0, "grace": 0.0, "ahead": 0}


def protocol(interval=4, each=8, **options):
  options.setdefault("ahead", 2)
  return server.DecoupledDiLoCo(
    batches=server.FixedBatches(each), interval=interval, **options
  )


def push(worker, task, samples=32, seconds=1.0):
  return server.Push(worker, task, samples, seconds)


def begin(rule, workers="abcd"):
  state = rule.init(workers)
  for worker in workers:
    rule.receive(state, 0.0, server.Pull(worker))
  return state


def test_a_quorum_opens_a_window_and_its_end_merges():
  rule = protocol(quorum=0.5, grace=0.25)
  state = begin(rule)
  assert rule.receive(state, 2.0, push("a", 0, seconds=2.0)) == []
  # Half of the four: the window is a quarter of the two seconds between pushes.
  (timer,) = rule.receive(state, 2.0, push("c", 4, seconds=2.0))
  assert timer == server.Timer(8, pytest.approx(0.5))
  assert rule.receive(state, 2.2, push("b", 2, seconds=2.2)) == []
  (update,) = rule.receive(state, 2.5, _messages.Expired(8))
  assert update.tasks == (0, 2, 4)  # In the order of joining.
  assert update.weights == pytest.approx((1 / 3,) * 3)
  # Who comes later goes into the next merge, and a timer ends but one window.
  assert rule.receive(state, 2.6, push("d", 6, seconds=2.6)) == []
  assert rule.receive(state, 2.7, _messages.Expired(8)) == []
  assert (state.version, state.merges) == (1, [1])


def test_half_of_three_learners_are_two():
  rule = protocol(quorum=0.5, grace=0.0)
  state = begin(rule, "abc")
  assert rule.receive(state, 1.0, push("a", 0)) == []
  (update,) = rule.receive(state, 2.0, push("b", 2))
  assert update.tasks == (0, 2)


def test_no_window_opens_when_all_learners_have_pushed():
  rule = protocol(quorum=0.5, grace=10.0)
  state = begin(rule, "ab")
  (timer,) = rule.receive(state, 1.0, push("a", 0))
  (update,) = rule.receive(state, 1.5, push("b", 2))
  assert update.tasks == (0, 2)
  assert rule.receive(state, 11.0, _messages.Expired(timer.task)) == []


def test_weights_are_tokens_by_tokens_a_step():
  rule = protocol(interval=4, fragments=2, quorum=1.0, grace=0.0)
  state = begin(rule, "ab")
  # Fragment 0 of b's second push is of two pushes' steps, a's of one.
  tasks = {x: list(state.members[x].tasks) for x in "ab"}
  rule.receive(state, 1.0, push("a", tasks["a"][0], 30))
  rule.receive(state, 1.0, push("b", tasks["b"][0], 10))
  assert (state.merges, state.merged_samples) == ([1, 0], 20.0)
  for worker in "ab":
    rule.receive(state, 1.0, server.Pull(worker))
  rule.receive(state, 2.0, push("a", tasks["a"][1], 30))
  (update,) = rule.receive(state, 2.0, push("b", tasks["b"][1], 10))
  # (60, 20) samples in four steps each: 900 to 100.
  assert update.weights == pytest.approx((0.9, 0.1))
  # Half of the parameters each: 40 samples of the first steps, once each.
  assert state.merged_samples == 20.0 + 40.0


def test_merged_fragments_are_sent_once():
  rule = protocol(interval=2, fragments=2, quorum=0.5, grace=0.0)
  state = rule.init("ab")
  first, second = rule.receive(state, 0.0, server.Pull("a"))
  assert (first.pulled, first.fragment, first.pull_plan) == (None, 0, 0)
  assert (second.pulled, second.fragment, second.pull_plan) == ((), 1, None)
  assert (rule.pull_share(first), rule.push_share(first)) == (1.0, 0.5)
  rule.receive(state, 1.0, push("a", 0, 8))
  (third,) = rule.receive(state, 1.0, server.Pull("a"))
  assert (third.pulled, third.fragment) == ((0,), 0)
  assert rule.pull_share(third) == 0.5
  # A worker that returns is sent everything.
  rule.receive(state, 2.0, server.Join("a"))
  again, _ = rule.receive(state, 2.0, server.Pull("a"))
  assert (again.pulled, again.fragment) == (None, 1)


def test_push_of_a_departed_learner_is_merged():
  rule = protocol(quorum=1.0, grace=0.0)
  state = begin(rule, "ab")
  assert rule.receive(state, 1.0, push("a", 0)) == []
  assert rule.receive(state, 1.0, server.Leave("a")) == []
  (update,) = rule.receive(state, 2.0, push("b", 2))
  assert update.tasks == (2, 0)
  assert rule.receive(state, 2.0, push("a", 1)) == [server.Discard(1, "left")]


def learn(rule, speeds, updates, *, outer=OUTER, fragments=1, **options):
  samples = data.SampleStream(gradients.DIGITS, len(speeds), seed=0, owned=True)
  machines = options.pop("machines", None) or cluster.workers(speeds)
  learner = _fragment_pair.fragment_pair(
    options.pop("loss_fn", gradients.LOSS),
    options.pop("optimizer", gradients.SGD),
    options.pop("params", gradients.MODEL.params),
    samples, workers=machines.names, outer=outer, fragments=fragments,
  )  # fmt: skip
  run = server.Simulation(
    machines, rule, gradients.COSTS, learner=learner, **options
  )
  run.run(updates=updates)
  return learner, run


def in_the_usual_loop(build, num, each, steps, optimizer=gradients.SGD):
  """The same samples by a method of `jdist.methods`: its anchor."""
  team = collectives.workers(num, substrate="vmap")
  chain = build(optimizer, axis=team.axis)
  step = team.jit(training.make_step(gradients.LOSS, chain, axis=team.axis))
  state = training.init_state(team, chain, gradients.MODEL.params)
  samples = data.SampleStream(gradients.DIGITS, num, seed=0, owned=True)
  for number in range(steps):
    own = [samples.batch(i, number * each, each) for i in range(num)]
    batch = {k: np.stack([x[k] for x in own]) for k in own[0]}
    state, _ = step(state, team.place(batch))
  return team.view(state.opt_state).anchor


INNER = {"sgd": gradients.SGD, "adamw": optax.adamw(1e-2)}


@pytest.fixture(autouse=True)
def promotion():
  with jax.numpy_dtype_promotion("standard"):  # Of Optax's Adam.
    yield


@pytest.mark.parametrize(
  "name", ("sgd", pytest.param("adamw", marks=pytest.mark.slow))
)
def test_equal_workers_with_a_full_quorum_match_diloco(name):
  inner = INNER[name]
  learner, run = learn(protocol(**TOGETHER), [1.0] * 4, 6, optimizer=inner)
  assert set(run.staleness) == {0}
  anchor = in_the_usual_loop(
    functools.partial(methods.diloco, interval=4), 4, 8, 24, inner
  )
  chex.assert_trees_all_close(
    learner.model.params, anchor, rtol=1e-6, atol=1e-6
  )


@pytest.mark.slow
def test_fragments_in_turn_match_streaming_diloco():
  learner, _ = learn(
    protocol(interval=4, fragments=2, **TOGETHER), [1.0] * 4, 8, fragments=2
  )
  anchor = in_the_usual_loop(
    functools.partial(
      methods.streaming_diloco, interval=4, fragments=2, delay_steps=0, mix=0.0
    ), 4, 8, 16,
  )  # fmt: skip
  chex.assert_trees_all_close(
    learner.model.params, anchor, rtol=1e-6, atol=1e-6
  )


def test_one_worker_with_a_plain_mean_matches_optax():
  learner, _ = learn(
    protocol(each=32, **TOGETHER), [1.0], 5, outer=optax.sgd(1.0)
  )
  params, opt_state = (
    gradients.MODEL.params,
    gradients.SGD.init(gradients.MODEL.params),
  )
  compute = jax.jit(training.make_gradient(gradients.LOSS))
  samples = data.SampleStream(gradients.DIGITS, 1, seed=0, owned=True)
  for number in range(20):
    batch = samples.batch(0, 32 * number, 32)
    found = compute(params, {}, batch, jax.random.key(0))
    updates, opt_state = gradients.SGD.update(found.grads, opt_state, params)
    params = optax.apply_updates(params, updates)
  chex.assert_trees_all_close(
    learner.model.params, params, rtol=1e-5, atol=1e-6
  )


def test_unequal_learners_match_steps_by_hand():
  """Each keeps what it has done; the others' come two pushes later."""
  each, steps, rate = 2, 2, 0.01
  rule = protocol(interval=steps, each=each, quorum=1.0, grace=0.0)
  learner, _ = learn(
    rule, [1.0, 1.0], 4, outer=optax.sgd(1.0), loss_fn=gradients.linear,
    params=jnp.array(0.0), optimizer=optax.sgd(rate),
  )  # fmt: skip
  samples = data.SampleStream(gradients.DIGITS, 2, seed=0, owned=True)

  def moved(w, worker, number):
    for i in range(steps):
      start = (number * steps + i) * each
      x = samples.batch(worker, start, each)["label"]
      w = w - rate * np.mean(2 * x * (w * x - 1.0))
    return w

  own, anchors = [[], []], [0.0]
  now = [0.0, 0.0]
  for number in range(4):
    for worker in range(2):
      # What the reply to the push before the last has brought: of the worker
      # that pushes last, one merge more.
      seen = max(number - 1 - (worker == 0), 0)
      if seen:
        now[worker] = anchors[seen] - sum(own[worker][seen:])
      end = moved(now[worker], worker, number)
      own[worker].append(now[worker] - end)
      now[worker] = end
    anchors.append(anchors[-1] - (own[0][number] + own[1][number]) / 2)
  np.testing.assert_allclose(learner.model.params, anchors[-1], rtol=1e-5)


def failing(seed=0):
  outages = {
    "b": (cluster.Outage(1.5, 3.0), cluster.Outage(6.0, 7.0)),
    "c": (cluster.Outage(4.0, 5.5),),
  }
  return cluster.Cluster(
    tuple(
      cluster.Node(x, jitter=0.2, outages=outages.get(x, ())) for x in "abcd"
    )
  )


def make(rule, fragments):
  machines = failing()
  learner = _fragment_pair.fragment_pair(
    gradients.LOSS, INNER["adamw"], gradients.MODEL.params,
    data.SampleStream(gradients.DIGITS, 4, seed=0),
    workers=machines.names, fragments=fragments, outer=optax.sgd(0.7),
  )  # fmt: skip
  return server.Simulation(
    machines, rule, gradients.COSTS, learner=learner, detection_s=0.2
  )


def fit(run, seconds, **options):
  session = server.ClockSession(run)
  return server.ServerRun(session).fit(seconds, "seconds", every=2.0, **options)


def test_a_run_with_failures_learns():
  run = make(protocol(interval=4, fragments=2, ahead=1), 2)
  records = fit(run, 8.0)
  assert records[-1].train_loss < 0.7 * records[0].train_loss
  # What an unsent fragment had learned is not merged.
  assert 0 < run.state.merged_samples <= run.learner.server.samples


@pytest.mark.slow  # Compiles much: a few hundred arrays are saved and compared.
@pytest.mark.parametrize("ahead", (0, 1, 2))
def test_resumed_run_with_failures_ends_with_the_same_bits(ahead, tmp_path):
  rule = protocol(interval=4, fragments=2, ahead=ahead)
  whole = make(rule, 2)
  records = fit(whole, 4.0)
  for end in (2.0, 4.0):
    part = make(rule, 2)
    found = fit(part, end, checkpoints=tmp_path)
  chex.assert_trees_all_equal(part.save(), whole.save())
  assert [x.train_loss for x in found] == [x.train_loss for x in records]


def test_restarted_learner_keeps_nothing_of_discarded_pushes():
  found = []
  for steps_are_made in (True, False):
    samples = data.SampleStream(gradients.DIGITS, 1, seed=0, owned=True)
    learner = _fragment_pair.fragment_pair(
      gradients.LOSS, gradients.SGD, gradients.MODEL.params, samples,
      workers=["a"], outer=optax.sgd(0.7), fragments=2,
    )  # fmt: skip
    syncer, worker = learner.server, learner.workers["a"]

    def do(
      task, fragment, pulled, *, computes=True, syncer=syncer, worker=worker
    ):
      reply = server.Reply(
        "a", task, 0, 32, 4, fragment=fragment, pulled=pulled
      )
      more, payload = syncer.reply(reply)
      header = reply._asdict() | {"more": more}
      if computes:
        worker.receive(header, payload)
        syncer.push(task, *worker.compute(header))

    do(0, 0, None, computes=steps_are_made)
    do(1, 1, (), computes=steps_are_made)
    syncer.discard(0)
    syncer.discard(1)
    worker.restart()
    syncer._steps = [0]  # Schedules alone know of discarded steps.
    do(2, 1, None)
    # The first fragment is sent, of which nothing was pushed since.
    do(3, 0, (0,))
    for task in (2, 3):
      syncer.apply(server.Apply((task,), (1.0,), (0,)))
    found.append(learner.model.params)
  chex.assert_trees_all_equal(*found)


def test_restarted_learner_continues_its_schedules():
  worker = server.FragmentRunner(
    gradients.LOSS, optax.adam(lambda count: 0.01 / (1 + count)),
    gradients.MODEL.params, data.SampleStream(gradients.DIGITS, 1, seed=0),
    number=0, num_workers=1,
  )  # fmt: skip
  anchor = jax.tree.leaves(gradients.MODEL.params)
  state = worker.first_state(anchor, {}, steps=7).opt_state
  counts = [x.count for x in state if isinstance(x, optax.ScaleByScheduleState)]
  assert [int(x) for x in counts] == [7]
  assert int(state[0].count) == 0  # Of Adam's moments, which are new.


BAD = {
  "interval": lambda: protocol(interval=5, fragments=2),
  "fragments": lambda: protocol(fragments=0),
  "quorum": lambda: protocol(quorum=0.0),
  "grace": lambda: protocol(grace=-1.0),
  "ahead": lambda: protocol(ahead=3),
  "parts": lambda: protocol(fragments=2, parts=(1.0,)),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_arguments_raise(name):
  with pytest.raises(ValueError, match=f"`{name}` must"):
    BAD[name]()


def test_number_of_fragments_must_match_the_protocol():
  with pytest.raises(ValueError, match="`fragments` must be as many"):
    learn(protocol(fragments=2), [1.0], 1, fragments=1)
  assert transforms.fragments_of({"a": jnp.ones(2)}, 1) == (0,)


def test_staleness_counts_merges_of_the_fragment():
  rule = protocol(
    interval=2, fragments=2, quorum=0.5, grace=0.0,
    weighting=server.Weighting(staleness=lambda merges: 1 / (1 + merges)),
  )  # fmt: skip
  state = begin(rule, "ab")
  mine, other = (list(state.members[x].tasks) for x in "ab")
  for task in mine:  # Of both fragments: the model has two updates.
    (update,) = rule.receive(state, 1.0, push("a", task, 8))
    assert (update.weights, update.staleness) == ((1.0,), (0,))
  assert (state.version, state.merges) == (2, [1, 1])
  # One merge of its own fragment is later than what the other worker was sent.
  (update,) = rule.receive(state, 2.0, push("b", other[0], 8))
  assert (update.weights, update.staleness) == ((0.5,), (1,))
  # A task counts from the merges that were sent with it.
  (reply,) = rule.receive(state, 2.0, server.Pull("b"))
  (update,) = rule.receive(state, 3.0, push("b", reply.task, 8))
  assert (update.weights, update.staleness) == ((1.0,), (0,))


def test_each_push_of_a_merge_is_damped_by_its_own_staleness():
  rule = protocol(
    quorum=1.0, grace=0.0,
    weighting=server.Weighting(staleness=lambda merges: 1 / (1 + merges)),
  )  # fmt: skip
  state = begin(rule, "ab")
  a, b = (list(state.members[x].tasks) for x in "ab")
  rule.receive(state, 1.0, push("a", a[0]))
  rule.receive(state, 1.0, push("b", b[0]))
  # A task of the first merge, and two that were given before it.
  (fresh,) = rule.receive(state, 1.0, server.Pull("a"))
  rule.receive(state, 2.0, push("a", a[1]))
  rule.receive(state, 3.0, push("a", fresh.task))
  (update,) = rule.receive(state, 3.0, push("b", b[1]))
  assert (update.tasks, update.staleness) == (
    (a[1], fresh.task, b[1]),
    (1, 0, 1),
  )
  assert update.weights == pytest.approx((1 / 6, 1 / 3, 1 / 6))


def test_damped_pushes_do_not_shrink_statistics():
  """Weights of 1/4 move the parameters by half, and the mean stays a mean."""
  syncer = server.FragmentSyncer(
    {"w": jnp.array(8.0)}, workers=["a", "b"], outer=optax.sgd(1.0),
    model_state={"mean": jnp.array(0.0)},
  )  # fmt: skip
  pushes = [
    _merge.Pushed([jnp.array(2.0)], {"mean": jnp.array(x)}) for x in (3.0, 5.0)
  ]
  for task, worker in enumerate("ab"):
    syncer.reply(server.Reply(worker, task, 0, 8))
  syncer._pushes, syncer._losses = dict(enumerate(pushes)), {0: 0.0, 1: 0.0}
  syncer.apply(server.Apply((0, 1), (0.25, 0.25), (1, 1)))
  assert syncer.model.params["w"].item() == 8.0 - 1.0
  assert syncer.model_state["mean"].item() == 4.0


def runner(number=0, num=1, loss_fn=gradients.linear, **options):
  return server.FragmentRunner(
    loss_fn, optax.sgd(0.0), options.pop("params", {"w": jnp.array(8.0)}),
    data.SampleStream(gradients.DIGITS, num, seed=0),
    number=number, num_workers=num, **options,
  )  # fmt: skip


def test_steps_since_the_last_push_are_pushed_after_a_merge():
  worker = runner()
  state = worker.first_state([jnp.array(8.0)], {})
  state = state._replace(params={"w": jnp.array(7.75)})
  state = worker.merged(state, {0: [jnp.array(4.0)]}, {})
  assert state.params["w"].item() == 3.75
  assert worker.push_of(state, 0)[2][0].item() == 0.25


def test_loss_of_a_task_is_the_mean_over_its_samples():
  """Three samples in two steps: the second step has two of them."""

  def loss_fn(params, model_state, batch, key):
    labels = batch["label"].astype(jnp.float32)
    mean = training.masked_mean(labels, batch["mask"])
    return mean + 0.0 * params["w"], (model_state, {})

  worker = runner(loss_fn=loss_fn)
  worker._state = worker.first_state([jnp.array(8.0)], {})
  header = {
    "task": 0, "fragment": 0, "samples": 3, "passes": 2, "more": {"start": 0},
  }  # fmt: skip
  labels = data.SampleStream(gradients.DIGITS, 1, seed=0).batch(0, 0, 3)[
    "label"
  ]
  assert labels[0] != labels[1:].mean()
  assert float(worker.compute(header)[0]["loss"]) == pytest.approx(
    labels.mean()
  )


def test_every_fragment_of_every_learner_draws_numbers_of_its_own():
  codec = reducers.MessageCodec(codecs.Quantize(4, rounding="stochastic"))
  params = {"a": jnp.zeros(8), "b": jnp.zeros(8)}
  steps = [
    int(state.step)
    for seed in range(2)
    for number in range(3)
    for state in runner(
      number, 3, params=params, fragments=2, push_codec=codec, seed=seed
    )._push_states
  ]
  assert len(set(steps)) == 2 * 3 * 2


def test_window_follows_a_mean_of_measured_times():
  rule = protocol(quorum=0.5, grace=1.0)
  state = begin(rule)
  rule.receive(state, 4.0, push("a", 0, seconds=4.0))
  (timer,) = rule.receive(state, 8.0, push("c", 4, seconds=8.0))
  # Of four learners a new time counts a quarter: 0.75 * 4 s + 0.25 * 8 s.
  assert timer.after_s == pytest.approx(5.0)


def test_learner_that_steps_itself_needs_samples():
  with _refusals.refused("samples", "a source of batches"):
    server.FragmentRunner(
      lambda *_: None, optax.sgd(0.1), {"w": np.zeros(2)}, None,
      number=0, num_workers=2,
    )  # fmt: skip


def test_pushed_samples_count_in_one_merge():
  rule = protocol(quorum=1.0, grace=0.0)
  state = begin(rule, "ab")
  tasks = {x: list(state.members[x].tasks) for x in "ab"}
  for i, samples in enumerate((30, 10)):
    rule.receive(state, 1.0, push("a", tasks["a"][i], 30))
    (update,) = rule.receive(state, 1.0, push("b", tasks["b"][i], samples))
  # The second pushes are of (30, 10) samples in as many steps: 900 to 100.
  assert update.weights == pytest.approx((0.9, 0.1))
  assert state.merged_samples == 60.0 + 40.0


def test_late_push_in_step_is_part_of_its_fragments_next_merge():
  rule = protocol(fragments=2, quorum=0.5, grace=0.0, ahead=1, in_step=True)
  state = begin(rule, "ab")
  (second, update) = rule.receive(state, 1.0, push("a", 0))
  assert (second.fragment, update.tasks, state.version) == (1, (0,), 1)
  # Fragment 0's next merge is the third, and the second has to come first.
  assert _applied(rule.receive(state, 2.0, push("b", 1))) == []
  found = rule.receive(state, 3.0, push("a", second.task))
  assert _applied(found) == [(second.task,), (1,)]
  assert state.merges == [2, 1]


def _applied(actions):
  return [x.tasks for x in actions if isinstance(x, server.Apply)]


def test_member_that_has_missed_merges_goes_on_with_the_newest():
  protocol = server.DecoupledDiLoCo(
    batches=server.FixedBatches(8), interval=2, fragments=2, quorum=0.5,
    grace=0.0, ahead=2, in_step=True,
  )  # fmt: skip
  state, tasks = protocol.init(["a", "b"]), {"a": [], "b": []}

  def receive(message):
    replies = protocol.receive(state, 0.0, message)
    for reply in replies:
      if isinstance(reply, server.Reply):
        tasks[reply.worker].append(reply)

  for worker in "ab":
    receive(server.Pull(worker))
  for _ in range(3):
    receive(server.Push("a", tasks["a"].pop(0).task, 8, 1.0))
    receive(server.Pull("a"))
  assert state.version == 3
  receive(server.Push("b", tasks["b"].pop(0).task, 8, 1.0))
  # Merge 3 is of fragment 1; its own next turn would have been merge 2.
  assert tasks["b"][-1].fragment == 1


def test_learner_alone_has_its_speed_and_time_measured():
  rule = protocol(fragments=2, parts=[30, 10])
  assert (rule.part(0), rule.part(1)) == (0.75, 0.25)
  state = begin(rule, "a")
  for task, seconds in enumerate((4.0, 8.0)):
    rule.receive(state, 0.0, push("a", task, 32, seconds))
  # Half of the first measurement, and half of the second.
  assert state.members["a"].speed == 6.0
  assert state.stretch_s == 6.0


def test_defaults_are_half_a_quorum_and_half_a_window():
  rule = server.DecoupledDiLoCo(batches=server.FixedBatches(8))
  assert (rule.quorum, rule.grace, rule.interval) == (0.5, 0.5, 8)


def test_worker_that_leaves_while_it_waits_is_given_nothing():
  rule = protocol(**TOGETHER)
  state = begin(rule, "abc")
  rule.receive(state, 1.0, push("a", 0))
  assert rule.receive(state, 1.0, server.Pull("a")) == []
  assert rule.receive(state, 1.0, server.Leave("a")) == []
  assert rule.receive(state, 2.0, push("b", 1)) == []
  # Its push is merged, and it counts neither as merged nor as living.
  (update,) = rule.receive(state, 2.0, push("c", 2))
  assert update.tasks == (1, 2, 0)
  assert [x[1:] for x in state.shares] == [(2, 2)]


def test_leaving_completes_the_merges_of_the_others():
  rule = protocol(**TOGETHER)
  state = begin(rule, "abc")
  for worker, task in (("a", 0), ("b", 1)):
    assert rule.receive(state, 1.0, push(worker, task)) == []
  (update,) = rule.receive(state, 1.0, server.Leave("c"))
  assert update.tasks == (0, 1)


def test_waiting_workers_are_served_in_the_order_of_joining():
  rule = protocol(**TOGETHER)
  state = begin(rule, "abc")
  for worker, task in (("b", 1), ("a", 0)):
    rule.receive(state, 1.0, push(worker, task))
    rule.receive(state, 1.0, server.Pull(worker))
  _, *replies = rule.receive(state, 1.0, push("c", 2))
  assert [x.worker for x in replies] == ["a", "b"]


def test_push_counts_the_samples_and_steps_since_the_last_one():
  rule = protocol(quorum=1.0, grace=0.0, ahead=1, fragments=2)
  state = begin(rule, "a")
  rule.receive(state, 1.0, push("a", 0, samples=16))
  rule.receive(state, 1.0, server.Join("b"))
  for worker in "ab":
    (reply,) = rule.receive(state, 1.0, server.Pull(worker))
    assert reply.fragment == 1
  assert rule.receive(state, 2.0, push("a", 1, samples=16)) == []
  update, *_ = rule.receive(state, 2.0, push("b", 2, samples=16))
  # Two tasks of two steps against one: (32^2 / 4) : (16^2 / 2).
  assert update.weights == pytest.approx((2 / 3, 1 / 3))
