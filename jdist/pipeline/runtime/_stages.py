"""Stages of a model: consecutive layers as one."""

import dataclasses
import functools
import inspect
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

from jdist import checks

PyTree = Any
# (outputs of the last stage, micro-batch) -> loss, metrics
OutputLoss = Callable[[Any, PyTree], tuple[jax.Array, dict[str, jax.Array]]]


class LayerLike(Protocol):
  """A layer, as `models.Layer` and `Stage` are.

  Attributes:
    name: of its own in the model.
    params: its part of the model's parameters: a nested dict, or any tree of
      a layer that shares none with others.
    state: its part of the model's state likewise.
    apply: `(params, state, x, *, train, mask=None) -> (y, state)`; with a
      keyword `key` it gets a random key of its own for each micro-batch, the
      same in the backward pass.
  """

  @property
  def name(self) -> str: ...
  @property
  def params(self) -> PyTree: ...
  @property
  def state(self) -> PyTree: ...
  @property
  def apply(self) -> Callable[..., tuple[Any, PyTree]]: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
  """Consecutive layers of a model, as one layer.

  Attributes:
    name: of the first and the last layer.
    params: of all its layers; the same keys as in the model.
    state: likewise.
    apply: runs the layers, one after the other.
    layers: in their order.
  """

  name: str
  params: PyTree
  state: PyTree
  apply: Callable[..., tuple[Any, PyTree]]
  layers: tuple[LayerLike, ...]

  def __repr__(self) -> str:
    return f"Stage({self.name}: {len(self.layers)} layers)"


def cut_layers(
  layers: Sequence[LayerLike], cuts: int | Sequence[int]
) -> tuple[Stage, ...]:
  """Cuts a model into stages.

  Args:
    layers: of the model, in their order, such as `Model.layers`.
    cuts: where the second and later stages begin; or the number of stages, of
      about as many layers each.

  Returns:
    The stages.

  Raises:
    ValueError: when there are fewer layers than stages, or the cuts do not
      grow.

  >>> from jdist import models
  >>> layers = [
  ...   models.Layer(n, {n: 2.0}, {}, lambda p, s, x, **_: (x + p[n], s))
  ...   for n in "abc"
  ... ]
  >>> cut_layers(layers, [1])
  (Stage(a: 1 layers), Stage(b to c: 2 layers))
  """
  layers = tuple(checks.check_list("layers", layers, "layers"))
  if isinstance(cuts, int):
    checks.check_int("cuts", cuts, 1)
    if cuts > len(layers):
      raise ValueError(
        f"`cuts` must be at most the model's {len(layers)} layers, got {cuts} "
        "stages. Take fewer stages, or a model of more layers."
      )
    cuts = [round(i * len(layers) / cuts) for i in range(1, cuts)]
  edges = [0, *cuts, len(layers)]
  if any(a >= b for a, b in itertools.pairwise(edges)):
    raise ValueError(
      f"`cuts` must grow and lie between the first and the last of the "
      f"{len(layers)} layers, got {list(cuts)}."
    )
  return tuple(_stage(layers[a:b]) for a, b in itertools.pairwise(edges))


def _stage(layers: tuple[LayerLike, ...]) -> Stage:
  name = layers[0].name
  if len(layers) > 1:
    name = f"{name} to {layers[-1].name}"
  # A layer of any tree, alone, needs no names in the model.
  single = len(layers) == 1

  def apply(
    params: PyTree, state: PyTree, x: Any, *, key: Any = None, **options: Any
  ) -> tuple[Any, PyTree]:
    if single:
      return _run(layers[0], params, state, x, key, options)
    for layer in layers:
      part = pick(state, layer.state)
      own = pick(params, layer.params)
      x, part = _run(layer, own, part, x, key, options)
      state = merge([state, part])
    return x, state

  return Stage(
    name,
    layers[0].params if single else merge([x.params for x in layers]),
    layers[0].state if single else merge([x.state for x in layers]),
    apply,
    layers,
  )


def apply_layer(
  layer: LayerLike,
  params: PyTree,
  state: PyTree,
  x: Any,
  batch: PyTree,
  key: jax.Array | None = None,
) -> tuple[Any, PyTree]:
  """Runs a layer or a stage in training, with the micro-batch's mask.

  Args:
    layer: to run.
    params: its parameters.
    state: its state.
    x: its inputs.
    batch: the micro-batch.
    key: of the micro-batch; each layer that draws derives its own from it and
      its name.
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
  if key is not None and _draws(layer.apply):
    number = zlib.crc32(layer.name.encode())
    options = {**options, "key": jax.random.fold_in(key, number)}
  return layer.apply(params, state, x, **options)


def make_inputs(
  inputs: str | Callable[..., Any],
) -> Callable[[PyTree, jax.Array | None], Any]:
  """Returns the first stage's inputs as a function of micro-batch and key.

  Args:
    inputs: a key of the micro-batch, or a function of it and, if it has such a
      parameter, `key`.
  """
  if isinstance(inputs, str):
    return lambda batch, key: batch[inputs]
  checks.check_function("inputs", inputs, "a micro-batch")
  if _draws(inputs):
    return lambda batch, key: inputs(batch, key=key)
  return lambda batch, key: inputs(batch)


@functools.cache
def _draws(apply: Callable[..., Any]) -> bool:
  """Returns whether a function has a keyword `key`."""
  return "key" in inspect.signature(apply).parameters


def recompute_layers(stages: Sequence[LayerLike]) -> tuple[Stage, ...]:
  """Makes each layer's backward pass run its forward pass again.

  What is kept of a micro-batch are the inputs of the layers.

  Args:
    stages: of a model, from `cut_layers`.
  """
  return tuple(
    _stage(
      tuple(
        _Recomputed(x)
        for x in (stage.layers if isinstance(stage, Stage) else (stage,))
      )
    )
    for stage in stages
  )


class _Recomputed:
  """A layer under `jax.checkpoint`."""

  def __init__(self, layer: LayerLike):
    self.name, self.params, self.state = layer.name, layer.params, layer.state

    def apply(
      params: PyTree, state: PyTree, x: Any, *, key: Any = None, **options: Any
    ) -> tuple[Any, PyTree]:
      arrays = {n: v for n, v in options.items() if not isinstance(v, bool)}
      static = {n: v for n, v in options.items() if isinstance(v, bool)}

      def run(params: PyTree, state: PyTree, x: Any, arrays: Any) -> Any:
        given = {**static, **arrays}
        if key is not None and _draws(layer.apply):  # Already its own.
          given["key"] = key
        return layer.apply(params, state, x, **given)

      return jax.checkpoint(run)(params, state, x, arrays)

    self.apply = apply


def merge(trees: Sequence[PyTree]) -> PyTree:
  """Merges nested dicts; where a path comes twice the last one counts.

  >>> merge([{"a": {"x": 1}}, {"a": {"y": 2}, "b": 3}])
  {'a': {'x': 1, 'y': 2}, 'b': 3}
  """
  found: dict[str, Any] = {}
  for tree in trees:
    for key, value in tree.items():
      both = isinstance(value, Mapping) and key in found
      found[key] = merge([found[key], value]) if both else value
  return found


def pick(tree: PyTree, like: PyTree) -> PyTree:
  """Returns the part of a nested dict that has the keys of another."""
  if not isinstance(like, Mapping):
    return tree
  return {key: pick(tree[key], value) for key, value in like.items()}


def shared_paths(stages: Sequence[LayerLike]) -> dict[str, tuple[int, ...]]:
  """Returns the parameters that several stages use, with these stages."""
  found: dict[str, list[int]] = {}
  for i, stage in enumerate(stages):
    if isinstance(stage.params, Mapping):
      for path, _ in jax.tree_util.tree_leaves_with_path(stage.params):
        found.setdefault(jax.tree_util.keystr(path), []).append(i)
  return {path: tuple(x) for path, x in found.items() if len(x) > 1}
