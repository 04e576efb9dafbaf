"""Settings of a live server."""

import dataclasses
from typing import Any

from jdist import cluster


@dataclasses.dataclass(frozen=True, kw_only=True)
class LivePlan:
  """Settings of a live server beside its protocol.

  Attributes:
    workers: the names of all, in the order of the data's numbers.
    machines: whose links messages take; none are modelled if None.
    samples: the run ends when so many are in updates, if given.
    updates: the same of updates.
    seconds: the same of wall seconds since the start.
    marks: numbers of samples at which a record is made.
    record: file for all messages of a run from its beginning, if any; one that
      goes on from a checkpoint has none.
    checkpoints: directory, if any; a checkpoint at each mark.
    identity: what a checkpoint must have been made with.
    versions: of Python, JAX and jdist, which workers must have, too.
  """

  workers: tuple[str, ...]
  machines: cluster.Cluster | None = None
  samples: int | None = None
  updates: int | None = None
  seconds: float | None = None
  marks: tuple[float, ...] = ()
  record: str | None = None
  checkpoints: str | None = None
  identity: dict[str, Any] = dataclasses.field(default_factory=dict)
  versions: dict[str, str] = dataclasses.field(default_factory=dict)
