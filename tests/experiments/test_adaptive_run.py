"""Layers move while a pipeline trains, by seconds of a given clock."""

import jax
import numpy as np
import optax
import pytest

from jdist import cluster, pipeline
from tests.experiments import _loading
from tests.pipeline.processes._threads import in_threads
from tests.pipeline.runtime import _small_models as small
from tests.pipeline.runtime import _training

_loading.alone("layer_moves", "pipeline/layer_moves.py")
replanning = _loading.alone("replanning", "pipeline/replanning.py")

_MICRO = 2
_COSTS = [pipeline.LayerCost(f"{i}", 1.0, 2.0) for i in range(4)]
_MACHINES = cluster.workers([1.0, 1.0])
_TABLE = pipeline.make_table("1f1b", 2, 2)


def _batches(number):
  found = small.batches(number, 1, _MICRO * 2)
  return _training.of_first(found)


class _Clocked(pipeline.StageProcess):
  """A process whose timeline follows given speeds."""

  def __init__(self, plan, peers, clock):
    super().__init__(
      pipeline.cut_layers(small.layers(), plan.cuts),
      small.loss,
      _TABLE,
      jax.tree.map(lambda x: x[:_MICRO], _batches(1)[0]),
      peers=peers,
      inputs="x",
      timeline=True,
    )
    self._plan, self._clock = plan, clock

  def trace(self):
    found = super().trace()
    assert len(found) == len(list(_TABLE))
    speeds, extra_s = self._clock
    times = pipeline.simulate(
      _TABLE,
      [x.scaled(1 / y) for x, y in zip(self._plan.stages, speeds, strict=True)],
      _MACHINES,
    )
    longer = cluster.Trace(times.trace.spans)
    longer.add("other", "B1/0", 0.0, times.makespan_s + extra_s)
    return longer


def _train(peers, phases, moved):
  """Trains through phases of steps and clock; returns cuts, losses, ..."""
  clock = [(1.0, 1.0), 0.0]
  optimizer = optax.sgd(0.1, momentum=0.9)
  plan = pipeline.partition(_COSTS, _MACHINES)
  replanner = replanning.Replanner(
    plan, _COSTS, _MACHINES, patience=2, decay=0.0, reorder=False
  )
  if not moved:
    phases = [(sum(x for x, _, _ in phases), (1.0, 1.0), 0.0)]
  run = replanning.AdaptiveRun(
    lambda plan: _Clocked(plan, peers, clock), replanner, optimizer
  )
  state, cuts, losses = run.init_state(seed=1), [], []
  batches = iter(_batches(sum(x for x, _, _ in phases)))
  for steps, speeds, extra_s in phases:
    clock[:] = speeds, extra_s
    for _ in range(steps):
      state, metrics = run.run(state, [next(batches)])
      cuts.append(run.plan.cuts[0])
      losses.append(metrics[0]["loss"])
  whole = jax.device_get(run.process.gather(state))
  return cuts, losses, whole, [(x, y.returns) for x, y in run.history]


def _both(phases):
  """Returns cuts and history, after comparing with undisturbed runs."""
  one, other = in_threads(2, lambda peers: _train(peers, phases, True))
  cuts, losses, whole, history = one
  assert (cuts, losses, history) == (other[0], other[1], other[3])
  _, wanted, model, none = in_threads(
    2, lambda peers: _train(peers, phases, False)
  )[0]
  assert none == []
  np.testing.assert_allclose(losses, wanted, rtol=1e-6)
  assert small.error(whole, model) < 1e-6
  return cuts, history


@pytest.mark.slow
def test_layers_move_from_a_slow_machine_without_losing_an_update():
  phases = [(3, (1.0, 1.0), 0.0), (6, (1.0, 0.4), 0.0)]
  cuts, history = _both(phases)
  # Two measurements must agree; the third layer is then on the first machine.
  assert cuts == [2] * 4 + [3] * 5
  assert history == [(5, False)]


@pytest.mark.slow
def test_layers_move_back_if_throughput_does_not_rise():
  phases = [(3, (1.0, 1.0), 0.0), (2, (1.0, 0.4), 0.0), (5, (1.0, 0.4), 99.0)]
  cuts, history = _both(phases)
  # The first run with new cuts compiles and does not count.
  assert cuts == [2] * 4 + [3] * 3 + [2] * 3
  assert history == [(5, False), (8, True)]


def test_seconds_are_medians_of_both_passes():
  trace = cluster.Trace()
  for name, start, end in (
    ("F0/0", 0, 1), ("F1/0", 1, 2), ("B0/0", 5, 7), ("B1/0", 7, 99),
    ("F0/1", 1, 4), ("F1/1", 4, 7), ("B0/1", 7, 8), ("B1/1", 8, 9),
    ("U/0", 99, 200),
  ):  # fmt: skip
    trace.add("device", name, start, end)
  found = replanning.stage_seconds(_TABLE, trace)
  assert found == [1 + 47, 3 + 1]


def test_throughput_does_not_depend_on_clock_offsets():
  def longest(ahead_s):
    trace = cluster.Trace()
    trace.add("device 0", "F0", 0.0, 1.0)
    trace.add("device 0", "B0", 4.0, 6.0)
    trace.add("device 1", "F0/1", ahead_s + 1.0, ahead_s + 2.0)
    trace.add("device 1", "B0/1", ahead_s + 2.0, ahead_s + 4.0)
    return replanning._longest_s(trace)

  assert longest(0.0) == longest(86400.0) == 6.0
