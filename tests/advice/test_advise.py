"""The equation of advice by hand, and measurements of a model."""

import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import advice, cluster, codecs, methods, reducers, training
from jdist.advice import _advise

SGD = optax.sgd(0.1, momentum=0.9)
NOT_LATE = advice.MethodCosts(1, (0.1, 0.1, 0.1), (0.0, 0.0, 0.0), 1e6, 0, 0)


def loss_fn(params, model_state, batch, key):
  del key
  return jnp.mean((batch @ params["w"]) ** 2), (model_state, {})


def advise(**changes):
  int4 = jdist.Compression(codecs.Quantize(4), reducers.ErrorFeedback())
  late = jdist.transforms.Delayed(stream=jdist.transforms.Stream())
  given = {
    "loss_fn": loss_fn,
    "params": {"w": jnp.ones((64, 64))},
    "batch": jnp.ones((8, 64)),
    "chains": {
      "ssgd": (lambda axis: methods.ssgd(SGD, axis=axis), 1),
      "int4": (
        lambda axis: methods.ssgd(SGD, axis=axis, compression=int4),
        1,
      ),
      "local": (lambda axis: methods.local_sgd(SGD, 4, axis=axis), 4),
      "streamed": (
        lambda axis: methods.local_sgd(SGD, 4, axis=axis, overlap=late),
        4,
      ),
    },
    "link": cluster.Link(1e6),
    "num_workers": 4,
    "optimizer": SGD,
    "limit_s": 1e-3,
  }
  return advice.advise(**given | changes)


def test_step_is_computation_and_what_is_not_hidden():
  link = cluster.Link(8e6, latency_s=0.01)  # A megabyte takes a second.
  costs = advice.MethodCosts(4, (0.1, 0.2, 0.3), (0.02,) * 3, 1e6, 10, 3)
  found = advice.Advice({"late": costs}, link)
  # A round sends for 1.1 s, of which three steps hide 0.6 s.
  assert found.exposed_s("late") == pytest.approx((1.1 - 0.6) / 4)
  assert found.seconds("late")[1] == pytest.approx(0.2 + 0.02 + 0.125)
  # On a machine of half the speed they hide all of it.
  slow = advice.Advice({"late": costs}, link, (2.0,))
  assert slow.seconds("late")[1] == pytest.approx(0.44)
  # Workers as fast as this one are there as well.
  fast = advice.Advice({"late": costs}, link, (0.5, 0.25))
  assert fast.slowdown == 1.0


@pytest.mark.parametrize(
  ("hidden", "mean_s"), [(0, 0.35), (2, 0.35), (2, 0.1), (5, 0.35), (5, 0.16)]
)
def test_measured_round_is_what_is_predicted_on_its_link(hidden, mean_s):
  """A round of four steps sends for 0.8 s by the link, under steps of 0.2 s."""
  link = cluster.Link(8e6)
  costs = advice.MethodCosts(4, (0.2,) * 3, (0.01,) * 3, 0.8e6, 0, hidden)
  found = _advise._as_sent(costs, mean_s - 0.21, link.send_s(0.8e6), 1.0)
  said = advice.Advice({"one": found}, link).seconds("one")[1]
  # No step is shorter than without a method.
  assert said == pytest.approx(max(mean_s, 0.2))
  if hidden == 0:
    # A round waits for 4 (0.35 - 0.21) s.
    assert found.send_ratio == pytest.approx(0.56 / 0.8)
    fast = cluster.Link(16e6)
    assert found.send_s(fast) == pytest.approx(0.28)
  if hidden == 5:
    # All is hidden: the thread that sends takes time from the step.
    assert found.send_ratio == 1
    assert found.extra_s[0] == pytest.approx(mean_s - 0.2)


def test_interval_is_wider_than_the_profile_but_what_pays_is_not():
  shorter = NOT_LATE._replace(step_s=(0.1,) * 3, round_bytes=0.95e6)
  found = advice.Advice(
    {"base": NOT_LATE, "shorter": shorter}, cluster.Link(8e6)
  )
  # A step of a tenth of a second sends for a second.
  assert found.seconds("base") == pytest.approx((1.023, 1.1, 1.177))
  assert found.pays("shorter") and found.best == "shorter"
  # Its median is shorter, too, but one of its blocks was as long as the base's.
  unsure = shorter._replace(step_s=(0.05, 0.1, 0.2))
  found = advice.Advice({"base": NOT_LATE, "unsure": unsure}, cluster.Link(8e6))
  assert found.seconds("unsure")[1] < found.seconds("base")[1]
  assert not found.pays("unsure") and found.best == "base"
  # A stall of 2 s lengthens the same block of both.
  both = [x._replace(step_s=(0.1, 0.1, 2.1)) for x in (NOT_LATE, shorter)]
  costs = dict(zip(("base", "shorter"), both, strict=True))
  found = advice.Advice(costs, cluster.Link(8e6))
  assert found.pays("shorter") and found.best == "shorter"


@pytest.mark.parametrize(
  ("interval", "late"), [(1, 1), (2, 1), (4, 1), (8, 2), (16, 5), (32, 6)]
)
def test_mean_is_as_late_as_hides_it_but_a_third_of_a_round(interval, late):
  # A megabyte and ten messages take 1.1 s, six steps of 0.2 s.
  costs = advice.MethodCosts(interval, (0.2,) * 3, (0.0,) * 3, 1e6, 10, 0)
  found = advice.Advice({"late": costs}, cluster.Link(8e6, latency_s=0.01))
  assert found.delay_steps("late") == late


def test_bandwidths_are_where_times_meet():
  costs = {
    "ssgd": NOT_LATE,
    "int4": advice.MethodCosts(1, (0.1,) * 3, (0.05,) * 3, 1e5, 0, 0),
    "worse": advice.MethodCosts(1, (0.1,) * 3, (0.05,) * 3, 2e6, 0, 0),
    "free": advice.MethodCosts(1, (0.1,) * 3, (0.0,) * 3, 0.0, 0, 0),
  }
  found = advice.Advice(costs, cluster.Link(1e9))
  # 8 (1e6 - 1e5) bits take the 0.05 s that the codec takes.
  assert found.pays_below("int4") == pytest.approx(8 * 9e5 / 0.05, rel=1e-4)
  assert found.pays_below("worse") is None
  assert found.pays_below("free") > 1e14
  # Half of a step is 0.1 s of messages.
  assert found.pays_below("ssgd") is None
  rate = found.rate_for("ssgd", 0.5)
  assert rate == pytest.approx(8e7, rel=1e-4)
  # The lowest rate is one at which it is reached.
  assert found.seconds("ssgd", cluster.Link(rate))[1] <= 0.2
  assert found.rate_for("int4", 0.9) is None
  assert found.rate_for("free", 0.99) == 0.0
  assert (found.best, found.pays("int4")) == ("free", False)


def test_it_says_no_on_a_fast_link_and_yes_on_a_slow_one():
  slow = advise()
  assert slow.pays("local")
  assert slow.best != "ssgd"
  fast = advice.Advice(slow.costs, cluster.Link(math.inf))
  assert not any(map(fast.pays, ("int4", "local")))


def test_bytes_are_those_of_the_traced_updates():
  costs = advise().costs
  sent = 2 * 3 / 4 * 4 * 64 * 64
  for name in ("ssgd", "local", "streamed"):
    assert costs[name].round_bytes == pytest.approx(sent, rel=0.01), name
  assert costs["int4"].round_bytes < sent / 7
  hidden = {name: x.hidden_steps for name, x in costs.items()}
  assert hidden == {"ssgd": 0, "int4": 0, "local": 0, "streamed": 4}
  assert all(np.isfinite(x.extra_s).all() for x in costs.values())


def test_a_process_of_a_run_measures_by_itself(monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  chains = {"ssgd": (lambda axis: methods.ssgd(SGD, axis=axis), 1)}
  assert advise(chains=chains).step_s > 0


def test_processes_predict_what_a_round_takes_on_their_link(monkeypatch):
  """Workers of one process stand for those of two: the calls are the same."""
  workers, sent, after = jdist.workers(2), [], _advise._as_sent
  monkeypatch.setattr(
    _advise, "_as_sent", lambda *given: sent.append(given) or after(*given)
  )
  chains = {
    "ssgd": (lambda axis: methods.ssgd(SGD, axis=axis), 1),
    "local": (lambda axis: methods.local_sgd(SGD, 4, axis=axis), 4),
  }
  given = {"chains": chains, "num_workers": 2, "workers": workers}
  found = advise(**given, limit_s=60.0)
  for (name, costs), (_, waits_s, sent_s, _) in zip(
    found.costs.items(), sent, strict=True
  ):
    assert sent_s == found.link.send_s(costs.round_bytes, costs.round_messages)
    assert found.exposed_s(name) == pytest.approx(max(0.0, waits_s)), name
  # Messages that take longer than `limit_s` are not sent.
  slow = advise(**given, link=cluster.Link(1e3))
  assert {costs.send_ratio for costs in slow.costs.values()} == {1}
  assert len(sent) == 2


def _trains(rounds):
  """Returns whether whole steps are taken, not a method's own updates."""
  return rounds._team.substrate != "vmap"


def test_what_a_step_waits_is_left_of_its_measured_time(monkeypatch):
  """A step takes 0.3 s alone, and 0.9 s with what a method adds and sends."""

  def seconds(rounds):
    rounds.controls = [jdist.transforms.Control()] * rounds.interval
    return 0.9 if _trains(rounds) else 0.1

  monkeypatch.setattr(_advise._Rounds, "seconds", seconds)
  monkeypatch.setattr(_advise, "_seconds", lambda *given: 0.3)
  chains = {"ssgd": (lambda axis: methods.ssgd(SGD, axis=axis), 1)}
  found = advise(
    chains=chains, num_workers=2, workers=jdist.workers(2), limit_s=60.0
  )
  assert found.seconds("ssgd")[1] == pytest.approx(0.9)
  assert found.exposed_s("ssgd") == pytest.approx(0.9 - 0.3)


@pytest.mark.parametrize("streamed", [False, True])
def test_processes_train_by_each_method(monkeypatch, streamed):
  """The steps that are timed are those of `training.make_step`."""
  workers, made = jdist.workers(2), []
  monkeypatch.setattr(_advise, "_TRIED_S", 0.01)
  late = jdist.transforms.Delayed(stream=jdist.transforms.Stream())

  def method(axis):
    overlap = late if streamed else None
    return methods.local_sgd(SGD, 2, axis=axis, overlap=overlap)

  begin = _advise._Rounds.__init__
  monkeypatch.setattr(
    _advise._Rounds,
    "__init__",
    lambda rounds, *given: made.append(rounds) or begin(rounds, *given),
  )
  given = {"w": jnp.full((4, 4), 0.1)}
  advise(
    params=given, batch=jnp.ones((2, 4)), chains={"local": (method, 2)},
    num_workers=2, workers=workers, limit_s=60.0,
  )  # fmt: skip
  (state,) = (x._state for x in made if _trains(x))
  optimizer = method(workers.axis)
  step = workers.jit(training.make_step(loss_fn, optimizer, axis=workers.axis))
  own = training.init_state(workers, optimizer, given)
  for _ in range(int(workers.view(state.step))):
    own, _ = step(own, workers.replicate(jnp.ones((2, 4))))
  assert int(workers.view(state.step)) >= 64
  np.testing.assert_allclose(
    workers.view(state.params)["w"], workers.view(own.params)["w"], atol=1e-6
  )


def test_sums_that_depend_on_each_other_are_messages_of_their_own():
  # A ring of four sends six messages: PowerSGD means one factor by the other.
  found = advise(
    chains={
      "ssgd": (lambda axis: methods.ssgd(optax.sgd(0.1), axis=axis), 1),
      "powersgd": (lambda axis: methods.powersgd(optax.sgd(0.1), axis=axis), 1),
    }
  )
  assert [x.round_messages for x in found.costs.values()] == [6, 12]


@pytest.mark.parametrize(
  "changes",
  [
    {"num_workers": 1},
    {"slowdown": 0.5},
    {"limit_s": 0},
    {"chains": {}},
    {"chains": {"ssgd": (lambda axis: methods.ssgd(SGD, axis=axis), 0)}},
    {"chains": {"ssgd": (lambda axis: methods.ssgd(SGD, axis=axis), 10**8)}},
    {"optimizer": 0.1},
    {"link": 100},
    {"loss_fn": None},
  ],
  ids=lambda x: next(iter(x)),
)
def test_wrong_argument_is_named(changes):
  (name,) = changes
  with pytest.raises(ValueError, match=f"`{name}`"):
    advise(**changes)


def test_a_link_within_one_process_is_refused():
  with pytest.raises(
    ValueError, match="`workers` must be in several processes"
  ):
    advice.measure_link(jdist.workers(2, substrate="vmap"))


def test_means_grow_on_a_link_that_is_too_fast_for_them(monkeypatch):
  """A mean of 4 KiB takes a microsecond, and its program two milliseconds."""
  workers, sizes = jdist.workers(2), []
  monkeypatch.setattr(jax, "process_count", lambda: 2)

  def seconds(function, given, count):
    sizes.append(given[0].nbytes // 2)
    return 2e-3 + sizes[-1] / 4e9

  monkeypatch.setattr(_advise, "_seconds", seconds)
  found = advice.measure_link(workers, num_bytes=2**12, repeats=1)
  assert found.bandwidth_bits_per_s == pytest.approx(4e9 * 8, rel=1e-3)
  # From there on the bytes take twice as long as the program.
  assert 4e9 * 2e-3 * 2 <= max(sizes) < 4 * 4e9 * 2e-3 * 2
  assert sizes.count(max(sizes)) == 2


def test_a_link_is_measured_between_workers():
  with pytest.raises(ValueError, match="`workers` must be"):
    advice.measure_link(4)


def test_branch_of_a_round_counts_once():
  """The device ends the round, in a conditional of each of four steps."""
  found = _advise._sent(
    lambda axis: methods.local_sgd(SGD, 4, axis=axis),
    [jdist.transforms.Control()] * 4, {"w": jnp.ones((64, 64))}, {}, 4,
  )  # fmt: skip
  assert found == (2 * 3 / 4 * 4 * 64 * 64, 6)


def test_link_of_four_workers_carries_the_bytes_of_a_ring(monkeypatch):
  workers = jdist.workers(4)
  monkeypatch.setattr(jax, "process_count", lambda: 4)

  def seconds(function, given, count):
    # Each sends 2 (N - 1) / N of its array, at a gigabyte a second.
    return 1e-3 + given[0].nbytes / 4 * 2 * 3 / 4 / 1e9

  monkeypatch.setattr(_advise, "_seconds", seconds)
  found = advice.measure_link(workers, num_bytes=2**22, repeats=1)
  assert found.bandwidth_bits_per_s == pytest.approx(8e9, rel=1e-3)


def test_a_slow_machine_makes_no_link_slower():
  """Its computation takes twice as long, and the messages as long as before."""
  costs = advice.MethodCosts(4, (0.2,) * 3, (0.0,) * 3, 1e6, 10, 0)
  link = cluster.Link(8e6, latency_s=0.01)
  slow = advice.Advice({"one": costs}, link, (2.0,))
  assert slow.seconds("one")[1] == pytest.approx(0.4 + 1.1 / 4)


def test_batch_statistics_are_messages_of_a_round():
  """A vector of 1,000 means is sent with each mean of 4,096 gradients."""
  chains = {
    "ssgd": (lambda axis: methods.ssgd(SGD, axis=axis), 1),
    "local": (lambda axis: methods.local_sgd(SGD, 4, axis=axis), 4),
  }
  state = {"mean": jnp.ones(1000)}
  costs = advise(chains=chains, model_state=state).costs
  for name, one in costs.items():
    assert one.round_bytes == 2 * 3 / 4 * 4 * (4096 + 1000), name


@pytest.mark.parametrize(("own_s", "slowdown"), [(0.3, 4.0), (1.2, 1.0)])
def test_processes_measure_the_slowest_of_them(monkeypatch, own_s, slowdown):
  """Another process takes 1.2 s for a step, and all wait for it."""

  def seconds(rounds):
    rounds.controls = [jdist.transforms.Control()] * rounds.interval
    return 1.2 + 0.5 if _trains(rounds) else 0.0

  monkeypatch.setattr(_advise._Rounds, "seconds", seconds)
  monkeypatch.setattr(_advise, "_seconds", lambda *given: own_s)
  gathered = _advise._gathered
  monkeypatch.setattr(
    _advise,
    "_gathered",
    lambda *given: np.maximum(gathered(*given), [0.0, 1.2]),
  )
  chains = {"ssgd": (lambda axis: methods.ssgd(SGD, axis=axis), 1)}
  found = advise(
    chains=chains, num_workers=2, workers=jdist.workers(2), limit_s=1e3
  )
  assert found.slowdown == pytest.approx(slowdown)
  assert found.slowdowns == pytest.approx((1.0, 1.2 / own_s))
  assert found.exposed_s("ssgd") == pytest.approx(0.5)
  assert found.seconds("ssgd")[1] == pytest.approx(1.7)
  with pytest.raises(ValueError, match="`slowdown` must be left out"):
    advise(workers=jdist.workers(2), slowdown=2.0)


def test_half_of_the_time_is_left_for_messages(monkeypatch):
  """Each measurement of a step takes a second of the clock."""
  now_s, sent = [0.0], []
  monkeypatch.setattr(_advise.time, "monotonic", lambda: now_s[0])

  step_s = [1.0]

  def alone(*given):
    now_s[0] += 1.0
    return step_s[0]

  def seconds(rounds):
    rounds.controls = [jdist.transforms.Control()] * rounds.interval
    if _trains(rounds):
      sent.append(rounds.interval)
    return 1.0

  monkeypatch.setattr(_advise._Rounds, "seconds", seconds)
  monkeypatch.setattr(_advise, "_seconds", alone)
  chains = {
    "ssgd": (lambda axis: methods.ssgd(SGD, axis=axis), 1),
    "local": (lambda axis: methods.local_sgd(SGD, 4, axis=axis), 4),
  }
  given = {"chains": chains, "num_workers": 2, "link": cluster.Link(1e9)}

  def blocks(limit_s, workers=None):
    now_s[0] = 0.0
    sent.clear()
    found = advise(limit_s=limit_s, workers=workers, **given)
    return len(found.costs["ssgd"].step_s)

  assert (blocks(8.0), blocks(60.0)) == (6, 9)
  # Half of 16 s; in the other half no method has time for five rounds.
  workers = jdist.workers(2)
  assert (blocks(16.0, workers), sent) == (6, [])
  # Half of 60 s is for 29 steps, each with a short message, and what these
  # leave for seven rounds of four steps; two rounds are compiled before.
  assert blocks(120.0, workers) == 9
  assert (sent.count(1), sent.count(4)) == (2 + 29, 2 + 7)
  # A step takes 1 ms, and 0.131 ms for its message: 64 are too few, and as many
  # are taken as fit into 1.5 s.
  step_s[0] = 1e-3
  assert blocks(120.0, workers) == 9
  assert (sent.count(1), sent.count(4)) == (2 + 1327 + 2, 2 + 364 + 2)


def test_messages_take_the_median_of_turns(monkeypatch):
  """Each fourth step takes 0.5 s longer, and one of them 100 s."""
  number = [0]

  def seconds(rounds):
    rounds.controls = [jdist.transforms.Control()]
    if not _trains(rounds):
      return 0.0
    number[0] += 1
    return 100.0 if number[0] == 20 else 1.0 + 0.5 * (number[0] % 4 == 0)

  monkeypatch.setattr(_advise._Rounds, "seconds", seconds)
  monkeypatch.setattr(_advise, "_seconds", lambda *given: 0.9)
  chains = {"ssgd": (lambda axis: methods.ssgd(SGD, axis=axis), 1)}
  found = advise(
    chains=chains, num_workers=2, workers=jdist.workers(2), limit_s=1e3
  )
  # In five turns of 64 steps there are 3 of 13 slow steps, twice, 3 of 12, 4 of
  # 13, and the longest one.
  assert found.exposed_s("ssgd") == pytest.approx(0.1 + 0.5 * 3 / 12)


def test_seconds_of_a_call_are_the_mean_of_all_calls(monkeypatch):
  times = iter([10.0, 12.0])
  monkeypatch.setattr(_advise.time, "perf_counter", lambda: next(times))
  calls = []
  assert _advise._seconds(calls.append, ("given",), 4) == 0.5
  assert calls == ["given"] * 4


def test_best_method_has_the_shortest_median_step():
  """And not the one whose slow steps are the shortest."""
  base, steady = ([x] * 3 for x in (1.0, 0.12))
  costs = {
    name: advice.MethodCosts(1, step_s, (0.0,) * 3, 0.0, 0, 0)
    for name, step_s in (
      ("base", base), ("steady", steady), ("uneven", [0.1, 0.1, 0.3]),
    )
  }  # fmt: skip
  found = advice.Advice(costs, cluster.Link(8e6))
  assert found.pays("steady") and found.pays("uneven")
  assert found.best == "uneven"


def test_latency_is_that_of_a_message_of_a_ring(monkeypatch):
  """A program starts in a second, and each mean takes 6 messages of 2 ms."""
  workers, programs = jdist.workers(4), {}
  monkeypatch.setattr(jax, "process_count", lambda: 4)

  def seconds(function, given, count):
    means = 8 * programs.setdefault(function, len(programs)) + 1
    return 1.0 + means * 6 * 2e-3 + given[0].nbytes

  monkeypatch.setattr(_advise, "_seconds", seconds)
  found = advice.measure_link(workers, num_bytes=2**12, repeats=1)
  assert found.latency_s == pytest.approx(2e-3, rel=1e-3)


def test_updates_of_all_workers_on_a_device_take_turns(monkeypatch):
  """A round of a second, of four workers on this device."""
  ticks = itertools.count()
  clock = types.SimpleNamespace(
    perf_counter=lambda: float(next(ticks)), monotonic=lambda: 0.0
  )
  monkeypatch.setattr(_advise, "time", clock)
  monkeypatch.setattr(_advise, "_seconds", lambda *given: 1.0)
  chains = {"local": (lambda axis: methods.local_sgd(SGD, 4, axis=axis), 4)}
  # In a round of four steps, and in one of a single step without a method.
  found = advise(chains=chains).costs["local"]
  assert found.extra_s == pytest.approx([1 / 16 - 1 / 4] * len(found.extra_s))
