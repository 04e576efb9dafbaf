"""Joins the processes of one run, and ends them together."""

import jax

from jdist import checks
from jdist.collectives import _mesh
from jdist.collectives.processes import _lifeline

# JAX must not end a run before the lifeline does.
_HEARTBEAT_S = 24 * 3600
_lifelines: list[_lifeline.Lifeline] = []


def start_processes(
  coordinator_address: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  *,
  cpu_devices_per_process: int = 1,
  timeout_s: float = 120.0,
) -> None:
  """Connects the processes of one run; call it before using JAX.

  Calls `jax.distributed.initialize`, which finds the three arguments itself
  under Slurm, Open MPI and Kubernetes.  GPUs use NCCL, CPUs gloo.

  Where the three are given, processes watch each other: when one dies, the
  others print one line with the command that resumes the run, and exit with
  status 75 within seconds.  Where JAX finds them, JAX ends the others.

  Args:
    coordinator_address: `host:port` of process 0.
    num_processes: the number of processes.
    process_id: the number of this process, from 0.
    cpu_devices_per_process: virtual devices of each process without GPUs.
    timeout_s: the time after which an error names the missing processes.

  Raises:
    TimeoutError: when process 0 does not answer, or others do not join.
    ValueError: when the processes disagree about their numbers.
  """
  _mesh.make_cpu_devices(cpu_devices_per_process)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  if coordinator_address is None or num_processes is None or process_id is None:
    jax.distributed.initialize(
      coordinator_address, num_processes, process_id,
      heartbeat_timeout_seconds=10,
    )  # fmt: skip
    return
  checks.check_int("num_processes", num_processes, 1)
  checks.check_int("process_id", process_id, 0, num_processes - 1)
  joined = _lifeline.Lifeline(coordinator_address, num_processes, process_id)
  address, bind = joined.join(checks.check_number("timeout_s", timeout_s))
  jax.distributed.initialize(
    address, num_processes, process_id, coordinator_bind_address=bind,
    # The lifeline reports dead processes.  One that was only suspended for some
    # minutes, with its machine for instance, must be able to continue.
    heartbeat_timeout_seconds=_HEARTBEAT_S,
  )  # fmt: skip
  _lifelines.append(joined)


def lifeline() -> _lifeline.Lifeline | None:
  """Returns the connections of this process to the others of its run.

  None for a process alone, and where JAX has found the processes itself: they
  do not watch each other.
  """
  return _lifelines[-1] if _lifelines else None
