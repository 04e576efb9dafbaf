"""Plans: where a model is cut and which machines have its stages."""

import dataclasses
import itertools
from collections.abc import Sequence

from jdist import checks, signatures
from jdist.pipeline.planning import _costs


@signatures.explained
@signatures.checked
@dataclasses.dataclass(frozen=True)
class Footprint:
  r"""The memory that a stage needs under the table that it will run.

  .. math:: p \, (v + o + 1) + a \, n + q

  with p bytes of parameters, and as many of gradients, a saved for each
  micro-batch, and q in use within a pass.  A stage that recomputes saves its
  input only, and its activations are part of q.

  Attributes:
    optimizer_copies: The optimizer's state o in sizes of the parameters: 1 for
      momentum, 2 for Adam.
    versions: The versions v of the parameters, one number or one a stage.
    in_flight: The micro-batches n that are kept, one number or one a stage.
    recompute: Whether stages keep their input only and run twice.
    input_bytes: The bytes of the model's input, for a micro-batch.
  """

  optimizer_copies: signatures.NonNegativeFloat = 1.0
  versions: signatures.PositiveInt | tuple[signatures.PositiveInt, ...] = 1
  in_flight: signatures.PositiveInt | tuple[signatures.PositiveInt, ...] = 1
  recompute: bool = False
  input_bytes: signatures.NonNegativeFloat = 0.0

  def copies(self, stage: int) -> float:
    """Returns a stage's memory for parameters, in sizes of these."""
    # The last term stands for the gradients.
    return _of_stage(self.versions, stage) + self.optimizer_copies + 1

  def live(self, stage: int) -> int:
    """Returns the number of micro-batches that a stage keeps."""
    return _of_stage(self.in_flight, stage)

  # The number of stages is known only when layers are cut.
  def check(self, num_stages: int) -> None:
    """Raises a ValueError unless there is a number for each stage."""
    for name in ("versions", "in_flight"):
      value = getattr(self, name)
      if not isinstance(value, int) and len(value) != num_stages:
        raise ValueError(
          f"`{name}` must be one number, or one for each of the {num_stages} "
          f"stages, got {len(value)}."
        )


def _of_stage(value: int | tuple[int, ...], stage: int) -> int:
  if isinstance(value, int):
    return value
  return value[checks.check_int("stage", stage, 0, len(value) - 1)]


@signatures.explained
@dataclasses.dataclass(frozen=True)
class Plan:
  """Stages of consecutive layers, each on a machine.

  Attributes:
    cuts: The index of the first layer of each stage but the first, as
      `cut_layers` takes them.
    nodes: The machine of each stage.
    stages: The cost of each stage, recomputation included.
    bottleneck_s: The seconds of a micro-batch on the busiest machine or link,
      a lower bound for any table.
    trip_s: The seconds of a micro-batch through all stages and back.
    memory_bytes: The memory of each stage.
    recompute: Whether stages keep their input only.
  """

  cuts: tuple[int, ...]
  nodes: tuple[str, ...]
  stages: tuple[_costs.LayerCost, ...]
  bottleneck_s: float
  trip_s: float
  memory_bytes: tuple[float, ...]
  recompute: bool = False

  @property
  def num_stages(self) -> int:
    """The number of stages."""
    return len(self.stages)

  @signatures.checked
  def stage_of(self, layer: signatures.NonNegativeInt) -> int:
    """Returns the stage of a layer, the last one for all after its cut."""
    return sum(cut <= layer for cut in self.cuts)

  def __str__(self) -> str:
    return " | ".join(
      f"{stage.name} on {node}"
      for stage, node in zip(self.stages, self.nodes, strict=False)
    )


def make_stages(
  costs: Sequence[_costs.LayerCost], cuts: Sequence[int], footprint: Footprint
) -> tuple[_costs.LayerCost, ...]:
  """Returns the cost of each stage, named by its first and last layer."""
  found = []
  for start, end in itertools.pairwise([0, *cuts, len(costs)]):
    name = costs[start].name
    if end > start + 1:
      name += f" to {costs[end - 1].name}"
    # A stage that recomputes keeps its input only, which is the previous
    # layer's output.
    stage = _costs.stage_cost(costs[start:end], name)
    if footprint.recompute:
      before = costs[start - 1].output_bytes if start else footprint.input_bytes
      stage = stage.recomputed(before)
    found.append(stage)
  return tuple(found)


def stage_bytes(
  stages: Sequence[_costs.LayerCost], footprint: Footprint
) -> tuple[float, ...]:
  """Returns the memory of each stage."""
  return tuple(
    stage.parameter_bytes * footprint.copies(i)
    + stage.saved_bytes * footprint.live(i)
    + stage.working_bytes
    for i, stage in enumerate(stages)
  )
