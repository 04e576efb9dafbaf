"""Moves of layers between processes, with their optimizer state."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist import checks, signatures, states
from jdist.pipeline.processes import _device_part, _peers, _stage_updates
from jdist.pipeline.runtime._stages import by_path
from jdist.storage import hashes

PyTree = Any
_FIELDS = ("params", "opt_state", "model_state")
_REMEDY = (
  "Move layers with optimizers whose state has a part for each parameter, and "
  "only counts besides, or save, and restore with the same cuts."
)


@signatures.checked
def move_layers(
  state: _device_part.ProcessState,
  before: Any,
  after: Any,
  optimizer: signatures.Optimizer,
) -> _device_part.ProcessState:
  """Moves the state of a run to other cuts of the same layers.

  Every process calls it between two calls of `run`, when no work is in
  progress.  A leaf moves with its parameter, as raw bytes; a leaf that a
  process already has is not sent.  An optimizer's leaf belongs to the parameter
  whose path ends its own path, as in all chains that treat each parameter
  separately.  All other leaves, such as counts, must be equal in all stages.
  The state of an optimizer that decides by all leaves moves as a whole to the
  first stage's device.

  Args:
    state: The state, as `before.run` has returned it.
    before: The `StageProcess` with the old cuts.
    after: The one with the new cuts, of the same layers, table and peers.
    optimizer: The optimizer of the state.

  Raises:
    ValueError: If the layers differ, or a leaf of the optimizer's state belongs
      to no parameter and is no count.
  """
  for name, process in (("before", before), ("after", after)):
    if not hasattr(process, "stages"):
      raise ValueError(
        f"`{name}` must be a `pipeline.StageProcess`, got "
        f"{checks.show(process)}."
      )
  # A single stage has all leaves, so the two may differ.
  whole = any(
    _stage_updates.sees_all(optimizer, x.stages) for x in (before, after)
  )
  # A whole state is not divided by parameters; it moves separately below.
  init = (lambda params: ()) if whole else optimizer.init
  _check_layers(before, after)
  wanted = {s: _Leaves(x, init) for s, x in enumerate(after.stages)}
  having = {s: _Leaves(x, init) for s, x in enumerate(before.stages)}
  # Everything that can fail is checked on shapes before anything is sent.
  _check_common([*having.values(), *wanted.values()])
  every = state._replace(opt_state=dict.fromkeys(state.params, ()))
  taken = every if whole else state
  arrays = {
    s: _named([getattr(taken, field)[s] for field in _FIELDS])
    for s in state.params
  }
  common = _common(arrays, having)
  # Unequal counts would silently differ by stage after the move.
  facts = {
    "the step": state.step,
    "what is kept for all stages": _digest([state.key, *common.values()]),
  }
  before.peers.check_agreement(facts, state.step)
  found = _transfer(state.step, before, after, having, wanted, arrays)
  for values in found.values():
    # Each stage needs its own copy, as an update donates it.
    values.update({name: jnp.array(x) for name, x in common.items()})
  moved = {s: wanted[s].tree(values) for s, values in found.items()}
  fresh = after.init_state(optimizer)  # This also makes its update program.
  fields: dict[str, Any] = {
    name: {s: tree[i] for s, tree in moved.items()}
    for i, name in enumerate(_FIELDS)
  }
  if whole:
    fields["opt_state"] |= _whole_state(state, before, after, fresh.opt_state)
  return state._replace(edges=fresh.edges, **fields)


def _transfer(
  step: int,
  before: Any,
  after: Any,
  having: Mapping[int, "_Leaves"],
  wanted: Mapping[int, "_Leaves"],
  arrays: Mapping[int, Mapping[str, Any]],
) -> dict[int, dict[str, Any]]:
  """Sends and receives leaves; returns those of this process's new stages.

  All processes go through all transfers in one order, so each knows what it has
  to send and what it will receive.  Sends are buffered, so none blocks.
  """
  peers, device = before.peers, before.peers.device
  have = {name: x for own in arrays.values() for name, x in own.items()}
  found: dict[int, dict[str, Any]] = {}
  for s, leaves in wanted.items():
    target = after.table.device_of[s]
    tag = _peers.Tag(_peers.Kind.LAYERS, s, 0, step)
    if device == target:
      found[s] = {}
    parts = _sources(leaves, having, before.table.device_of, target)
    for source, names in parts.items():
      if device == source == target:
        found[s] |= {name: have[name] for name in names}
      elif device == source:
        peers.send(target, tag, [have[name] for name in names])
      elif device == target:
        like = [leaves.shapes[name] for name in names]
        received = peers.receive(source, tag, like)
        found[s] |= dict(zip(names, received, strict=True))
  return found


def _whole_state(
  state: _device_part.ProcessState,
  before: Any,
  after: Any,
  fresh: Mapping[int, PyTree],
) -> dict[int, PyTree]:
  """Returns an optimizer's state of all stages on the first stage's device."""
  peers, device = before.peers, before.peers.device
  source, target = before.table.device_of[0], after.table.device_of[0]
  if source == target:
    return {0: state.opt_state[0]} if device == target else {}
  tag = _peers.Tag(_peers.Kind.LAYERS, 0, 1, state.step)
  if device == source:
    own = jax.tree.map(states.key_words, state.opt_state[0])
    peers.send(target, tag, own)
  if device != target:
    return {}
  # The fresh state only gives shapes.
  like = fresh[0]
  found = peers.receive(source, tag, jax.tree.map(states.key_words, like))
  return {0: jax.tree.map(states.as_key, found, like)}


class _Leaves:
  """The leaves of a stage by name: its parameters' and common ones."""

  def __init__(self, stage: Any, init: Callable[[PyTree], PyTree]):
    if not isinstance(stage.params, Mapping):
      raise ValueError(
        "`stages` must have dicts of parameters, which name their layers, got "
        f"{type(stage.params).__name__} of {stage.name}. Give its parameters "
        "names."
      )
    self._like = jax.eval_shape(
      lambda: (stage.params, init(stage.params), stage.state)
    )
    self.shapes = _named(self._like)
    # A path such as `['dense']['kernel']` ends the path of each of its moments;
    # the optimizer's other leaves belong to no parameter.
    paths = tuple(by_path(stage.params))
    self.common = [
      name
      for name in self.shapes
      if name.startswith("opt_state") and not name.endswith(paths)
    ]

  def tree(self, values: Mapping[str, Any]) -> tuple[PyTree, PyTree, PyTree]:
    leaves = [jnp.asarray(values[name]) for name in self.shapes]
    return jax.tree.unflatten(jax.tree.structure(self._like), leaves)


def _named(parts: Iterable[PyTree]) -> dict[str, Any]:
  """Returns the leaves of a stage's parameters, optimizer and model by name."""
  return {
    field + path: leaf
    for field, tree in zip(_FIELDS, parts, strict=True)
    for path, leaf in by_path(tree).items()
  }


def _check_layers(before: Any, after: Any) -> None:
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
  """Returns the common leaves, once they are equal in a process's stages."""
  # Digests compare bits, and so random keys and NaN, too.
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
  """Raises a ValueError unless common leaves have one shape in all stages."""
  kinds = [
    {(name, x.shapes[name].shape, x.shapes[name].dtype) for name in x.common}
    for x in every
  ]
  for other in kinds[1:]:
    if different := sorted(name for name, *_ in kinds[0] ^ other):
      raise ValueError(
        "`optimizer` must have the same leaves besides those of parameters in "
        f"all stages, got {different[0]} of unlike shapes. {_REMEDY}"
      )


def _sources(
  leaves: _Leaves,
  having: Mapping[int, _Leaves],
  device_of: tuple[int, ...],
  target: int,
) -> dict[int, list[str]]:
  """Returns the leaves that a stage receives from each device.

  A tied leaf, which several stages have, is taken from the target itself if
  possible, else from the first of their devices.
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
  return hashes.fingerprint(*map(states.key_words, arrays))
