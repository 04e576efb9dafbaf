"""A plan: where a model is cut, and on which machines its stages lie."""

import dataclasses
import itertools
from collections.abc import Sequence

from jdist import checks
from jdist.pipeline.planning import _costs


@dataclasses.dataclass(frozen=True)
class Footprint:
  r"""The memory that a stage takes, by the table that it will run.

  .. math:: p \, (v + o + 1) + a \, n + q

  with p bytes of parameters and their gradients, a saved for a micro-batch, and
  q in use within a pass; of a stage that recomputes a is its input, and what
  it saves otherwise is in q.

  Attributes:
    optimizer_copies: o, in sizes of the parameters: 1 for momentum, 2 for Adam.
    versions: v, of the parameters; one number, or of each stage.
    in_flight: n, micro-batches; one number, or of each stage.
    recompute: whether stages keep their input only and run twice.
    input_bytes: of the model's input, of a micro-batch.
  """

  optimizer_copies: float = 1.0
  versions: int | tuple[int, ...] = 1
  in_flight: int | tuple[int, ...] = 1
  recompute: bool = False
  input_bytes: float = 0.0

  def __post_init__(self) -> None:
    for name in ("optimizer_copies", "input_bytes"):
      checks.check_number(name, getattr(self, name))

  def copies(self, stage: int) -> float:
    """Returns in how many sizes of its parameters a stage has them."""
    return _of_stage(self.versions, stage) + self.optimizer_copies + 1

  def live(self, stage: int) -> int:
    """Returns the micro-batches that a stage keeps."""
    return _of_stage(self.in_flight, stage)

  def check(self, num_stages: int) -> None:
    """Raises a ValueError unless there is a number for each stage."""
    for name in ("versions", "in_flight"):
      value = getattr(self, name)
      values = [value] if isinstance(value, int) else value
      for each in values:
        checks.check_int(name, each, 1)
      if not isinstance(value, int) and len(values) != num_stages:
        raise ValueError(
          f"`{name}` must be one number, or one for each of the {num_stages} "
          f"stages, got {len(values)}."
        )


def _of_stage(value: int | tuple[int, ...], stage: int) -> int:
  return value if isinstance(value, int) else value[stage]


@dataclasses.dataclass(frozen=True)
class Plan:
  """Stages of consecutive layers, each on a machine.

  Attributes:
    cuts: where the second and later stages begin, as `cut_layers` takes them.
    nodes: the machine of each stage.
    stages: the cost of each, recomputation included.
    bottleneck_s: of a micro-batch on the busiest machine or link; no table can
      take less.
    trip_s: of a micro-batch through all stages and back.
    memory_bytes: of each stage.
    recompute: whether stages keep their input only.
    replicas: machines of each stage, which are its own and those that follow
      it in `nodes`; one each but in PipeDream's plans.
  """

  cuts: tuple[int, ...]
  nodes: tuple[str, ...]
  stages: tuple[_costs.LayerCost, ...]
  bottleneck_s: float
  trip_s: float
  memory_bytes: tuple[float, ...]
  recompute: bool = False
  replicas: tuple[int, ...] = ()

  @property
  def num_stages(self) -> int:
    """Stages of the model."""
    return len(self.stages)

  def stage_of(self, layer: int) -> int:
    """Returns the stage of a layer."""
    return sum(cut <= layer for cut in self.cuts)

  def __str__(self) -> str:
    return " | ".join(
      f"{stage.name} on {node}"
      for stage, node in zip(self.stages, self.nodes, strict=False)
    )


def make_stages(
  costs: Sequence[_costs.LayerCost],
  cuts: Sequence[int],
  footprint: Footprint,
) -> tuple[_costs.LayerCost, ...]:
  """Returns the cost of each stage, named by its first and last layer."""
  found = []
  for start, end in itertools.pairwise([0, *cuts, len(costs)]):
    name = costs[start].name
    if end > start + 1:
      name += f" to {costs[end - 1].name}"
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
