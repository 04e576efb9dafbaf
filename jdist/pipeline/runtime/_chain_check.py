"""Optimizers that one program cannot run as one device would."""

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import jax
import optax

# What reads more of a leaf, or of its name, than single numbers, by the
# factories and classes that a chain is made of.
_OF_LEAVES = {
  "Muon": ("muon", "scale_by_muon"),
  "LARS or LAMB": ("lars", "lamb", "fromage", "scale_by_trust_ratio"),
  "Adafactor": ("adafactor", "scale_by_factored_rms"),
  "NovoGrad": ("novograd", "scale_by_novograd"),
  "SM3": ("sm3", "scale_by_sm3"),
  "PowerSGD": ("PowerSGD",),
  "a policy per leaf": ("PerLeaf",),
  "a partition of leaves": ("partition", "multi_transform"),
  "a mask": ("masked",),
  "adaptive_grad_clip": ("adaptive_grad_clip",),
  "clip_by_block_rms": ("clip_by_block_rms",),
  "centralize": ("centralize",),
}
_OTHER = (type, types.ModuleType, jax.Array)
_OF_ALL = (
  "clip_by_global_norm",
  "normalize_by_update_norm",
  "apply_if_finite",
  "prodigy",
  "scale_by_dog",
  "scale_by_polyak",
)


def check_chain(
  optimizer: optax.GradientTransformation, *, packed: bool, num_devices: int
) -> None:
  """Refuses what would act on other leaves than the unsplit model's.

  Args:
    optimizer: an Optax chain, whose parts are known by the names of the
      functions and classes that made them.
    packed: whether the leaves of a stage lie in one buffer.
    num_devices: of the pipeline.

  Raises:
    ValueError: when it holds one of these, named.
  """
  found = frozenset(_names(optimizer, set()))
  if num_devices > 1:
    for name in _OF_ALL:
      if name in found:
        raise ValueError(
          "`inner` must not decide by all leaves at once in a pipeline, whose "
          f"devices see those of their own stages only, got {name}. To clip, "
          "take `clip_norm` of the pipeline."
        )
  if not packed:
    return
  names = [x for x, parts in _OF_LEAVES.items() if found.intersection(parts)]
  # LARS and its kind hold masks, too: the first name says what was asked for.
  if names:
    raise ValueError(
      "`inner` must act on each number alone, or in blocks, where stages are "
      "unlike or share parameters and lie packed in one buffer, got "
      f"{names[0]}. Take stages of equal shapes, or run each in a process of "
      "its own."
    )


def _names(part: Any, seen: set[int]) -> Iterator[str]:
  """Goes through the names of all that a chain's functions hold."""
  if id(part) in seen:
    return
  seen.add(id(part))
  held: list[Any] = []
  if isinstance(part, functools.partial):
    held = [part.func, *part.args, *part.keywords.values()]
  elif inspect.isfunction(part):
    yield part.__qualname__.split(".<locals>")[0]
    for cell in part.__closure__ or ():
      try:
        held.append(cell.cell_contents)
      except ValueError:  # Not assigned yet.
        continue
    held.append(getattr(part, "__wrapped__", None))
  elif inspect.ismethod(part):
    held = [part.__self__, part.__func__]
  elif isinstance(part, list | tuple):
    held = list(part)
  elif isinstance(part, dict):
    held = list(part.values())
  elif hasattr(part, "__dict__") and not isinstance(part, _OTHER):
    yield type(part).__name__
    held = list(vars(part).values())
  for x in held:
    yield from _names(x, seen)
