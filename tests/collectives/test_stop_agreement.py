"""Processes agree after which step they stop, by notes that are passed here."""

import threading

import pytest

from jdist.collectives.processes import _stop_agreement


class _Team:
  """Agreements whose notes wait until they are delivered."""

  def __init__(self, num_processes):
    self.sent = []

    def sender(number):
      def send(note):
        others = range(1, num_processes) if number == 0 else [0]
        self.sent += [(number, to, note) for to in others]

      return send

    self.all = [
      _stop_agreement.StopAgreement(num_processes, i, sender(i))
      for i in range(num_processes)
    ]

  def want(self, number):
    self.all[number].want()

  def deliver(self):
    while self.sent:
      number, to, note = self.sent.pop(0)
      self.all[to].take(number, note)


@pytest.mark.parametrize("wants", [0, 1, 2])
def test_all_stop_one_step_after_the_latest(wants):
  team = _Team(3)
  for one, step in zip(team.all, (5, 7, 6), strict=True):
    assert not any(one.stops_after(x + 1) for x in range(step))
  team.want(wants)
  team.deliver()
  for one, step in zip(team.all, (5, 7, 6), strict=True):
    assert [one.stops_after(x) for x in range(step + 1, 10)] == [
      x >= 8 for x in range(step + 1, 10)
    ]


def test_two_stop_requests_agree_once():
  team = _Team(2)
  for one in team.all:
    assert not one.stops_after(3)
  team.want(1)
  team.want(0)
  team.deliver()
  assert [one.stops_after(4) for one in team.all] == [True, True]
  # A second request, for instance by another signal, starts nothing.
  for one in team.all:
    one.want()
  assert not team.sent


def test_no_step_begins_before_all_have_answered():
  team = _Team(2)
  for one in team.all:
    assert not one.stops_after(3)
  team.want(1)
  found = []
  waits = threading.Thread(
    target=lambda: found.append(team.all[1].stops_after(4))
  )
  waits.start()
  waits.join(0.05)
  assert waits.is_alive() and not found
  team.deliver()
  waits.join(60)
  assert found == [True]


def test_missing_answer_times_out(monkeypatch):
  monkeypatch.setattr(_stop_agreement, "_LIMIT_S", 0.01)
  team = _Team(2)
  team.want(1)
  with pytest.raises(TimeoutError, match=r"did not agree within 0\.01 s"):
    team.all[1].stops_after(1)


@pytest.mark.parametrize(
  "note", [{"stop": "agreed", "step": 1}, {"stop": "asked"}]
)
def test_other_processes_cannot_stop_process_zero(note):
  team = _Team(2)
  team.all[0].take(1, note)
  assert not any(team.all[0].stops_after(step) for step in (1, 2, 3))


def test_one_process_stops_one_step_later():
  team = _Team(1)
  assert not team.all[0].stops_after(1)
  team.want(0)
  assert team.all[0].stops_after(2)
