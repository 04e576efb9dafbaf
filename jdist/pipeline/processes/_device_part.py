"""What one device of a pipeline has and knows."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jdist.pipeline.processes import _peers, _stage_program
from jdist.pipeline.schedule import Table, Versions

PyTree = Any


class ProcessState(NamedTuple):
  """What one process of a pipeline trains; each value by number of its stage.

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
