"""Ray as the engine: server and workers are actors, on one machine or many."""

import contextlib
import os
import pathlib
import secrets
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

from jdist import signatures
from jdist.server.runtime import _engine
from jdist.server.runtime.ray_actors import _ray_access, _ray_actors

# The longest start of a server, as of all workers.
_START_S = 900.0
# A worker that was stopped returns within this time.
_HOME_S = 5.0
# A worker has joined within this time, which spares would make longer.
_SPARE_S = 8.0
# Modules that a spare process imports while it waits.
_PRELOADED = (
  "jdist.data", "jdist.models", "jdist.server", "jdist.training", "flax",
  "optax",
)  # fmt: skip
_MIN_STORE_BYTES = 78 * 2**20
# One thread of computation for each process: workers share the machine.
ONE_THREAD = {
  "JAX_PLATFORMS": "cpu",
  "XLA_FLAGS": (
    "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
  ),
  "NPROC": "1",
  "OMP_NUM_THREADS": "1",
}
# Variables of workers with a GPU, in place of those; merges are on the CPU.
_ON_GPU = {"JAX_PLATFORMS": "cuda,cpu"}
# Ray's autoscaler would show its metrics to anyone; it has no port of this
# number, and goes on without.
_NO_METRICS = {"AUTOSCALER_METRIC_PORT": "-1"}
_CACHE = (
  "JAX_COMPILATION_CACHE_DIR",
  "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
  "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES",
)


@signatures.checked
class RayEngine:
  """Runs server and workers as Ray actors.

  Without an address a cluster of this machine alone is started, with a token of
  its own, in a directory that goes with it; else that of the address is used,
  which off this machine must have token authentication on.  Ray listens at all
  addresses of a machine, whichever it is given, and its calls need the token.
  A worker that dies is noticed by its call, which fails;
  `spawn` starts a new one in its place.  SIGTERM ends a run as an exit does, so
  that `stop` is reached, unless the program has a handler of its own.

  Args:
    workers: Number of workers that will be spawned.
    address: HOST:PORT of a cluster's head; None starts one here.
    cpus_per_worker: Ray's CPUs for each worker, by which it places actors;
      take a part of one for workers that mostly sleep.
    gpus_per_worker: Ray's GPUs for each worker, which sees only its own; take a
      part of one for workers that share a GPU, and 0 for CPUs alone.  The
      server has none.
    spares: Further processes that have loaded all that a worker needs, and wait
      to take the place of one that is lost.
    environment: Environment variables of the actors; by default one thread on
      the CPU, and CUDA for workers with a GPU.
    cache: Directory for compiled programs, which all actors of a machine share;
      None makes one that is removed with the engine.

  Raises:
    ValueError: If the address is wrong or may not be used, or there are too
      few CPUs or GPUs.
    ConnectionError: If Ray does not start on this machine.
  """

  def __init__(
    self,
    workers: signatures.PositiveInt,
    *,
    address: str | None = None,
    cpus_per_worker: signatures.PositiveFloat = 1.0,
    gpus_per_worker: signatures.NonNegativeFloat = 0.0,
    spares: signatures.NonNegativeInt = 0,
    environment: dict[str, str] | None = None,
    cache: str | None = None,
  ):
    if gpus_per_worker > 1 and gpus_per_worker != int(gpus_per_worker):
      raise ValueError(
        "`gpus_per_worker` must be a part of one or whole ones, got "
        f"{gpus_per_worker}."
      )
    _ray_access.check_address(address)
    self._gpus, self._own = gpus_per_worker, environment is not None
    self._cpus, self._num, self._num_spares = cpus_per_worker, workers, spares
    needed = (workers + 1 + spares) * cpus_per_worker
    if address is None:
      _check_cpus(needed, os.cpu_count() or 1)
    own = ONE_THREAD if environment is None else environment
    names = [*own, *_CACHE, *_NO_METRICS, _ray_access.MODE, _ray_access.TOKEN]
    self._before = {x: os.environ.get(x) for x in names}
    if address is None:
      _ray_access.set_token()
    ray = _ray_access.import_ray()  # It reads once whether there are tokens.
    self._sigterm = signal.getsignal(signal.SIGTERM)
    self._folder = tempfile.mkdtemp(prefix="jdist-ray-")
    compiled = cache or f"{self._folder}/compiled"
    cached = zip(_CACHE, (compiled, "0", "-1"), strict=True)
    self._environment = dict(cached) | own
    self._ray: Any = ray
    # Each worker's actor, and the call that it is working on. Actors without a
    # call wait in `_idle` for the next run.
    self._workers: dict[str, tuple[Any, Any]] = {}
    self._idle: dict[str, Any] = {}
    self._spares: list[Any] = []
    # The actors of the server and its shards, by name.
    self._servers: dict[str, Any] = {}
    self.on_lost(lambda name, reason: None)
    self._namespace = f"jdist-{secrets.token_hex(4)}"
    try:
      if address is None:
        self._start_here()
      else:
        self._init(
          f"The Ray cluster at {address} cannot be used",
          ValueError,
          address=address,
          runtime_env={"env_vars": self._environment},
        )
        _check_cpus(needed, ray.cluster_resources().get("CPU", 0.0))
      self._check_gpus()
    except BaseException:
      self.stop()
      raise

  def _check_gpus(self) -> None:
    needed = (self._num + self._num_spares) * self._gpus
    available = self._ray.cluster_resources().get("GPU", 0.0)
    if needed > available + 1e-9:
      raise ValueError(
        f"The workers need {needed:g} GPUs, and Ray has {available:g}: add "
        "nodes, take fewer workers, or let some share one (`gpus_per_worker`)."
      )

  def _start_here(self) -> None:
    # Ray's processes inherit the environment of this one.
    os.environ.update(self._environment | _NO_METRICS)
    self._init(
      "Ray did not start on this machine, which may be too busy",
      _engine.LostServerError,
      num_cpus=os.cpu_count() or 1,
      # A dashboard would listen on a port, and start further processes.
      include_dashboard=False,
      object_store_memory=4 * _MIN_STORE_BYTES,
      _node_ip_address="127.0.0.1",
      _temp_dir=f"{self._folder}/s",
    )

  def _init(self, what: str, kind: type[Exception], **options: Any) -> None:
    try:
      with _ray_access.quiet_start():
        self._ray.init(
          log_to_driver=False,
          configure_logging=False,
          namespace=self._namespace,
          **options,
        )
    except BaseException as error:
      # Ray does not end the processes of a node that it has not completed.
      for frame, _ in traceback.walk_tb(error.__traceback__):
        end = getattr(frame.f_locals.get("self"), "kill_all_processes", None)
        if end is not None:
          end(check_alive=False, allow_graceful=True)
      if not isinstance(error, Exception):
        raise
      raise kind(f"{what}: {_ray_actors.one_line(error)}") from None

  def serve(self, make: _engine.Make, *shards: _engine.Make) -> None:
    """Starts the server: in the processes that there are, if all answer."""
    names = [f"{_ray_actors.SERVER}-{i + 1}" for i in range(len(shards))]
    # The server is the last one, as it asks its shards.
    makes = dict(zip(names, shards, strict=True)) | {_ray_actors.SERVER: make}
    needed = (self._num + len(makes) + self._num_spares) * self._cpus
    _check_cpus(needed, self._ray.cluster_resources().get("CPU", 0.0))
    if self._servers:
      if self._servers.keys() == makes.keys():
        with contextlib.suppress(_engine.LostServerError):
          self._serve(makes)
          return
      # One version for all: if one is lost, all begin again.
      for actor in self._servers.values():
        self._kill(actor)
    self._servers = {name: self._server_actor(name) for name in makes}
    self._serve(makes)

  def _serve(self, makes: dict[str, _engine.Make]) -> None:
    for name, make in makes.items():
      self._get(self._servers[name].serve.remote(make), _START_S)

  def _server_actor(self, name: str, **options: Any) -> Any:
    actor = self._ray.remote(_ray_actors.ServerActor).options(
      name=name, num_cpus=self._cpus, **options
    )
    until = time.monotonic() + 30.0
    while True:
      try:
        return actor.remote()
      except ValueError:  # The name of a lost actor is still taken.
        if time.monotonic() > until:
          raise
        time.sleep(0.1)

  def spawn(self, name: str, work: Callable[[_engine.Channel], None]) -> None:
    """Starts a worker, in its old process if the server had stopped that."""
    # A process that has compiled its programs is worth keeping.
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
    self._spawned.add(name)
    self._spawned_s = time.monotonic()
    pickled = self._ray.cloudpickle.dumps(work)
    self._workers[name] = (actor, actor.work.remote(pickled))

  def _worker_actor(self, **options: Any) -> Any:
    actor = self._ray.remote(_ray_actors.WorkerActor)
    options["num_cpus"] = self._cpus
    if self._gpus:
      options["num_gpus"] = self._gpus
      if not self._own:
        # By default JAX takes most of a GPU's memory for one process.
        shares = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        variables = _ON_GPU | (shares if self._gpus < 1 else {})
        options["runtime_env"] = {"env_vars": variables}
    return actor.options(**options).remote()

  def _kill(self, actor: Any) -> None:
    with contextlib.suppress(Exception):
      self._ray.kill(actor, no_restart=True)

  def process_of(self, name: str) -> int:
    """Returns the process id of a worker, `server`, or a shard, `server-1`."""
    found = self._servers.get(f"jdist-{name}") or self._workers[name][0]
    return int(self._get(found.process.remote(), 30.0))

  def ask(self, method: str, *args: Any, timeout_s: float = 60.0) -> Any:
    """Calls a method of the server."""
    server = self._servers[_ray_actors.SERVER]
    return self._get(server.ask.remote(method, args), timeout_s)

  def _get(self, reference: Any, timeout_s: float) -> Any:
    exceptions = self._ray.exceptions
    try:
      return self._ray.get(reference, timeout=timeout_s)
    except exceptions.RayTaskError as error:
      # The server's own error, as if it had been called here.
      raise error.cause from None
    except (exceptions.RayActorError, exceptions.GetTimeoutError) as error:
      raise _engine.LostServerError(_ray_actors.one_line(error)) from None

  def on_lost(self, call: Callable[[str, str], None]) -> None:
    """Has `call(name, reason)` called when a worker is lost."""
    # Calls of the session before may still return.
    self._call, self._spawned = call, set[str]()

  def poll(self) -> None:
    """Reports workers whose call has failed or returned."""
    ray = self._ray
    # Spares start once all workers run, which they would only slow down.
    began = len(self._workers) == self._num > 0
    if began and time.monotonic() > self._spawned_s + _SPARE_S:
      while len(self._spares) < self._num_spares:
        self._spares.append(self._worker_actor())
        self._spares[-1].warm.remote(_PRELOADED)
    for name in self._spawned.intersection(self._workers):
      actor, call = self._workers[name]
      ready, _ = ray.wait([call], timeout=0)
      if not ready:
        continue
      try:
        ray.get(call)
        reason = _engine.RETURNED
      except ray.exceptions.ActorUnavailableError:
        # Its connection was cut, and the process lives: it works on.
        self._workers[name] = (actor, actor.work.remote(None))
        continue
      except ray.exceptions.RayActorError as error:
        reason = _ray_actors.one_line(error)
      except ray.exceptions.RayTaskError as error:
        reason = (
          f"{type(error.cause).__name__}: {_ray_actors.one_line(error.cause)}"
        )
      self._call(name, reason)
      if reason == _engine.RETURNED:
        self._idle[name], _ = self._workers.pop(name)

  def stop(self) -> None:
    """Ends all actors, the cluster if it was started here, and its files."""
    ray = self._ray
    if ray.is_initialized():
      actors = [actor for actor, _ in self._workers.values()]
      actors += [*self._idle.values(), *self._spares, *self._servers.values()]
      for actor in actors:
        self._kill(actor)
    # A start that failed halfway has left processes, too.
    ray.shutdown()
    for each in (self._workers, self._idle, self._spares):
      each.clear()
    for name, value in self._before.items():
      if value is None:
        os.environ.pop(name, None)
      else:
        os.environ[name] = value
    _ray_access.set_handler(
      signal.SIG_DFL if self._sigterm is None else self._sigterm
    )
    for _ in range(20):  # Ray's processes write logs until they end.
      shutil.rmtree(self._folder, ignore_errors=True)
      if not pathlib.Path(self._folder).exists():
        break
      time.sleep(0.1)


def _check_cpus(needed: float, available: float) -> None:
  if needed > available + 1e-9:
    raise ValueError(
      f"The servers and the workers need {needed:g} CPUs, and Ray has "
      f"{available:g}: add nodes, take fewer workers, or give each fewer "
      f"(`cpus_per_worker`), as those may have that mostly sleep."
    )
