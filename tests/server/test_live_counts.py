"""A live server and a worker's loop count, and forget."""

import concurrent.futures
import contextlib
import queue
import random
import time
import types

import numpy as np
import pytest

from jdist import cluster, server
from jdist.server.runtime import _engine, _mailboxes, _worker_loop

pytest.importorskip("simpy")


class Picky(server.EmptyServer):
  """Refuses the pushes whose first byte is 1."""

  def push(self, task, more, payload):
    if payload[0]:
      raise server.RefusedError("nan", "It has a NaN.")


@pytest.fixture
def live():
  """A server of tasks of four samples, of which this test is worker "a"."""
  plan = server.LivePlan(workers=("a", "b"))
  protocol = server.ASP(batches=server.FixedBatches(4))
  found = server.LiveServer(protocol, Picky(100), plan)
  lives = [hello(found)]
  found.start()
  yield found, lives
  found.stop()


def hello(found):
  header = {"kind": "hello", "worker": "a", "fresh": True}
  return found.push(header)["life"]


def pull(live):
  return live[0].pull("a", live[1][-1]).result(timeout=60.0)[0]


def push(live, task, first=0, **more):
  header = {
    "kind": "push", "worker": "a", "life": live[1][-1], "task": task,
    "samples": 4, "compute_s": 0.25, "waited_s": 0.0, "more": {},
  } | more  # fmt: skip
  live[0].push(header, np.full(100, first, np.uint8))


def test_seconds_and_bytes_of_pushes_are_summed(live):
  for over_s in (0.5, 2.0, 0.0):
    push(live, pull(live)["task"], over_s=over_s)
  pull(live)
  found = live[0].summary()
  assert found["nodes"]["a"]["compute_s"] == 0.75
  assert found["nodes"]["a"]["samples"] == found["samples"] == 12
  assert found["over_s"] == {"a": 2.5}
  assert (found["pulled_bytes"], found["pushed_bytes"]) == (400, 300)


def test_utilisation_is_of_all_workers(live):
  push(live, pull(live)["task"], compute_s=0.05)
  pull(live)
  time.sleep(0.2)
  live[0].finish()
  pull(live)
  found = live[0].summary()
  # The other one of two has computed nothing.
  assert found["utilisation"] == pytest.approx(0.05 / (2 * found["wall_s"]))
  assert found["samples_per_s"] == pytest.approx(4 / found["wall_s"])


def test_new_process_of_a_worker_may_err_three_times_again(live):
  for _ in range(2):
    for _ in range(2):
      push(live, pull(live)["task"], first=1)
      assert pull(live)["kind"] == "rejoin"
      word = {"kind": "join", "worker": "a", "life": live[1][-1]}
      live[0].push(word)
    live[1].append(hello(live[0]))
  push(live, pull(live)["task"])
  assert pull(live)["kind"] == "task"
  assert live[0].summary()["refused"] == {"nan": 4}


def test_lost_worker_is_not_here_until_its_next_process_says_hello(live):
  assert pull(live)["kind"] == "task"
  assert live[0].status()["here"] == ["a"]
  live[0].lost("a")
  assert live[0].status()["here"] == []
  late = {"kind": "push", "worker": "a", "life": live[1][-1]}
  assert live[0].push(late) == {"refused": "stale"}
  live[1].append(hello(live[0]))
  assert pull(live)["kind"] == "task"
  assert live[0].status()["here"] == ["a"]


class Losing:
  """A channel that loses its server after each hello, and then refuses."""

  def __init__(self):
    self.said = []

  def push(self, header, payload=None):
    self.said.append(header["fresh"])
    return {"refused": "done"} if len(self.said) == 3 else {"life": 1}

  def pull(self, name, life):
    raise _engine.LostServerError


def test_only_the_first_hello_of_a_process_is_fresh():
  """A state from a checkpoint must not replace that of a living process."""
  channel = Losing()
  with pytest.raises(ValueError, match="done"):
    server.WorkerLoop(channel, "a", server.EmptyWorker(), depth=1).run()
  assert channel.said == [True, False, False]


class Away:
  """A channel to a server that two hellos do not reach."""

  hellos = 0

  def push(self, header, payload=None):
    self.hellos += 1
    if self.hellos < 3:
      raise _engine.LostServerError("It is away.")
    return {"refused": "done"}


def test_worker_says_hello_until_its_patience_ends(monkeypatch):
  monkeypatch.setattr(_worker_loop, "_AGAIN_S", 0.0)
  for patience_s, hellos in ((60.0, 3), (-1.0, 1)):
    channel = Away()
    loop = server.WorkerLoop(
      channel, "a", server.EmptyWorker(), depth=1, patience_s=patience_s
    )
    with contextlib.suppress(_engine.LostServerError, ValueError):
      loop.run()
    assert channel.hellos == hellos


def test_tasks_that_were_taken_from_a_worker_are_not_computed(monkeypatch):
  loop = server.WorkerLoop(None, "a", server.EmptyWorker(), depth=1)
  done = []
  monkeypatch.setattr(
    loop, "_do", lambda session, header, *_: done.append(header["generation"])
  )
  inbox = queue.Queue()
  for kind, generation in (("task", 1), ("task", 2), ("stop", 2)):
    inbox.put(({"kind": kind, "generation": generation}, None, 0.0))
  session = types.SimpleNamespace(inbox=inbox, generation=2)
  assert loop._work(session) and done == [2]


def run_to(marks, **options):
  """Starts a server that no worker joins, and returns it at its last mark."""
  plan = server.LivePlan(workers=("a",), unit="seconds", marks=marks, **options)
  found = server.LiveServer(server.ASP(), server.EmptyServer(), plan)
  before_s = found.status()["now_s"]
  found.start()
  end = time.monotonic() + 60.0
  while not found.status()["finished"]:
    assert time.monotonic() < end, found.status()
    time.sleep(0.01)
  times = [found.record_of(i)[0].now_s for i in range(len(marks))]
  found.stop()
  return before_s, times


def test_marks_of_seconds_pass_without_a_message():
  before_s, times = run_to((0.05, 0.1, 0.15))
  assert before_s == 0.0
  assert times == pytest.approx([0.05, 0.1, 0.15], abs=1e-6)


def test_clock_of_a_resumed_run_waits_at_its_checkpoint(tmp_path):
  run_to((0.1,), checkpoints=str(tmp_path))
  before_s, times = run_to((0.1, 0.2), checkpoints=str(tmp_path))
  assert before_s == times[0] == pytest.approx(0.1, abs=1e-6)
  assert times[1] == pytest.approx(0.2, abs=1e-6)


def test_marks_before_the_second_of_a_resume_are_reached_at_once(tmp_path):
  run_to((0.1,), checkpoints=str(tmp_path))
  _, times = run_to((0.05, 0.08, 0.2), checkpoints=str(tmp_path))
  assert times == pytest.approx([0.1, 0.1, 0.2], abs=1e-6)


def test_mailbox_of_a_worker_that_was_gone_has_the_word_to_rejoin_alone():
  box = _mailboxes.Mailbox(life=7)
  told = []

  def pull(life):
    future = concurrent.futures.Future()
    future.add_done_callback(lambda x: told.append(x.result()[0]))
    box.pull(life, future)

  box.put(_mailboxes.word("task", task=3))
  box.take_tasks()  # Its process was lost: no word to it.
  assert not box.messages
  box.here = True
  box.put(_mailboxes.word("task", task=4))
  box.take_tasks()
  pull(7)
  assert told == [{"kind": "rejoin", "generation": 2}] and not box.messages
  pull(7)  # It waits, and ends once another process takes its place.
  pull(6)
  box.empty()
  assert told[1:] == [{"kind": "stop"}, {"kind": "stop"}]


def test_machine_is_as_fast_as_it_is_when_its_task_begins(monkeypatch):
  """Not when the task arrived: it may have waited for the one before it."""
  slow = cluster.Node("a", slowdowns=(cluster.Slowdown(110.0, 0.5),))
  pace = server.Pace(slow, cluster.Profile(seconds_per_sample=1.0))
  loop = server.WorkerLoop(None, "a", server.EmptyWorker(), depth=2, pace=pace)
  slept, start_s = [], 70.0
  clock = types.SimpleNamespace(monotonic=lambda: start_s, sleep=slept.append)
  monkeypatch.setattr(_worker_loop, "time", clock)
  header = {"samples": 20, "passes": 1, "push_plan": 0, "pull_plan": 0}
  header |= {"now_s": 100.0}
  for waited_s in (0.0, 20.0):
    loop._wait(header, start_s - waited_s, start_s)
  # Ten seconds of work before the slowdown, or none.
  assert slept == pytest.approx([10.0 + 20.0, 40.0])


def test_paced_task_takes_as_long_as_on_the_clock(monkeypatch):
  """Its jitter is drawn by the text that seeds the clock's machines."""
  node, draws = cluster.Node("a", jitter=0.5), random.Random("3 a")
  costs = cluster.Profile(1.0, 0.25, seconds_per_encoding=2.0)
  pace = server.Pace(node, costs, seed=3)
  loop = server.WorkerLoop(None, "a", server.EmptyWorker(), depth=1, pace=pace)
  slept = []
  clock = types.SimpleNamespace(monotonic=lambda: 0.0, sleep=slept.append)
  monkeypatch.setattr(_worker_loop, "time", clock)
  header = {"samples": 4, "passes": 2, "now_s": 0.0}
  for push_plan, pull_plan in ((0, None), (1, None), (1, 2)):
    plans = {"push_plan": push_plan, "pull_plan": pull_plan}
    loop._wait(header | plans, 0.0, 0.0)
  wanted = [work_s * node.draw(draws) for work_s in (4.5, 6.5, 8.5)]
  assert slept == pytest.approx(wanted)


def test_task_under_way_is_dropped_with_the_membership_of_its_worker():
  machines = cluster.workers([1.0], link=cluster.Link(8e3))
  (name,) = machines.names
  protocol = server.ASP(timeout_s=0.03)  # A message takes 0.1 s.
  found = server.LiveServer(
    protocol,
    server.EmptyServer(100),
    server.LivePlan(workers=machines.names, machines=machines),
  )
  life = found.push({"kind": "hello", "worker": name})["life"]
  found.start()
  assert found.pull(name, life).result(timeout=60.0)[0]["kind"] == "rejoin"
  following = found.pull(name, life)
  with pytest.raises(TimeoutError):
    following.result(timeout=0.2)
  found.stop()
  assert following.result(timeout=60.0)[0]["kind"] == "stop"
