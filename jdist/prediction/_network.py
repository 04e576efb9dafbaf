"""Layers of a network in their order, and the arrays of each.

A layer is a convolution or a dense layer, with the normalization behind it.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist import checks
from jdist.states import PyTree

# The order of leaves with equally many dimensions; other names follow.
_ORDER = ("kernel", "bias", "scale")


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One array of a network's parameters, at the path of its keys."""

  path: tuple[str, ...]
  shape: tuple[int, ...]
  dtype: str = "float32"

  @property
  def name(self) -> str:
    """The path as one word, `conv01.kernel`."""
    return ".".join(self.path)

  @property
  def size(self) -> int:
    """The number of entries."""
    return math.prod(self.shape)

  def __str__(self) -> str:
    return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class LeafGroup:
  """Kernel and bias of a convolution or dense layer, with its normalization."""

  leaves: tuple[Leaf, ...]

  @property
  def name(self) -> str:
    """The path of the module, `stage1_block1.conv1`."""
    return ".".join(self.leaves[0].path[:-1])

  @property
  def size(self) -> int:
    """The number of entries of its leaves together."""
    return sum(leaf.size for leaf in self.leaves)

  @property
  def is_dense(self) -> bool:
    """Whether the kernel, the first leaf, is a matrix and not a window."""
    return len(self.leaves[0].shape) < 3


def leaves_of(tree: PyTree) -> dict[tuple[str, ...], Any]:
  """Returns the leaves of a nested plain dict by their paths."""
  _check_plain(tree)
  found: dict[tuple[str, ...], Any] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    keys = [getattr(key, "key", None) for key in path]
    words = tuple(key for key in keys if isinstance(key, str))
    if not words or len(words) < len(keys):
      raise ValueError(
        "`tree` must be a nested dict of arrays with text as keys, as of "
        f"`jdist.models`, got a leaf at {jax.tree_util.keystr(path)!r}. Pass "
        "networks of other forms through `jdist.models.functional`."
      )
    found[words] = leaf
  return found


def _check_plain(tree: PyTree) -> None:
  """Refuses other mappings, which `Cut.join` could not restore."""
  if isinstance(tree, Mapping):
    if type(tree) is not dict:
      raise ValueError(
        f"`tree` must be of plain dicts, got a {type(tree).__name__}. Copy it "
        "into dicts, as `flax.core.unfreeze` and `dict` do."
      )
    for node in tree.values():
      _check_plain(node)


def layers_of(
  tree: PyTree, order: Sequence[str] | None = None
) -> tuple[LeafGroup, ...]:
  """Returns the layers of a network, at least two; see `cut`."""
  # Leaves of one module belong to one layer.  JAX sorts the keys of dicts as
  # text, which would put `conv10` in front of `conv2`.
  modules: dict[str, list[Leaf]] = {}
  for path, leaf in sorted(leaves_of(tree).items(), key=_natural):
    modules.setdefault(".".join(path[:-1]), []).append(_leaf(path, leaf))
  layers: list[tuple[Leaf, ...]] = []
  normalized = ""
  for name in modules if order is None else _checked(order, list(modules)):
    leaves = sorted(modules[name], key=_rank)
    # A module of vectors only is the normalization of the previous layer.
    vectors = len(leaves[0].shape) < 2
    # Two normalizations in sequence, or one in front of all layers, mean that
    # the names do not give the order of execution.
    if order is None and vectors and (normalized or not layers):
      other = f"{normalized} is" if normalized else "no layer is"
      raise ValueError(
        f"`order` must be given for this network: {name} holds vectors only, "
        f"as a normalization behind its layer does, but {other} before it by "
        f"name. Name the modules as they run; they are {', '.join(modules)}."
      )
    if layers and vectors:
      layers[-1] += tuple(leaves)
      normalized = name
    else:
      layers.append(tuple(leaves))
      normalized = ""
  if len(layers) < 2:
    raise ValueError(
      "`model` must have two layers at least, one in front of a cut and one "
      f"behind it, got {len(layers)}. Give the whole network or its parameters."
    )
  return tuple(map(LeafGroup, layers))


def _leaf(path: tuple[str, ...], leaf: Any) -> Leaf:
  shape: Any = getattr(leaf, "shape", None)
  dtype: Any = getattr(leaf, "dtype", object)
  if shape is None or not jnp.issubdtype(dtype, jnp.floating):
    # A float32 message would not restore other types exactly.
    raise ValueError(
      "`tree` must hold arrays of real floats, which alone can be sent and "
      f"predicted, got {checks.show(leaf)} at {'.'.join(path)}. Cut the "
      "parameters that are trained, and keep counters and keys in the model's "
      "state."
    )
  return Leaf(path, tuple(shape), jnp.dtype(dtype).name)


def _natural(item: tuple[tuple[str, ...], Any]) -> Any:
  """Returns a key that sorts numbers in names by value."""
  path, _ = item
  words = [re.split("([0-9]+)", key) for key in path]
  return [
    # Every second word is a number, so that types of entries always match.
    ([int(x) if i % 2 else x for i, x in enumerate(parts)], key)
    for parts, key in zip(words, path, strict=True)
  ]


def _checked(order: Sequence[str], names: list[str]) -> Sequence[str]:
  several = isinstance(order, Iterable) and not isinstance(
    order, str | jax.Array
  )
  given: list[Any] = list(order) if several else [order]
  wrong = [f"{x!r} is none of them" for x in given if x not in names]
  wrong += [f"{x!r} is missing" for x in names if x not in given]
  wrong += [f"{x!r} is named twice" for x in names if given.count(x) > 1]
  if wrong:
    raise ValueError(
      "`order` must name every module that holds arrays once, the first that "
      f"runs first, but {wrong[0]}. They are {', '.join(names)}."
    )
  return given


def _rank(leaf: Leaf) -> tuple[int, int, str]:
  # The leaf with the most dimensions is the kernel, whatever its name.
  last = leaf.path[-1]
  known = _ORDER.index(last) if last in _ORDER else len(_ORDER)
  return -len(leaf.shape), known, last
