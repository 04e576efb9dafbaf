"""The options of `jdist launch`; a field's docstring is its help."""

import dataclasses
from typing import Annotated, Literal

import tyro

from jdist.cli import _options


@dataclasses.dataclass(frozen=True)
class Launch:
  """Starts a training run in several processes on this machine: those of the
  command behind `--`. One that fails is started again from its last checkpoint,
  later each time. Or prints the file by which a cluster starts it.

  SIGTERM makes the run save and end with status 143. Statuses 2 (options that
  cannot be used) and 3 (diverged) end it for good.
  """

  num_processes: Annotated[int, tyro.conf.arg(aliases=["-n"], metavar="N")] = 1
  """Their number, -n for short; the workers are divided among them."""

  restarts: int = 5
  """Times in a row that a run without a new checkpoint is started again."""

  backoff_s: float = 1.0
  """Seconds before it is; twice as many each further time, up to a minute."""

  print: Literal["slurm", "kubernetes", "mpi"] | None = None
  """Start nothing: print the file with which Slurm, Kubernetes (JobSet) or MPI
  starts the run, and how."""

  name: str = "jdist"
  """Of the printed job."""

  gpus_per_node: int | None = None
  """Of the printed job: GPUs of a machine, a process each; CPUs if not
  given."""

  image: str = "jdist:latest"
  """Of a printed JobSet: a container image in which jdist is installed."""

  claim: str = "jdist-checkpoints"
  """Of a printed JobSet: the claim of the volume with the checkpoints."""

  command: tyro.conf.Suppress[tuple[str, ...]] = ()
  train: tyro.conf.Suppress[_options.Train | None] = None
