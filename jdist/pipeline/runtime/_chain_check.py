"""Optimizers that a pipeline cannot run as one device would."""

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
# What decides by all leaves at once, and what to take for it.
_OF_ALL = {
  "clip_by_global_norm": "To clip, take `clip_norm` of the pipeline.",
  "apply_if_finite": (
    "In one program take `transforms.skip_nonfinite`, on which stages agree."
  ),
  "normalize_by_update_norm": "",
  "prodigy": "",
  "scale_by_dog": "",
  "scale_by_polyak": "",
}
# What does so and agrees over the stages of one program, but not of processes.
_AGREED = {
  "skip_nonfinite": "Run all stages in one program, or without a guard.",
  "clip_local": "To clip, take `clip_norm` of the pipeline.",
}


def check_parts(
  argument: str,
  optimizer: optax.GradientTransformation,
  num_parts: int,
  *,
  agree: bool,
  tied: bool = False,
) -> None:
  """Refuses what would decide by a part of the model's leaves.

  Args:
    argument: its name.
    optimizer: as of `check_chain`.
    num_parts: of the model, each with an optimizer of its own.
    agree: whether `collectives.sum_of_parts` adds over them.
    tied: whether parts share parameters, which such a sum counts twice.

  Raises:
    ValueError: when it holds one of these, named.
  """
  if num_parts < 2:
    return
  found = frozenset(_names(optimizer, set()))
  refused = _OF_ALL | ({} if agree else _AGREED)
  if tied:
    refused |= {"clip_local": _AGREED["clip_local"]}
  for name, remedy in refused.items():
    if name in found:
      error = (
        f"`{argument}` must not decide by all leaves at once in a pipeline, "
        "which gives it those of its own stages only, got "
        f"{name}. {remedy}"
      )
      raise ValueError(error.rstrip())


def check_chain(
  optimizer: optax.GradientTransformation, *, packed: bool
) -> None:
  """Refuses what would act on other leaves than the unsplit model's.

  Args:
    optimizer: an Optax chain, whose parts are known by the names of the
      functions and classes that made them.
    packed: whether the leaves of a stage lie in one buffer.

  Raises:
    ValueError: when it holds one of these, named.
  """
  if not packed:
    return
  found = frozenset(_names(optimizer, set()))
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
