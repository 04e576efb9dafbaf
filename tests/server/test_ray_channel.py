"""A worker's process of Ray: lost answers, a cut connection, its imports."""

import asyncio
import importlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import types

import numpy as np
import pytest

from jdist.server.runtime.ray_actors import _ray_access, _ray_actors
from tests import _processes
from tests.experiments import _loading
from tests.server import test_ray_engine


class _TimeoutError(Exception):
  """Ray's error when an answer has not come in time."""


class _LostError(Exception):
  """Ray's error when no machine has an object any more."""


class _Ray:
  """Ray without processes: the answers to some calls are lost for ever."""

  exceptions = types.SimpleNamespace(
    RayTaskError=KeyError, RayActorError=KeyError, ObjectLostError=_LostError,
    GetTimeoutError=_TimeoutError, RayError=Exception,
  )  # fmt: skip

  cloudpickle = pickle

  def __init__(self, lost, late=0):
    self.lost, self.late, self.calls = lost, late, []

  def get_actor(self, name):
    del name
    return self

  def __getattr__(self, method):
    def remote(*args):
      del args
      self.calls.append(method)
      return method

    return types.SimpleNamespace(remote=remote)

  def wait(self, calls, timeout, num_returns=1):
    assert timeout is not None
    self.late -= 1
    ready = self.late < 0 and calls[0] not in self.lost
    return (calls, []) if ready else ([], calls)

  def get(self, call, timeout=None):
    if call in self.lost:
      assert timeout is not None, "it waits for ever"
      raise _TimeoutError(call)
    return _ray_actors._envelope.pack({"kind": "task"}), [], None


def channel(ray, monkeypatch):
  monkeypatch.setattr(_ray_access, "import_ray", lambda: ray)
  return _ray_actors._RayChannel()


@pytest.mark.parametrize("method", ["pull", "push"])
def test_lost_answer_ends_a_call(method, monkeypatch):
  ray = _Ray({method, "process"})
  call = getattr(channel(ray, monkeypatch), method)
  with pytest.raises(ConnectionError):
    call(*(("a", 1) if method == "pull" else ({"kind": "hello"},)))
  # It is not repeated: the server may have taken it.
  assert ray.calls == [method, "process"]


@pytest.fixture
def sigterm():
  before = signal.getsignal(signal.SIGTERM)
  yield
  signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("own", [True, False])
def test_process_exits_at_sigterm_unless_it_has_a_handler(own, sigterm):
  handler = (lambda number, frame: None) if own else signal.SIG_DFL
  signal.signal(signal.SIGTERM, handler)
  with _ray_access.quiet_start():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray sets its own.
  found = signal.getsignal(signal.SIGTERM)
  if own:
    assert found is handler
  else:
    with pytest.raises(SystemExit, match="143"):  # 128 + 15, as a shell says.
      found(signal.SIGTERM, None)


def test_late_answer_of_a_living_server_is_waited_for(monkeypatch):
  ray = _Ray(set(), late=100)
  header, _ = channel(ray, monkeypatch).pull("a", 1)
  assert header == {"kind": "task"}
  assert ray.calls == ["pull", *["process"] * 100]


def test_message_that_a_peer_has_lost_comes_from_the_server(monkeypatch):
  """Here b's second part is lost, and that of c has not come in time."""
  taken, asked, now = [], [], [0.0]
  merges = [[0, [4, 5, 6], [0.25] * 3, ["b", "c", "z"]]]
  rests = []
  clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=rests.append)

  class Ray(_Ray):
    def wait(self, calls, timeout, num_returns=1):
      return calls, []

    def get(self, call, timeout=None):
      if call == "pull":
        message = _ray_actors._envelope.pack({"kind": "task", "merges": merges})
        return message, [], [["b0", "b1"], ["c0"], ["z0", "z1"]]
      if call == "ask":
        return np.array([asked[-1]], np.uint8)
      taken.append((call, timeout))
      if call == "b1":
        raise _LostError
      if call == "c0":
        now[0] += timeout
        raise _TimeoutError
      now[0] += 4.0
      return np.array([ord(call[0]), int(call[1])], np.uint8)

    def __getattr__(self, method):
      def remote(*args):
        if method == "ask":
          assert args[0] == "message"
          asked.append(*args[1])
        return method

      return types.SimpleNamespace(remote=remote)

  way = channel(Ray(set()), monkeypatch)
  monkeypatch.setattr(_ray_actors, "time", clock)
  header, _ = way.pull("b", 1)
  z = [ord("z"), 0, ord("z"), 1]
  assert [x.tolist() for x in header["messages"]] == [[4], [5], z]
  # A worker begins behind itself.  The first message may take long, and later
  # ones three times as long as the last that came.
  assert taken == [
    ("c0", 20.0), ("z0", 20.0), ("z1", 16.0), ("b0", 24.0), ("b1", 20.0),
  ]  # fmt: skip
  assert asked == [5, 4] and rests == [0.2] * 3  # 5 % of 4 s each.
  taken.clear()
  way.pull("z", 1)
  assert [call for call, _ in taken] == ["b0", "b1", "c0", "z0", "z1"]


def test_message_for_peers_is_a_result_of_the_servers_call(monkeypatch):
  """The server is its owner, and does not wait for it: it has the message."""
  sent, taken, asked = [], [], []
  worker = _ray_actors.WorkerActor()

  class Ray(_Ray):
    def get_runtime_context(self):
      return types.SimpleNamespace(current_actor="this worker")

    def __getattr__(self, method):
      return types.SimpleNamespace(remote=lambda *args: sent.append(args))

    def get(self, call, timeout=None):
      return {}

  class Server:
    def push(self, header, payload):
      taken.append((header, payload.tolist()))
      return {}

  payload, way = np.array([7], np.uint8), channel(Ray(set()), monkeypatch)
  monkeypatch.setattr(_ray_actors, "_SHARED", {})
  for shared in (True, False):
    way.push({"kind": "push", "task": 3, "shared": shared}, payload)
  (first, _, peer), (second, _, nobody) = sent
  assert (peer, nobody) == ("this worker", None)
  assert asyncio.run(worker.message(3, 0, 1)).tolist() == [7]
  actor = _ray_actors.ServerActor()
  actor._server = Server()
  remote = types.SimpleNamespace(remote=lambda *x: asked.append(x) or "it")
  asyncio.run(actor.push(first, [], types.SimpleNamespace(message=remote)))
  asyncio.run(actor.push(second, []))
  assert [x["handle"] for x, _ in taken[:1]] == [["it"]]
  assert asked == [(3, 0, 1)]
  assert taken[1][0]["handle"].tolist() == [7]
  assert [x for _, x in taken] == [[7], [7]]
  for task in range(10, 20):
    way.push({"kind": "push", "task": task, "shared": True}, payload)
  assert list(_ray_actors._SHARED) == [16, 17, 18, 19]


class _Link(_Ray):
  """Ray on a link of 1 MB/s, with a clock; objects are their own handles."""

  def __init__(self, monkeypatch, reply=None):
    super().__init__(set())
    self.now_s, self.log, self.reply = 0.0, [], reply
    clock = types.SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.rest)
    monkeypatch.setattr(_ray_actors, "time", clock)

    async def rest(seconds):
      self.rest(seconds)

    monkeypatch.setattr(_ray_actors.asyncio, "sleep", rest)

  def rest(self, seconds):
    self.now_s += seconds
    self.log.append(("rest", round(seconds, 6)))

  def put(self, piece):
    link = self

    class Piece:
      def __await__(self):
        return link.take(piece).__await__()

    return Piece()

  async def take(self, piece):
    self.carry(piece)
    return piece

  def carry(self, piece):
    self.now_s += len(piece) / 1e6
    self.log.append(("piece", len(piece)))

  def wait(self, calls, timeout, num_returns=1):
    return calls, []

  def get(self, call, timeout=None):
    if isinstance(call, np.ndarray):
      self.carry(call)
      return call
    return self.reply(call) if self.reply else {}

  def __getattr__(self, method):
    return types.SimpleNamespace(remote=lambda *args: (method, *args))


PAYLOAD = (np.arange(600_000) % 251).astype(np.uint8)
# 262,144 bytes take 0.262144 s at 1 MB/s, and the link then rests for 5 %.
SENT = [
  ("piece", 262_144), ("rest", 0.013107), ("piece", 262_144),
  ("rest", 0.013107), ("piece", 75_712), ("rest", 0.003786),
]  # fmt: skip


def test_pulled_payload_comes_in_pieces_below_the_links_rate(monkeypatch):
  sizes = []

  def reply(call):
    method, _, _, size = call
    assert method == "pull"
    sizes.append(size)
    starts = range(0, len(PAYLOAD), size)
    pieces = [PAYLOAD[start : start + size] for start in starts]
    return _ray_actors._envelope.pack({"kind": "task"}), pieces, None

  link = _Link(monkeypatch, reply)
  way = channel(link, monkeypatch)
  for _ in range(2):
    header, payload = way.pull("a", 1)
    assert header == {"kind": "task"}
    np.testing.assert_array_equal(payload, PAYLOAD)
  assert link.log == SENT * 2
  assert sizes == [262_144] * 2  # A quarter of a second at 0.95 MB/s is less.
  # The next pieces take a quarter of a second at the rate of these.
  link.carry = lambda piece: setattr(link, "now_s", link.now_s + 0.1)
  for _ in range(2):
    way.pull("a", 1)
  assert sizes[2:] == [262_144, int(600_000 / (3 * 0.105) * 0.25)]


def test_pushed_payload_is_taken_in_pieces_below_the_links_rate(monkeypatch):
  taken, link = [], _Link(monkeypatch)
  way, actor = channel(link, monkeypatch), _ray_actors.ServerActor()

  class Server:
    def push(self, header, payload):
      taken.append((header, payload))
      return {"taken": header["task"]}

  def get(call, timeout=None):
    method, *args = call
    assert method == "push"
    return asyncio.run(actor.push(*args))

  actor._server, link.get = Server(), get
  assert way.push({"kind": "push", "task": 3}, PAYLOAD) == {"taken": 3}
  ((header, payload),) = taken
  np.testing.assert_array_equal(payload, PAYLOAD)
  assert header["handle"] is payload and link.log == SENT
  assert way._size == 262_144  # As of pulls.
  monkeypatch.setattr(link, "carry", lambda piece: link.rest(0.1))
  way.push({"kind": "push", "task": 4}, PAYLOAD)
  assert way._size == int(600_000 / (3 * 0.105) * 0.25)
  # Peers take it in the same pieces, from the worker.
  parts = []
  remote = lambda *x: parts.append(x)  # noqa: E731
  peer = types.SimpleNamespace(message=types.SimpleNamespace(remote=remote))
  pieces = [
    link.put(PAYLOAD[:9]),
    link.put(PAYLOAD[9:18]),
    link.put(PAYLOAD[:4]),
  ]
  message = _ray_actors._envelope.pack({"kind": "push", "task": 5})
  asyncio.run(actor.push(message, pieces, peer))
  assert parts == [(5, 0, 9), (5, 9, 18), (5, 18, 27)]
  # What Ray sends with a call stays there.
  link.log.clear()
  way.push({"kind": "push", "task": 4}, PAYLOAD[:262_144])
  assert link.log == [] and len(taken[-1][1]) == 262_144


# Two modules that import each other: of two threads that begin at either end,
# the one that comes last to the other's module finds it half made.
_ENDS = {
  "one_end": "import time; time.sleep(0.2); import other_end; VALUE = 1",
  "other_end": "import time; time.sleep(0.5); from one_end import VALUE",
}


def test_work_is_unpickled_once_its_spare_is_warm(tmp_path, monkeypatch):
  for name, text in _ENDS.items():
    (tmp_path / f"{name}.py").write_text(text.replace("; ", "\n"))
    monkeypatch.delitem(sys.modules, name, raising=False)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(_ray_access, "import_ray", lambda: _Ray({}))

  class Work:
    def __reduce__(self):
      return _importing, ("one_end",)

  async def run():
    actor = _ray_actors.WorkerActor()
    warm = asyncio.ensure_future(actor.warm(("other_end",)))
    await asyncio.sleep(0.05)
    await actor.work(pickle.dumps(Work()))
    await warm

  asyncio.run(run())


def _importing(name):
  importlib.import_module(name)
  return lambda channel: None


# The worker `a` has sent its push and waits, when the server answers into a cut
# connection and closes it.  Run in a network of its own.
CUT = """
import functools, sys, time
sys.path.insert(0, sys.argv[1])
import links
links.enter()
links.limit_rto(5.0)
from jdist import server

class Slow(server.EmptyWorker):
  def __init__(self, seconds):
    super().__init__()
    self.seconds = seconds
  def compute(self, header):
    time.sleep(self.seconds)
    return super().compute(header)

def make_server(plan):
  protocol = server.BSP(batches=server.FixedBatches(1), timeout_s=12.0)
  return server.LiveServer(protocol, server.EmptyServer(1000), plan)

def work(name, seconds, channel):
  server.WorkerLoop(channel, name, Slow(seconds), depth=1).run()

cuts, times = links.Cuts(), {}

def watch(status):
  cuts.follow()
  now_s = status["now_s"]
  if "two" not in times and status["updates"] == 2:
    times["two"] = now_s
  if "cut" not in times and now_s > times.get("two", now_s) + 1.5:
    times["cut"] = now_s
    cuts.cut("a", engine.process_of("a"))
  if "heal" not in times and now_s > times.get("cut", now_s) + 45.0:
    times["heal"] = now_s
    cuts.heal("a")
  if "cut" in times and "back" not in times:
    times["left" if status["members"] == 1 else "here"] = now_s
    if times.get("left", now_s) < now_s:
      times["back"] = now_s

engine = server.RayEngine(2, cpus_per_worker=0.25)
try:
  seconds = {"a": 0.1, "b": 4.0}
  works = {x: functools.partial(work, x, y) for x, y in seconds.items()}
  plan = server.LivePlan(workers=("a", "b"))
  session = server.LiveSession(
    engine, make_server, works, plan, on_status=watch, survive=True
  )
  server.ServerRun(session).fit(120.0, "seconds")
  print(times["back"] - times["heal"], session.events)
finally:
  engine.stop()
"""


@test_ray_engine.needs_ray
@pytest.mark.slow
@pytest.mark.skipif(
  os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and ip"
)
@pytest.mark.parametrize("keepalive_s", (300, 30))
def test_worker_returns_after_its_answer_was_lost_in_a_cut(keepalive_s):
  # After as long Ray reports connections that were closed during the cut.
  keepalive = {
    "RAY_grpc_client_keepalive_time_ms": f"{keepalive_s}000",
    "RAY_worker_niceness": "0",
  }
  told = subprocess.run(
    (sys.executable, "-c", CUT, str(_loading.FOLDER / "storm")),
    env=_processes.environment() | keepalive, capture_output=True, text=True,
    timeout=900,  # A busy machine takes minutes to start Ray.
  )  # fmt: skip
  # Without a look at the server it would wait for five minutes.
  assert not told.returncode, told.stderr
  back_s, _, events = told.stdout.splitlines()[-1].partition(" ")
  assert -1.0 < float(back_s) < 30.0 and events == "[]", told.stdout
