"""Costs of a layer or a stage for a micro-batch."""

import dataclasses
import math
import pathlib
import tomllib
from collections.abc import Iterable

import jax

from jdist import checks, cluster, codecs, signatures


@signatures.explained
@signatures.checked
@dataclasses.dataclass(frozen=True)
class LayerCost:
  """The cost of a layer or a stage for one micro-batch.

  Seconds are those of a device of speed 1.

  Attributes:
    name: The name in reports.
    forward_s: The seconds of the forward pass.
    backward_s: The seconds of the whole backward pass, recomputation included.
    weight_s: The part of `backward_s` for gradients of the parameters, which a
      zero-bubble table runs separately.  The default is half of it.
    update_s: The seconds of the optimizer's step, once an iteration.
    parameter_bytes: The bytes of the parameters.
    output_bytes: The bytes of the output, and of its gradient.
    sent_share: The share of these bytes that a codec sends.
    saved_bytes: The bytes that the forward pass saves for the backward pass,
      including the input.
    working_bytes: Further bytes that a pass needs until its end.
  """

  name: str = "layer"
  forward_s: float = 0.0
  backward_s: float = 0.0
  weight_s: float | None = None
  update_s: float = 0.0
  parameter_bytes: float = 0.0
  output_bytes: float = 0.0
  sent_share: float = 1.0
  saved_bytes: float = 0.0
  working_bytes: float = 0.0

  def __post_init__(self) -> None:
    # In dense layers both gradients are products of the same size.
    if self.weight_s is None:
      object.__setattr__(self, "weight_s", self.backward_s / 2)
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name != "name" and not 0 <= value < math.inf:
        raise ValueError(
          f"`{field.name}` must be finite and not negative, got {value} for "
          f"{self.name!r}."
        )
    if self.weight_s > self.backward_s:  # type: ignore[operator]
      raise ValueError(
        f"`weight_s` must be at most the whole backward_s {self.backward_s}, "
        f"of which it is a part, got {self.weight_s} for {self.name!r}."
      )

  @property
  def compute_s(self) -> float:
    """The seconds of both passes."""
    return self.forward_s + self.backward_s

  @property
  def sent_bytes(self) -> float:
    """The bytes of an output, or of its gradient, as a message."""
    return self.output_bytes * self.sent_share

  @property
  def input_s(self) -> float:
    """The part of the backward pass for the gradient of the input."""
    assert self.weight_s is not None
    return self.backward_s - self.weight_s

  def scaled(self, factor: float) -> "LayerCost":
    """Returns the cost of a micro-batch with `factor` times the samples.

    >>> LayerCost("a", forward_s=1, parameter_bytes=8).scaled(2).forward_s
    2
    """
    # The optimizer's step and the parameters do not depend on the samples.
    constant = ("name", "update_s", "parameter_bytes", "sent_share")
    names = [x.name for x in dataclasses.fields(self) if x.name not in constant]
    scaled = {name: getattr(self, name) * factor for name in names}
    return dataclasses.replace(self, **scaled)

  @signatures.checked
  def coded(self, codec: codecs.Codec) -> "LayerCost":
    """Returns the cost where a codec sends outputs and gradients.

    Their entries are taken for float32, and encoding for free.

    >>> LayerCost("a", output_bytes=2048).coded(codecs.Quantize(4)).sent_bytes
    264.0
    """
    like = jax.ShapeDtypeStruct((round(self.output_bytes / 4),), "float32")
    share = codec.num_bits(like) / (32 * like.size) if like.size else 1.0
    return dataclasses.replace(self, sent_share=share)

  def recomputed(self, input_bytes: float) -> "LayerCost":
    """Returns the cost of a stage that keeps its input only and runs twice."""
    # What the first run would have saved exists during the second run alone.
    # The backward pass includes the second run, as it does in a table.
    return dataclasses.replace(
      self,
      backward_s=self.backward_s + self.forward_s,
      saved_bytes=input_bytes,
      working_bytes=self.working_bytes + self.saved_bytes,
    )


def stage_cost(layers: Iterable[LayerCost], name: str = "stage") -> LayerCost:
  """Adds the costs of consecutive layers; only the last output is sent.

  >>> a = LayerCost("a", forward_s=1, backward_s=2, output_bytes=8)
  >>> b = LayerCost("b", forward_s=2, backward_s=4, output_bytes=4)
  >>> stage_cost([a, b]).compute_s, stage_cost([a, b]).output_bytes
  (9, 4)
  """
  found = list(layers)
  # Layers run one after the other, so their temporaries share room.
  sums = {
    field.name: sum(getattr(layer, field.name) for layer in found)
    for field in dataclasses.fields(LayerCost)
    if field.name not in ("name", "output_bytes", "sent_share", "working_bytes")
  }
  sums["working_bytes"] = max(layer.working_bytes for layer in found)
  return dataclasses.replace(found[-1], name=name, **sums)


@signatures.checked
def load_costs(path: str | pathlib.Path) -> list[LayerCost]:
  """Reads the costs of a pipeline's stages or a model's layers.

  The file has a table for each of them, with the fields of `LayerCost`::

      [[stages]]
      name = "front"
      forward_s = 0.01
      backward_s = 0.02
      output_bytes = 1_000_000

  Raises:
    ValueError: If the file is not TOML, has an unknown key, or a value is out
      of its range; the message names the file and the place.
    FileNotFoundError: If there is no such file.
  """
  path = pathlib.Path(path)
  known = [field.name for field in dataclasses.fields(LayerCost)]
  whole = checks.read_text(path, tomllib.loads, "TOML")
  tables = whole.pop("stages", None)
  listed = isinstance(tables, list) and all(isinstance(x, dict) for x in tables)
  if not listed or not tables:
    raise ValueError(f"{path}: `stages` must be one [[stages]] table at least.")
  if whole:
    raise ValueError(
      f"{path} must have [[stages]] alone, got {', '.join(map(repr, whole))}."
    )
  found = []
  for i, table in enumerate(tables):
    place = f"{path}: [[stages]] number {i + 1}"
    for key, value in table.items():
      number = isinstance(value, int | float) and not isinstance(value, bool)
      if key not in known or number == (key == "name"):
        raise ValueError(
          f"{place} must have numbers for {', '.join(known[1:])} and a text "
          f"for name, got {key} = {value!r}."
        )
    try:
      found.append(LayerCost(**{"name": f"stage {i}", **table}))
    except ValueError as error:
      raise ValueError(f"{place}: {error}") from None
  return found


def check_there(nodes: Iterable[cluster.Node]) -> None:
  """Raises a ValueError for a machine that is away at times."""
  for node in nodes:
    if node.outages:
      raise ValueError(
        f"`outages` must be left out in a pipeline, got some of {node.name!r}: "
        "nothing moves its stage to another machine."
      )
