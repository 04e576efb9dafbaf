"""Optimizers that see too little on one device of a pipeline."""

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import jax
import optax

from jdist import transforms

# Transformations that need whole leaves, or their names, by the factories and
# classes that make up a chain.  Optax's chains are closures without types, so
# the names of their functions are all that can be recognized.
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
# Transformations that decide by all leaves at once, or draw random numbers for
# one leaf after the other.
_OF_ALL = {
  "add_noise", "apply_if_finite", "clip_by_global_norm", "dadapt_adamw",
  "differentially_private_aggregate", "dog", "dowg", "flatten",
  "hutchinson_estimator_diag_hessian", "mechanize", "momo", "momo_adam",
  "normalize_by_update_norm", "polyak_sgd", "prodigy", "sam",
  "scale_by_backtracking_linesearch", "scale_by_dog", "scale_by_lbfgs",
  "scale_by_polyak", "scale_by_zoom_linesearch", "skip_large_updates",
  "skip_not_finite",
}  # fmt: skip
# Transformations that do so but agree over the stages of one program by
# `collectives.sum_of_parts`.
_AGREED = frozenset({"skip_nonfinite", "clip_local"})
_WHOLE = "whole_model"
# Transformations that may choose by a leaf's name, which differs by stage.
_OF_NAMES = ("a partition of leaves", "a mask")


def needs_all(
  optimizer: optax.GradientTransformation,
  *,
  num_parts: int,
  num_stages: int,
  tied: bool,
  one_program: bool,
) -> bool:
  """Returns whether a chain has to see all leaves of a model at once.

  The model's stages lie in several parts with an optimizer each; `tied` stages
  share parameters, which a norm would count twice.  In one program the parts
  agree by `collectives.sum_of_parts`, and leaves lose the names of their stage.
  """
  found = frozenset(_names(optimizer, set()))
  if (num_parts > 1 or tied) and found & _OF_ALL:
    return True
  if num_parts > 1 and not one_program and found & {*_AGREED, _WHOLE}:
    return True
  if tied and "clip_local" in found:
    return True
  kinds = _kinds(found)
  # LARS and LAMB hold masks of their own, which go by the leaves' shapes.
  by_name = bool(kinds) and all(kind in _OF_NAMES for kind in kinds)
  return one_program and num_stages > 1 and by_name


def check_chain(optimizer: optax.GradientTransformation) -> None:
  """Refuses a chain that needs whole leaves, for stages packed in a buffer."""
  names = _kinds(frozenset(_names(optimizer, set())))
  # LARS and LAMB hold masks, too: the first name is what the user asked for.
  if names:
    raise ValueError(
      "`inner` must act on each number alone, or in blocks, where stages are "
      "unlike or share parameters and lie packed in one buffer, got "
      f"{names[0]}. Take stages of equal shapes, or a `StageProcess` with a "
      "`team` of workers; or `pipeline.whole_model(optimizer)`."
    )


def check_state(state: Any) -> None:
  """Raises a ValueError for a state with rounds or predicted weights."""

  def refused(x: Any) -> bool:
    predicts = isinstance(x, transforms.PredictWeightsState)
    return predicts or getattr(type(x), "rounds", False) is True

  for x in jax.tree.leaves(state, is_leaf=refused):
    if refused(x):
      raise ValueError(
        "`optimizer` must have neither rounds nor predicted weights where it "
        f"is given all stages' leaves, got one with {type(x).__name__}. Put "
        "`pipeline.whole_model` around the Optax chain inside of it: "
        "`local_sgd(whole_model(chain), 8, axis=axis)`, "
        "`predict_weights(whole_model(chain), delay)`."
      )


def _kinds(found: frozenset[str]) -> list[str]:
  """Returns the parts of a chain that need whole leaves."""
  return [x for x, parts in _OF_LEAVES.items() if found.intersection(parts)]


def _names(part: Any, seen: set[int]) -> Iterator[str]:
  """Yields the names of all functions and classes that a chain holds."""
  if id(part) in seen:
    return
  seen.add(id(part))
  held: list[Any] = []
  if isinstance(part, functools.partial):
    held = [part.func, *part.args, *part.keywords.values()]
  elif inspect.isfunction(part):
    name = part.__qualname__.split(".<locals>")[0]
    yield name
    # A part inside of it has all that it needs.
    if name == _WHOLE:
      return
    for cell in part.__closure__ or ():
      try:
        held.append(cell.cell_contents)
      except ValueError:  # The cell has not been assigned yet.
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
