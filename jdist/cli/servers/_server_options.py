"""Groups of options of parameter servers; a group's docstring is its title."""

import dataclasses
import functools
from typing import Annotated, Literal

import tyro

from jdist.cli import _groups
from jdist.cli._groups import COUNT, NOT_NEGATIVE, option, POSITIVE

# Options of a protocol have no use without one.
_option = functools.partial(option, needs=("protocol",))
_LIVE = ("driver", "ray", "threads")
_RAY = ("driver", "ray")


@dataclasses.dataclass(frozen=True)
class ProtocolOptions:
  """Protocols of a parameter server.

  An option that is not given leaves the protocol's own default.
  """

  bound: int | None = _option(None, "bound", within=NOT_NEGATIVE)
  """Steps that a worker may be ahead of the slowest, for ssp (default 3)."""

  splits: int | None = _option(None, "n", within=COUNT)
  """n of n_softsync: an update takes floor(workers / n) gradients (default
  1)."""

  buffer: int | None = _option(None, "buffer", within=COUNT)
  """Gradients of an update of fedbuff (default 10)."""

  max_staleness: int | None = _option(None, "max_staleness", within=COUNT)
  """Staleness from which ringmaster discards a gradient (default: the number of
  workers)."""

  backups: int | None = _option(None, "backups", within=NOT_NEGATIVE)
  """Slowest workers for which bsp does not wait, fewer than there are (default
  0)."""

  parts: tuple[Literal["tasks", "pipeline", "bits"], ...] = _option(
    ("tasks", "pipeline", "bits"), "tasks", "pipelined", "plans"
  )
  """Parts of h_ps: tasks by speed, messages under computation, and messages of
  fewer bits."""

  pipeline_from: float = _option(0.0, "pipelined_from", within="[0, 1)")
  """Share of the run's updates after which h_ps sends messages under
  computation, so that gradients are one update late. 0.5 keeps the accuracy
  where a pipeline from the beginning does not, see experiments/h_ps."""

  fragments: int | None = _option(None, "fragments", within=COUNT)
  """Parts of the parameters that decoupled_diloco pushes in turn; must divide
  the interval (default 1)."""

  quorum: float | None = _option(None, "quorum")
  """Share of the workers whose pushes a merge of decoupled_diloco, or of an
  elastic method, waits for (default 0.5)."""

  grace: float | None = _option(None, "grace")
  """Time that a merge of decoupled_diloco waits for the other workers, in
  multiples of the time between two pushes of a worker (default 0.5; 1 for
  elastic methods)."""

  ahead: int | None = _option(None, "ahead")
  """Tasks that a worker of decoupled_diloco begins (1) or has received (2)
  before its push is merged; with 0 it waits for the merge (default 1)."""

  peers: bool = _option(False, "peers")
  """Workers of decoupled_diloco, or of an elastic method, send each other their
  messages as they are encoded, and merge them; the server sends no merges."""


@dataclasses.dataclass(frozen=True)
class ServerOptions(ProtocolOptions):
  """Parameter server."""

  protocol: _groups.Part = None
  """Train with a parameter server's protocol in place of a method: one of
  `jdist simulate --help`, or a class or function of your own."""

  error_limit: float = _option(0.02, "plans")
  """Largest relative error of a tensor that h_ps sends with fewer bits."""

  local_rate: float | None = _option(None, "local_step", within=NOT_NEGATIVE)
  """Highest learning rate of the step by which a worker of h_ps anticipates the
  server's next update, on the server's schedule; 0 for no such step (default:
  the server's)."""

  local_momentum: float | None = _option(None, "local_step")
  """Momentum of that step (default: the server's)."""

  elastic: bool = False
  """Train with `--method`, one with rounds, through a server by which workers
  join, leave and return while the others continue."""

  cluster: _groups.Cluster = option(None, needs=("protocol",))
  """File of the machines and a model's costs, as `cluster.load_cluster` reads
  it; each machine is a worker. With `--elastic` the default is `--workers`
  equal ones."""

  driver: Literal["clock", "threads", "ray"] | None = _option(None)
  """Engine of the run: a virtual clock, threads of this process, or Ray's
  actors, the latter two in real time with the speeds and links of the file
  (default: clock; threads with `--elastic`)."""

  address: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = option(
    None, needs=_RAY
  )
  """Head of a running Ray cluster (default: one is started on this machine)."""

  cpus_per_worker: float = option(1.0, within=POSITIVE, needs=_RAY)
  """CPUs of the server and of each worker on Ray; less than 1 suits workers
  that sleep most of the time."""

  gpus_per_worker: float = option(0.0, needs=_RAY)
  """GPUs of each worker on Ray, which sees no others; less than 1 for workers
  that share a GPU, 0 for CPUs alone."""

  paced: bool = option(True, needs=_LIVE)
  """Lengthen each task, by sleeping, to the time that the cluster's file gives
  it; without it workers compute as fast as they can."""

  timeout_s: float | None = _option(None, "timeout_s", within=POSITIVE)
  """Seconds without a push after which a worker counts as lost (default:
  never)."""

  record: _groups.File = option(None, needs=_LIVE)
  """File for all messages, which `server.replay` reads."""

  shards: int = _option(1, "shards", within=COUNT)
  """Servers over which the parameters are divided, by whole tensors of about
  equal bytes; on the clock the server's link is that of all of them."""

  owned: bool = _option(False)
  """Give each worker a part of the samples of its own, as `--alpha` does. By
  default all workers take from one stream."""
