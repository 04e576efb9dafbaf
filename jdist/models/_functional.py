"""NNX modules as pure functions."""

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx, traverse_util

from jdist.models import _layered_network


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
  """A layer of a network, for what cuts networks into parts.

  Attributes:
    name: of its own in the network.
    params: its part of the network's parameters: the same nested keys.
    state: its part of the network's state likewise.
    apply: `apply(params, state, x, *, train, mask=None)` gives `(y, state)`.
  """

  name: str
  params: dict[str, Any]
  state: dict[str, Any]
  apply: Callable[..., tuple[Any, dict[str, Any]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
  """Holds the starting values and the pure function of a network.

  Attributes:
    params: what is trained: nested dict of float32 arrays. The keys sort in
      the order in which the layers of `build`'s models run, so the leaves of
      the tree go from the front layers to the back.
    state: what is not trained but changes in training, such as running batch
      statistics: nested dict of arrays, `{}` when there is none. Of a model
      built with `abstract=True` both hold `jax.ShapeDtypeStruct`.
    apply: `apply(params, state, images, *, train, mask=None)` gives
      `(logits, state)`; see `functional`.
    layers: the same in layers, for what cuts networks into parts; of a module
      of one's own the whole in one. One after the other, each on its part of
      `params` and `state`, they compute what `apply` does, to the bit. A part
      that several have, such as tied vectors, is in each of them.
  """

  params: dict[str, Any]
  state: dict[str, Any]
  apply: Callable[..., tuple[jax.Array, dict[str, Any]]]
  layers: tuple[Layer, ...] = ()

  def __repr__(self) -> str:
    return f"Model({num_params(self):,} parameters)"


def num_params(model: Model) -> int:
  """Counts the trained numbers of a model."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.params))


def functional(module: nnx.Module) -> Model:
  """Turns an NNX module into a pure function of its parameters and state.

    apply(params, state, images, *, train, mask=None) -> (logits, state)

  `train=True` runs the module after its `train()` (batch statistics of this
  batch, dropout on) and returns the new state; `train=False` runs it after
  `eval()`. `mask` [batch], 1 for samples and 0 for padding, goes to modules
  whose `__call__` takes a `mask`: there batch normalization leaves padding out
  of its statistics. It does not zero the logits of padding: the loss must
  select.

  Parameters are every `nnx.Param`; state is every other variable, random keys
  of dropout included. Cast parameters and images to bfloat16 to compute in it.

  Args:
    module: called as `module(images)` or `module(images, mask=mask)`. It is
      copied: training the model leaves it as it is.

  Raises:
    ValueError: from `apply`, if a mask is given in training to a module that
      has state but takes no mask.

  >>> import jax.numpy as jnp
  >>> from flax import nnx
  >>> model = functional(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
  >>> logits, _ = model.apply(model.params, {}, jnp.ones((4, 3)), train=False)
  >>> logits.shape
  (4, 2)
  """
  graph, params, state = nnx.split(module, nnx.Param, ...)
  params_paths = tuple(nnx.to_flat_state(params).paths)
  state_paths = tuple(nnx.to_flat_state(state).paths)
  takes_mask = "mask" in inspect.signature(module).parameters

  def apply(
    params: dict[str, Any],
    state: dict[str, Any],
    images: jax.Array,
    *,
    train: bool,
    mask: jax.Array | None = None,
  ) -> tuple[jax.Array, dict[str, Any]]:
    if mask is not None and train and state_paths and not takes_mask:
      raise ValueError(
        "`mask` must not be given in training to a module that has state but "
        f"no `mask` argument, got {type(module).__name__}: padding would "
        "enter its batch statistics. Add `mask=None` to its `__call__` and "
        "pass it on to the normalization layers."
      )
    # A fresh copy per call: NNX modules change in place, inside this call
    # only.
    copy = nnx.merge(
      graph, _unflatten(params, params_paths), _unflatten(state, state_paths)
    )
    if train:
      copy.train()
    else:
      copy.eval()
    kwargs = {"mask": mask} if takes_mask else {}
    logits = copy(images, **kwargs)
    return logits, _to_dict(nnx.state(copy), state_paths)

  network = (
    _to_dict(params, params_paths),
    _to_dict(state, state_paths),
    apply,
  )
  if not isinstance(module, _layered_network.LayeredNetwork):
    return Model(*network, (Layer("network", *network),))
  parts = {
    part.names[0]: functional(_layered_network.PartialNetwork(module, part))
    for part in module.parts()
  }
  layers = (Layer(n, x.params, x.state, x.apply) for n, x in parts.items())
  return Model(*network, tuple(layers))


_Path = tuple[Any, ...]


def _to_dict(variables: Any, paths: tuple[_Path, ...]) -> dict[str, Any]:
  """Returns the values at `paths` as a nested dict, with text as keys.

  What came up during the call, such as recorded intermediates, is left out.
  """
  flat = nnx.to_flat_state(variables)
  values = dict(zip(flat.paths, flat.leaves, strict=True))
  return traverse_util.unflatten_dict(
    {tuple(map(str, path)): values[path].get_value() for path in paths}
  )


def _unflatten(tree: dict[str, Any], paths: tuple[_Path, ...]) -> Any:
  """Undoes `_to_dict`."""
  values = traverse_util.flatten_dict(tree)
  return nnx.from_flat_state(
    [(path, values[tuple(map(str, path))]) for path in paths]
  )
