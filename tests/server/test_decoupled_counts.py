"""The counts, shares and turns of Decoupled DiLoCo, each by hand."""

import math

import pytest

from jdist import server
from jdist.server import _messages


def protocol(**options):
  options = {"interval": 4, "quorum": 1.0, "grace": 0.0, "ahead": 2} | options
  return server.DecoupledDiLoCo(batches=server.FixedBatches(8), **options)


def push(worker, task, samples=32, seconds=1.0):
  return server.Push(worker, task, samples, seconds)


def begin(rule, workers):
  state = rule.init(workers)
  tasks = {
    worker: [x.task for x in rule.receive(state, 0.0, server.Pull(worker))]
    for worker in workers
  }
  return state, tasks


@pytest.mark.parametrize(
  ("parts", "pushed", "pulled"),
  [(None, 0.5, (1.0, 0.0, 0.5, 1.0)), ([30, 10], 0.25, (1.0, 0.0, 0.75, 1.0))],
)
def test_bytes_follow_the_parts_of_fragments(parts, pushed, pulled):
  rule = protocol(fragments=2, parts=parts)
  replies = [
    server.Reply("a", 0, 0, 16, fragment=1, pulled=x)
    for x in (None, (), (0,), (0, 1))
  ]
  assert [rule.push_share(x) for x in replies] == [pushed] * 4
  assert tuple(rule.pull_share(x) for x in replies) == pulled


@pytest.mark.parametrize("parts", [(0, 0), (-1, 2), (math.nan, 1), (1, 2, 3)])
def test_parts_must_be_one_number_for_each_fragment(parts):
  with pytest.raises(ValueError, match="`parts` must be 2 numbers"):
    protocol(fragments=2, parts=parts)


def test_fragment_may_have_no_bytes():
  rule = protocol(fragments=2, parts=(0, 3))
  assert [rule.part(x) for x in range(2)] == [0.0, 1.0]


def test_task_has_the_steps_between_two_pushes():
  rule = protocol(interval=6, fragments=3)
  replies = rule.receive(rule.init("a"), 0.0, server.Pull("a"))
  assert [(x.samples, x.passes) for x in replies] == [(16, 2), (16, 2)]


def test_merged_share_is_the_mean_over_merges():
  rule = protocol()
  state = rule.init("ab")
  assert math.isnan(rule.summary(state)["merged_share"])
  # The last merge is of members that have all left since their pushes.
  state.shares = [(0.0, 1, 1), (1.0, 1, 2), (2.0, 0, 0)]
  assert rule.summary(state)["merged_share"] == 0.5


def test_pushes_members_and_joins_are_counted():
  rule = protocol()
  state, tasks = begin(rule, "ab")
  for task in tasks["a"]:
    rule.receive(state, 1.0, push("a", task))
  (update,) = rule.receive(state, 1.0, push("b", tasks["b"][0]))
  # Both pushes of a are merged, and a is one of two members.
  assert update.tasks == (*tasks["a"], tasks["b"][0])
  assert (state.version, state.applied) == (1, 3)
  assert [x[1:] for x in state.shares] == [(2, 2)]
  for _ in range(2):
    rule.receive(state, 2.0, server.Leave("a"))
    rule.receive(state, 3.0, server.Join("a"))
  assert state.joins == {"a": 3, "b": 1}
  assert state.changes[-2:] == [
    (2.0, 1, "left", "a", 1), (3.0, 1, "returned", "a", 2),
  ]  # fmt: skip


def test_without_measured_time_no_window_opens():
  rule = protocol(quorum=0.5, grace=1.0)
  state, tasks = begin(rule, "ab")
  (update,) = rule.receive(state, 1.0, push("a", tasks["a"][0], seconds=0.0))
  assert update.tasks == (tasks["a"][0],)


def test_late_push_of_a_past_fragment_keeps_the_turn():
  """With `ahead` 0; a has pushed two of three fragments, b the first late."""
  rule = protocol(interval=3, fragments=3, quorum=0.5, ahead=0)
  state, tasks = begin(rule, "ab")
  (task,) = tasks["a"]
  for fragment in range(2):
    (update,) = rule.receive(state, 1.0, push("a", task, 8))
    assert (update.tasks, state.turn) == ((task,), fragment + 1)
    ((task, _),) = [
      (x.task, x.fragment) for x in rule.receive(state, 1.0, server.Pull("a"))
    ]
  (update,) = rule.receive(state, 2.0, push("b", tasks["b"][0], 8))
  assert (update.tasks, state.turn) == ((tasks["b"][0],), 2)
  # Its next task is of the turn's fragment, and does not wait for a merge.
  (reply,) = rule.receive(state, 2.0, server.Pull("b"))
  assert (reply.fragment, reply.pulled) == (2, (0, 1))


def test_late_push_of_the_present_turn_waits_for_its_merge():
  rule = protocol(ahead=0, quorum=1.0)
  state, tasks = begin(rule, "ab")
  rule.receive(state, 1.0, push("a", tasks["a"][0]))
  assert state.waiting == {"a": False}
  assert rule.receive(state, 1.0, server.Pull("a")) == []
  _, reply = rule.receive(state, 2.0, push("b", tasks["b"][0]))
  assert (reply.worker, state.waiting) == ("a", {})


def test_member_is_sent_each_merge_once():
  rule = protocol(interval=2, fragments=2, quorum=0.5, ahead=1)
  state, tasks = begin(rule, "a")
  (task,), pulled = tasks["a"], []
  for _ in range(4):
    rule.receive(state, 1.0, push("a", task, 8))
    (reply,) = rule.receive(state, 1.0, server.Pull("a"))
    task = reply.task
    pulled.append((reply.pulled, reply.pull_plan, reply.fragment))
  assert pulled == [((x % 2,), 0, (x + 1) % 2) for x in range(4)]


def test_window_of_a_merge_that_was_made_ends_without_effect():
  rule = protocol(quorum=0.5, grace=1.0, ahead=1)
  state, tasks = begin(rule, "ab")
  (timer,) = rule.receive(state, 1.0, push("a", tasks["a"][0]))
  (update,) = rule.receive(state, 1.5, push("b", tasks["b"][0]))
  assert (update.tasks, state.grace) == ((*tasks["a"], *tasks["b"]), {})
  (reply,) = rule.receive(state, 1.5, server.Pull("a"))
  (again,) = rule.receive(state, 1.8, push("a", reply.task))
  assert isinstance(again, server.Timer) and again.task != timer.task
  assert rule.receive(state, 2.0, _messages.Expired(timer.task)) == []
  (update,) = rule.receive(state, 2.8, _messages.Expired(again.task))
  assert update.tasks == (reply.task,)
