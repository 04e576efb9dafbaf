"""The programs that a run may need are those that it chooses."""

import itertools

import numpy as np
import pytest

from jdist.training.loop import _programs


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


def test_mean_may_be_applied_within_a_round():
  known = _programs.Programs((), True).needed(1, undelayed=False)
  said = {(c.control.round_ends, c.control.arrives) for c in known}
  assert said == set(itertools.product([False, True], repeat=2))
