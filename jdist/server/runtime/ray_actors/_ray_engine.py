"""Ray as the engine: server and workers are actors, on one machine or many."""

import asyncio
import contextlib
import importlib
import os
import pathlib
import secrets
import shutil
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jdist import checks
from jdist.server.runtime import _engine

_SERVER = "jdist-server"
# Within so many seconds a worker that was sent home is there.
_HOME_S = 5.0
# What a spare process has imported when it is needed.
_PRELOADED = (
  "jdist.data", "jdist.models", "jdist.server", "jdist.training", "flax",
  "optax",
)  # fmt: skip
_MIN_STORE_BYTES = 78 * 2**20
_MODE, _TOKEN, _TOKEN_PATH = (
  "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH",
)  # fmt: skip
# One thread of computation for each process: workers share the machine.
ONE_THREAD = {
  "JAX_PLATFORMS": "cpu",
  "XLA_FLAGS": (
    "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
  ),
  "NPROC": "1",
  "OMP_NUM_THREADS": "1",
}


_CACHE = (
  "JAX_COMPILATION_CACHE_DIR",
  "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
  "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES",
)
# Ray reads a process's token once.
_OWN_TOKEN = secrets.token_hex(32)


def _set_token() -> None:
  """Turns token authentication on, with a token of this process's own.

  Unless the environment has one.  Raises a ValueError where it is too late.
  """
  if os.environ.get(_MODE) == "token":
    return
  if "ray" in sys.modules and _MODE not in _SET:
    raise ValueError(
      f"`{_MODE}=token` must be set before Ray is imported, or a `RayEngine` "
      "be the first that imports it: it starts nothing without a token."
    )
  _SET.add(_MODE)
  os.environ[_MODE], os.environ[_TOKEN] = "token", _OWN_TOKEN


_SET: set[str] = set()


def import_ray() -> Any:
  """Imports Ray.

  Raises:
    ImportError: when it is missing; the message says how to install it.
  """
  try:
    import ray
  except ImportError:
    raise ImportError(
      '`driver` ray needs Ray: `pip install ".[ray]"` in a clone, or '
      "`pip install 'jdist[ray]'`."
    ) from None
  return ray


def check_address(address: str | None) -> None:
  """Raises a ValueError unless a cluster may be, and can be, connected to.

  Off this machine only with token authentication, and only where something
  answers.
  """
  if address is None:
    return
  host, _, port = address.rpartition(":")
  if not host or not port.isdigit():
    raise ValueError(
      f"`address` must be HOST:PORT of a Ray cluster's head, got {address!r}."
    )
  if not _is_loopback(host):
    if os.environ.get(_MODE) != "token":
      raise ValueError(
        f"`address` {address} is not on this machine, and {_MODE} is not "
        f"`token`: set {_MODE}=token and {_TOKEN_PATH} on every node."
      )
    default = pathlib.Path.home() / ".ray" / "auth_token"
    path = pathlib.Path(os.environ.get(_TOKEN_PATH, default))
    if not os.environ.get(_TOKEN) and not path.is_file():
      raise ValueError(
        f"There is no token at {path}: copy the head's, or set {_TOKEN_PATH}."
      )
  try:
    socket.create_connection((host, int(port)), timeout=5.0).close()
  except OSError as error:
    raise ValueError(
      f"No Ray cluster answers at {address}: "
      f"{str(error.strerror or error).lower()}. `ray status` on its head says "
      "the address."
    ) from None


def _is_loopback(host: str) -> bool:
  return host in ("localhost", "::1") or host.startswith("127.")


class RayEngine:
  """Runs server and workers as Ray actors.

  Without an address a cluster of this machine alone is started, on the loopback
  interface, with a token of its own, in a directory that goes with it; else
  that of the address is used, which off this machine must have token
  authentication on.  A worker that dies is noticed by its call, which fails;
  `spawn` starts a new one in its place.

  Args:
    workers: so many will be spawned.
    address: HOST:PORT of a cluster's head; None starts one here.
    cpus_per_worker: of Ray's, by which it places actors; parts of one are for
      workers that mostly sleep.
    spares: further processes that have loaded all that a worker needs, and wait
      to take the place of one that is lost.
    environment: of the actors; one thread on the CPU by default, here.
    cache: directory for compiled programs, which all actors of a machine use;
      one that goes with the engine if None.

  Raises:
    ImportError: when Ray is missing.
    ValueError: when the address is wrong or may not be used, or there are too
      few CPUs.
  """

  def __init__(
    self,
    workers: int,
    *,
    address: str | None = None,
    cpus_per_worker: float = 1.0,
    spares: int = 0,
    environment: dict[str, str] | None = None,
    cache: str | None = None,
  ):
    checks.check_int("workers", workers, 1)
    checks.check_number("cpus_per_worker", cpus_per_worker, open_low=True)
    check_address(address)
    self._cpus, self._num = cpus_per_worker, workers
    self._num_spares = checks.check_int("spares", spares, 0)
    if address is None:
      _check_cpus(self._needed(workers), os.cpu_count() or 1)
    self._before = {
      x: os.environ.get(x) for x in (*ONE_THREAD, *_CACHE, _MODE, _TOKEN)
    }
    if address is None:
      _set_token()
    ray = import_ray()  # It reads once whether there are tokens.
    self._folder = tempfile.mkdtemp(prefix="jdist-ray-")
    compiled = cache or f"{self._folder}/compiled"
    self._environment = {
      **dict(zip(_CACHE, (compiled, "0", "-1"), strict=True)),
      **(ONE_THREAD if environment is None else environment),
    }
    self._ray: Any = ray
    # Of workers that work their call, too; others wait for the next one.
    self._workers: dict[str, tuple[Any, Any]] = {}
    self._idle: dict[str, Any] = {}
    self._spares: list[Any] = []
    self._server: Any = None
    self._call: Callable[[str, str], None] = lambda name, reason: None
    self._namespace = f"jdist-{secrets.token_hex(4)}"
    try:
      if address is None:
        self._start_here()
      else:
        self._connect(address)
        available = ray.cluster_resources().get("CPU", 0.0)
        _check_cpus(self._needed(workers), available)
    except BaseException:
      self.stop()
      raise

  def _needed(self, workers: int) -> float:
    return (workers + 1 + self._num_spares) * self._cpus

  def _start_here(self) -> None:
    """Starts a cluster on the loopback interface, with a token of its own."""
    # Inherited by all that is started now.
    os.environ.update(self._environment)
    with _quiet_ray():
      self._ray.init(
        num_cpus=os.cpu_count() or 1,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        namespace=self._namespace,
        object_store_memory=4 * _MIN_STORE_BYTES,
        _node_ip_address="127.0.0.1",
        _temp_dir=f"{self._folder}/s",
      )

  def _connect(self, address: str) -> None:
    try:
      with _quiet_ray():
        self._ray.init(
          address=address,
          log_to_driver=False,
          configure_logging=False,
          namespace=self._namespace,
          runtime_env={"env_vars": self._environment},
        )
    except Exception as error:
      text = " ".join(str(error).split())
      raise ValueError(
        f"The Ray cluster at {address} cannot be used: {text[:300]}"
      ) from None

  def serve(self, make: Callable[[], Any]) -> None:
    """Starts the server: in the process that there is, if it answers."""
    if self._server is not None:
      with contextlib.suppress(_engine.LostServerError):
        self._get(self._server.serve.remote(make), 300.0)
        return
      self._kill(self._server)
    actor = self._ray.remote(_ServerActor).options(
      name=_SERVER, num_cpus=self._cpus
    )
    until = time.monotonic() + 30.0
    while True:
      try:
        self._server = actor.remote()
        break
      except ValueError:  # The name of one that is lost is still taken.
        if time.monotonic() > until:
          raise
        time.sleep(0.1)
    self._get(self._server.serve.remote(make), 300.0)

  def spawn(self, name: str, work: Callable[[_engine.Channel], None]) -> None:
    """Starts a worker: in its process of before, if that was sent home."""
    actor = self._idle.pop(name, None)
    if actor is None and name in self._workers:
      actor, call = self._workers[name]
      try:
        self._ray.get(call, timeout=_HOME_S)
      except Exception:
        self._kill(actor)
        actor = None
    if actor is None and self._spares:
      actor = self._spares.pop()
    if actor is None:
      actor = self._worker_actor()
    self._workers[name] = (actor, actor.work.remote(work))

  def _worker_actor(self) -> Any:
    actor = self._ray.remote(_WorkerActor)
    return actor.options(num_cpus=self._cpus).remote()

  def _kill(self, actor: Any) -> None:
    with contextlib.suppress(Exception):
      self._ray.kill(actor, no_restart=True)

  def process_of(self, name: str) -> int:
    """Returns the process id of a worker, or of the server for `"server"`."""
    found = self._server if name == "server" else self._workers[name][0]
    return int(self._get(found.process.remote(), 30.0))

  def ask(self, method: str, *args: Any, timeout_s: float = 60.0) -> Any:
    """Calls a method of the server."""
    return self._get(self._server.ask.remote(method, args), timeout_s)

  def _get(self, reference: Any, timeout_s: float) -> Any:
    exceptions = self._ray.exceptions
    try:
      return self._ray.get(reference, timeout=timeout_s)
    except exceptions.RayTaskError as error:
      raise error.cause from None
    except (exceptions.RayActorError, exceptions.GetTimeoutError) as error:
      raise _engine.LostServerError(_line(error)) from None

  def on_lost(self, call: Callable[[str, str], None]) -> None:
    """Has `call(name, reason)` called when a worker is lost."""
    self._call = call

  def poll(self) -> None:
    """Looks whose call has failed; one that has returned was sent home."""
    ray = self._ray
    if len(self._workers) == self._num > 0:
      while len(self._spares) < self._num_spares:
        self._spares.append(self._worker_actor())
        self._spares[-1].warm.remote(_PRELOADED)
    for name, (actor, call) in list(self._workers.items()):
      ready, _ = ray.wait([call], timeout=0)
      if not ready:
        continue
      try:
        ray.get(call)
        del self._workers[name]
        self._idle[name] = actor
        continue
      except ray.exceptions.RayActorError as error:
        reason = _line(error)
      except ray.exceptions.RayTaskError as error:
        reason = f"{type(error.cause).__name__}: {_line(error.cause)}"
      self._call(name, reason)

  def stop(self) -> None:
    """Ends all actors, the cluster if it was started here, and its files."""
    ray = self._ray
    if ray.is_initialized():
      actors = [actor for actor, _ in self._workers.values()]
      actors += [*self._idle.values(), *self._spares, self._server]
      for actor in actors:
        self._kill(actor)
      ray.shutdown()
    self._workers.clear()
    self._idle.clear()
    self._spares.clear()
    for name, value in self._before.items():
      if value is None:
        os.environ.pop(name, None)
      else:
        os.environ[name] = value
    for _ in range(20):  # Its processes write logs until they end.
      shutil.rmtree(self._folder, ignore_errors=True)
      if not pathlib.Path(self._folder).exists():
        break
      time.sleep(0.1)


class _ServerActor:
  """The server's process."""

  def __init__(self) -> None:
    self._server: Any = None

  async def serve(self, make: Callable[[], Any]) -> None:
    loop = asyncio.get_running_loop()
    before, self._server = self._server, None
    if before is not None:
      await loop.run_in_executor(None, before.stop)
    self._server = await loop.run_in_executor(None, make)

  async def push(self, message: np.ndarray) -> dict[str, Any]:
    if self._server is None:
      raise _engine.LostServerError("The server has not begun.")
    return self._server.push(message)

  async def pull(self, worker: str, life: int) -> np.ndarray:
    if self._server is None:
      raise _engine.LostServerError("The server has not begun.")
    return await asyncio.wrap_future(self._server.pull(worker, life))

  async def ask(self, method: str, args: tuple[Any, ...]) -> Any:
    function = getattr(self._server, method)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(None, lambda: function(*args))

  async def process(self) -> int:
    return os.getpid()


class _WorkerActor:
  """A worker's process."""

  async def work(self, work: Callable[[_engine.Channel], None]) -> None:
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, work, _RayChannel())

  async def warm(self, modules: tuple[str, ...]) -> None:
    """Loads what every worker needs."""
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, _load, modules)

  async def process(self) -> int:
    return os.getpid()


def _load(modules: tuple[str, ...]) -> None:
  for name in modules:
    importlib.import_module(name)
  jax.devices()


class _RayChannel:
  """The way from a worker's process to the server, by the server's name."""

  def __init__(self) -> None:
    self._ray = import_ray()
    self._server: Any = None

  def push(self, message: np.ndarray) -> dict[str, Any]:
    return self._call("push", 60.0, message)

  def pull(self, worker: str, life: int) -> np.ndarray:
    return self._call("pull", None, worker, life)

  def _call(self, method: str, timeout_s: float | None, *args: Any) -> Any:
    ray = self._ray
    server = self._server
    try:
      if server is None:
        server = self._server = ray.get_actor(_SERVER)
      return ray.get(getattr(server, method).remote(*args), timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
      self._server = None
      if isinstance(error.cause, _engine.LostServerError):
        raise error.cause from None
      raise
    except (
      ray.exceptions.RayActorError,
      ray.exceptions.GetTimeoutError,
      ray.exceptions.ObjectLostError,
      ValueError,  # There is no actor of this name.
    ) as error:
      self._server = None
      raise _engine.LostServerError(_line(error)) from None


def _check_cpus(needed: float, available: float) -> None:
  if needed > available + 1e-9:
    raise ValueError(
      f"The server and the workers need {needed:g} CPUs, and Ray has "
      f"{available:g}: add nodes, take fewer workers, or give each fewer "
      f"(`cpus_per_worker`), as those may have that mostly sleep."
    )


def _line(error: BaseException) -> str:
  return " ".join(str(error).split())[:200]


@contextlib.contextmanager
def _quiet_ray() -> Iterator[None]:
  """Lets Ray tell of its start only what is wrong."""
  import logging

  logger = logging.getLogger("ray")
  before = logger.level
  logger.setLevel(logging.ERROR)
  try:
    with warnings.catch_warnings():
      # Its processes do not go on in a fork, but execute another program.
      warnings.filterwarnings("ignore", message=".*os.fork.*")
      warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
      yield
  finally:
    logger.setLevel(before)
