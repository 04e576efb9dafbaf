"""Layers that move between processes, with what an optimizer has of them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from jdist import checks
from jdist.pipeline.processes import _device_part, _peers
from jdist.pipeline.runtime import LayerLike, needs_all
from jdist.pipeline.schedule import Table
from jdist.storage import hashes

PyTree = Any
_FIELDS = ("params", "opt_state", "model_state")
_REMEDY = (
  "Move layers with optimizers whose state has a part for each parameter, and "
  "besides counts alone, or save, and restore with the same cuts."
)


class ProcessLike(Protocol):
  """A `StageProcess`."""

  stages: tuple[LayerLike, ...]
  table: Table
  peers: _peers.Peers | None

  def init_state(
    self, optimizer: optax.GradientTransformation
  ) -> _device_part.ProcessState: ...


def move_layers(
  state: _device_part.ProcessState,
  before: ProcessLike,
  after: ProcessLike,
  optimizer: optax.GradientTransformation,
) -> _device_part.ProcessState:
  """Brings a run's state to other cuts of the same layers.

  Every process calls it between two calls of `run`, when nothing is under way.
  A leaf goes to where its parameter goes, as raw bytes; what a process has
  already is not sent.  An optimizer's leaf belongs to the parameter in whose
  path its own ends, as in all chains that treat each parameter by itself; the
  others, such as counts, must be equal in all stages and stay so.

  Args:
    state: of `before`.
    before: this process with the cuts so far.
    after: this process with the new cuts, over the same `peers`.
    optimizer: of the run.

  Returns:
    The state of `after`.

  Raises:
    ValueError: when both are of unlike layers, or the optimizer's state cannot
      be taken apart.
  """
  checks.check_optimizer("optimizer", optimizer)
  if needs_all(
    optimizer, num_parts=len(after.stages), num_stages=len(after.stages),
    agree=False, named=True,
  ):  # fmt: skip
    raise ValueError(
      "`optimizer` must see the leaves of one stage at a time where layers "
      f"move, got one that decides by all leaves. {_REMEDY}"
    )
  _check_layers(before, after)
  wanted = {s: _Leaves(x, optimizer) for s, x in enumerate(after.stages)}
  having = {s: _Leaves(x, optimizer) for s, x in enumerate(before.stages)}
  _check_common([*having.values(), *wanted.values()])
  arrays = {
    s: dict(having[s].named(*(getattr(state, field)[s] for field in _FIELDS)))
    for s in state.params
  }
  common = _common(arrays, having)
  device = 0 if before.peers is None else before.peers.device
  if before.peers is not None:
    before.peers.check_agreement(
      "Step, key and what an optimizer has for all stages",
      f"step {state.step}, {_digest([state.key, *common.values()])}",
      state.step,
    )
  found: dict[int, dict[str, Any]] = {}
  for s, leaves in wanted.items():
    target = after.table.device_of[s]
    tag = _peers.Tag(_peers.Kind.LAYERS, s, 0, state.step)
    parts = _sources(leaves, having, before.table.device_of, target)
    if device == target:
      # Each its own copy, as an update uses it up.
      found[s] = {name: jnp.array(x) for name, x in common.items()}
    for source, names in parts.items():
      if device == source:
        have = {k: v for own in arrays.values() for k, v in own.items()}
        mine = {name: have[name] for name in names}
        if device == target:
          found[s] |= mine
        else:
          assert before.peers is not None, "there are other devices"
          before.peers.send(target, tag, list(mine.values()))
    if device == target:
      for source, names in parts.items():
        if source != device:
          assert before.peers is not None, "there are other devices"
          like = [leaves.shapes[name] for name in names]
          came = before.peers.receive(source, tag, like)
          found[s] |= dict(zip(names, came, strict=True))
  moved = {s: wanted[s].tree(values) for s, values in found.items()}
  after.init_state(optimizer)  # Makes its update program.
  params, opt_state, model_state = (
    {s: tree[i] for s, tree in moved.items()} for i in range(len(_FIELDS))
  )
  return state._replace(
    params=params, opt_state=opt_state, model_state=model_state
  )


class _Leaves:
  """The leaves of a stage by name: those of parameters, and common ones."""

  def __init__(self, stage: Any, optimizer: optax.GradientTransformation):
    if not isinstance(stage.params, Mapping):
      raise ValueError(
        "`stages` must have dicts of parameters, which name their layers, got "
        f"{type(stage.params).__name__} of {stage.name}. Give its parameters "
        "names."
      )
    self._like = jax.eval_shape(
      lambda: (stage.params, optimizer.init(stage.params), stage.state)
    )
    self._paths = [
      jax.tree_util.keystr(path)
      for path, _ in jax.tree_util.tree_leaves_with_path(stage.params)
    ]
    self.shapes = dict(self.named(*self._like))
    # Those that belong to no parameter.
    self.common = [
      name
      for name in self.shapes
      if name.startswith("opt_state")
      and not any(name.endswith(path) for path in self._paths)
    ]

  def named(self, *parts: PyTree) -> list[tuple[str, Any]]:
    return [
      (field + jax.tree_util.keystr(path), leaf)
      for field, tree in zip(_FIELDS, parts, strict=True)
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]

  def tree(self, values: Mapping[str, Any]) -> tuple[PyTree, PyTree, PyTree]:
    leaves = [jnp.asarray(values[name]) for name in self.shapes]
    return jax.tree.unflatten(jax.tree.structure(self._like), leaves)


def _check_layers(before: ProcessLike, after: ProcessLike) -> None:
  names = [
    [layer.name for stage in x.stages for layer in getattr(stage, "layers", [])]
    for x in (before, after)
  ]
  if names[0] != names[1] or before.peers is not after.peers:
    raise ValueError(
      "`after` must be of the same layers and peers as `before`, got "
      f"{names[1]} where {names[0]} were."
    )


def _common(
  arrays: Mapping[int, Mapping[str, Any]], having: Mapping[int, _Leaves]
) -> dict[str, Any]:
  """Returns the leaves that all of a process's stages share."""
  first = next(iter(arrays))
  found = {name: arrays[first][name] for name in having[first].common}
  for s in arrays:
    own = {name: arrays[s][name] for name in having[s].common}
    if _digest(own.values()) != _digest(found.values()):
      raise ValueError(
        "`optimizer` must have the same counts in all stages, got others in "
        f"stages {first} and {s}. {_REMEDY}"
      )
  return found


def _check_common(every: Sequence[_Leaves]) -> None:
  """Raises a ValueError unless all stages have equal common leaves."""
  kinds = [
    {name: (x.shapes[name].shape, x.shapes[name].dtype) for name in x.common}
    for x in every
  ]
  for other in kinds[1:]:
    if different := sorted(
      {name for name, _ in kinds[0].items() ^ other.items()}
    ):
      raise ValueError(
        "`optimizer` must have the same leaves beside those of parameters in "
        f"all stages, got {different[0]} of unlike shapes. {_REMEDY}"
      )


def _sources(
  leaves: _Leaves,
  having: Mapping[int, _Leaves],
  device_of: tuple[int, ...],
  target: int,
) -> dict[int, list[str]]:
  """Returns the leaves that a stage gets from each device.

  One that several stages have, tied, comes from the target itself if it is one
  of theirs, else from the first.
  """
  found: dict[int, list[str]] = {}
  for name in leaves.shapes:
    if name in leaves.common:
      continue
    devices = [device_of[s] for s, x in having.items() if name in x.shapes]
    if not devices:
      raise ValueError(
        "`optimizer` must have the same leaves for a parameter in any stage, "
        f"got {name} in the new cuts alone. {_REMEDY}"
      )
    source = target if target in devices else devices[0]
    found.setdefault(source, []).append(name)
  return found


def _digest(arrays: Iterable[Any]) -> str:
  return hashes.fingerprint(
    *(
      jax.random.key_data(x)
      if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
      else x
      for x in arrays
    )
  )
