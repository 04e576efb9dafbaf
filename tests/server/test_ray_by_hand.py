"""Ray's engine and actors without Ray: what they start, ask for and leave."""

import asyncio
import concurrent.futures
import os
import pathlib
import pickle
import signal
import types

import numpy as np
import pytest

from jdist import server
from jdist.server.runtime import _engine, _envelope
from jdist.server.runtime.ray_actors import (
  _ray_access,
  _ray_actors,
  _ray_engine,
)


class ActorError(Exception):
  """Ray's error of an actor that is lost."""


class UnavailableError(ActorError):
  """Ray's error of a living actor whose connection was cut."""


class TaskError(Exception):
  """Ray's error of a method that raised its cause."""

  def __init__(self, cause):
    super().__init__("A trace of many lines.")
    self.cause = cause


class Actor:
  """Notes its calls; a call's result is in its actor's `results`, by name."""

  def __init__(self, ray, kind, options):
    self.ray, self.kind, self.options = ray, kind, options
    self.calls, self.results = [], {"process": 7}

  def __getattr__(self, method):
    def remote(*args):
      self.calls.append((method, *args))
      return self, method

    return types.SimpleNamespace(remote=remote)


class Ray:
  """Ray's functions, which note what they are called with."""

  cloudpickle = pickle
  exceptions = types.SimpleNamespace(
    RayTaskError=TaskError, RayActorError=ActorError,
    ActorUnavailableError=UnavailableError, GetTimeoutError=TimeoutError,
    ObjectLostError=TimeoutError, RayError=Exception,
  )  # fmt: skip

  def __init__(self):
    self.resources = {"CPU": 8.0, "GPU": 2.0}
    self.actors, self.killed, self.waits = [], [], []
    self.error, self.taken, self.started, self.down = None, 0, None, 0

  def init(self, **options):
    self.started = options, dict(os.environ)
    if self.error:
      raise self.error

  def is_initialized(self):
    return True

  def shutdown(self):
    self.down += 1

  def cluster_resources(self):
    return self.resources

  def remote(self, kind):
    def options(**given):
      def make():
        if self.taken:
          self.taken -= 1
          raise ValueError("The name is taken.")
        self.actors.append(Actor(self, kind, given))
        return self.actors[-1]

      return types.SimpleNamespace(remote=make)

    return types.SimpleNamespace(options=options)

  def kill(self, actor, no_restart):
    assert no_restart
    self.killed.append(actor)
    raise ActorError("It had ended.")

  def wait(self, calls, timeout):
    ((actor, method),) = calls
    return (calls, []) if method in actor.results else ([], calls)

  def get(self, call, timeout=None):
    actor, method = call
    self.waits.append((method, timeout))
    found = actor.results.get(method)
    if isinstance(found, Exception):
      raise found
    return found


@pytest.fixture(autouse=True)
def _same_environment():
  """An actor's variables are those of its process, and here of all tests."""
  before = dict(os.environ)
  yield
  os.environ.clear()
  os.environ.update(before)


@pytest.fixture
def ray(monkeypatch):
  found = Ray()
  monkeypatch.setattr(_ray_access, "import_ray", lambda: found)
  monkeypatch.setattr(_ray_access, "_SET", {_ray_access.MODE})
  monkeypatch.setattr(os, "cpu_count", lambda: 8)
  monkeypatch.delenv(_ray_access.MODE, raising=False)
  before = signal.getsignal(signal.SIGTERM)
  yield found
  signal.signal(signal.SIGTERM, before)


@pytest.fixture
def clock(monkeypatch):
  found = types.SimpleNamespace(now=0.0, monotonic=lambda: found.now)
  found.sleep = lambda s: setattr(found, "now", found.now + s)
  monkeypatch.setattr(_ray_engine, "time", found)
  return found


@pytest.fixture
def start(ray, clock):
  """Starts an engine that ends with its test."""
  engines = []

  def start(*given, **options):
    engines.append(server.RayEngine(*given, **options))
    return engines[-1]

  yield start
  for engine in engines:
    engine.stop()


def test_cluster_of_this_machine_has_its_own_files_and_token(ray, monkeypatch):
  monkeypatch.setenv("NPROC", "3")
  monkeypatch.setattr(signal, "getsignal", lambda number: None)
  handlers = []
  monkeypatch.setattr(_ray_access, "set_handler", handlers.append)
  before = dict(os.environ)
  engine = server.RayEngine(2, spares=1)
  options, environment = ray.started
  namespace = options.pop("namespace")
  assert namespace.startswith("jdist-") and len(namespace) == 14
  folder = pathlib.Path(options.pop("_temp_dir")).parent
  assert folder.name.startswith("jdist-ray-") and folder.exists()
  assert options == {
    "log_to_driver": False, "configure_logging": False, "num_cpus": 8,
    "include_dashboard": False, "object_store_memory": 312 * 2**20,
    "_node_ip_address": "127.0.0.1",
  }  # fmt: skip
  own = {
    **_ray_engine.ONE_THREAD, "AUTOSCALER_METRIC_PORT": "-1",
    "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _ray_access._OWN_TOKEN,
    "JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }  # fmt: skip
  assert environment == before | own
  engine.serve(len)
  engine.spawn("x", len)
  engine.stop()
  assert ray.killed == ray.actors[::-1] and ray.down == 1
  assert dict(os.environ) == before and not folder.exists()
  # The start has put its own in place of the default, and the end takes it.
  assert handlers == [_ray_access._end, signal.SIG_DFL]


def test_handler_of_the_program_is_back_at_the_end(ray):
  handler = lambda number, frame: None  # noqa: E731
  signal.signal(signal.SIGTERM, handler)
  before = dict(os.environ)
  server.RayEngine(1, environment={"A": "b"}, cache="there").stop()
  assert dict(os.environ) == before
  _, environment = ray.started
  assert environment["A"] == "b" and "OMP_NUM_THREADS" not in environment
  assert environment["JAX_COMPILATION_CACHE_DIR"] == "there"
  assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize(
  ("error", "raised"),
  [(OSError, ConnectionError), (KeyboardInterrupt, KeyboardInterrupt)],
)
def test_processes_of_a_node_that_does_not_start_are_ended(
  error, raised, ray, monkeypatch
):
  ended = []

  class Node:
    def __init__(self, **options):
      raise error

    def kill_all_processes(self, **options):
      ended.append(options)

  monkeypatch.setattr(ray, "init", Node)
  with pytest.raises(raised):
    server.RayEngine(1)
  assert ended == [{"check_alive": False, "allow_graceful": True}]


def test_cluster_of_an_address_gets_the_environment(ray, monkeypatch):
  monkeypatch.setattr(_ray_access, "check_address", lambda address: None)
  before, ray.resources = dict(os.environ), {"CPU": 3.0}
  make = server.RayEngine
  engine = make(2, address="h:1", environment={"A": "b"}, cache="there")
  options, environment = ray.started
  engine.stop()
  assert environment == before == dict(os.environ)
  assert options["address"] == "h:1" and "num_cpus" not in options
  assert options["runtime_env"]["env_vars"] == {
    "JAX_COMPILATION_CACHE_DIR": "there", "A": "b",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }  # fmt: skip
  with pytest.raises(ValueError, match="need 4 CPUs, and Ray has 3: add"):
    make(2, address="h:1", spares=1)
  with pytest.raises(ValueError, match="need 2 GPUs, and Ray has 0: add"):
    make(2, address="h:1", gpus_per_worker=1)
  ray.resources = {}
  with pytest.raises(ValueError, match="need 2 CPUs, and Ray has 0: add"):
    make(1, address="h:1")
  ray.error = RuntimeError("It is\n  another's.")
  with pytest.raises(
    ValueError, match="at h:1 cannot be used: It is another's"
  ):
    make(2, address="h:1")
  assert ray.down == 5


def test_start_that_fails_leaves_nothing(ray, monkeypatch):
  folders, before = [], dict(os.environ)
  make = _ray_engine.tempfile.mkdtemp
  monkeypatch.setattr(
    _ray_engine.tempfile, "mkdtemp",
    lambda **given: folders.append(make(**given)) or folders[-1],
  )  # fmt: skip
  ray.error = RuntimeError("No\nport.")
  with pytest.raises(_engine.LostServerError, match="too busy: No port"):
    server.RayEngine(1)
  ray.error = None
  with pytest.raises(ValueError, match=r"need 2\.5 GPUs, and Ray has 2: add"):
    server.RayEngine(4, gpus_per_worker=0.5, spares=1)
  for more in ({"workers": 8}, {"workers": 7, "spares": 1}):
    with pytest.raises(ValueError, match="need 9 CPUs, and Ray has 8: add"):
      server.RayEngine(**more)
  with pytest.raises(ValueError, match=r"or whole ones, got 1\.5"):
    server.RayEngine(1, gpus_per_worker=1.5)
  server.RayEngine(1, gpus_per_worker=2).stop()
  server.RayEngine(4, gpus_per_worker=0.5).stop()
  server.RayEngine(15, cpus_per_worker=0.5).stop()
  assert len(folders) == ray.down == 5 and dict(os.environ) == before
  assert not any(pathlib.Path(x).exists() for x in folders)


def test_servers_begin_in_their_order_and_stay(ray, start):
  engine = start(2, cpus_per_worker=0.5, spares=1)
  engine.serve("server", "one", "two")
  names = ["jdist-server-1", "jdist-server-2", "jdist-server"]
  assert [x.options for x in ray.actors] == [
    {"name": name, "num_cpus": 0.5} for name in names
  ]
  assert all(x.kind is _ray_actors.ServerActor for x in ray.actors)
  assert [x.calls for x in ray.actors] == [
    [("serve", x)] for x in ("one", "two", "server")
  ]
  assert ray.waits == [("serve", 900.0)] * 3
  engine.serve("again", "one", "two")
  assert len(ray.actors) == 3 and not ray.killed
  assert ray.actors[2].calls[1:] == [("serve", "again")]
  # One that is lost takes all with it, as another number of shards does.
  ray.actors[0].results["serve"] = ActorError("lost")
  engine.serve("server", "one", "two")
  assert ray.killed == ray.actors[:3] and len(ray.actors) == 6
  engine.serve("server")
  assert ray.killed == ray.actors[:6] and len(ray.actors) == 7
  ray.resources = {"CPU": 2.0}
  engine.serve("server")
  with pytest.raises(ValueError, match=r"need 2\.5 CPUs, and Ray has 2: add"):
    engine.serve("server", "one")
  ray.resources = {}
  with pytest.raises(ValueError, match="and Ray has 0: add"):
    engine.serve("server")
  ray.resources = {"CPU": 2.0}
  ray.actors[-1].results["serve"] = TaskError(KeyError("its own"))
  with pytest.raises(KeyError, match="its own"):
    engine.serve("server")


def test_name_that_is_taken_is_waited_for(ray, start, clock):
  engine, ray.taken = start(1), 100
  engine.serve("server")
  assert len(ray.actors) == 1 and clock.now == pytest.approx(10.0)
  engine, ray.taken = start(1), 1000
  with pytest.raises(ValueError, match="is taken"):
    engine.serve("server")
  assert clock.now == pytest.approx(40.1, abs=0.15)


def test_calls_reach_the_server_and_its_errors_come_back(ray, start):
  engine = start(1)
  engine.serve("server", "one")
  engine.spawn("x", len)
  shard, main, worker = ray.actors
  main.results |= {"ask": {"updates": 3}, "process": 5}
  shard.results["process"], worker.results["process"] = 6, 8
  assert engine.ask("status", 1, 2) == {"updates": 3}
  assert main.calls[-1] == ("ask", "status", (1, 2))
  assert ray.waits[-1] == ("ask", 60.0)
  engine.ask("status", timeout_s=2.0)
  assert ray.waits[-1] == ("ask", 2.0)
  names = ("server", "server-1", "x")
  assert list(map(engine.process_of, names)) == [5, 6, 8]
  assert ray.waits[-1] == ("process", 30.0)
  main.results["ask"] = TaskError(KeyError("its own"))
  with pytest.raises(KeyError, match="its own"):
    engine.ask("status")
  for error in (ActorError, TimeoutError):
    main.results["ask"] = error("It is\nlost.")
    with pytest.raises(_engine.LostServerError, match=r"^It is lost\.$"):
      engine.ask("status")


def test_worker_takes_a_process_that_has_compiled(ray, start):
  engine = start(1)
  for name in ("x", "y"):
    engine.spawn(name, len)
  one, two = ray.actors
  assert one.kind is _ray_actors.WorkerActor and one.options == {"num_cpus": 1}
  ((_, work),) = one.calls
  assert pickle.loads(work) is len
  # Its work has ended: the process works again. That of y fails.
  one.results["work"], two.results["work"] = None, ActorError("lost")
  engine.spawn("x", abs)
  assert len(ray.actors) == 2 and pickle.loads(one.calls[1][1]) is abs
  assert ray.waits == [("work", 5.0)] and not ray.killed
  engine.spawn("y", abs)
  assert ray.killed == [two] and len(ray.actors) == 3
  engine._spares.append(spare := Actor(ray, None, {}))
  engine.spawn("z", max)
  assert len(ray.actors) == 3 and pickle.loads(spare.calls[0][1]) is max
  assert not engine._spares


@pytest.mark.parametrize(
  ("gpus", "own", "variables"),
  [
    (1, False, {"JAX_PLATFORMS": "cuda,cpu"}),
    (
      0.5, False,
      {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    ),
    (0.5, True, None),
  ],
)  # fmt: skip
def test_worker_with_a_gpu_computes_there(ray, start, gpus, own, variables):
  environment = {"A": "b"} if own else None
  start(1, gpus_per_worker=gpus, environment=environment).spawn("x", len)
  ((actor,), wanted) = ray.actors, {"num_cpus": 1, "num_gpus": gpus}
  if variables:
    wanted["runtime_env"] = {"env_vars": variables}
  assert actor.options == wanted


def test_calls_that_end_are_reported_once(ray, start):
  engine, lost = start(5), []
  engine.spawn("before", len)
  engine.on_lost(lambda *given: lost.append(given))
  for name in "abcde":
    engine.spawn(name, len)
  before, a, b, c, d, _ = ray.actors
  before.results["work"] = a.results["work"] = None
  b.results["work"] = UnavailableError("cut")
  c.results["work"] = ActorError("It\ndied.")
  d.results["work"] = TaskError(KeyError("key"))
  engine.poll()
  assert sorted(lost) == [
    ("a", _engine.RETURNED), ("c", "It died."), ("d", "KeyError: 'key'"),
  ]  # fmt: skip
  # That of a cut connection goes on, and a process that is free waits.
  assert [x[1:] for x in b.calls[1:]] == [(None,)]
  lost.clear()
  for actor in (b, c, d):
    del actor.results["work"]
  engine.poll()
  assert not lost
  engine.spawn("a", abs)
  assert pickle.loads(a.calls[1][1]) is abs and len(ray.actors) == 6
  engine.stop()
  assert ray.killed == [before, b, c, d, ray.actors[5], a]


def test_spares_begin_when_all_workers_run(ray, start, clock):
  engine = start(2, spares=2)
  engine.spawn("x", len)
  clock.now = 100.0
  engine.poll()
  assert len(ray.actors) == 1
  engine.spawn("y", len)
  clock.now = 108.0
  engine.poll()
  assert len(ray.actors) == 2
  clock.now = 108.1
  for _ in range(2):
    engine.poll()
  assert len(ray.actors) == 4
  for spare in ray.actors[2:]:
    assert spare.calls == [("warm", _ray_engine._PRELOADED)]
    assert spare.kind is _ray_actors.WorkerActor


def test_server_of_an_actor_stops_for_the_next(ray):
  actor, log = _ray_actors.ServerActor(), []
  for call in (actor.push(None, []), actor.pull("x", 1, 1)):
    with pytest.raises(_engine.LostServerError, match="has not begun"):
      asyncio.run(call)

  class Server:
    def __init__(self, channel):
      log.append(channel)

    def stop(self):
      log.append("stop")

    def add(self, a, b):
      return a + b

    def pull(self, worker, life):
      assert (worker, life) == ("x", 3)
      found = concurrent.futures.Future()
      header = {"kind": "task", "messages": ["handle"]}
      found.set_result((header, np.arange(300_000) % 7))
      return found

  ray.put = lambda piece: piece.tolist()

  async def run():
    await actor.serve(Server)
    assert await actor.ask("add", (2, 3)) == 5
    assert await actor.process() == os.getpid()
    message, pieces, handles = await actor.pull("x", 3, 200_000)
    assert _envelope.unpack(message)[0] == {"kind": "task"}
    assert handles == ["handle"] and list(map(len, pieces)) == [
      200_000,
      100_000,
    ]
    assert np.concatenate(pieces).tolist() == (np.arange(300_000) % 7).tolist()
    await actor.serve(Server)

  asyncio.run(run())
  first, stop, second = log
  assert stop == "stop"
  assert first._name == second._name == "jdist-server"
  assert first.shard(2)._name == "jdist-server-2"


def test_work_whose_call_was_cut_is_waited_for(ray):
  actor, log = _ray_actors.WorkerActor(), []
  ray.cloudpickle = types.SimpleNamespace(loads=lambda work: log.append)

  async def run():
    await actor.work(b"work")
    await actor.work(None)
    assert await actor.process() == os.getpid()

  asyncio.run(run())
  ((channel),) = log
  assert channel._name == "jdist-server"


def test_server_is_looked_up_again_after_an_error(ray):
  way, looked = _ray_actors._RayChannel("jdist-server-1"), []

  def get_actor(name):
    looked.append(name)
    if len(looked) == 4:
      raise ValueError("There\nis none.")
    return actor

  ray.get_actor, actor = get_actor, Actor(ray, None, {})
  actor.results["ask"] = 3
  assert [way.ask("count", 1) for _ in range(2)] == [3, 3]
  assert actor.calls == [("ask", "count", (1,))] * 2
  assert looked == ["jdist-server-1"]
  actor.results["ask"] = TaskError(KeyError("its own"))
  with pytest.raises(KeyError, match="its own"):
    way.ask("count", 1)
  actor.results["ask"] = ActorError("It is\nlost.")
  for _ in range(2):
    with pytest.raises(_engine.LostServerError, match=r"^It is lost\.$"):
      way.ask("count", 1)
  with pytest.raises(_engine.LostServerError, match=r"^There is none\.$"):
    way.ask("count", 1)
  assert len(looked) == 4


@pytest.mark.parametrize(
  ("address", "rule"),
  [
    ("there", "`address` must be HOST:PORT of .*, got 'there'"),
    ("127.0.0.1:x", "`address` must be HOST:PORT of .*, got '127.0.0.1:x'"),
    ("127.0.0.1:1", "No Ray cluster answers at 127.0.0.1:1: "),
  ],
)
def test_address_without_a_cluster_is_refused(address, rule, monkeypatch):
  monkeypatch.delenv(_ray_access.MODE, raising=False)
  with pytest.raises(ValueError, match=rule):
    _ray_access.check_address(address)


@pytest.mark.parametrize("mode", [None, "disabled"])
def test_cluster_of_other_machines_needs_tokens(mode, monkeypatch):
  monkeypatch.delenv(_ray_access.MODE, raising=False)
  if mode is not None:
    monkeypatch.setenv(_ray_access.MODE, mode)
  with pytest.raises(ValueError, match="RAY_AUTH_MODE is not `token`"):
    _ray_access.check_address("10.1.2.3:6379")
