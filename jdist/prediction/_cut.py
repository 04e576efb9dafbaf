"""Cuts of networks in two: the front that is sent, the rear that is predicted.

A cut is plain data, made from shapes.  It flattens trees of parameters layer by
layer from the front, with the kernel, the bias and the normalization of each.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import traverse_util

from jdist import checks, models, signatures
from jdist.prediction import _network
from jdist.states import PyTree
from jdist.storage import hashes

Layers = tuple[_network.LeafGroup, ...]
# A text shows at most this many layers, the first ones and the last.
_NUM_NAMES = 4
# The options of the authors' networks, and the number of pushed layers.
_NARROW = {"width": 32, "norm": "none"}
_PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
  "lenet": ({}, 2), "alexnet": ({"form": "cifar"}, 2),
  "vgg15": ({"norm": "none"}, 4),
  "resnet18": (_NARROW | {"shortcut_size": 3}, 10),
  "resnet34": (_NARROW | {"shortcut_size": 3}, 16), "resnet50": (_NARROW, 23),
}  # fmt: skip
PUBLISHED = tuple(_PUBLISHED)  # The networks with a published cut.


def _leaves(layers: Layers) -> list[_network.Leaf]:
  return [leaf for layer in layers for leaf in layer.leaves]


@signatures.explained
@dataclasses.dataclass(frozen=True)
class Cut:
  """A network cut in two; made by `cut` or `published_cut`.

  It is hashable, for static arguments of compiled functions.  The name of the
  network appears in messages only.
  """

  model: str
  front: Layers
  rear: Layers
  made_by = ", as of `prediction.cut(...)`"  # Errors show it.

  @property
  def num_front(self) -> int:
    """The number of parameters in front of the cut."""
    return sum(layer.size for layer in self.front)

  @property
  def num_rear(self) -> int:
    """The number of parameters behind the cut."""
    return sum(layer.size for layer in self.rear)

  @functools.cached_property
  def fingerprint(self) -> str:
    """A hash of the leaves in both halves, without the network's name."""
    # Two builds of one network must match, so that names of models, such as
    # those in messages, do not count.
    text = json.dumps([self.describe()[half] for half in ("front", "rear")])
    return hashes.hash_bytes(text.encode())[:16]

  def __repr__(self) -> str:
    names = [layer.name for layer in self.front]
    if len(names) > _NUM_NAMES:
      names[2:-1] = ["..."]
    halves = [checks.counted(len(x), "layer") for x in (self.front, self.rear)]
    return (
      f"Cut({self.model}: {halves[0]} of {self.num_front:,} parameters "
      f"({', '.join(names)}) | {halves[1]} of {self.num_rear:,})"
    )

  def describe(self) -> dict[str, Any]:
    """Returns the cut as JSON values; see `from_description`."""
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
    """Undoes `describe`."""

    def layer(leaves: list[Any]) -> _network.LeafGroup:
      return _network.LeafGroup(
        tuple(_network.Leaf(tuple(p), tuple(s), d) for p, s, d in leaves)
      )

    front, rear = (
      tuple(map(layer, description[half])) for half in ("front", "rear")
    )
    return cls(description["model"], front, rear)

  def abstract(self) -> PyTree:
    """Returns the network's parameters as a tree of `jax.ShapeDtypeStruct`."""
    return traverse_util.unflatten_dict(
      {
        leaf.path: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))
        for leaf in _leaves(self.front + self.rear)
      }
    )

  def split(self, tree: PyTree) -> tuple[PyTree, PyTree]:
    """Splits one worker's parameters into front and rear.

    Raises:
      ValueError: If the tree is of another network; it names the first leaf
        that differs.
    """
    found = self._checked("tree", tree)
    return _pick(found, self.front), _pick(found, self.rear)

  def join(self, front: PyTree, rear: PyTree) -> PyTree:
    """Joins both halves; undoes `split`."""
    found = self._checked("front", front) | self._checked("rear", rear)
    return _pick(found, self.front + self.rear)

  def flatten_front(self, tree: PyTree) -> jax.Array:
    """Flattens the front of a network into the vector that a worker sends."""
    # A leaf outside of the front shows that the tree must be the whole network,
    # which the error of another network should say.
    leaves = _leaves(self.front)
    whole = _network.leaves_of(tree).keys() - {leaf.path for leaf in leaves}
    found = self._checked("tree" if whole else "front", tree)
    # One vector in float32 is one message, whatever the types of the leaves.
    return jnp.concatenate(
      [jnp.ravel(found[leaf.path]).astype(jnp.float32) for leaf in leaves]
    )

  def unflatten_front(self, vector: jax.Array) -> PyTree:
    """Undoes `flatten_front`: [num_front] to the front's tree."""
    return self._unflatten("front", vector)

  def unflatten_rear(self, vector: jax.Array) -> PyTree:
    """Returns the tree of a flat rear, [num_rear]."""
    return self._unflatten("rear", vector)

  def check_vector(self, half: Literal["front", "rear"], vector: Any) -> None:
    """Raises a ValueError unless a vector is a flat "front" or "rear"."""
    size = getattr(self, f"num_{half}")
    if getattr(vector, "shape", None) != (size,):
      raise ValueError(
        f"`vector` must be an array of shape [{size}], the {half} of {self!r}, "
        f"got {checks.show(vector)}. Map over samples with `jax.vmap`."
      )

  def _unflatten(self, half: Any, vector: jax.Array) -> PyTree:
    self.check_vector(half, vector)
    values, start = {}, 0
    for leaf in _leaves(getattr(self, half)):
      # Slices of static bounds, which XLA fuses into their users.
      part = vector[start : start + leaf.size]
      values[leaf.path] = part.reshape(leaf.shape).astype(leaf.dtype)
      start += leaf.size
    return traverse_util.unflatten_dict(values)

  def _checked(self, argument: str, tree: PyTree) -> dict[Any, Any]:
    """Returns the leaves of "tree", the whole network, "front" or "rear"."""
    whole = argument == "tree"
    found = _network.leaves_of(tree)
    layers = self.front + self.rear if whole else getattr(self, argument)
    rule = f"`{argument}` must be the {'network' if whole else argument} of"
    checks.check_form(
      f"{rule} {self!r}",
      {".".join(path): leaf for path, leaf in found.items()},
      {x.name: jax.ShapeDtypeStruct(x.shape, x.dtype) for x in _leaves(layers)},
      "Make the cut from this network's parameters; of parameters "
      "[workers, ...] take one worker's, as a step sees them.",
    )
    return found


def refuse_other_cut(argument: str, theirs: Cut, ours: Cut) -> None:
  """Raises a ValueError that names the first leaf in which two cuts differ."""
  if theirs.fingerprint == ours.fingerprint:
    return

  def told(cut: Cut) -> list[str]:
    halves = (("in front of", cut.front), ("behind", cut.rear))
    return [f"{x}, {at} the cut" for at, half in halves for x in _leaves(half)]

  # The first difference is the most useful one: a shifted cut or another width
  # changes all leaves behind it.
  both = itertools.zip_longest(told(ours), told(theirs), fillvalue="nothing")
  mine, other = next((x, y) for x, y in both if x != y)
  raise ValueError(
    f"`{argument}` must be of {ours!r}, got one of {theirs!r}: in place of "
    f"{mine}, there is {other}. Use the one that was made for this network and "
    "cut."
  )


def _pick(
  found: Mapping[tuple[str, ...], Any], layers: Layers
) -> dict[str, Any]:
  paths = (leaf.path for leaf in _leaves(layers))
  return traverse_util.unflatten_dict({path: found[path] for path in paths})


def cut(
  model: models.Model | PyTree,
  num_layers: int,
  *,
  name: str = "model",
  order: Sequence[str] | None = None,
) -> Cut:
  """Cuts a network behind its first layers.

  A layer is a convolution or a dense layer with the normalization behind it,
  which is a module of vectors only.  Its kernel is the leaf with the most
  dimensions, three or more for a convolution; convolutions of shortcuts count.
  Layers are ordered by name, `Dense_10` behind `Dense_9`, which is the order of
  execution in `jdist.models`; for other networks check the names that the cut
  shows.

  Args:
    model: A model, for instance `models.build(..., abstract=True)`, or one
      worker's parameters: a nested dict of arrays or shapes.
    num_layers: The number of layers in front of the cut, from 1 to one less
      than all.
    name: The network's name in messages.
    order: The names of all modules that hold arrays in the order of execution,
      for networks whose names do not sort so, such as normalizations in Linen.

  >>> from jdist import models
  >>> cut(models.build("lenet", input_shape=(28, 28, 1), num_classes=10), 2)
  Cut(model: 2 layers of 2,572 parameters (conv1, conv2)
  | 3 layers of 59,134)
  >>> dense = {"kernel": jnp.zeros((2, 2))}
  >>> order = ("first", "second", "head")
  >>> cut({"first": dense, "second": dense, "head": dense}, 2, order=order)
  Cut(model: 2 layers of 8 parameters (first, second) | 1 layer of 4)
  """
  checks.check_type("name", name, str, "text")
  params = model.params if isinstance(model, models.Model) else model
  layers = _network.layers_of(params, order)
  remedy = f"The network has {checks.counted(len(layers), 'layer')}."
  # One layer must remain on each side.
  number = checks.check_int(
    "num_layers", num_layers, 1, len(layers) - 1, remedy
  )
  return Cut(name, layers[:number], layers[number:])


def published_model(
  name: str,
  *,
  input_shape: tuple[int, int, int] | None = None,
  num_classes: int = 10,
  **options: Any,
) -> models.Model:
  """Builds a network of the MP² paper.

  The networks have no normalization, and the ResNets begin with 32 features
  instead of 64.  Their fronts have the authors' numbers of parameters with
  shortcuts over 3x3 pixels for ResNet-18 and 34, over one for ResNet-50.

  | name     | layers pushed | parameters pushed | of       |
  |----------|---------------|-------------------|----------|
  | lenet    | 2             | 2,572             | 61,706   |
  | alexnet  | 2             | 617,344           |          |
  | vgg15    | 4             | 260,160           | 4,722,698|
  | resnet18 | 10            | 185,664           | 3,139,274|
  | resnet34 | 16            | 351,872           |          |
  | resnet50 | 23            | 343,104           |          |

  Args:
    name: A name of the table.
    input_shape: (height, width, channels); default 28x28x1 for LeNet and
      32x32x3 for the others.
    num_classes: The number of logits, default 10.
    **options: Options of `models.build`, such as `seed` and `abstract`.

  References:
    MP², model parameter prediction.  Reconstruction: the layers behind the cut
    of AlexNet, ResNet-34 and ResNet-50, whose totals are not published, and
    the pooling among VGG-15's eight last convolutions.
  """
  fixed, _ = _published(name)
  # Another width or shortcut would be another network than the published one.
  if own := sorted(fixed.keys() & options.keys()):
    raise ValueError(
      f"`{own[0]}` must be left out, as {name} has {own[0]}="
      f"{fixed[own[0]]!r} as published, got {options[own[0]]!r}. Build other "
      "forms with `jdist.models.build`."
    )
  if input_shape is None:
    input_shape = (28, 28, 1) if name == "lenet" else (32, 32, 3)
  return models.build(
    name, input_shape=input_shape, num_classes=num_classes, **fixed, **options
  )


def published_cut(name: str) -> Cut:
  """Returns the published cut of a network of `published_model`.

  >>> published_cut("vgg15")
  Cut(vgg15: 4 layers of 260,160 parameters (conv01, conv02, conv03, conv04)
  | 11 layers of 4,462,538)
  """
  _, num_layers = _published(name)
  return cut(published_model(name, abstract=True), num_layers, name=name)


def _published(name: str) -> tuple[dict[str, Any], int]:
  remedy = "Cut other networks with `cut`."
  checks.check_choice("name", name, tuple(_PUBLISHED), remedy)
  return _PUBLISHED[name]
