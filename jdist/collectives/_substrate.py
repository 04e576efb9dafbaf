"""Devices and meshes, and how a run's workers spread over them."""

import os
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jdist import checks, signatures
from jdist.collectives import _axis, _workers

# XLA's CPU backend sizes its one thread pool by this variable.  Virtual
# devices share the pool, a collective blocks one thread a device, and steps
# in flight behind it take the threads that it needs: with 8 devices on 2
# cores the default pool aborted within seconds, and 32 threads ran 12,528
# steps: four a device.  One device takes a second thread to compute under a
# collective; more would split convolutions further, and make them slower.
_POOL_VARIABLE = "NPROC"


def make_cpu_devices(num_devices: int) -> int:
  """Splits this host's CPU into virtual devices, if JAX has not started.

  Also enlarges the pool of threads that these devices share, without which
  programs with collectives deadlock on a busy machine.

  Args:
    num_devices: 1 or more; the highest number of several calls counts.

  Returns:
    The number of CPU devices that this process will have.
  """
  num_devices = checks.check_int("num_devices", num_devices, 1)
  # It is -1 if it was never set.
  asked_before = jax.config.values["jax_num_cpu_devices"]
  num_devices = max(num_devices, asked_before)
  try:
    jax.config.update("jax_num_cpu_devices", num_devices)
  except RuntimeError:  # The backend has started, and keeps its devices.
    try:
      return len(jax.local_devices(backend="cpu"))
    except RuntimeError:  # JAX has no CPU backend under JAX_PLATFORMS=cuda.
      return 0
  ours = _pool_threads(asked_before) if asked_before > 0 else None
  if os.environ.get(_POOL_VARIABLE) in (None, ours):
    os.environ[_POOL_VARIABLE] = _pool_threads(num_devices)
  return num_devices


def _pool_threads(num_devices: int) -> str:
  needed = 2 if num_devices == 1 else 4 * num_devices
  # As XLA counts: the cores on which this process may run, where it can tell.
  mine = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
  return str(max(needed, len(mine(0))))


@signatures.checked
def make_mesh(
  shape: Sequence[signatures.PositiveInt],
  names: Sequence[str],
  devices: Sequence[jax.Device] | None = None,
) -> jax.sharding.Mesh:
  """Makes a mesh whose axes are automatic.

  `jax.make_mesh` gives explicit axes, whose `shard_map` refuses unsharded
  inputs; the workers' runner needs automatic ones.

  Args:
    shape: The number of devices along each axis, for instance `(4, 2)`.
    names: The name of each axis, for instance `("worker", "fsdp")`.
    devices: The devices to use, by default all of the process.
  """
  if not len(shape) == len(names) == len(set(names)):
    raise ValueError(
      "`shape` and `names` must have one entry an axis, names once, got "
      f"{tuple(shape)} and {tuple(names)}."
    )
  devices = jax.devices() if devices is None else devices
  needed = int(np.prod(shape))
  if needed > len(devices):
    raise ValueError(
      f"`shape` must fit the devices: {tuple(shape)} needs {needed}, there "
      f"are {len(devices)}. On a CPU call "
      f"`jdist.collectives.make_cpu_devices({needed})` before using JAX."
    )
  return jax.make_mesh(
    tuple(shape),
    tuple(names),
    axis_types=(jax.sharding.AxisType.Auto,) * len(names),
    devices=devices[:needed],
  )


Substrate = Literal["auto", "none", "vmap", "shard_map"]
# A thousand logical workers share devices, because each device has threads of
# its own.
_MOST_CPU_DEVICES = 64


@signatures.checked
def workers(
  num_workers: signatures.PositiveInt,
  *,
  substrate: Substrate = "auto",
  mesh: Mesh | None = None,
  axis: str = "worker",
) -> _workers.Workers:
  """Makes the workers of a run and chooses how they run.

  With `substrate="auto"` the workers share the user's mesh if there is one.
  Otherwise each gets a device, if there are enough, or every device gets an
  equal number of workers; one worker on one device needs no axis.  Without
  GPUs, and before JAX has started, the process splits its CPU into one virtual
  device for each worker: small networks ran 2.5 to 6 times faster on them than
  under `vmap`.

  Args:
    num_workers: The number of workers, over all processes.
    substrate: `"auto"`, `"none"` (one worker), `"vmap"` (all on one device)
      or `"shard_map"`.
    mesh: The user's mesh, whose axis `axis` the workers share; its other axes
      stay automatic, so that a worker may itself be sharded.  Explicit axes,
      which `jax.make_mesh` makes by default, become automatic: place arrays on
      the mesh of the workers, by `replicate`, `place` and `shard`.
    axis: The name of the workers' axis.

  >>> import numpy as np
  >>> from jdist import collectives
  >>> team = workers(4, substrate="vmap")
  >>> total = team.jit(lambda x: collectives.sum(x, team.axis))
  >>> total(team.place(np.arange(4))).tolist()
  [6, 6, 6, 6]
  """
  _axis.check_axis(axis)
  if mesh is not None:
    checks.check_type(
      "mesh", mesh, Mesh, "a `jax.sharding.Mesh`, of `make_mesh` for instance"
    )
    if substrate not in ("auto", "shard_map"):
      raise ValueError(
        f"`mesh` needs `substrate='shard_map'`, got {substrate!r}."
      )
    return _on_mesh(num_workers, mesh, axis)
  if substrate == "none" and num_workers > 1:
    raise ValueError(
      "`substrate='none'` is one worker without an axis, got "
      f"`num_workers={num_workers}`. Take 'vmap' to have several on a device."
    )
  if substrate == "none":
    return _workers.Workers(1, "none", None)
  if (
    substrate in ("auto", "shard_map") and not jax.distributed.is_initialized()
  ):
    make_cpu_devices(min(num_workers, _MOST_CPU_DEVICES))
  num_devices, processes = jax.device_count(), jax.process_count()
  if processes > 1 and substrate == "vmap":
    raise ValueError(
      "`substrate='vmap'` puts all workers on one device, but this run has "
      f"{processes} processes. Take 'shard_map'."
    )
  if substrate == "vmap" or (substrate == "auto" and num_devices == 1):
    if num_workers == 1 and substrate == "auto":
      return _workers.Workers(1, "none", None)
    return _workers.Workers(num_workers, "vmap", axis)
  # The largest number of devices that divides the workers.  A run of several
  # processes needs all devices, since each process must take part.
  used = next(
    d
    for d in range(min(num_devices, num_workers), 0, -1)
    if num_workers % d == 0
  )
  if processes > 1 and used != num_devices:
    raise ValueError(
      "`num_workers` must be a multiple of the number of devices in a run of "
      f"several processes: {num_devices} devices, got {num_workers}."
    )
  return _on_mesh(num_workers, make_mesh((used,), (axis,)), axis)


def _on_mesh(num_workers: int, mesh: Mesh, axis: str) -> _workers.Workers:
  if axis not in mesh.axis_names:
    raise ValueError(
      f"`axis` must be an axis of the mesh, one of {mesh.axis_names}, got "
      f"{axis!r}."
    )
  if any(kind != AxisType.Auto for kind in mesh.axis_types):
    # The `shard_map` of explicit axes refuses unsharded inputs.
    mesh = Mesh(mesh.devices, mesh.axis_names)
  along = mesh.shape[axis]
  if num_workers % along:
    raise ValueError(
      f"`num_workers` must be a multiple of the mesh's {along} places along "
      f"{axis!r}, got {num_workers}."
    )
  names: _axis.Axis = axis if num_workers == along else (f"{axis}_local", axis)
  return _workers.Workers(num_workers, "shard_map", names, mesh)
