"""Marks of a server's run: where it is measured, saved and evaluated."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import numpy as np

from jdist import checks, cluster, signatures, training

Unit = Literal["updates", "samples", "seconds"]
REFUSED = "the server had to refuse the pushes of all workers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
  """The marks of a run, and where it is saved.

  Attributes:
    unit: In what the marks are counted.
    marks: The positions, in ascending order; the run ends at the last one. A
      run without marks lasts until it is stopped.
    checkpoints: The directory of the checkpoints, one for each mark; None saves
      nothing.
    identity: What a checkpoint must have been made with to be resumed.
  """

  unit: Unit = "samples"
  marks: tuple[float, ...] = ()
  checkpoints: str | None = None
  identity: dict[str, Any] = dataclasses.field(default_factory=dict)

  def kept(self, header: Any) -> list["Mark"]:
    """Returns a checkpoint's marks, except the end of a shorter run."""
    found = zip(header["marks"], header["limits"], self.marks, strict=False)
    return [mark for mark, limit, at in found if limit >= at]


@signatures.checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class LivePlan(RunPlan):
  """Settings of a live server, except its protocol and learner.

  `LiveSession` fills in the marks and the checkpoints of its run.

  Attributes:
    workers: The names of all workers, in the order of the data's numbers.
    machines: The cluster whose links messages take; none are modelled if None.
    record: A file for all messages of a run from its beginning. A run that is
      resumed records nothing.
    versions: Versions of Python and packages that workers must have, too.
    shards: Servers over which a `GradientServer`'s parameters are divided, by
      whole tensors; another one decides for all of them.
    shard: The number of a shard, from 1; 0 is the server that decides.
    channel: That server's connections, from the engine.
  """

  workers: tuple[str, ...]
  machines: cluster.Cluster | None = None
  record: str | None = None
  versions: dict[str, str] = dataclasses.field(default_factory=dict)
  shards: signatures.PositiveInt = 1
  shard: int = 0
  channel: Any = None

  def __post_init__(self) -> None:
    checks.check_distinct("workers", self.workers, "names")


class Mark(NamedTuple):
  """The figures of a run at a mark, as JSON can hold them.

  Attributes:
    updates: Updates of the parameters so far.
    samples: Samples whose gradients are in updates.
    now_s: Seconds since the start, on the engine's clock.
    pushed_bytes: Bytes that all workers have sent to the server.
    staleness: The mean staleness of the gradients in updates.
    train_loss: The mean loss of the updates since the mark before; NaN if there
      was none.
    last_loss: The loss of the last of them; None if there was none.
    usable: Whether training can continue from the state, which is saved only
      then: it is finite, and has not made the server expel all workers.
    ended: Why the run cannot reach a later mark; None if it can.
    changes: Changes of the membership since the mark before, of protocols with
      merges; see `DecoupledState`.
    merged_share: The mean share of the members in a merge since then.
  """

  updates: int
  samples: int
  now_s: float
  pushed_bytes: float
  staleness: float
  train_loss: float
  last_loss: float | None
  usable: bool
  ended: str | None
  changes: list[tuple[float, int, str, str, int]] = []  # noqa: RUF012
  merged_share: float | None = None


def measure(
  driver: Any,
  learner: Any,
  before: Mark | None,
  *,
  now_s: float,
  pushed_bytes: float,
  ended: str | None = None,
) -> Mark:
  """Measures a run where it stands, by its `Driver` and server learner."""
  # `EmptyServer` and other learners without a model have no losses either.
  after = 0 if before is None else before.samples
  losses = [
    x for samples, x in getattr(learner, "losses", ()) if samples > after
  ]
  state, after_s = driver.state, -1.0 if before is None else before.now_s
  changes = [x for x in getattr(state, "changes", ()) if x[0] > after_s]
  shares = [
    merged / max(living, 1)
    for at_s, merged, living in getattr(state, "shares", ())
    if at_s > after_s
  ]
  return Mark(
    updates=driver.state.version,
    samples=driver.applied_samples,
    now_s=now_s,
    pushed_bytes=pushed_bytes,
    staleness=driver.mean_staleness,
    train_loss=float(np.mean(losses)) if losses else math.nan,
    last_loss=losses[-1] if losses else None,
    usable=is_finite(learner) and not driver.all_expelled,
    # On the clock machines that were expelled are away for good, too.
    ended=REFUSED if ended and driver.all_expelled else ended,
    changes=changes,
    merged_share=float(np.mean(shares)) if shares else None,
  )


def is_finite(learner: Any) -> bool:
  """Returns whether training can continue from a server's model."""
  model = getattr(learner, "model", None)
  if model is None:
    return True
  if hasattr(learner, "finite"):  # The model is elsewhere.
    return bool(learner.finite)
  # Pushes that wait for an update were refused unless they were finite.
  laws = getattr(getattr(learner, "server", learner), "laws", ())
  return bool(
    training.is_finite(model.params, model.opt_state, model.model_state, laws)
  )
