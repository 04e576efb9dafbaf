"""Replanning: when a plan changes, and when the change is undone."""

import dataclasses

import pytest

from jdist import cluster, pipeline
from tests.experiments import _loading

_loading.alone("layer_moves", "pipeline/layer_moves.py")
replanning = _loading.alone("replanning", "pipeline/replanning.py")

_COSTS = [pipeline.LayerCost(f"{i}", 1.0, 2.0) for i in range(6)]


class _Run:
  """A pipeline that follows proposals, on machines that may change."""

  def __init__(self, number=2, **options):
    machines = cluster.workers([1.0] * number)
    plan = pipeline.partition(_COSTS, machines)
    self.replanner = replanning.Replanner(plan, _COSTS, machines, **options)
    self.speeds = dict.fromkeys(machines.names, 1.0)
    self.extra_s = 0.0

  def seconds(self):
    plan = self.replanner.plan
    return [
      stage.compute_s / self.speeds[name]
      for stage, name in zip(plan.stages, plan.nodes, strict=True)
    ]

  def steps(self, number):
    found = []
    for _ in range(number):
      seconds = self.seconds()
      rate = 1 / (max(seconds) + self.extra_s)
      found.append(self.replanner.observe(seconds, rate))
    return found


def test_slow_machine_gives_a_layer_away():
  run = _Run(decay=0.0, patience=3)
  assert run.steps(5) == [None] * 5 and run.replanner.drift() == 0.0
  run.speeds["worker1"] = 0.5
  *before, proposal = run.steps(3)
  assert before == [None, None] and not proposal.returns
  assert proposal.plan.cuts == (4,) and proposal.plan.bottleneck_s == 12.0
  assert proposal.moves == (replanning.LayerMove(3, "worker1", "worker0"),)
  assert run.replanner._before is not None
  # The new plan reaches 1 / 12 samples a second instead of 1 / 18.
  assert run.steps(20) == [None] * 20 and run.replanner._before is None
  # The machine recovers, and gets its layer back.
  run.speeds["worker1"] = 1.0
  (proposal,) = [x for x in run.steps(3) if x]
  assert proposal.plan.cuts == (3,)
  assert proposal.moves == (replanning.LayerMove(3, "worker0", "worker1"),)


def test_replanning_comes_close_to_a_fresh_plan():
  run = _Run(3)
  run.steps(3)
  run.speeds["worker1"] = 1 / 3
  run.steps(30)
  fresh = pipeline.place(_COSTS, cluster.workers([1.0, 1 / 3, 1.0]))
  assert 0.9 * max(run.seconds()) <= fresh.bottleneck_s
  assert run.replanner._before is None


def test_noise_and_short_spikes_move_nothing():
  run = _Run(decay=0.0, patience=3)
  for step in range(30):
    run.speeds["worker1"] = 0.3 if step % 3 else 0.95
    assert run.steps(1) == [None]


def test_drift_follows_the_moving_average():
  run = _Run(decay=0.75, threshold=0.4)
  run.steps(1)
  run.speeds["worker0"] = 0.5
  run.steps(1)
  assert run.replanner.drift() == pytest.approx(0.25)  # From 9 to 11.25 s.
  run.steps(1)
  assert run.replanner.drift() == pytest.approx(0.4375)


def test_plan_that_is_no_faster_is_undone():
  run = _Run(decay=0.0, patience=2)
  run.speeds["worker1"] = 0.5
  first = [x for x in run.steps(2) if x]
  run.extra_s = 100.0  # Something else has become slow.
  none, back = run.steps(2)
  assert len(first) == 1 and none is None and back.returns
  assert back.plan.cuts == (3,) and run.replanner.patience == 4
  assert back.moves == (replanning.LayerMove(3, "worker0", "worker1"),)
  # Equal speeds cause no other plan.
  assert run.steps(20) == [None] * 20
  run.speeds["worker1"] = 0.25
  run.extra_s = 0.0
  *early, again = run.steps(4)
  assert early == [None] * 3 and again.plan.cuts == (5,)
  # The plan was faster, so the patience is the initial one again.
  run.steps(4)
  assert run.replanner.patience == 2 and run.replanner._before is None


def test_small_gain_moves_nothing():
  # The other cut takes 12 seconds instead of 13.5, and gains a ninth.
  for gain, moved in ((0.05, True), (0.2, False)):
    run = _Run(decay=0.0, patience=1, gain=gain)
    run.speeds["worker1"] = 2 / 3
    assert (run.steps(1) != [None]) == moved
    assert run.replanner.drift() == 0.0


def test_machines_change_their_order_if_that_is_better():
  heavy = dataclasses.replace(_COSTS[0], backward_s=9.0)
  costs = [heavy, _COSTS[1]]
  machines = cluster.workers([4.0, 1.0])
  plan = pipeline.partition(costs, machines)
  found = []
  for reorder in (True, False):
    replanner = replanning.Replanner(
      plan, costs, machines, patience=1, reorder=reorder
    )
    found.append(replanner.observe([10.0, 3 / 4], 1.0))
  assert found[0].plan.nodes == ("worker1", "worker0")
  assert len(found[0].moves) == 2 and found[1] is None


def test_another_order_must_gain_as_much_as_a_move():
  # A moved layer leaves 11.7 seconds at the bottleneck, the other order 11.4.
  costs = [
    pipeline.LayerCost(name, 1.0, backward_s)
    for name, backward_s in (("a", 4.0), ("b", 5.0), ("c", 4.7))
  ]
  machines = cluster.workers([1.0, 1.0])
  plan = pipeline.partition(costs, machines)
  for gain, number in ((0.05, 1), (0.01, 3)):
    replanner = replanning.Replanner(
      plan, costs, machines, patience=1, gain=gain
    )
    proposal = replanner.observe([22.0, 5.7], 1.0)
    assert len(proposal.moves) == number


def test_wrong_measurements_raise():
  run = _Run()
  for wrong in ([1.0], [1.0, 0.0]):
    with pytest.raises(ValueError, match="each of the 2 stages"):
      run.replanner.observe(wrong, 1.0)


def test_plan_that_recovers_part_of_the_loss_stays():
  # The throughput is 100 samples a second at first, 25 once a machine is slow,
  # and 32 by the new plan: below the mean of the first two, above the second.
  machines = cluster.workers([1.0, 1.0])
  plan = pipeline.partition(_COSTS, machines)
  replanner = replanning.Replanner(plan, _COSTS, machines)
  for _ in range(5):
    assert replanner.observe([9.0, 9.0], 100.0) is None
  *_, proposal = (replanner.observe([36.0, 9.0], 25.0) for _ in range(3))
  assert proposal is not None and not proposal.returns
  for _ in range(3):
    assert replanner.observe([24.0, 12.0], 32.0) is None
  assert replanner._before is None and replanner.patience == 3
