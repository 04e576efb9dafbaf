"""Protocols and clusters from the options of `simulate` and `train`."""

import inspect
import pathlib
from collections.abc import Sequence
from typing import Any

from jdist import checks, cluster, server
from jdist.cli import _methods, _options


def check_used(option: str, names: Sequence[str], options: Any) -> None:
  """Raises a ValueError for an option that none of the protocols uses."""
  _options.check_names(option, names, "protocols", server.PROTOCOLS)
  _options.check_used(
    options,
    names,
    server.PROTOCOLS,
    lambda name: _takes(server.PROTOCOLS[name], options),
  )


def _takes(factory: Any, options: Any) -> set[str]:
  """Returns the arguments of a protocol and of its learners."""
  found = {"worker_optimizer", *inspect.signature(factory).parameters}
  if factory is server.DecoupledDiLoCo:
    found |= {"rule", *_methods.of_outer(options)}
  else:
    found.add("shards")
  if factory is server.h_ps and "bits" not in options.parts:
    found.discard("plans")
  if factory is server.h_ps:
    # It chooses the bits of each message, and takes no codec.
    return found | ({"local_step"} if "pipeline" in options.parts else set())
  # A protocol of a user's own trains by the learners of plain gradients.
  return found | {"compression"} | _methods.of_compression(options)


def load(path: str) -> tuple[cluster.Cluster, cluster.Profile]:
  """Reads a cluster and a model's costs from a file."""
  if not pathlib.Path(path).is_file():
    raise ValueError(
      f"There is no file {path!r} of a cluster's machines; docs/servers.md "
      "shows a small one."
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
  options: Any,
  batch_size: int,
  machines: cluster.Cluster,
  profile: cluster.Profile,
  plans: server.BitPlans | None = None,
  updates: float | None = None,
) -> server.Protocol:
  """Builds a protocol for these machines with the options that it takes.

  A task has `batch_size` samples. Without `plans`, messages of h_ps have the
  bits of no model; `updates` is the length of the run, if it is known.
  """
  num = len(machines.nodes)
  # The library cannot refuse this: there members come and go.
  remedy = f"An update waits for one of the {num} workers at least."
  checks.check_int("--backups", options.backups or 0, 0, num - 1, remedy)
  remedy = f"An update takes {num} / splits gradients, one at least."
  checks.check_int("--splits", options.splits or 1, 1, num, remedy)
  given = {
    "total": num * batch_size,
    "batches": server.FixedBatches(batch_size),
    # Neither has a default in the library, as both depend on the cluster.
    "n": 1,
    "max_staleness": num,
    "limits": {
      node.name: profile.max_samples(node.memory_bytes)
      for node in machines.nodes
    },
    **_methods.filled(options),
    "interval": options.interval,
    # The parts of h_ps are one option, and three arguments.
    "tasks": "tasks" in options.parts,
    "pipelined": "pipeline" in options.parts,
    "pipelined_from": _pipelined_from(options.pipeline_from, updates),
    "plans": (plans or server.BitPlans()) if "bits" in options.parts else None,
  }
  factory = server.PROTOCOLS[name]
  takes = inspect.signature(factory).parameters
  built = factory(**{key: x for key, x in given.items() if key in takes})
  checks.check_type(name, built, server.Protocol, "a `server.Protocol`")
  return built


def _pipelined_from(share: float, updates: float | None) -> int:
  if share and updates is None:
    raise ValueError(
      f"`--pipeline-from` must be 0 with `--seconds`, got {share}: it is a "
      "share of the run's updates. Give `--updates` or `--samples`."
    )
  return round(share * updates) if updates else 0


def gradients_per_update(name: str, options: Any, num_workers: int) -> int:
  """Returns how many gradients an update takes, to know a run's length.

  Local steps of all workers count as one. A protocol of a user's own is taken
  to make an update of each gradient.
  """
  if name in ("h_ps", "decoupled_diloco"):
    return num_workers
  if name == "bsp":
    return max(1, num_workers - (options.backups or 0))
  if name == "n_softsync":
    return options.buffer or max(1, num_workers // (options.splits or 1))
  return (options.buffer or 10) if name == "fedbuff" else 1
