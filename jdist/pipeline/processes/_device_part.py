"""The part of a pipeline that one device has."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jdist.pipeline.processes import _peers, _stage_program
from jdist.pipeline.schedule import Table, Versions

PyTree = Any


class ProcessState(NamedTuple):
  """Part that a process of a pipeline trains; each value by its stage's number.

  Attributes:
    step: iterations of the run so far.
    params: of each of its stages.
    opt_state: likewise, of any optimizer.
    model_state: likewise.
    key: the run's random key, uint32 [2].
  """

  step: int
  params: dict[int, PyTree]
  opt_state: dict[int, PyTree]
  model_state: dict[int, PyTree]
  key: np.ndarray


@dataclasses.dataclass(frozen=True)
class DevicePart:
  """A device's stages, and where they stand in the table.

  Attributes:
    table: of all devices.
    device: number of this one.
    own: its stages.
    programs: of these, by number.
    versions: which each action reads.
    between: shapes of what each stage but the last passes on.
    shapes: of each stage's parameters.
    tied: parameters of several stages: these, by path.
    clip_norm: greatest norm of all stages' gradients.
    loss_dtype: of the last stage's loss.
    metric_names: of the last stage, the loss first.
    peers: the other processes.
  """

  table: Table
  device: int
  own: tuple[int, ...]
  programs: Mapping[int, _stage_program.StageProgram]
  versions: Versions
  between: tuple[Any, ...]
  shapes: tuple[PyTree, ...]
  tied: Mapping[str, tuple[int, ...]]
  clip_norm: float | None
  loss_dtype: Any
  metric_names: tuple[str, ...]
  peers: _peers.Peers | None

  @property
  def others(self) -> list[int]:
    """The numbers of the other devices."""
    return [] if self.peers is None else self.peers.others

  def send(self, device: int, tag: _peers.Tag, arrays: list[Any]) -> None:
    """Sends arrays to another device."""
    assert self.peers is not None, "there is another device only with peers"
    self.peers.send(device, tag, arrays)

  def receive(self, device: int, tag: _peers.Tag, like: list[Any]) -> list[Any]:
    """Waits for arrays of another device."""
    assert self.peers is not None, "there is another device only with peers"
    return self.peers.receive(device, tag, like)

  def share(
    self, source: int, tag: _peers.Tag, own: list[Any] | None, like: list[Any]
  ) -> list[Any]:
    """Gives every process arrays that one device has.

    Args:
      source: that device.
      tag: of the message.
      own: the arrays on that device, None on others.
      like: their shapes.
    """
    if own is None:
      return self.receive(source, tag, like)
    for other in self.others:
      self.send(other, tag, own)
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

    Args:
      kind: of the messages.
      own: arrays of one shape, of this device's stages.
      step: of the run.
      stages: all if None.
      number: of several such exchanges in a step.
    """
    stages = range(self.table.num_stages) if stages is None else stages
    devices = {self.table.device_of[s] for s in stages}
    for s, value in own.items():
      tag = _peers.Tag(kind, s, number, step)
      for device in devices - {self.device}:
        self.send(device, tag, [value])
    like = next(iter(own.values()))
    found: dict[int, Any] = {}
    for s in stages:
      if s in own:
        found[s] = own[s]
      else:
        tag = _peers.Tag(kind, s, number, step)
        found[s] = self.receive(self.table.device_of[s], tag, [like])[0]
    return found


def check_barriers(table: Table, num_own: int, what: str) -> None:
  """Refuses what would wait for itself.

  Args:
    table: of all devices.
    num_own: stages of this one.
    what: for which all stages wait before an update.

  Raises:
    ValueError: when a device would.
  """
  flushed = table.num_iterations == 1 and table.window == 1
  if num_own > 1 and not flushed:
    raise ValueError(
      f"{what} must be left out where a device has several stages and "
      f"iterations overlap, got {table}. Take a table of one iteration, or a "
      "stage for each device."
    )
