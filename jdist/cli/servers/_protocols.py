"""Server protocols and clusters by options, of `simulate` and of `train`."""

import inspect
import pathlib
from collections.abc import Sequence

from jdist import cluster, server
from jdist.cli.servers import _server_options


def check_names(option: str, names: Sequence[str]) -> None:
  """Raises a ValueError unless there are such protocols."""
  for name in names:
    if name not in server.PROTOCOLS:
      raise ValueError(
        f"`{option}` must be of {', '.join(server.PROTOCOLS)}, got {name!r}."
      )


def load(path: str) -> tuple[cluster.Cluster, cluster.Profile]:
  """Reads a file of a cluster and of a model's costs."""
  if not pathlib.Path(path).is_file():
    raise ValueError(
      f"There is no file {path!r} of a cluster's machines; README shows a "
      "small one."
    )
  machines, profile = cluster.load_cluster(path)
  if profile is None:
    raise ValueError(
      f"{path} must have a [profile], the model's costs: "
      "`seconds_per_sample`, `pull_bytes` and `push_bytes` at least."
    )
  return machines, profile


def build(
  name: str,
  options: _server_options.ProtocolOptions,
  batch_size: int,
  machines: cluster.Cluster,
  profile: cluster.Profile,
  plans: server.BitPlans | None = None,
  updates: float | None = None,
) -> server.Protocol:
  """Builds a protocol for these machines with those options that it takes.

  `updates` are those of the run, if that is known.
  """
  num = len(machines.nodes)
  most = options.max_staleness
  parts = options.parts
  given = {
    "total": num * batch_size,
    "batches": server.FixedBatches(batch_size),
    "bound": options.bound,
    "n": options.splits,
    "max_staleness": num if most is None else most,
    "backups": options.backups,
    "interval": getattr(options, "interval", 8),
    "fragments": options.fragments,
    "quorum": options.quorum,
    "grace": options.grace,
    "ahead": options.ahead,
    "tasks": "tasks" in parts,
    "pipelined": "pipeline" in parts,
    "pipelined_from": _pipelined_from(options.pipeline_from, updates),
    "timeout_s": getattr(options, "timeout_s", None),
    "plans": (plans or server.BitPlans()) if "bits" in parts else None,
    "limits": {
      node.name: profile.max_samples(node.memory_bytes)
      for node in machines.nodes
    },
  }
  factory = server.PROTOCOLS[name].factory
  takes = inspect.signature(factory).parameters
  return factory(**{key: x for key, x in given.items() if key in takes})


def _pipelined_from(share: float, updates: float | None) -> int:
  if not 0 <= share < 1:
    raise ValueError(f"`--pipeline-from` must be in [0, 1), got {share}.")
  if share and updates is None:
    raise ValueError(
      f"`--pipeline-from` must be 0 with `--seconds`, got {share}: it is a "
      "share of the run's updates. Give `--updates` or `--samples`."
    )
  return round(share * updates) if updates else 0


def gradients_per_update(
  name: str, options: _server_options.ProtocolOptions, machines: cluster.Cluster
) -> int:
  """Returns how many gradients an update takes, to know a run's length.

  Local steps of all workers are counted as one.
  """
  num = len(machines.nodes)
  if name in ("h_ps", "decoupled_diloco"):
    return num
  if name == "bsp":
    return max(1, num - options.backups)
  if name == "n_softsync":
    return max(1, num // options.splits)
  return 1
