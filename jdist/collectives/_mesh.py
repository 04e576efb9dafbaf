"""Devices and meshes; the rest of the library makes none.

JAX reads the number of virtual CPU devices and the size of their thread pool
once, when its backend starts.
"""

import os
from collections.abc import Sequence

import jax
import numpy as np

from jdist import checks

# XLA's CPU backend sizes its one thread pool by this variable.  Virtual
# devices share the pool, a collective blocks one thread a device, and steps
# in flight behind it take the threads that it needs: with 8 devices on 2
# cores the default pool aborted within seconds, and 32 threads ran 12,528
# steps.  Four threads a device leave room for several steps in flight.
_POOL_VARIABLE = "NPROC"
_POOL_THREADS_PER_DEVICE = 4


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
  wanted = max(_POOL_THREADS_PER_DEVICE * num_devices, os.cpu_count() or 1)
  os.environ.setdefault(_POOL_VARIABLE, str(wanted))
  return num_devices


def make_mesh(
  shape: Sequence[int],
  names: Sequence[str],
  devices: Sequence[jax.Device] | None = None,
) -> jax.sharding.Mesh:
  """Makes a mesh whose axes are automatic.

  `jax.make_mesh` gives explicit axes, whose `shard_map` refuses unsharded
  inputs; the workers' runner needs automatic ones.

  Args:
    shape: the number of devices along each axis, for instance `(4, 2)`.
    names: the name of each axis, for instance `("worker", "fsdp")`.
    devices: the devices to use, by default all of the process.

  Raises:
    ValueError: when names and sizes do not match or there are too few devices.
  """
  shape = [
    checks.check_int("shape", x, 1)
    for x in checks.check_list("shape", shape, "numbers of devices")
  ]
  names = checks.check_list("names", names, "names")
  for name in names:
    checks.check_type("names", name, str, "a list of names")
  if len(shape) != len(names):
    raise ValueError(
      f"`shape` and `names` must have one entry an axis, got {tuple(shape)} "
      f"and {tuple(names)}."
    )
  if devices is None:
    devices = jax.devices()
  devices = checks.check_list("devices", devices, "devices")
  for device in devices:
    checks.check_type("devices", device, jax.Device, "a list of `jax.Device`")
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
