"""A live run starts in an order that its result alone does not show."""

import concurrent.futures
import functools
import time

import numpy as np
import pytest

from jdist import server
from jdist.server.runtime import _server_core
from tests.server import _live_runs

pytest.importorskip("simpy")

ASP = server.ASP(batches=server.FixedBatches(4))


class Noting(server.ThreadEngine):
  """Notes which workers are started and lost, and who is there then."""

  def __init__(self):
    super().__init__()
    self.log = []

  def spawn(self, name, work):
    # Otherwise the server would forget the new process, and the run not end.
    again = any(x[:2] == ("spawn", name) for x in self.log)
    assert not again or self.log[-1] == ("lost", name)
    self.log.append(("spawn", name, super().ask("status")["here"]))
    super().spawn(name, work)

  def ask(self, method, *args, timeout_s=60.0):
    if method == "lost":
      self.log.append(("lost", *args))
    return super().ask(method, *args)


def run(works, total=4, **options):
  """Returns the log of a run of empty tasks."""
  engine = Noting()

  def make_server(plan):
    return server.LiveServer(ASP, server.EmptyServer(100), plan)

  def work(name, channel):
    works.get(name, lambda: None)()
    time.sleep(0.05)  # Without a wait the next one is spawned now.
    server.WorkerLoop(channel, name, server.EmptyWorker(), depth=1).run()

  found = {name: functools.partial(work, name) for name in "abc"}
  try:
    _live_runs.run(engine, make_server, found, total, **options)
  finally:
    engine.stop()
  return engine.log


def test_first_worker_is_there_before_the_others_are_started():
  """It compiles for all."""
  first, *others = run({})
  assert first == ("spawn", "a", [])
  assert [x[:2] for x in others] == [("spawn", "b"), ("spawn", "c")]
  assert all("a" in here for _, _, here in others)


def test_lost_worker_is_forgotten_before_it_is_started_again():
  fails = [RuntimeError("It has failed.")]

  def fail():
    if fails:
      raise fails.pop()

  log = [x[:2] for x in run({"b": fail})]
  assert log.count(("lost", "b")) == 1 and log.count(("spawn", "b")) == 2


class Counted(server.EmptyServer):
  """Counts what is compiled, and takes a while for each push."""

  def __init__(self):
    super().__init__(100)
    self.prepared = 0

  def prepare(self):
    self.prepared += 1

  def push(self, task, more, payload):
    time.sleep(0.02)
    super().push(task, more, payload)


@pytest.fixture
def counted():
  """A server with worker "a", its learner and the worker's life."""
  learner = Counted()
  found = server.LiveServer(ASP, learner, server.LivePlan(workers=("a",)))
  # Before a worker may wait for the compiler.
  assert learner.prepared == 1
  life = found.push({"kind": "hello", "worker": "a", "fresh": True})["life"]
  found.start()
  yield found, life
  found.stop()
  assert learner.prepared == 1


def push(found, life, task):
  header = {
    "kind": "push", "worker": "a", "life": life, "task": task, "samples": 4,
    "compute_s": 0.1, "waited_s": 0.0, "more": {},
  }  # fmt: skip
  return found.push(header, np.zeros(100, np.uint8))


def test_busy_seconds_of_all_messages_are_summed(counted):
  found, life = counted
  for _ in range(3):
    header, _ = found.pull("a", life).result(timeout=60.0)
    assert push(found, life, header["task"]) == {}
  found.pull("a", life).result(timeout=60.0)
  assert 0.06 <= found.summary()["server_busy_s"] < 60.0


def test_pushes_of_a_lost_process_are_refused_at_once(counted):
  found, life = counted
  header, _ = found.pull("a", life).result(timeout=60.0)
  found.lost("a")
  assert push(found, life, header["task"]) == {"refused": "stale"}


def test_checkpoint_waits_for_the_members_that_are_here_alone(tmp_path):
  plan = server.LivePlan(workers=("a", "b"), checkpoints=str(tmp_path))
  core = _server_core.ServerCore(ASP, server.EmptyServer(100), plan)

  def handle(kind, worker="", payload=None, **header):
    payload = np.zeros(0, np.uint8) if payload is None else payload
    item = _server_core.Item(0.0, kind, worker, header, payload)
    core.handle(item)

  for name in "ab":
    handle("hello", name, life=1, fresh=True)
  handle("start")
  # The process of "b" is lost, which the protocol has yet to be told.
  core.boxes["b"].here = False
  done = concurrent.futures.Future()
  handle("save", done=done)
  words = {
    name: [header["kind"] for header, _ in box.messages]
    for name, box in core.boxes.items()
  }
  assert words == {"a": ["task", "save"], "b": ["task"]}
  assert not done.done()
  handle("state", "a", np.zeros(1, np.uint8))
  assert done.result(timeout=60.0) == 0
