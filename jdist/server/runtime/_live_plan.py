"""Settings of a live server."""

import dataclasses

from jdist import cluster
from jdist.server.run import _run_marks


@dataclasses.dataclass(frozen=True, kw_only=True)
class LivePlan(_run_marks.RunPlan):
  """Settings of a live server, except its protocol and learner.

  `LiveSession` fills in the marks and the checkpoints of its run.

  Attributes:
    workers: The names of all workers, in the order of the data's numbers.
    machines: The cluster whose links messages take; none are modelled if None.
    record: A file for all messages of a run from its beginning. A run that is
      resumed records nothing.
    versions: Versions of Python, JAX and jdist that workers must have, too.
  """

  workers: tuple[str, ...]
  machines: cluster.Cluster | None = None
  record: str | None = None
  versions: dict[str, str] = dataclasses.field(default_factory=dict)
