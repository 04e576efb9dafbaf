"""Stages on the disk: a directory for each step, in it one for each stage.

    step_00000040/stage_000/    arrays and their manifest, see `array_files`
    step_00000040/stage_001/    of another process, perhaps on another machine

A stage that is there is there whole.  A step counts when all stages have it,
which no process knows alone: `StageProcess.restore` compares their lists.
"""

import contextlib
import os
import pathlib
import re
import warnings
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdist.pipeline.processes import _device_part, _peers
from jdist.storage import array_files, hashes

PyTree = Any
_WHAT = "a pipeline's stage"
# That processes tell each other of.
_MAX_STEPS = 16
_STEP = re.compile(r"step_(\d{8,})")


def save_stages(
  directory: str | os.PathLike[str],
  part: _device_part.DevicePart,
  state: _device_part.ProcessState,
  names: Sequence[str],
  number: int,
  keep: int,
  ours: bool,
) -> None:
  """Saves a process's stages; returns when all processes have theirs.

  Args:
    directory: of the run.
    part: this process's.
    state: between two runs of the table.
    names: of all stages of the model.
    number: of this exchange between the processes.
    keep: steps to keep.
    ours: whether what is there is of this run: restored from, or saved to.

  Raises:
    ValueError: when another run has saved a later step there.
  """
  later = [x for x in _steps(directory) if x > state.step]
  if not ours and any(_is_there(directory, x, part.own) for x in later):
    raise ValueError(
      f"`directory` must have no step after {state.step}, got {later[0]} of "
      f"another run in {directory}. Take another directory, or go on from "
      "there with `restore`."
    )
  for stage in part.own:
    target = _folder(directory, state.step, stage)
    body = {"what": _WHAT, "stages": list(names)}
    array_files.save_arrays(target, _part(state, stage), body)
  if part.peers is not None:
    # An earlier step goes only when all have this one.
    part.peers.check_agreement("`state.step`", str(state.step), number)
  # What is later was given up, by a restore or by whoever saves again.
  earlier = [x for x in _steps(directory) if x <= state.step]
  for step in later + earlier[keep:]:
    for stage in part.own:
      array_files.remove(_folder(directory, step, stage))
    # The last process that has a stage there removes the step.
    with contextlib.suppress(OSError):
      _folder(directory, step, 0).parent.rmdir()


def restore_stages(
  directory: str | os.PathLike[str],
  part: _device_part.DevicePart,
  like: _device_part.ProcessState,
  names: Sequence[str],
  number: int,
) -> _device_part.ProcessState | None:
  """Returns a process's stages of the newest step that all have, if any.

  Args:
    directory: of `save_stages`.
    part: this process's.
    like: a state of the same shapes.
    names: of all stages of the model.
    number: of this exchange between the processes.

  Raises:
    ValueError: when there is no step that all have, or the stages are others.
  """
  own = np.full(_MAX_STEPS, -1)
  there = _steps(directory)
  steps = [x for x in there if _is_whole(directory, x, part.own, names)]
  own[: len(steps)] = steps[:_MAX_STEPS]
  every = [[own]]
  if part.peers is not None:
    tag = _peers.Tag(_peers.Kind.MOVED, 0, 2, number)
    every = part.peers.exchange(tag, [own])
  found = [{int(x) for x in row if x >= 0} for (row,) in every]
  if not any(found):
    return None
  common = set.intersection(*found)
  if not common:
    raise ValueError(
      "`directory` must hold a step that all processes have whole, got "
      f"{[sorted(x) for x in found]} of the processes in {directory}. Start "
      "anew in another directory."
    )
  return _load(directory, max(common), like)


def _load(
  directory: str | os.PathLike[str], step: int, like: _device_part.ProcessState
) -> _device_part.ProcessState:
  parts = {}
  for stage in like.params:
    target = _folder(directory, step, stage)
    arrays, _ = array_files.load_arrays(target, what=_WHAT)
    parts[stage] = array_files.tree_of(arrays, _part(like, stage))
  return _device_part.ProcessState(
    step,
    {s: part["params"] for s, part in parts.items()},
    {s: part["opt_state"] for s, part in parts.items()},
    {s: part["model_state"] for s, part in parts.items()},
    np.asarray(next(iter(parts.values()))["key"]),
  )


def _steps(directory: str | os.PathLike[str]) -> list[int]:
  folder = array_files.folder(directory)
  paths = folder.iterdir() if folder.exists() else ()
  found = (_STEP.fullmatch(path.name) for path in paths)
  return sorted((int(x[1]) for x in found if x), reverse=True)


def _is_there(
  directory: str | os.PathLike[str], step: int, own: Sequence[int]
) -> bool:
  return all(array_files.is_there(_folder(directory, step, s)) for s in own)


def _is_whole(
  directory: str | os.PathLike[str],
  step: int,
  own: Sequence[int],
  names: Sequence[str],
) -> bool:
  for stage in own:
    target = _folder(directory, step, stage)
    try:
      _, body = array_files.load_arrays(target, what=_WHAT)
    except FileNotFoundError:
      return False
    except hashes.DamagedError as error:
      warnings.warn(
        f"Stage {stage} of step {step} is damaged ({error.reason}); an "
        "earlier step is used if there is one.",
        stacklevel=4,
      )
      return False
    if body["stages"] != list(names):
      raise ValueError(
        f"`directory` must hold the stages {', '.join(names)}, got "
        f"{', '.join(body['stages'])} in {target}. Cut the layers as they "
        "were when they were saved."
      )
  return True


def _folder(
  directory: str | os.PathLike[str], step: int, stage: int
) -> pathlib.Path:
  whole = array_files.folder(directory)
  return whole / f"step_{step:08d}" / f"stage_{stage:03d}"


def _part(state: _device_part.ProcessState, stage: int) -> dict[str, PyTree]:
  """Returns all that the run needs of one stage."""
  return {
    "params": state.params[stage],
    "opt_state": state.opt_state[stage],
    "model_state": state.model_state[stage],
    "key": jnp.asarray(state.key),
  }
