"""Stages of a model: consecutive layers as one."""

import dataclasses
import functools
import inspect
import itertools
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Protocol, TypeAlias

import jax

from jdist import checks, signatures
from jdist.states import PyTree


class LayerLike(Protocol):
  """A layer, such as `models.Layer` or a `Stage`.

  Attributes:
    name: The name of the layer, unique in the model.
    params: Its part of the model's parameters: a nested dict with the model's
      keys.  The same array under equal keys of two layers is a tied parameter.
      A layer that is a stage alone may have any other tree.
    state: Its part of the model's state, likewise.
    apply: `(params, state, x, *, train, mask=None) -> (y, state)`.  If it has a
      keyword `key`, it receives a random key of its own for each micro-batch,
      the same in the backward pass.
  """

  @property
  def name(self) -> str: ...
  @property
  def params(self) -> PyTree: ...
  @property
  def state(self) -> PyTree: ...
  @property
  def apply(self) -> Callable[..., tuple[Any, PyTree]]: ...


def _check_layers(name: str, value: Any) -> None:
  fields = "name", "params", "state", "apply"
  listed = isinstance(value, Sequence) and not isinstance(value, str)
  for x in value if listed else [value]:
    if not all(hasattr(x, field) for field in fields):
      raise ValueError(
        f"`{name}` must be a list of layers with name, params, state and "
        f"apply, as `models.Layer` has, got {checks.show(x)}. Cut a module as "
        "a whole: `pipeline.cut(models.functional(module), ...)`."
      )


Layers: TypeAlias = Annotated[Sequence[LayerLike], _check_layers]


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
  """Consecutive layers of a model as one layer.

  Attributes:
    name: The names of the first and the last layer.
    params: The parameters of all its layers, under the model's keys.
    state: The state of all its layers, likewise.
    apply: Runs the layers one after the other.
    layers: The layers, in order.
    copied: Paths of state that several layers move alike, such as a random key:
      each reads the value before the micro-batch.
  """

  name: str
  params: PyTree
  state: PyTree
  apply: Callable[..., tuple[Any, PyTree]]
  layers: tuple[LayerLike, ...]
  copied: Collection[str] = ()

  def __repr__(self) -> str:
    return f"Stage({self.name}: {checks.counted(len(self.layers), 'layer')})"


@signatures.checked
def cut_layers(layers: Layers, cuts: int | Sequence[int]) -> tuple[Stage, ...]:
  """Cuts a model into stages.

  Args:
    layers: The layers of the model, in order, such as `Model.layers`.
    cuts: The index of the first layer of each stage but the first; or the
      number of stages, which then have about equally many layers.

  Raises:
    ValueError: If there are fewer layers than stages, the cuts do not grow, or
      the parameters of several layers cannot be one dict.

  >>> from jdist import models
  >>> layers = [
  ...   models.Layer(n, {n: 2.0}, {}, lambda p, s, x, **_: (x + p[n], s))
  ...   for n in "abc"
  ... ]
  >>> cut_layers(layers, [1])
  (Stage(a: 1 layer), Stage(b to c: 2 layers))
  """
  if isinstance(cuts, int):
    remedy = "Each stage has layers: take fewer, or a model of more layers."
    checks.check_int("cuts", cuts, 1, len(layers), remedy)
    # Rounded edges make stages whose sizes differ by one layer at most.
    cuts = [round(i * len(layers) / cuts) for i in range(1, cuts)]
  edges = [0, *cuts, len(layers)]
  if any(a >= b for a, b in itertools.pairwise(edges)):
    raise ValueError(
      f"`cuts` must grow and lie between the first and the last of the "
      f"{len(layers)} layers, got {list(cuts)}."
    )
  # Two layers that are meant to be different but share a key would silently
  # train one array, so this is checked before trees are merged.
  shared_paths(layers)
  # Random keys follow from the names.
  checks.check_distinct("layers", [x.name for x in layers], "layers by name")
  return tuple(_stage(tuple(layers[a:b])) for a, b in itertools.pairwise(edges))


def _stage(layers: tuple[LayerLike, ...]) -> Stage:
  name = layers[0].name
  if len(layers) > 1:
    name = f"{name} to {layers[-1].name}"
  # The trees of a single layer may be of any type.
  single = len(layers) == 1

  def apply(
    params: PyTree, state: PyTree, x: Any, *, key: Any = None, **options: Any
  ) -> tuple[Any, PyTree]:
    if single:
      return _run(layers[0], params, state, x, key, options)
    # Each layer sees its own part only, as in the unsplit model.  The state is
    # merged layer by layer, since two layers may share one.
    before = state
    for layer in layers:
      copied = getattr(layer, "copied", ())
      part = jax.tree_util.tree_map_with_path(
        lambda at, *x, c=copied: x[jax.tree_util.keystr(at) in c],
        pick(state, layer.state), pick(before, layer.state),
      )  # fmt: skip
      own = pick(params, layer.params)
      x, part = _run(layer, own, part, x, key, options)
      state = merge([state, part])
    return x, state

  params, states = [x.params for x in layers], [x.state for x in layers]
  return Stage(name, merge(params), merge(states), apply, layers)


def apply_layer(
  layer: LayerLike,
  params: PyTree,
  state: PyTree,
  x: Any,
  batch: PyTree,
  key: jax.Array | None = None,
) -> tuple[Any, PyTree]:
  """Runs a layer or a stage in training, with the micro-batch's mask.

  Each layer that draws random numbers derives its own key from the
  micro-batch's `key` and its name, so that cuts do not change what it draws.
  """
  mask = batch.get("mask") if isinstance(batch, dict) else None
  options = {} if mask is None else {"mask": mask}
  options["train"] = True
  if isinstance(layer, Stage):
    return layer.apply(params, state, x, key=key, **options)
  return _run(layer, params, state, x, key, options)


def _run(
  layer: LayerLike,
  params: PyTree,
  state: PyTree,
  x: Any,
  key: jax.Array | None,
  options: Mapping[str, Any],
) -> tuple[Any, PyTree]:
  if not _takes(layer.apply, "train"):
    raise ValueError(
      f"`apply` of layer {layer.name!r} must take `train` and `mask` as "
      "keywords, got a function without. Add `**options` to its arguments."
    )
  if key is not None and _takes(layer.apply, "key", by_name=True):
    # Python's own hash differs between processes, CRC-32 does not.
    number = zlib.crc32(layer.name.encode())
    options = {**options, "key": jax.random.fold_in(key, number)}
  found = layer.apply(params, state, x, **options)
  name = f"apply` of layer `{layer.name}"
  y, after = checks.check_pair(name, found, "its outputs and its new state")
  checks.check_arrays(f"{name}`: `y", y)
  return y, after


@functools.cache
def _takes(
  function: Callable[..., Any], keyword: str, *, by_name: bool = False
) -> bool:
  """Returns whether a function takes a keyword, perhaps among `**options`."""
  parameters = inspect.signature(function).parameters
  several = any(x.kind == x.VAR_KEYWORD for x in parameters.values())
  return keyword in parameters or (several and not by_name)


def make_inputs(
  inputs: str | Callable[..., Any], microbatch: PyTree
) -> Callable[[PyTree, jax.Array | None], Any]:
  """Returns the first stage's inputs as a function of micro-batch and key."""
  if isinstance(inputs, str):
    if not isinstance(microbatch, Mapping) or inputs not in microbatch:
      known = microbatch if isinstance(microbatch, Mapping) else ()
      raise ValueError(
        "`inputs` must be a key of the micro-batch, which has "
        f"{', '.join(map(repr, known)) or 'none'}, got {inputs!r}."
      )
    return lambda batch, key: batch[inputs]
  if checks.is_function(inputs) and _takes(inputs, "key", by_name=True):
    return lambda batch, key: inputs(batch, key=key)
  checks.check_function("inputs", inputs, "a micro-batch", 1)
  return lambda batch, key: inputs(batch)


def recompute_layers(stage: LayerLike) -> Stage:
  """Makes each layer's backward pass run the layer's forward pass again.

  Only the layers' inputs are kept for each micro-batch.
  """
  layers = stage.layers if isinstance(stage, Stage) else (stage,)
  return _stage(tuple(map(_recomputed, layers)))


def _recomputed(layer: LayerLike) -> LayerLike:
  def apply(
    params: PyTree, state: PyTree, x: Any, *, key: Any = None, **options: Any
  ) -> tuple[Any, PyTree]:
    # Flags such as `train` must stay Python values: `jax.checkpoint` would
    # trace them, and layers branch on them.
    static = {n: v for n, v in options.items() if isinstance(v, bool)}
    arrays = {n: v for n, v in options.items() if n not in static}
    # The key is the layer's own already.
    if key is not None and _takes(layer.apply, "key", by_name=True):
      arrays["key"] = key
    run = jax.checkpoint(functools.partial(layer.apply, **static))
    return run(params, state, x, **arrays)

  made = Stage(layer.name, layer.params, layer.state, apply, ())
  return dataclasses.replace(made, copied=getattr(layer, "copied", ()))


def merge(trees: Sequence[PyTree]) -> PyTree:
  """Merges nested dicts; if a path appears twice, the last one counts.

  A single tree may be of any type and is returned as it is.

  >>> merge([{"a": {"x": 1}}, {"a": {"y": 2}, "b": 3}])
  {'a': {'x': 1, 'y': 2}, 'b': 3}
  """
  if len(trees) == 1:
    return trees[0]
  found: dict[str, Any] = {}
  for tree in trees:
    if not isinstance(tree, Mapping):
      raise ValueError(
        "`layers` must have nested dicts of parameters and state to be put "
        f"together, got {checks.show(tree)}. Give each layer a key of its own: "
        "`{name: params}`."
      )
    for key, value in tree.items():
      both = isinstance(value, Mapping) and key in found
      found[key] = merge([found[key], value]) if both else value
  return found


def pick(tree: PyTree, like: PyTree) -> PyTree:
  """Returns the part of a nested dict that has the keys of another."""
  if not isinstance(like, Mapping):
    return tree
  return {key: pick(tree[key], value) for key, value in like.items()}


def part_of(whole: PyTree, own: PyTree) -> PyTree:
  """Returns a stage's part of a whole model's tree, its own without one."""
  return own if whole is None else pick(whole, own)


def shapes_of(tree: PyTree) -> PyTree:
  """Returns the shapes and dtypes of a tree's leaves."""
  return jax.eval_shape(lambda: tree)


def shared_paths(parts: Sequence[LayerLike]) -> dict[str, tuple[int, ...]]:
  """Returns the tied parameters by path, with the parts that have them.

  Raises a ValueError if two parts have one path, but not one array.
  """
  _holders("state", parts, [part.state for part in parts])
  found = _holders("params", parts, [part.params for part in parts])
  return {path: tuple(x) for path, x in found.items() if len(x) > 1}


def _holders(
  field: str, parts: Sequence[LayerLike], trees: Sequence[PyTree]
) -> dict[str, list[int]]:
  found: dict[str, list[int]] = {}
  leaves: dict[str, Any] = {}
  for i, tree in enumerate(trees):
    named = isinstance(tree, Mapping)
    for path, leaf in by_path(tree).items() if named else ():
      found.setdefault(path, []).append(i)
      first = leaves.setdefault(path, leaf)
      # Abstract models have no arrays, so equal shapes have to suffice there.
      abstract = isinstance(leaf, jax.ShapeDtypeStruct) and first == leaf
      # Equal values are no sign of a tie: two norms begin with equal ones.
      if first is not leaf and not abstract:
        one, other = (parts[j].name for j in (found[path][0], i))
        raise ValueError(
          "`layers` must have one array under equal keys, which ties them, got "
          f"two under {path} in the {field} of {one!r} and {other!r}. Give "
          "each layer a key of its own, and tied ones the same array object."
        )
  return found


def by_path(tree: PyTree) -> dict[str, Any]:
  """Returns a tree's leaves by their paths, see `jax.tree_util.keystr`."""
  return {
    jax.tree_util.keystr(path): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }
