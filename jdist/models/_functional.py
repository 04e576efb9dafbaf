"""Modules of NNX, Linen and Equinox as pure functions."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx, traverse_util

from jdist import checks, signatures, states
from jdist.models import _layered_network


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
  """A layer of a network, for pipelines and other partitions of networks.

  Attributes:
    name: A unique name in the network.
    params: The layer's part of the network's parameters, with the same keys.
    state: The layer's part of the network's state, likewise.
    apply: A function `apply(params, state, x, *, train, mask=None)` that
      returns `(y, state)`.
  """

  name: str
  params: dict[str, Any]
  state: dict[str, Any]
  apply: Callable[..., tuple[Any, dict[str, Any]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
  """Holds the starting values and the pure function of a network.

  Attributes:
    params: The trained parameters, a nested dict of float32 arrays. The keys of
      `build`'s models sort in the order in which the layers run, so that the
      leaves of the tree go from the first layer to the last.
    state: Variables that training changes without gradients, such as running
      batch statistics: a nested dict of arrays, or `{}`. With `abstract=True`
      both trees hold `jax.ShapeDtypeStruct`.
    apply: A function `apply(params, state, images, *, train, mask=None)` that
      returns `(logits, state)`; see `functional`.
    layers: The same network in layers; a single one for your own modules. In
      their order, each on its part of `params` and `state`, they compute the
      same as `apply`, to the bit. Parameters that several layers share, such as
      tied embeddings, are a part of each of them.
  """

  params: dict[str, Any]
  state: dict[str, Any]
  apply: Callable[..., tuple[jax.Array, dict[str, Any]]]
  layers: tuple[Layer, ...] = ()

  def __repr__(self) -> str:
    return f"Model({num_params(self):,} parameters)"


@signatures.checked
def num_params(model: Model) -> int:
  """Returns the number of a model's trained parameters."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.params))


# The flags that modules take, and their values in training.
_FLAGS = dict.fromkeys(("train", "training", "is_training"), True)
_FLAGS |= dict.fromkeys(
  ("deterministic", "inference", "use_running_average"), False
)

# Parameters, state, and a function of both, images, `train` and other options.
_Network: TypeAlias = tuple[dict[str, Any], dict[str, Any], Callable[..., Any]]


@signatures.checked
def functional(
  module: Callable[..., Any], state: Any = None, *, seed: signatures.Seed = 0
) -> Model:
  """Turns a module into a pure function of its parameters and state.

    apply(params, state, images, *, train, mask=None) -> (logits, state)

  With `train=True` an NNX module runs after its `train()` (statistics of this
  batch, dropout on), and else after its `eval()`. Every `nnx.Param` is a
  parameter, and every other variable is state, including random keys. A Linen
  module's "params" are the parameters, other collections and the keys that it
  is bound to the state. An Equinox module, or another callable tree, is mapped
  over the samples by `jax.vmap`; its finite arrays of floats, of NumPy too, are
  the parameters, each once, named by their paths. With `train=False` it runs in
  `eqx.nn.inference_mode`, and without a `key` unless it requires one.

  A module is told by `train`, `training`, `is_training`, `deterministic`,
  `inference` and `use_running_average` if it takes them, or has them as fields
  in Linen. In NNX and Equinox one that is None by default follows the mode.

  Modules whose `__call__` takes a `mask` get the `mask` [batch], 1 for samples
  and 0 for padding, so that batch normalization leaves padding out of its
  statistics; the loss must select logits. Cast parameters and images to
  bfloat16 to compute in it.

  Args:
    module: A module that is called as `module(images)` or
      `module(images, mask=mask)`: of NNX, a Linen module with its variables,
      `module.bind(variables, rngs=...)`, or an Equinox module. It is never
      changed.
    state: The `eqx.nn.State` of an Equinox module that takes one.
    seed: The seed of the keys of an Equinox module that takes a `key`.

  Raises:
    ValueError: If a Linen module has no variables, or one needs more than its
      inputs; from `apply`, if one with state but no mask is trained with one.

  >>> model = functional(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
  >>> logits, _ = model.apply(model.params, {}, jnp.ones((4, 3)), train=False)
  >>> logits.shape
  (4, 2)
  """
  given = () if state is None else (state,)
  takes = inspect.signature(module).parameters
  tree = functools.partial(_tree, given=given, seed=seed)
  kinds: dict[Any, Callable[[Any], _Network]]
  kinds = {linen.Module: _linen, nnx.Module: _nnx, object: tree}
  make = next(f for kind, f in kinds.items() if isinstance(module, kind))
  if given and make is not tree:
    raise ValueError(
      "`state` must be None for a module of Flax, which holds its own, got "
      f"{checks.show(state)}. Give NNX modules alone, and Linen modules bound."
    )
  flags = [x for x in _FLAGS if x in takes]
  keyed = ["key"] if make is tree and "key" in takes else []
  if not checks.is_function(module, 1 + len(given), *flags, *keyed):
    raise ValueError(
      "`module` must be a function of inputs and of the given `state`, got "
      f"{type(module).__name__} of {', '.join(takes)} and "
      f"state={checks.show(*given or [None])}. Give both results of "
      "`eqx.nn.make_with_state`, or write others as a `models.Model`."
    )
  if make is not _linen:  # Others have a mode, by which None is decided.
    flags = [x for x in flags if takes[x].default is not None]
  first, variables, run = make(module)
  # Modules without a mask, as users have them, must work as they are.

  def apply(
    params: dict[str, Any],
    state: dict[str, Any],
    images: jax.Array,
    *,
    train: bool,
    mask: jax.Array | None = None,
  ) -> tuple[jax.Array, dict[str, Any]]:
    statistics = any(  # Keys and counts are none.
      jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(state)
    )
    if mask is not None and train and statistics and "mask" not in takes:
      raise ValueError(
        "`mask` must not be given in training to a module that has state but "
        f"no `mask` argument, got {type(module).__name__}: padding would "
        "enter its batch statistics. Add `mask=None` to its `__call__` and "
        "pass it on to the normalization layers."
      )
    options: dict[str, Any] = {x: _FLAGS[x] == bool(train) for x in flags}
    options |= {"mask": mask} if "mask" in takes else {}
    return run(params, state, images, train, options)

  network = first, variables, apply
  name, parts = "network", list[_layered_network.PartialNetwork]()
  if isinstance(module, _layered_network.LayeredNetwork):
    # A layer is the functional form of its sub-modules alone.
    parts = [_layered_network.PartialNetwork(module, x) for x in module.parts]
    name = module.parts[0].names[0]
  if len(parts) > 1:
    return Model(*network, tuple(functional(x).layers[0] for x in parts))
  return Model(*network, (Layer(name, *network),))


def _nnx(module: nnx.Module) -> _Network:
  graph, params, state = nnx.split(module, nnx.Param, ...)
  params_paths = tuple(nnx.to_flat_state(params).paths)
  state_paths = tuple(nnx.to_flat_state(state).paths)

  def run(
    params: Any, state: Any, images: Any, train: bool, options: Any
  ) -> Any:
    # NNX modules change in place: a new copy for each call keeps `apply` pure.
    copy = nnx.merge(
      graph, _unflatten(params, params_paths), _unflatten(state, state_paths)
    )
    (copy.train if train else copy.eval)()
    logits = copy(images, **options)
    return logits, _to_dict(nnx.state(copy), state_paths)

  return _to_dict(params, params_paths), _to_dict(state, state_paths), run


def _linen(module: linen.Module) -> _Network:
  if module.scope is None:
    raise ValueError(
      "`module` must be bound to its variables where it is a Linen module, got "
      f"{type(module).__name__}. Give `module.bind(module.init(key, images))`."
    )
  keys = {name: rng.as_jax_rng() for name, rng in module.scope.rngs.items()}
  for name, key in keys.items():
    keys[name] = key if states.is_key(key) else jax.random.wrap_key_data(key)
  module, variables = module.unbind()
  fields = [x for x in _FLAGS if vars(module).get(x) is not None]

  def run(
    params: Any, state: Any, images: Any, train: bool, options: Any
  ) -> Any:
    own = module.clone(**{x: _FLAGS[x] == bool(train) for x in fields})
    options = {x: v for x, v in options.items() if x not in fields}
    rest = dict(state)
    keys = {n: jax.random.split(x) for n, x in rest.pop("rngs", {}).items()}
    logits, new = own.apply(
      {"params": params, **rest}, images, mutable=list(rest),
      rngs={name: x[0] for name, x in keys.items()}, **options,
    )  # fmt: skip
    if keys and train:
      return logits, {**new, "rngs": {name: x[1] for name, x in keys.items()}}
    return logits, {**state, **new}

  state = dict(variables) | ({"rngs": keys} if keys else {})
  return state.pop("params", {}), state, run


def _tree(module: Any, given: tuple[Any, ...], seed: int) -> _Network:
  keyed = inspect.signature(module).parameters.get("key")
  required = keyed is not None and keyed.default is keyed.empty
  leaves, form = jax.tree.flatten(module)
  ends, names = list[str](), dict[int, str]()
  for path, x in jax.tree_util.tree_leaves_with_path(module):
    ends.append(jax.tree_util.keystr(path[-1:]))
    # As `eqx.is_inexact_array`, but infinities, as of a mask, are constants.
    known = isinstance(x, jax.Array | np.ndarray | np.generic)
    floats = known and jnp.issubdtype(x.dtype, jnp.inexact)
    if floats and not states.exceptions(x):
      names.setdefault(id(x), jax.tree_util.keystr(path))
  axis = dict(zip(ends, leaves, strict=True)).get(".axis_name")
  held, held_form = jax.tree.flatten(given)
  numbers = list(map(str, range(len(held))))

  def run(
    params: Any, state: Any, images: Any, train: bool, options: Any
  ) -> Any:
    def own(x: Any, end: str) -> Any:
      if id(x) in names:
        return params[names[id(x)]]
      # As `eqx.nn.inference_mode` does, which fails on a static flag.
      return (end == ".inference" and not train) or x

    called = jax.tree.unflatten(form, map(own, leaves, ends))
    before = jax.tree.unflatten(held_form, [state[n] for n in numbers])
    new = dict(state)
    flags = {x: options.pop(x) for x in [*options] if x in _FLAGS}
    if "rngs" in state and (train or required):
      key, after = jax.random.split(state["rngs"]["key"])
      options["key"] = jax.random.split(key, len(images))
      new |= {"rngs": {"key": after}} if train else {}

    def one(x: Any, options: Any) -> Any:
      found = called(x, *before, **options, **flags)
      if not before:
        return found, None
      return checks.check_pair("module", found, "logits, state")

    mapped = jax.vmap(one, out_axes=(0, None), axis_name=axis)
    logits, after = mapped(images, options)
    return logits, new | dict(zip(numbers, jax.tree.leaves(after), strict=True))

  keys = {"rngs": {"key": jax.random.key(seed)}} if keyed else {}
  state = keys | dict(zip(numbers, held, strict=True))
  first = {names[id(x)]: jnp.asarray(x) for x in leaves if id(x) in names}
  return first, state, run


_Path = tuple[Any, ...]


def _to_dict(variables: Any, paths: tuple[_Path, ...]) -> dict[str, Any]:
  """Returns the values at `paths` as a nested dict, with text as keys.

  Variables that the call has created, such as recorded intermediates, are left
  out: the state's structure must not change.
  """
  values = dict(nnx.to_flat_state(variables))
  return traverse_util.unflatten_dict(
    {tuple(map(str, path)): values[path].get_value() for path in paths}
  )


def _unflatten(tree: dict[str, Any], paths: tuple[_Path, ...]) -> Any:
  """Undoes `_to_dict`."""
  values = traverse_util.flatten_dict(tree)
  return nnx.from_flat_state(
    [(path, values[tuple(map(str, path))]) for path in paths]
  )
