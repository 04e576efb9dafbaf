"""Protocols on real workers: threads here, and messages by hand."""

import contextlib
import functools
import itertools
import json
import math
import pickle
import queue
import re
import threading
import time
import types

import numpy as np
import pytest

from jdist import cluster, server, training
from jdist.server.gradients import _learner
from jdist.server.run import _run_checkpoints
from jdist.server.runtime import (
  _delivery,
  _engine,
  _envelope,
  _live_server,
  _live_session,
  _server_core,
  _worker_loop,
)
from jdist.storage import hashes, sealed_json
from tests.server import _live_runs

pytest.importorskip("simpy")

NAMES = ("a", "b")
BSP = server.BSP(batches=server.FixedBatches(4))
WAIT_S = 60.0  # For what comes at once, on a busy machine.


class Clock:
  """The clock of servers, which stands still until it is told."""

  time_ns = staticmethod(time.time_ns)

  def __init__(self):
    self.now_s = 0.0

  def monotonic(self):
    return self.now_s


@pytest.fixture
def clock(monkeypatch):
  found = Clock()
  for module in (_live_server, _server_core):
    monkeypatch.setattr(module, "time", found)
  return found


def asleep(name, seconds=0.0):
  """A machine on which a task takes so many seconds."""
  profile = cluster.Profile(seconds_per_sample=0.0, seconds_per_batch=1.0)
  return server.Pace(
    cluster.Node(name, speed=1.0 / max(seconds, 1e-6)), profile
  )


def run(
  protocol, total, unit="updates", *, names=NAMES, works=None, seconds=0.002,
  until=None, **options,
):  # fmt: skip
  """Runs workers that compute nothing, as threads, to the end."""
  engine, found = server.ThreadEngine(), {}

  def work(name, channel):
    server.WorkerLoop(
      channel, name, server.EmptyWorker(), depth=protocol.depth,
      pace=asleep(name, seconds),
    ).run()  # fmt: skip

  def on_status(status):
    if until is not None and until(engine.server, status):
      engine.ask("finish")

  found = {name: functools.partial(work, name) for name in names}
  try:
    return _live_runs.run(
      engine,
      lambda plan: server.LiveServer(protocol, server.EmptyServer(100), plan),
      found | (works or {}),
      total,
      unit,
      startup_s=20.0,
      on_status=on_status,
      **options,
    )
  finally:
    engine.stop()


def test_run_whose_tasks_all_expire_is_refused():
  """It would never end: each push comes after its worker has left."""
  protocol = server.ASP(batches=server.FixedBatches(4), timeout_s=1e-9)
  with pytest.raises(ValueError, match="`timeout_s` must be longer"):
    run(protocol, 4)


class Hand:
  """A server whose workers are this test: one message after the other."""

  def __init__(self, protocol, learner=None, names=NAMES, **plan):
    learner = server.EmptyServer(100) if learner is None else learner
    self.server = server.LiveServer(
      protocol, learner, server.LivePlan(workers=names, **plan)
    )
    self.lives = {}
    for name in names:
      self.hello(name)
    self.server.start()

  def hello(self, name, **more):
    header = {"kind": "hello", "worker": name, "fresh": True} | more
    receipt = self.server.push(header)
    self.lives[name] = receipt.get("life")
    return receipt

  def pull(self, name):
    future = self.server.pull(name, self.lives[name])
    return future.result(timeout=WAIT_S)[0]

  def push(self, name, task, payload=None, **more):
    header = {
      "kind": "push", "worker": name, "life": self.lives[name], "task": task,
      "samples": 4, "compute_s": 0.1, "waited_s": 0.0, "more": {},
    } | more  # fmt: skip
    payload = np.zeros(100, np.uint8) if payload is None else payload
    return self.server.push(header, payload)

  def word(self, kind, name):
    header = {"kind": kind, "worker": name, "life": self.lives[name]}
    return self.server.push(header)

  def until(self, condition):
    end = time.monotonic() + WAIT_S
    while not condition(self.server):
      assert time.monotonic() < end, self.server.status()
      time.sleep(0.005)


@pytest.fixture
def hand():
  made = []

  def make(*args, **options):
    made.append(Hand(*args, **options))
    return made[-1]

  yield make
  for each in made:
    each.server.stop()


def test_barrier_matches_messages_by_hand(hand):
  by = hand(BSP)
  first, second = by.pull("a"), by.pull("b")
  assert (first["task"], second["task"]) == (0, 1)
  assert (first["version"], first["samples"]) == (0, 4)
  by.push("b", 1)
  by.push("a", 0)
  assert by.pull("b")["version"] == by.pull("a")["version"] == 1
  status = by.server.status()
  assert (status["updates"], status["samples"]) == (1, 8)


def test_tasks_pushed_twice_count_once(hand):
  by = hand(server.ASP(batches=server.FixedBatches(4)))
  by.pull("a")
  by.push("a", 0)
  by.push("a", 0)
  by.until(lambda x: x.summary()["discarded"].get("repeated") == 1)
  assert by.server.summary()["updates"] == 1


def test_lost_worker_leaves_the_barrier_and_joins_again(hand):
  by = hand(BSP)
  by.pull("a"), by.pull("b")
  by.push("a", 0)
  by.server.lost("b")
  assert by.pull("a")["version"] == 1  # Of a's gradient alone.
  by.until(lambda x: x.status()["members"] == 1)
  old = by.lives["b"]
  by.hello("b")
  assert by.lives["b"] != old
  by.until(lambda x: x.status()["members"] == 2)
  by.push("a", 2)
  assert by.pull("b")["version"] == 2
  summary = by.server.summary()
  assert summary["lost_samples"] == 4 and not summary["refused"]


def test_push_of_an_earlier_connection_is_refused(hand):
  by = hand(BSP)
  task = by.pull("a")["task"]
  old = by.lives["a"]
  by.hello("a")
  assert by.push("a", task, life=old) == {"refused": "stale"}


def test_hanging_worker_leaves_at_its_timeout_and_joins_again(hand, clock):
  by = hand(server.BSP(batches=server.FixedBatches(4), timeout_s=1.0))
  by.pull("a")
  task = by.pull("b")["task"]
  clock.now_s = 0.5
  by.push("a", 0)
  clock.now_s = 0.9
  by.until(lambda x: x.status()["pushed"] == ["a"] and x._core.now_s == 0.9)
  assert by.server.status()["updates"] == 0
  clock.now_s = 1.1
  assert by.pull("a")["version"] == 1
  # It wakes up, and the server refuses its old gradient.
  assert by.pull("b")["kind"] == "rejoin"
  by.push("b", task)
  by.until(lambda x: x.summary()["discarded"].get("left") == 1)
  by.word("join", "b")
  by.until(lambda x: x.status()["members"] == 2)


class Picky(server.EmptyServer):
  """Refuses a push whose first byte is not zero."""

  def push(self, task, more, payload):
    del task, more
    if payload[0]:
      raise server.RefusedError("nan", "It is not zero.")


def test_refused_push_is_counted_and_blocks_no_worker(hand):
  by = hand(BSP, Picky(100))
  by.pull("a"), by.pull("b")
  by.push("b", 1, np.ones(100, np.uint8))
  by.push("a", 0)
  assert by.pull("a")["version"] == 1
  assert by.pull("b")["kind"] == "rejoin"
  assert by.server.summary()["refused"] == {"nan": 1}


def test_worker_is_stopped_after_three_refused_pushes(hand):
  by = hand(server.ASP(batches=server.FixedBatches(4)), Picky(100))
  for _ in range(2):
    by.push("b", by.pull("b")["task"], np.ones(100, np.uint8))
    assert by.pull("b")["kind"] == "rejoin"
    by.word("join", "b")
  by.push("b", by.pull("b")["task"], np.ones(100, np.uint8))
  assert by.pull("b")["kind"] == "stop"
  assert by.server.status()["members"] == 1


class Shaped(server.EmptyServer):
  """Says which shapes its parameters and statistics have."""

  shapes = types.MappingProxyType({"as the shape of leaf 0": [4, 2]})


@pytest.mark.parametrize(
  ("said", "told"),
  [
    ({"versions": {"jax": "8"}}, "has jax 8, and the server 9"),
    # The messages of the two matrices have the same bytes.
    (
      {"shapes": {"as the shape of leaf 0": [2, 4]}},
      r"has as the shape of leaf 0 \[2, 4\], and the server \[4, 2\]",
    ),
  ],
)
def test_worker_that_does_not_fit_ends_a_run_only_before_it_begins(said, told):
  fits = {"versions": {"jax": "9"}, "shapes": Shaped.shapes}
  plan = server.LivePlan(workers=NAMES, versions={"jax": "9"})
  made = server.LiveServer(BSP, Shaped(100), plan)

  def hello(name, **more):
    return made.push({"kind": "hello", "worker": name} | fits | more)

  try:
    assert "life" in hello("a")
    assert made.status()["error"] is None
    assert re.search(told, hello("b", **said)["refused"])
    assert re.search(told, made.status()["error"])
    made._error = None
    made.start()
    made.pull("a", hello("a")["life"]).result(timeout=WAIT_S)
    assert re.search(told, hello("b", **said)["refused"])
    assert made.status()["error"] is None
    # A learner of a user's own may not say its shapes.
    assert "life" in hello("b", shapes=None)
    assert made.plan.versions == plan.versions
  finally:
    made.stop()


def test_versions_are_those_of_all_packages_that_compute():
  found = server.versions()
  packages = {"python", "jdist", "jax", "jaxlib", "flax", "optax", "numpy"}
  assert set(found) == packages and "not installed" not in found.values()


def test_timer_without_a_task_expires(hand):
  """The end of a grace window, which no task has."""
  by = hand(
    server.DecoupledDiLoCo(
      batches=server.FixedBatches(4), interval=1, quorum=0.5, grace=1.0
    )
  )
  by.push("a", by.pull("a")["task"], compute_s=0.1)
  by.until(lambda x: x.status()["updates"] == 1)
  assert by.server.summary()["nodes"]["a"]["ages"] == {0: 1}


def test_a_checkpoint_is_made_when_asked_for(hand, tmp_path):
  by = hand(BSP, checkpoints=str(tmp_path))
  by.pull("a"), by.pull("b")
  by.push("a", 0), by.push("b", 1)
  for name in NAMES:
    assert by.pull(name)["version"] == 1
  found = []
  asks = threading.Thread(target=lambda: found.append(by.server.save()))
  asks.start()
  for name in NAMES:
    assert by.pull(name)["kind"] == "save"
    by.word("state", name)
  asks.join(timeout=WAIT_S)
  assert found == [1] and [x.name for x in tmp_path.glob("update_*")] == [
    "update_0000000001"
  ]


def test_without_checkpoints_nothing_is_saved(hand):
  assert hand(BSP).server.save() == -1


def test_workers_cannot_send_control_messages(hand):
  by = hand(server.ASP(batches=server.FixedBatches(4)))
  for kind in ("finish", "lost", "save", "nothing"):
    assert "A worker sends" in by.word(kind, "a")["refused"]
  by.push("a", by.pull("a")["task"])
  by.until(lambda x: x.status()["updates"] == 1)
  assert not by.server.status()["finished"]


@pytest.mark.parametrize(
  "wrong",
  [
    {"samples": "many"}, {"samples": 4.0}, {"samples": 0}, {"samples": -4},
    {"samples": 5}, {"samples": 2**70}, {"task": math.inf}, {"more": None},
    {"compute_s": math.nan}, {"compute_s": -1.0}, {"compute_s": math.inf},
    {"waited_s": -1.0}, {"over_s": "0"}, {"payload": []},
  ],
  ids=str,
)  # fmt: skip
def test_push_without_its_header_is_refused(hand, wrong):
  by = hand(BSP)
  by.pull("a"), by.pull("b")
  by.push("b", **({"task": 1} | wrong))
  by.push("a", 0)
  assert by.pull("a")["version"] == 1
  assert by.server.summary()["refused"] == {"header": 1}


def test_unknown_workers_are_refused(hand):
  by = hand(BSP)
  assert "no worker" in by.hello("c")["refused"]
  for message in (np.zeros(3, np.float32), np.zeros((2, 8), np.uint8)):
    with pytest.raises(ValueError, match="uint8"):
      _envelope.unpack(message)
  with pytest.raises(ValueError, match="header"):
    _envelope.unpack(np.full(9, 255, np.uint8))
  long = _envelope.pack({"a": "x" * 2**20})
  with pytest.raises(ValueError, match="says its header has 1048585"):
    _envelope.unpack(long)
  # A header alone is a message.
  header, payload = _envelope.unpack(_envelope.pack({"task": 3}))
  assert header == {"task": 3} and not len(payload)
  with pytest.raises(ValueError, match="no object"):
    _envelope.unpack(_envelope.pack(["a", "list"]))


def test_run_ends_once_all_workers_are_expelled():
  class Refusing(server.EmptyServer):
    def push(self, task, more, payload):
      raise _learner.RefusedError("nan", "A push must be finite, got NaN.")

  def work(name, channel):
    server.WorkerLoop(channel, name, server.EmptyWorker(), depth=1).run()

  engine = server.ThreadEngine()
  try:
    with pytest.warns(RuntimeWarning, match="refuse the pushes of all workers"):
      result = _live_runs.run(
        engine,
        lambda plan: server.LiveServer(BSP, Refusing(100), plan),
        {name: functools.partial(work, name) for name in NAMES},
        10**6,
        startup_s=20.0,
      )
  finally:
    engine.stop()
  assert result.summary["updates"] == 0
  assert result.summary["refused"] == {"nan": 6}


def test_messages_take_the_time_of_their_links(hand):
  machines = cluster.workers([1.0, 1.0], link=cluster.Link(8e3))
  names = machines.names
  start = time.monotonic()
  by = hand(BSP, names=names, machines=machines)
  by.pull(names[0]), by.pull(names[1])
  # 100 bytes at 1 kB a second; both share the server's link.
  assert time.monotonic() - start >= 0.2
  by.push(names[0], 0)
  by.push(names[1], 1)
  by.until(lambda x: x.status()["updates"] == 1)
  assert time.monotonic() - start >= 0.4


def test_transfer_begins_when_its_message_is_made(clock):
  """Not when the message came that asked for it."""

  class Slow(server.EmptyServer):
    def reply(self, reply):
      clock.now_s += 1.0
      return super().reply(reply)

  # A message takes an eighth of a second.
  machines = cluster.workers([1.0], link=cluster.Link(6400.0))
  (name,) = machines.names
  core = _server_core.ServerCore(
    BSP, Slow(100), server.LivePlan(workers=(name,), machines=machines)
  )
  for kind in ("hello", "start"):
    none = np.zeros(0, np.uint8)
    core.handle(_server_core.Item(0.0, kind, name, {"life": 1}, none))
  for now_s, messages in ((1.1, 0), (1.15, 1)):
    core.advance(now_s)
    assert len(core.boxes[name].messages) == messages


def test_push_under_way_is_dropped_with_its_worker(hand, clock):
  machines = cluster.workers([1.0, 1.0], link=cluster.Link(8e3))
  first, second = machines.names
  by = hand(BSP, names=machines.names, machines=machines)
  by.until(lambda x: x._core.began)
  clock.now_s = 1.0
  by.pull(first), by.pull(second)
  by.push(first, 0)
  by.server.lost(first)
  by.push(second, 1)  # It arrives behind the other one.
  by.until(lambda x: x.status()["here"] == [second] and x._inbox.empty())
  clock.now_s = 2.0
  by.until(lambda x: x.status()["updates"] == 1)
  assert by.server.summary()["discarded"] == {}


class Meeting:
  """Two threads that wait for each other in each of some rounds."""

  def __init__(self, rounds):
    self._rounds, self.met = rounds, 0
    self._both = threading.Barrier(2, self._count, timeout=WAIT_S)

  def _count(self):
    self.met += 1

  def wait(self, number):
    # Without the other one the worker goes on, and the run ends.
    with contextlib.suppress(threading.BrokenBarrierError):
      if number in self._rounds:
        self._both.wait()


def test_push_and_pull_travel_at_the_same_time():
  """A pipelined worker computes while its messages travel.

  Each push is under way until the task that answers the one before has arrived,
  and until the worker computes that task; the task waits for the push as well.
  """
  protocol, rounds, meetings = server.h_ps(8, plans=None), 12, {}

  def work(name, channel):
    # The first two tasks come at once.
    pulling, computing = Meeting(range(2, rounds)), Meeting(range(1, rounds))
    meetings[name] = pulling, computing
    pushed, pulled, computed = (itertools.count(x) for x in (1, 0, 0))

    class Relay:
      def push(self, header, payload=None):
        if header["kind"] == "push":
          number = next(pushed)
          pulling.wait(number)
          computing.wait(number)
        return channel.push(header, payload)

      def pull(self, worker, life):
        header, payload = channel.pull(worker, life)
        if header["kind"] == "task":
          pulling.wait(next(pulled))
        return header, payload

    class Computing(server.EmptyWorker):
      def compute(self, header):
        computing.wait(next(computed))
        return super().compute(header)

    server.WorkerLoop(Relay(), name, Computing(), depth=protocol.depth).run()

  works = {name: functools.partial(work, name) for name in NAMES}
  found = run(protocol, rounds, works=works).summary
  assert found["staleness"]["counts"].keys() == {"0", "1"}
  for pulling, computing in meetings.values():
    assert (pulling.met, computing.met) == (rounds - 2, rounds - 1)


def test_links_carry_a_push_and_a_pull_at_the_same_time(hand, clock):
  # 100 bytes take an eighth of a second in each direction.
  machines = cluster.workers([1.0], link=cluster.Link(6400.0))
  (name,) = machines.names
  protocol = server.h_ps(4, plans=None)
  by = hand(protocol, names=machines.names, machines=machines)

  def at(now_s):
    # The server has taken what was sent before.
    by.until(lambda x: x._inbox.empty())
    clock.now_s = now_s

  first = by.server.pull(name, by.lives[name])
  at(0.125)
  tasks = [first.result(timeout=WAIT_S)[0]["task"], by.pull(name)["task"]]
  by.push(name, tasks[0])
  at(0.25)
  by.until(lambda x: x.status()["updates"] == 1)
  by.push(name, tasks[1])
  answer = by.server.pull(name, by.lives[name])
  at(0.3125)
  by.until(lambda x: x._core.now_s == 0.3125)
  assert by.server.status()["updates"] == 1 and not answer.done()
  clock.now_s = 0.375
  assert answer.result(timeout=WAIT_S)[0]["version"] == 1
  by.until(lambda x: x.status()["updates"] == 2)


def test_threaded_run_ends_at_its_updates():
  result = run(BSP, 40, "samples", every=16)
  assert [x.step for x in result.records] == [2, 4, 5]
  assert {x.clock for x in result.records} == {"wall"}
  assert result.summary["updates"] == 5
  assert result.summary["samples"] == 40
  assert result.summary["nodes"]["a"]["updates"] == 5
  assert result.summary["nodes"]["a"]["ages"] == {0: 5}
  assert result.events == []


def test_threaded_run_ends_after_its_seconds(clock, monkeypatch):
  push = server.EmptyServer.push

  def pushed(*given):
    clock.now_s += 1 / 64
    return push(*given)

  monkeypatch.setattr(server.EmptyServer, "push", pushed)
  result = run(BSP, 0.5, "seconds", every=0.25)
  first, last = result.records
  assert 0.25 <= first.train_s < 0.5 <= last.train_s
  assert last.step > first.step > 0


def test_worker_sends_its_state_when_it_is_asked():
  none, sent = np.zeros(0, np.uint8), queue.Queue()
  asked = iter([{"kind": "save"}])

  class Channel:
    def push(self, header, payload=None):
      if header["kind"] == "state":
        sent.put((header["notes"], payload.tolist()))
      return {"life": 1}

    def pull(self, worker, life):
      if (header := next(asked, None)) is None:
        with contextlib.suppress(queue.Empty):
          states.append(sent.get(timeout=WAIT_S))
        header = {"kind": "stop"}
      return header, none

  class Saved(server.EmptyWorker):
    def save(self):
      return {"seen": 3}, np.array([1, 2], np.uint8)

  states = []
  server.WorkerLoop(Channel(), "a", Saved(), depth=1).run()
  assert states == [({"seen": 3}, [1, 2])]


def test_failed_worker_is_noticed_and_spawned_again():
  tries = []

  def work(channel):
    class Failing(server.EmptyWorker):
      def compute(self, header):
        if len(tries) < 2:
          tries.append(header["task"])
          raise RuntimeError("It has failed.")
        return super().compute(header)

    server.WorkerLoop(channel, "b", Failing(), depth=1).run()

  def until(live, status):
    here = len(tries) == 2 and "b" in status["here"]
    return here and live.summary()["nodes"]["b"]["updates"] > 0

  protocol = server.ASP(batches=server.FixedBatches(4))
  with pytest.warns(RuntimeWarning, match="updates: it was finished"):
    result = run(protocol, 10**6, works={"b": work}, seconds=0.02, until=until)
  kinds = [(x["kind"], x["worker"]) for x in result.events]
  assert kinds.count(("lost", "b")) == 2 and kinds[-1] == ("back", "b")
  assert result.summary["events"] == result.events
  assert result.summary["nodes"]["b"]["updates"] > 0
  assert "repeated" not in result.summary["discarded"]


def test_worker_that_never_returns_ends_the_run():
  def work(channel):
    raise RuntimeError("There is no disk.")

  with pytest.raises(RuntimeError, match="There is no disk"):
    run(BSP, WAIT_S, "seconds", works={"b": work})


class Killed(server.ThreadEngine):
  """Loses its server at each of its first starts but the first."""

  def __init__(self, losses):
    super().__init__()
    self.losses, self.starts, self.works = losses, 0, {}

  def spawn(self, name, work):
    self.works[name] = work
    super().spawn(name, work)

  def serve(self, make):
    super().serve(make)
    self.starts += 1
    # `stop` has sent the workers home, which a killed server does not.
    self.on_lost(self._call)
    for name, work in self.works.items():
      super().spawn(name, work)

  def ask(self, method, *args, timeout_s=60.0):
    found = super().ask(method, *args)
    if method != "status" or self.starts > self.losses:
      return found
    if self.starts > 1 or found["samples"] >= 16:
      self.server.stop()
      raise _engine.LostServerError("It was killed.")
    return found


@pytest.mark.parametrize("losses", (1, 2, 4))
def test_server_may_be_lost_again_while_it_restarts(losses, tmp_path):
  engine = Killed(losses)

  def work(name, channel):
    server.WorkerLoop(
      channel, name, server.EmptyWorker(), depth=1, pace=asleep(name, 0.002)
    ).run()

  def train():
    return _live_runs.run(
      engine,
      lambda plan: server.LiveServer(BSP, server.EmptyServer(100), plan),
      {name: functools.partial(work, name) for name in NAMES},
      200,
      "samples",
      every=16,
      startup_s=20.0,
      checkpoints=str(tmp_path),
    )

  try:
    if losses > 3:
      with pytest.raises(server.LostRunError, match="lost 3 times before it"):
        train()
      return
    result = train()
  finally:
    engine.stop()
  # An update of those who are back may be one's alone.
  assert 200 <= result.summary["samples"] < 208
  kinds = [x["kind"] for x in result.events if x["worker"] == "server"]
  assert kinds == ["lost"] * losses + ["back"]


def test_run_ends_if_a_worker_never_connects(monkeypatch):
  ended, engine = threading.Event(), server.ThreadEngine()
  now_s = [0.0]

  def sleep(seconds):
    time.sleep(seconds)
    now_s[0] += seconds * bool(events)  # Not before "a" has connected.

  clock = types.SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep)
  monkeypatch.setattr(_live_session, "time", clock)

  def work(channel):
    server.WorkerLoop(channel, "a", server.EmptyWorker(), depth=1).run()

  events = []
  try:
    with pytest.raises(server.LostRunError, match=r"^b did not connect within"):
      _live_runs.run(
        engine,
        lambda plan: server.LiveServer(BSP, server.EmptyServer(100), plan),
        {"a": work, "b": lambda channel: ended.wait(WAIT_S)},
        4,
        "samples",
        startup_s=0.2,
        on_event=events.append,
      )
  finally:
    ended.set()
    engine.stop()
  assert [(x["kind"], x["worker"]) for x in events] == [("ready", "a")]


@pytest.mark.parametrize("wrong", (("a",), NAMES))
def test_run_ends_if_a_worker_fails_at_each_of_its_tasks(wrong):
  """It says hello each time, but never pushes."""

  class Failing(server.EmptyWorker):
    def compute(self, header):
      time.sleep(0.1)  # Until it has been seen.
      raise TypeError("no such loss")

  def work(name, channel):
    learner = (Failing if name in wrong else server.EmptyWorker)()
    server.WorkerLoop(channel, name, learner, depth=1).run()

  engine = server.ThreadEngine()
  try:
    with pytest.raises(server.LostRunError, match="4 times before it pushed"):
      _live_runs.run(
        engine,
        lambda plan: server.LiveServer(BSP, server.EmptyServer(100), plan),
        {name: functools.partial(work, name) for name in NAMES},
        10**6,
        startup_s=20.0,
      )
  finally:
    engine.stop()


def test_run_ends_if_the_work_of_a_worker_returns_before_it():
  """Another session on the engine does not hear of it."""
  engine = server.ThreadEngine()

  def work(name, channel, early=()):
    if name not in early:
      server.WorkerLoop(channel, name, server.EmptyWorker(), depth=1).run()

  def fit(**options):
    return _live_runs.run(
      engine,
      lambda plan: server.LiveServer(BSP, server.EmptyServer(100), plan),
      {name: functools.partial(work, name, **options) for name in NAMES},
      20,
      startup_s=20.0,
    )  # fmt: skip

  try:
    with pytest.raises(server.LostRunError, match=r"^b: its work returned"):
      fit(early=("b",))
    for _ in range(2):
      assert fit().events == []
  finally:
    engine.stop()


def test_threads_of_an_earlier_run_are_not_reported_to_the_next_one():
  engine, heard, end = server.ThreadEngine(), [], threading.Event()
  engine.on_lost(lambda *told: heard.append(("first", *told)))
  engine.spawn("a", lambda channel: None)
  engine.spawn("b", lambda channel: end.wait(WAIT_S))
  engine._threads["a"].join()
  engine.poll()
  assert [x[:2] for x in heard] == [("first", "a")]
  engine.spawn("a", lambda channel: None)
  engine._threads["a"].join()
  engine.on_lost(lambda *told: heard.append(("next", *told)))
  end.set()  # Its thread ends after the next run has begun.
  engine._threads["b"].join()
  engine.poll()
  assert len(heard) == 1


def test_server_continues_from_its_checkpoint(tmp_path):
  folder = str(tmp_path / "checkpoints")
  first = Hand(BSP, checkpoints=folder, marks=(8.0, 24.0), identity={"x": 1})
  first.pull("a"), first.pull("b")
  first.push("a", 0), first.push("b", 1)
  for name in NAMES:
    header = first.pull(name)
    if header["kind"] == "task":
      header = first.pull(name)
    assert header["kind"] == "save"
    first.server.push(
      {"kind": "state", "worker": name, "life": first.lives[name]},
      np.array([len(name)], np.uint8),
    )
  first.until(lambda _: list((tmp_path / "checkpoints").glob("update_*")))
  second = Hand(BSP, checkpoints=folder, marks=(8.0, 24.0), identity={"x": 1})
  try:
    # The worker's own state first, then a task of the next update.
    assert second.pull("a")["kind"] == "load"
    assert second.pull("a")["version"] == 1
    assert second.server.status()["resumed"] == 1
    assert second.server.status()["samples"] == 8
  finally:
    first.server.stop()
    second.server.stop()
  with pytest.raises(training.OtherRunError) as refused:
    Hand(BSP, checkpoints=folder, identity={"x": 2})
  # The server's process sends it, and another one reads it.
  error = pickle.loads(pickle.dumps(refused.value))
  assert error.differences == {"x": (1, 2)}
  assert str(error).startswith("`identity` must be that of the checkpoint, but")


def checkpoints_in(folder):
  return _run_checkpoints.RunCheckpoints(str(folder), {})


def save_checkpoint(saved, updates, driver=None):
  saved.begin(
    {
      "updates": updates, "now_s": 0.0, "marks": [], "limits": [],
      "state": {
        "learner": {}, "driver": driver, "pushed_bytes": 0, "pulled_bytes": 0,
      },
    },
    {"learner": np.zeros(4, np.uint8)},
    set(),
  )  # fmt: skip


def test_saved_checkpoints_are_kept_and_damaged_later_ones_removed(tmp_path):
  earlier = checkpoints_in(tmp_path)
  for number in (6, 100):
    save_checkpoint(earlier, number)
  for manifest in tmp_path.glob("*/arrays.json"):
    manifest.write_text("{}")
  with pytest.warns(UserWarning, match="update_0000000.* is damaged"):
    saved = checkpoints_in(tmp_path)
  assert saved.found is None
  for updates in (4, 5, 6, 6):
    save_checkpoint(saved, updates)
  names = sorted(x.name for x in tmp_path.glob("update_*"))
  assert names == ["update_0000000005", "update_0000000006"]
  assert checkpoints_in(tmp_path).found[0]["updates"] == 6


def _live(folder):
  server.LiveServer(
    server.ASP(batches=server.FixedBatches(1)),
    server.EmptyServer(10),
    server.LivePlan(workers=("a",), checkpoints=str(folder)),
  )


class _Opens:
  """Opens a file for writing once it is unpickled."""

  def __init__(self, victim):
    self.victim = victim

  def __reduce__(self):
    return open, (str(self.victim), "w")


@pytest.mark.parametrize("kind", ("driver", "array"))
def test_crafted_checkpoint_runs_nothing(kind, tmp_path):
  """A writer of the directory cannot name a type, function or file to open."""
  victim, folder = tmp_path / "victim", tmp_path / "checkpoints"
  victim.write_text("precious")
  if kind == "driver":
    plain = _delivery.Delivery(
      BSP, server.EmptyServer(1), ["a"], ["a"]
    ).save() | {"state": {"type": "builtins.open", "args": [str(victim), "w"]}}
    save_checkpoint(checkpoints_in(folder), 3, plain)
    with pytest.raises(ValueError, match="`state` must have the fields of a"):
      _live(folder)
  else:
    save_checkpoint(checkpoints_in(folder), 3)
    (array,) = folder.glob("*/*.npy")
    np.save(array, np.array([_Opens(victim)]), allow_pickle=True)
    # A manifest with the right hash, as an attacker would write it.
    manifest = array.with_name("arrays.json")
    digest = hashes.hash_file(array)
    body = sealed_json.read(manifest, form=3)
    file = array.with_name(f"learner-{digest[:12]}.npy")
    array.rename(file)
    body["files"] = {"learner": [file.name, digest, "uint8"]}
    sealed_json.write(manifest, body, form=3)
    with pytest.warns(UserWarning, match="holds a file that is no array"):
      assert checkpoints_in(folder).found is None
  assert victim.read_text() == "precious"


@pytest.mark.parametrize(
  "protocol",
  (
    BSP,
    server.SSP(bound=2),
    server.h_ps(64),
    server.DecoupledDiLoCo(
      batches=server.FixedBatches(4), interval=2, fragments=2
    ),
  ),
  ids=lambda x: type(x).__name__,
)
def test_protocol_state_is_the_same_after_json(protocol):
  def drive(delivery, tasks, start_s):
    for i in range(6):
      for name in NAMES[: 1 + i % 2]:
        if not tasks.get(name):
          message = server.Pull(name)
        else:
          message = server.Push(name, tasks[name].pop(0), 4, 0.1 + 0.01 * i)
        delivery.deliver(message, start_s + i)
        sent, _ = delivery.take_sent()
        for each in sent:
          tasks.setdefault(each.reply.worker, []).append(each.reply.task)
    return delivery

  learners = server.EmptyServer(1), server.EmptyServer(1)
  whole, resumed = (
    _delivery.Delivery(protocol, learner, NAMES, NAMES) for learner in learners
  )
  tasks = {}
  drive(whole, tasks, 0.0)
  learners[1].load(*learners[0].save())
  resumed.load(json.loads(json.dumps(whole.save())))
  assert resumed.state == whole.state
  assert [list(x.state.members) for x in (resumed, whole)] == [[*NAMES]] * 2
  again = {name: list(numbers) for name, numbers in tasks.items()}
  drive(whole, tasks, 10.0), drive(resumed, again, 10.0)
  assert resumed.state == whole.state and again == tasks
  assert resumed.summary() == whole.summary()


class Twice:
  """A machine on which every task takes twice its time."""

  def draw(self, random):
    del random
    return 2.0

  def end_s(self, start_s, work_s):
    return start_s + work_s


def paced(name, learner=None):
  profile = cluster.Profile(seconds_per_sample=1.0, seconds_per_encoding=10.0)
  return server.WorkerLoop(
    None, name, learner, depth=1, pace=server.Pace(Twice(), profile, seed=3)
  )


def test_paced_worker_ends_when_its_machine_would(monkeypatch):
  header = {"samples": 1, "passes": 1, "push_plan": 1, "pull_plan": 1}
  header |= {"now_s": 100.0}
  slept, now_s = [], 70.0
  clock = types.SimpleNamespace(monotonic=lambda: now_s, sleep=slept.append)
  monkeypatch.setattr(_worker_loop, "time", clock)
  loop = paced("a")
  # A sample and two messages that are encoded, twice.
  assert loop._wait(header, now_s, now_s) == 0.0
  assert slept == [pytest.approx(42.0)]
  late_s = loop._wait(header, now_s - 50.0, now_s - 50.0)
  assert late_s == pytest.approx(8.0) and len(slept) == 1
  # Machines vary for themselves.
  assert loop._random.random() != paced("b")._random.random()


def test_push_says_how_long_its_task_waited(monkeypatch):
  sent = []
  session = types.SimpleNamespace(
    send=lambda kind, header, out: sent.append(header)
  )
  loop = server.WorkerLoop(None, "a", server.EmptyWorker(), depth=1)
  monkeypatch.setattr(loop._learner, "receive", lambda *given: None)
  monkeypatch.setattr(loop._learner, "compute", lambda header: ({}, None))
  header = {"task": 0, "push_plan": 0, "samples": 1}
  clock = types.SimpleNamespace(monotonic=lambda: 70.0)
  monkeypatch.setattr(_worker_loop, "time", clock)
  loop._do(session, header, None, 65.0)
  assert sent[0]["waited_s"] == 5.0


def test_session_keeps_its_first_generation_until_it_rejoins():
  kinds = [("task", 1), ("task", 2), ("rejoin", 3), ("stop", 4)]
  messages = iter([{"kind": x, "generation": y} for x, y in kinds])
  session, seen = types.SimpleNamespace(generation=None), []

  def pull(name, life):
    seen.append(session.generation)
    return next(messages), None

  vars(session).update(
    _closed=threading.Event(), _name="a", _life=0, inbox=queue.Queue(),
    _channel=types.SimpleNamespace(pull=pull, push=lambda join: None),
  )  # fmt: skip
  _worker_loop._Session._pull(session)
  assert seen == [None, 1, 1, 3]


@pytest.mark.parametrize("method", ("pull", "push"))
def test_worker_whose_connection_fails_raises(method):
  """A thread that ended silently would let it wait for ever."""

  class Channel:
    def push(self, header, payload=None):
      if method == "push" and header["kind"] != "hello":
        raise RuntimeError("The connection is broken.")
      return {"life": 1}

    def pull(self, worker, life):
      if method == "pull":
        raise RuntimeError("The connection is broken.")
      time.sleep(0.01)
      return {"kind": "save", "generation": 0}, np.zeros(0, np.uint8)

  class Learner:
    def restart(self, *, lost=False):
      pass

    def save(self):
      return {}, np.zeros(0, np.uint8)

  loop = server.WorkerLoop(Channel(), "a", Learner(), depth=1)
  with pytest.raises(RuntimeError, match="connection is broken"):
    loop.run()
