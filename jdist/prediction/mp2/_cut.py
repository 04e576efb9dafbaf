"""Where a network is cut: the front that is sent, the rear that is predicted.

A cut is plain data, made from shapes alone. It turns trees of parameters into
flat vectors and back, always in the same order: layer by layer from the front,
of each layer the kernel, then the bias, then what a normalization adds.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist import checks, models
from jdist.prediction.mp2 import _layers

PyTree = Any
# Of so many layers a cut tells all names.
_NUM_NAMES = 4


@dataclasses.dataclass(frozen=True)
class Cut:
  """Where a network is cut in two; made by `cut` or `published_cut`.

  Hashable, printable and made without values, so it may be a static argument
  of a compiled function, a key, or part of a file.

  Attributes:
    model: what the network is called; for messages.
    front: the layers in front of the cut, in their order.
    rear: the layers behind it.
  """

  model: str
  front: tuple[_layers.Layer, ...]
  rear: tuple[_layers.Layer, ...]

  @property
  def num_front(self) -> int:
    """How many parameters are in front of the cut."""
    return sum(layer.size for layer in self.front)

  @property
  def num_rear(self) -> int:
    """How many parameters are behind the cut."""
    return sum(layer.size for layer in self.rear)

  @functools.cached_property
  def fingerprint(self) -> str:
    """The same for the same leaves in the same halves, whatever the name."""
    text = json.dumps([self.describe()[half] for half in ("front", "rear")])
    return hashlib.sha256(text.encode()).hexdigest()[:16]

  def __repr__(self) -> str:
    names = [layer.name for layer in self.front]
    if len(names) > _NUM_NAMES:
      names[2:-1] = ["..."]
    return (
      f"Cut({self.model}: {len(self.front)} layers of {self.num_front:,} "
      f"parameters ({', '.join(names)}) | {len(self.rear)} layers of "
      f"{self.num_rear:,})"
    )

  def describe(self) -> dict[str, Any]:
    """The cut as JSON can hold it; see `from_description`."""
    halves = {"front": self.front, "rear": self.rear}
    return {"model": self.model} | {
      half: [
        [[list(leaf.path), list(leaf.shape), leaf.dtype] for leaf in x.leaves]
        for x in layers
      ]
      for half, layers in halves.items()
    }

  @classmethod
  def from_description(cls, description: dict[str, Any]) -> "Cut":
    """The cut that `describe` told of."""
    front, rear = (
      tuple(
        _layers.Layer(
          tuple(
            _layers.Leaf(tuple(path), tuple(shape), dtype)
            for path, shape, dtype in leaves
          )
        )
        for leaves in description[half]
      )
      for half in ("front", "rear")
    )
    return cls(description["model"], front, rear)

  def abstract(self) -> PyTree:
    """The network's parameters as a tree of `jax.ShapeDtypeStruct`."""
    layers = (*self.front, *self.rear)
    shapes = {
      leaf.path: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))
      for layer in layers
      for leaf in layer.leaves
    }
    return _pick(shapes, layers)

  def split(self, tree: PyTree) -> tuple[PyTree, PyTree]:
    """Cuts one worker's parameters in two.

    Args:
      tree: nested dict of arrays, the whole network's.

    Returns:
      Front and rear, nested dicts with their own leaves only.

    Raises:
      ValueError: when the tree is not of this network, naming the first leaf
        that differs.
    """
    found = _layers.leaves_of(tree)
    self._check(found, (*self.front, *self.rear), "tree", "the network")
    return (_pick(found, self.front), _pick(found, self.rear))

  def join(self, front: PyTree, rear: PyTree) -> PyTree:
    """Puts the network together; the inverse of `split`.

    Raises:
      ValueError: when a half is not of this cut.
    """
    ahead, behind = _layers.leaves_of(front), _layers.leaves_of(rear)
    self._check(ahead, self.front, "front", "the front")
    self._check(behind, self.rear, "rear", "the rear")
    return _pick(ahead | behind, (*self.front, *self.rear))

  def flatten_front(self, tree: PyTree) -> jax.Array:
    """Makes the message: the front in one vector.

    Layer by layer, of each layer kernel, bias and normalization, each in the
    order of its dimensions; as the authors' (weights, then bias).

    Args:
      tree: the whole network's parameters, or the front of them.

    Returns:
      float32 [num_front].

    Raises:
      ValueError: when the tree does not fit.
    """
    return self._flatten(tree, self.front, "front")

  def flatten_rear(self, tree: PyTree) -> jax.Array:
    """The rear in one vector, float32 [num_rear]; see `flatten_front`."""
    return self._flatten(tree, self.rear, "rear")

  def unflatten_front(self, vector: jax.Array) -> PyTree:
    """The inverse of `flatten_front`: [num_front] to the front's tree."""
    return _unflatten(vector, self.front, self.num_front)

  def unflatten_rear(self, vector: jax.Array) -> PyTree:
    """The inverse of `flatten_rear`: [num_rear] to the rear's tree."""
    return _unflatten(vector, self.rear, self.num_rear)

  def _flatten(
    self, tree: PyTree, layers: tuple[_layers.Layer, ...], half: str
  ) -> jax.Array:
    found = _layers.leaves_of(tree)
    inside = {leaf.path for layer in layers for leaf in layer.leaves}
    if found.keys() <= inside:
      self._check(found, layers, half, f"the {half}")
    else:
      self._check(found, (*self.front, *self.rear), "tree", "the network")
    parts = [
      jnp.ravel(found[leaf.path]).astype(jnp.float32)
      for layer in layers
      for leaf in layer.leaves
    ]
    return jnp.concatenate(parts)

  def _check(
    self,
    found: dict[tuple[str, ...], Any],
    layers: Sequence[_layers.Layer],
    argument: str,
    what: str,
  ) -> None:
    checks.check_shapes(
      f"`{argument}` must be {what} of {self!r}, but",
      "Make the cut from this network's parameters; of parameters "
      "[workers, ...] take one worker's, as a step sees them.",
      {".".join(path): leaf for path, leaf in found.items()},
      {leaf.name: leaf.shape for layer in layers for leaf in layer.leaves},
    )


def check_cut(argument: str, value: Any) -> None:
  """Raises a ValueError unless an argument is a cut."""
  checks.check_type(
    argument,
    value,
    Cut,
    "where a network is cut, for instance `prediction.cut(model, num_layers)`",
  )


def refuse_other_cut(argument: str, theirs: Cut, ours: Cut) -> None:
  """Raises a ValueError that names the first leaf in which two cuts differ.

  Args:
    argument: what was given, for the message.
    theirs: the cut of what was given.
    ours: the cut that is expected.
  """
  if theirs.fingerprint == ours.fingerprint:
    return
  pairs = zip(_halves(ours), _halves(theirs), strict=False)
  for (i, mine), (j, other) in pairs:
    if mine != other:
      difference = f"{mine} there is {other}"
      break
    if i != j:
      difference = f"{mine}, {i} the cut here, is {j} it there"
      break
  else:
    longer = max(ours, theirs, key=lambda x: x.num_front + x.num_rear)
    difference = f"only {longer!r} has all of its leaves"
  raise ValueError(
    f"`{argument}` must be of {ours!r}, got one of {theirs!r}: in place of "
    f"{difference}. Use the one that was made for this network and cut."
  )


def _halves(cut: Cut) -> Iterator[tuple[str, _layers.Leaf]]:
  for half, layers in (("in front of", cut.front), ("behind", cut.rear)):
    for layer in layers:
      for leaf in layer.leaves:
        yield half, leaf


def _pick(
  found: dict[tuple[str, ...], Any], layers: Sequence[_layers.Layer]
) -> dict[str, Any]:
  tree: dict[str, Any] = {}
  for layer in layers:
    for leaf in layer.leaves:
      node = tree
      for key in leaf.path[:-1]:
        node = node.setdefault(key, {})
      node[leaf.path[-1]] = found[leaf.path]
  return tree


def _unflatten(
  vector: jax.Array, layers: tuple[_layers.Layer, ...], size: int
) -> PyTree:
  shape = getattr(vector, "shape", None)
  if shape != (size,):
    given = checks.told(vector) if shape is None else list(shape)
    raise ValueError(
      f"`vector` must be an array of shape [{size}], got {given}. Map over "
      "further dimensions with `jax.vmap`."
    )
  values, start = {}, 0
  for layer in layers:
    for leaf in layer.leaves:
      part = vector[start : start + leaf.size]
      values[leaf.path] = part.reshape(leaf.shape).astype(leaf.dtype)
      start += leaf.size
  return _pick(values, layers)


def count_layers(
  model: models.Model | PyTree, order: Sequence[str] | None = None
) -> int:
  """How many layers a network has, as `cut` counts them."""
  return len(_layers.layers_of(_params_of(model), order))


def _params_of(model: models.Model | PyTree) -> PyTree:
  return model.params if isinstance(model, models.Model) else model


def cut(
  model: models.Model | PyTree,
  num_layers: int,
  *,
  name: str = "model",
  order: Sequence[str] | None = None,
) -> Cut:
  """Cuts a network behind its first layers.

  A layer is a convolution or a dense layer: the leaves of one module, together
  with those of a normalization that follows it, a module of vectors only. Of a
  module the leaf with the most dimensions comes first, its kernel, whatever it
  is called: with three or more the layer is a convolution. Shortcuts that are
  convolutions count. The layers' order is that of the sorted keys, `Dense_10`
  behind `Dense_9`, which for models of `jdist.models` is the order in which
  they run; for others look at the names that the cut shows, and give `order`
  where they do not tell it. Where a normalization comes first by name, or two
  follow each other, as Linen calls them, `order` must be given.

  Args:
    model: a model, for instance of `models.build(..., abstract=True)`, or one
      worker's parameters: a nested dict of arrays or shapes.
    num_layers: how many layers are in front of the cut; from 1 to one less
      than all.
    name: what the network is called in messages.
    order: names of all modules that hold arrays, `Layer.name`, the first that
      runs first and a normalization behind its layer; default as they sort.

  Returns:
    The cut.

  Raises:
    ValueError: if an argument is out of range, the network has fewer than two
      layers, a leaf is no floating array, or the names do not tell the order.

  >>> from jdist import models
  >>> cut(models.build("lenet", input_shape=(28, 28, 1), num_classes=10), 2)
  Cut(model: 2 layers of 2,572 parameters (conv1, conv2)
  | 3 layers of 59,134)
  >>> dense = {"kernel": jnp.zeros((2, 2))}
  >>> cut({"first": dense, "second": dense, "head": dense}, 2)
  Cut(model: 2 layers of 8 parameters (first, head) | 1 layers of 4)
  >>> order = ("first", "second", "head")
  >>> cut({"first": dense, "second": dense, "head": dense}, 2, order=order)
  Cut(model: 2 layers of 8 parameters (first, second) | 1 layers of 4)
  """
  checks.check_type("name", name, str, "text")
  layers = _layers.layers_of(_params_of(model), order)
  if len(layers) < 2:
    raise ValueError(
      "`model` must have two layers at least, one in front of a cut and one "
      f"behind it, got {len(layers)}. Give the whole network or its parameters."
    )
  remedy = f"The network has {len(layers)} layers."
  num_layers = checks.check_int(
    "num_layers", num_layers, 1, len(layers) - 1, remedy
  )
  return Cut(name, layers[:num_layers], layers[num_layers:])
