"""Joins the processes of one run, and ends them together."""

from collections.abc import Mapping
from typing import Any

import jax

from jdist import channel, checks, signatures
from jdist.collectives import _substrate
from jdist.collectives.processes import _lifeline

# JAX must not end a run before the lifeline does.
_HEARTBEAT_S = 24 * 3600
_lifelines: list[_lifeline.Lifeline] = []


@signatures.checked
def start_processes(
  coordinator_address: str | None = None,
  num_processes: signatures.PositiveInt | None = None,
  process_id: int | None = None,
  *,
  cpu_devices_per_process: int = 1,
  timeout_s: signatures.PositiveFloat = 900.0,
  options: Mapping[str, Any] | None = None,
) -> None:
  """Connects the processes of one run; call it before using JAX.

  Calls `jax.distributed.initialize`, which finds the three arguments itself
  under Slurm, Open MPI and Kubernetes.  GPUs use NCCL, CPUs gloo.

  Where the three are given, processes prove to each other that they know the
  run's secret (docs/runs.md), and that they have the same versions and options.
  They watch each other: when one dies, the others print one line with the
  command that resumes the run, and exit with status 75 within seconds.  Where
  JAX finds them, JAX ends the others.

  Args:
    coordinator_address: `host:port` of process 0.
    num_processes: The number of processes.
    process_id: The number of this process, from 0.
    cpu_devices_per_process: Virtual devices of each process without GPUs.
    timeout_s: The time after which an error names the missing processes.
    options: Values by name that must be the same in all processes, as JSON can
      hold them.

  Raises:
    OSError: If another run, or another program, has the address.
    TimeoutError: If process 0 does not answer, or others do not join.
    ValueError: If the processes disagree about their numbers, versions or
      options.
  """
  _substrate.make_cpu_devices(cpu_devices_per_process)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  if coordinator_address is None or num_processes is None or process_id is None:
    jax.distributed.initialize(
      coordinator_address, num_processes, process_id,
      heartbeat_timeout_seconds=10,
    )  # fmt: skip
    return
  checks.check_int("process_id", process_id, 0, num_processes - 1)
  joined = _lifeline.Lifeline(coordinator_address, num_processes, process_id)
  facts = channel.package_versions() | dict(options or {})
  address, bind = joined.join(timeout_s, facts)
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


def agree(
  subject: str, facts: Mapping[str, Any], timeout_s: float = 900.0
) -> None:
  """Waits until all processes of the run call this, with equal facts.

  Called right before the first collective, it lets processes start and compile
  for different times, for which gloo would wait 30 s.  A process alone returns
  at once, and so do processes that JAX has found itself.

  Args:
    subject: What the processes wait for, in words.
    facts: Values by name, as JSON can hold them; for instance a seed.
    timeout_s: The time after which an error names the missing processes.

  Raises:
    TimeoutError: If not all processes have called it.
    ValueError: If facts differ; it names the processes and the facts.
  """
  if found := lifeline():
    found.agree(subject, facts, timeout_s)
