"""Files of a pipeline's stages: a directory for each step and stage.

    step_00000040/stage_000/    arrays and their manifest, see `array_files`
    step_00000040/stage_001/    from another process, perhaps on another machine

A stage's directory appears only when it is complete.  A step counts if all
stages have it, which no process knows alone: `StageProcess.restore` compares
the processes' lists.
"""

import contextlib
import os
import pathlib
import warnings

import jax.numpy as jnp
import numpy as np

from jdist.pipeline.processes import _device_part, _peers
from jdist.states import PyTree
from jdist.storage import array_files, hashes, numbered_files

_WHAT = "a pipeline's stage"
# The newest steps that processes compare; a message has a fixed size.
_MAX_STEPS = 16


def save_stages(
  directory: str | os.PathLike[str],
  part: _device_part.DevicePart,
  state: _device_part.ProcessState,
  *,
  exchange: int,
  keep: int,
  ours: bool,
) -> None:
  """Saves a process's stages; returns when all processes have saved theirs.

  `exchange` numbers this exchange between the processes, and `ours` says
  whether this run has restored from the directory or saved to it.
  """
  later = [x for x in _steps(directory) if x > state.step]
  theirs = [
    step
    for step in later
    if all(array_files.is_there(_folder(directory, step, s)) for s in part.own)
  ]
  if theirs and not ours:
    raise ValueError(
      f"`directory` must have no step after {state.step}, got {theirs[0]} of "
      f"another run in {directory}. Take another directory, or continue from "
      "there with `restore`."
    )
  for stage in part.own:
    target = _folder(directory, state.step, stage)
    body = {"what": _WHAT, "stages": _names(part), "step": state.step}
    array_files.save_arrays(target, _part(state, stage), body)
  # An earlier step may be removed only when all processes have this one: if one
  # is killed before, the others must still have a step in common with it.
  part.peers.check_agreement({"`state.step`": state.step}, exchange)
  # This run has restored an earlier step, so later ones were given up.
  earlier = [x for x in _steps(directory) if x <= state.step]
  for step in later + earlier[keep:]:
    for stage in part.own:
      array_files.remove(_folder(directory, step, stage))
    # Only the last process with a stage there can remove the step itself.
    with contextlib.suppress(OSError):
      _folder(directory, step, 0).parent.rmdir()


def restore_stages(
  directory: str | os.PathLike[str],
  part: _device_part.DevicePart,
  like: _device_part.ProcessState,
  *,
  exchange: int,
) -> _device_part.ProcessState | None:
  """Returns a process's stages of the newest step that all processes have.

  `like` is a state of the same shapes; `exchange` is as in `save_stages`.
  """
  steps = [x for x in _steps(directory) if _is_whole(directory, x, part)]
  own = np.full(_MAX_STEPS, -1)
  own[: len(steps)] = steps[:_MAX_STEPS]
  every = part.collect(
    _peers.Kind.MOVED, dict.fromkeys(part.own, own), exchange, number=2
  )
  found = {
    part.table.device_of[s]: {int(x) for x in row if x >= 0}
    for s, row in every.items()
  }
  if not any(found.values()):
    return None
  common = set.intersection(*found.values())
  if not common:
    raise ValueError(
      "`directory` must hold a step that all processes have whole, got "
      f"{[sorted(x) for _, x in sorted(found.items())]} of the processes in "
      f"{directory}. Start again in another directory."
    )
  step, parts = max(common), {}
  for stage in like.params:
    target = _folder(directory, step, stage)
    arrays, _ = array_files.load_arrays(target, what=_WHAT)
    parts[stage] = array_files.tree_of(arrays, _part(like, stage))
  # The key belongs to the run and is stored with each stage.
  key = np.asarray(next(iter(parts.values()))["key"])
  fields = {
    name: {s: found[name] for s, found in parts.items()}
    for name in ("params", "opt_state", "model_state", "edges")
  }
  return _device_part.ProcessState(step=step, key=key, **fields)


def _steps(directory: str | os.PathLike[str]) -> list[int]:
  return list(numbered_files.find(array_files.folder(directory), "step_"))


def _is_whole(
  directory: str | os.PathLike[str], step: int, part: _device_part.DevicePart
) -> bool:
  """Returns whether a process's stages of a step can be restored."""
  names = _names(part)
  for stage in part.own:
    target = _folder(directory, step, stage)
    try:
      _, body = array_files.load_arrays(target, what=_WHAT)
      if (saved := body.get("step", step)) != step:
        raise hashes.DamagedError(target, f"is of step {saved}")
    except FileNotFoundError:
      return False
    except hashes.DamagedError as error:
      warnings.warn(
        f"Stage {stage} of step {step} is damaged ({error.reason}); an "
        "earlier step is used if there is one.",
        stacklevel=4,
      )
      return False
    # Other cuts are a mistake of the user, not a damaged file.
    if body["stages"] != names:
      raise ValueError(
        f"`directory` must hold the stages {', '.join(names)}, got "
        f"{', '.join(body['stages'])} in {target}. Cut the layers as they "
        "were when they were saved."
      )
  return True


def _names(part: _device_part.DevicePart) -> list[str]:
  return [stage.name for stage in part.model.stages]


def _folder(
  directory: str | os.PathLike[str], step: int, stage: int
) -> pathlib.Path:
  return array_files.folder(directory) / f"step_{step:08d}/stage_{stage:03d}"


def _part(state: _device_part.ProcessState, stage: int) -> dict[str, PyTree]:
  """Returns everything that the run needs of one stage."""
  return {
    "params": state.params[stage],
    "opt_state": state.opt_state[stage],
    "model_state": state.model_state[stage],
    "key": jnp.asarray(state.key),
    "edges": state.edges.get(stage, {}),
  }
