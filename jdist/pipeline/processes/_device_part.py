"""The part of a pipeline that one process runs."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist import collectives
from jdist.pipeline.processes import _peers
from jdist.pipeline.runtime import _traced_model
from jdist.pipeline.schedule._table import read_versions, Table, Versions
from jdist.states import PyTree


class ProcessState(NamedTuple):
  """The part of a pipeline's state that one process trains.

  Attributes:
    step: The number of iterations of the run so far.
    params: The parameters of each of its stages, by the stage's number.
    opt_state: The optimizer's state, likewise.
    model_state: The model's state, likewise.
    key: The run's random key, uint32 [2].
    edges: The state of coded messages, by the stage that sends them.
  """

  step: int
  params: dict[int, PyTree]
  opt_state: dict[int, PyTree]
  model_state: dict[int, PyTree]
  key: np.ndarray
  edges: dict[int, PyTree] = {}  # noqa: RUF012


@dataclasses.dataclass(frozen=True)
class DevicePart:
  """A device's stages and their place in the table.

  The model and the table are those of all devices.  `own` are the numbers of
  its stages, which `programs` run, and `tied` the parameters that several
  stages share, by path.  The `team` are the workers whose models the stages
  belong to, None for one model, and `edges` the codes of messages by kind and
  the stage that they are for.
  """

  model: _traced_model.TracedModel
  table: Table
  own: tuple[int, ...]
  programs: Mapping[int, Any]
  tied: Mapping[str, tuple[int, ...]]
  peers: _peers.Peers
  team: collectives.Workers | None
  edges: Mapping[tuple[_peers.Kind, int], Any]

  @functools.cached_property
  def versions(self) -> Versions:
    """The version of the parameters that each action reads."""
    return read_versions(self.table)

  @property
  def front(self) -> tuple[int, ...]:
    """The axis of a team's workers, with which its arrays begin."""
    return () if self.team is None else (self.team.num_workers,)

  def like(self, tree: PyTree) -> PyTree:
    """Returns the shapes of a tree of one model as this process has it."""
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((*self.front, *x.shape), x.dtype), tree
    )

  @property
  def device(self) -> int:
    """The number of this device."""
    return self.peers.device

  def share(
    self, source: int, tag: _peers.Tag, own: PyTree, like: PyTree
  ) -> PyTree:
    """Broadcasts the tree `own` of one device, None on others, to all."""
    # The exchange is driven by the table, so no request is necessary.
    if own is None:
      return self.peers.receive(source, tag, like)
    for other in self.peers.others:
      self.peers.send(other, tag, own)
    return own

  def collect(
    self,
    kind: _peers.Kind,
    own: dict[int, Any],
    step: int,
    stages: Sequence[int] | None = None,
    number: int = 0,
  ) -> dict[int, Any]:
    """Exchanges an array of each stage among the devices of these stages.

    All arrays have one shape.  Several exchanges of one kind in an iteration
    have different numbers.
    """
    stages = range(self.table.num_stages) if stages is None else stages
    # A device with several of the stages sends and receives once for each.
    devices = {self.table.device_of[s] for s in stages}
    for s, value in own.items():
      tag = _peers.Tag(kind, s, number, step)
      for device in devices - {self.device}:
        self.peers.send(device, tag, value)
    # All arrays have one shape, so an own one shows what to expect.
    like = next(iter(own.values()))
    found = dict(own)
    for s in stages:
      if s not in own:
        tag = _peers.Tag(kind, s, number, step)
        source = self.table.device_of[s]
        found[s] = self.peers.receive(source, tag, like)
    return found


def check_barriers(table: Table, num_own: int, what: str) -> None:
  """Refuses a barrier over all stages at which a device would deadlock.

  A device reaches the barrier when all of its stages have their gradients.  If
  iterations overlap, the table may put another stage's next action, which
  needs the update, before that.
  """
  flushed = table.num_iterations == 1 and table.window == 1
  if num_own > 1 and not flushed:
    raise ValueError(
      f"{what} must be left out where a device has several stages and "
      f"iterations overlap, got {table}. Take a table of one iteration, or a "
      "stage for each device."
    )
