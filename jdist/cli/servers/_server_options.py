"""Groups of options of parameter servers; a group's docstring is its title."""

import dataclasses
from typing import Annotated, Literal

import tyro

from jdist.cli import _groups
from jdist.cli._groups import option

_PROTOCOL = ("protocol",)
_RAY = ("driver", "ray")


@dataclasses.dataclass(frozen=True)
class ProtocolOptions:
  """Protocols of a parameter server."""

  bound: int = option(3, "bound", needs=_PROTOCOL)
  """Of ssp: steps that a worker may be ahead of the slowest."""

  splits: int = option(1, "n", needs=_PROTOCOL)
  """n of n_softsync: an update takes the workers' number over n gradients."""

  max_staleness: int | None = option(None, "max_staleness", needs=_PROTOCOL)
  """From which staleness on ringmaster discards; the number of workers if not
  given."""

  backups: int = option(0, "backups", needs=_PROTOCOL)
  """Slowest workers for which bsp does not wait."""

  parts: tuple[Literal["tasks", "pipeline", "bits"], ...] = option(
    ("tasks", "pipeline", "bits"),
    "tasks",
    "pipelined",
    "plans",
    needs=_PROTOCOL,
  )
  """Of h_ps: tasks by speed, messages under computation, messages of fewer
  bits."""

  pipeline_from: float = option(0.0, "pipelined_from", needs=_PROTOCOL)
  """Of h_ps: share of the run's updates before messages go under computation,
  which makes gradients one update late. 0.5 keeps the accuracy where a pipeline
  from the beginning does not, see experiments/h_ps."""

  error_limit: float = option(0.02, "plans", needs=_PROTOCOL)
  """Of h_ps: relative error that fewer bits of a tensor may have."""

  local_rate: float | None = option(None, "pipelined", needs=_PROTOCOL)
  """Of h_ps: highest learning rate of a worker's own step in front of what it
  was sent, on the server's schedule; the server's if not given, and 0 for no
  such step."""

  local_momentum: float | None = option(None, "pipelined", needs=_PROTOCOL)
  """Of h_ps: momentum of a worker's own step; the server's if not given, so
  that the step foresees its update."""

  fragments: int = option(1, "fragments", needs=_PROTOCOL)
  """Of decoupled_diloco: parts of the parameters that are pushed in turn; they
  divide the interval."""

  quorum: float = option(0.5, "quorum", needs=_PROTOCOL)
  """Of decoupled_diloco: part of the workers whose push a merge waits for."""

  grace: float = option(0.5, "grace", needs=_PROTOCOL)
  """Of decoupled_diloco: how long a merge waits for the others, in times from
  one push of a worker to its next."""

  ahead: int = option(1, "ahead", needs=_PROTOCOL)
  """Of decoupled_diloco: tasks that a worker begins (1), or has in hand (2),
  before its push is merged; with 0 it waits for the merge."""


@dataclasses.dataclass(frozen=True)
class ServerOptions(ProtocolOptions):
  """Parameter server on a virtual clock."""

  protocol: str | None = None
  """Train by a server's protocol in place of a method, of `jdist simulate
  --help`: real gradients, in the order that the machines' speeds dictate."""

  cluster: Annotated[str | None, tyro.conf.arg(metavar="CLUSTER.toml")] = (
    option(None, needs=_PROTOCOL)
  )
  """The machines, with a model's costs, as of `cluster.load_cluster`; each is a
  worker."""

  driver: Literal["clock", "ray"] = option("clock", needs=_PROTOCOL)
  """Runs the workers: a virtual clock, or Ray's actors in real time, at
  the speeds and over the links of the cluster's file."""

  address: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = option(
    None, needs=_RAY
  )
  """Of ray: the head of a running cluster; one is started on this machine if
  not given."""

  cpus_per_worker: float = option(1.0, within=_groups.POSITIVE, needs=_RAY)
  """Of ray: CPUs of the server and of each worker; parts of one for workers
  that mostly sleep."""

  gpus_per_worker: float = option(0.0, needs=_RAY)
  """Of ray: GPUs of each worker, which sees no others; parts of one for workers
  that share a GPU, 0 for CPUs alone."""

  paced: bool = option(True, needs=_RAY)
  """Of ray: lengthen each task, by sleeping, to what it takes by the cluster's
  file; if not, workers compute as fast as they can."""

  timeout_s: float | None = option(
    None, within=_groups.POSITIVE, needs=_PROTOCOL
  )
  """After so many seconds without a push a worker counts as gone; never if not
  given."""

  record: str | None = option(None, needs=_RAY)
  """Of ray: a file for all messages, for `server.replay`."""

  owned: bool = option(False, needs=_PROTOCOL)
  """Each worker owns a part of the samples; if not, whoever comes next takes
  the next ones. With `--alpha` they are owned."""
