"""The programs that a run may need are those that it chooses."""

import itertools
from typing import NamedTuple

import numpy as np
import optax
import pytest

from jdist import collectives, methods, training, transforms
from jdist.training.loop import _programs
from tests.training import _tiny


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("steps", [(), (1,), (2, 4), (1, 2, 4, 8, 16)])
@pytest.mark.parametrize("due", [0, 1, 3, 5])
def test_every_place_has_its_program(due, steps, host):
  programs = _programs.Programs(steps, host)
  known = [choice.control for choice in programs.needed(due, undelayed=False)]
  assert len(known) == len(set(known))
  used = set()
  for interval in range(1, 40):
    window = min(interval, due) or interval
    nothing = [0] if due else []
    for now, offset in itertools.product([window, *nothing], range(interval)):
      if now or offset < window:
        place = np.array([now, offset, interval])
        used.add(programs.choose(place).control)
  assert used == set(known)
  first, *others = programs.needed(due, undelayed=True)
  assert first.control == programs.choose(np.array([-1, 0, 1])).control
  assert {choice.control for choice in others} <= set(known)


def test_device_decides_without_a_host():
  control, idle = _programs.Choice()
  assert control == transforms.Control(
    round_ends=None, arrives=None, stream_steps="fixed", drain=False,
    fragments=None,
  )  # fmt: skip
  assert not idle


def test_mean_may_be_applied_within_a_round():
  known = _programs.Programs((), True).needed(1, undelayed=False)
  said = {(c.control.round_ends, c.control.arrives) for c in known}
  assert said == set(itertools.product([False, True], repeat=2))


SENT_WHOLE = transforms.Control(stream_steps=None)


@pytest.mark.parametrize(
  ("steps", "host", "places", "wanted", "idle"),
  [
    ((), False, [(4, 0, 4), (4, 3, 4)], None, False),
    ((), True, [(4, 0, 4), (4, 3, 4)], [(False, "fixed"), (True, "fixed")], 0),
    ((1, 2), False, [(4, 0, 4), (4, 3, 4)], [(None, 2), (None, None)], 0),
    ((1, 2), False, [(4, 2, 4), (4, 3, 4)], [(None, None)] * 2, 1),
    ((2,), True, [(3, 1, 5), (1, 4, 5)], [(False, 2), (True, None)], 0),
  ],
)
def test_each_fragment_is_chosen_by_its_own_place(
  steps, host, places, wanted, idle
):
  found = _programs.Programs(steps, host).choose(np.array(places))
  each = found.control.fragments
  if each is not None:
    each = [(one.round_ends, one.stream_steps) for one in each]
  assert each == wanted
  assert found.idle == bool(idle)


def test_fragments_that_are_sent_when_due_are_sent_whole():
  assert _programs.Programs(()).fragments_at_once(2) == _programs.Choice()
  found = _programs.Programs((1, 2)).fragments_at_once(3)
  assert found.control.fragments == (SENT_WHOLE,) * 3
  assert not found.idle


def test_metrics_of_other_processes_are_left_out():
  class Shard(NamedTuple):
    data: np.ndarray

  class Metrics(NamedTuple):
    addressable_shards: list
    is_fully_addressable: bool = False

  parts = [np.array([[1.0, 2.0]]), np.array([[3.0, 4.0], [5.0, 6.0]])]
  found = _programs.local_rows(Metrics([Shard(x) for x in parts]))
  assert found.tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def test_fingerprints_name_what_all_workers_share():
  team = collectives.workers(2, substrate="vmap")
  optimizer = methods.local_sgd(optax.sgd(0.1, momentum=0.9), 2, axis=team.axis)
  state = training.init_state(team, optimizer, _tiny.params())
  step = training.make_step(_tiny.loss_fn, optimizer, axis=team.axis)
  programs = _programs.CompiledStep(team, step, 1)

  def with_anchor(name):
    anchor = state.opt_state.anchor
    anchor = anchor | {name: anchor[name] + 1}
    sync = state.opt_state.sync._replace(anchor=anchor)
    return state._replace(opt_state=state.opt_state._replace(sync=sync))

  found = programs.fingerprints(state)
  # Parameters and momenta are each worker's own.
  assert not any(".params" in name or "inner" in name for name in found)
  for leaf in ("bias", "kernel", "scale"):
    other = programs.fingerprints(with_anchor(leaf))
    assert found.keys() == other.keys()
    changed = [name for name in found if found[name] != other[name]]
    assert changed == [f"`opt_state.sync.anchor.{leaf}`"]
  moved = state._replace(step=state.step + 1)
  other = programs.fingerprints(moved)
  assert [x for x in found if found[x] != other[x]] == ["`step`"]
