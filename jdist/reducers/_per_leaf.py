"""A reducer for each leaf, by path, size and rank."""

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from jdist import checks, collectives, signatures
from jdist.reducers import _reducer
from jdist.states import PyTree

Path: TypeAlias = str | re.Pattern[str] | Callable[[str, Any], bool] | None


@signatures.checked
@dataclasses.dataclass(frozen=True)
class Rule:
  """Selects leaves for a reducer.

  Attributes:
    reducer: The reducer, which takes all of them together.
    path: a glob that the whole path must match (`"*/kernel"`; the path of
      `tree["a"][0]` is `"a/0"`), a compiled pattern that is searched for in it,
      a function of the path and the leaf, or None for every path.
    min_size: The smallest number of entries of a leaf.
    min_ndim: The smallest number of dimensions of a leaf.
  """

  reducer: _reducer.Reducer
  path: Path = None
  min_size: signatures.NonNegativeInt = 0
  min_ndim: signatures.NonNegativeInt = 0

  def __post_init__(self) -> None:
    _reducer.check_reducer("reducer", self.reducer)

  def matches(self, path: str, leaf: Any) -> bool:
    """Returns whether a leaf is selected."""
    size = math.prod(leaf.shape)
    # The size and rank are checked first, so that a user's function sees fewer
    # leaves.
    if size < self.min_size or len(leaf.shape) < self.min_ndim:
      return False
    if self.path is None:
      return True
    if isinstance(self.path, str):
      return fnmatch.fnmatchcase(path, self.path)
    if isinstance(self.path, re.Pattern):
      return self.path.search(path) is not None
    return bool(self.path(path, leaf))

  def __str__(self) -> str:
    """Prints for instance `*/kernel, 1024 entries or more: Exact()`."""
    if isinstance(self.path, re.Pattern):
      parts = [f"/{self.path.pattern}/"]
    else:
      parts = [] if self.path is None else [str(self.path)]
    if self.min_size:
      parts.append(f"{self.min_size} entries or more")
    if self.min_ndim:
      parts.append(f"{self.min_ndim} dimensions or more")
    return f"{', '.join(parts) or 'all'}: {self.reducer}"


@dataclasses.dataclass(frozen=True)
class PerLeaf(_reducer.Reducer):
  """Reduces every leaf by the reducer of the first rule that matches it.

  Leaves with equal reducers are reduced together, in one call.  The state is a
  tuple with the state of each different reducer, in the order of the rules.

  Args:
    rules: a list of `Rule`, of which the first match counts.
    default: The reducer of all other leaves; `Exact()` also takes integers.

  Raises:
    ValueError: If an argument is of another kind; at `init`, when a leaf does
      not suit its reducer.

  >>> small = PerLeaf((Rule(_reducer.Exact(), "*/bias"),))
  >>> print(small)
  PerLeaf:
    */bias: Exact()
    else: Exact()
  """

  rules: tuple[Rule, ...]
  default: _reducer.Reducer = dataclasses.field(default_factory=_reducer.Exact)

  def __post_init__(self) -> None:
    rules = checks.check_list("rules", self.rules, "`Rule(reducer, path=...)`")
    for rule in rules:
      checks.check_type("rules", rule, Rule, "a list of `Rule`s only")
    object.__setattr__(self, "rules", tuple(rules))
    Rule(self.default)  # Checks the type.

  @property
  def reducers(self) -> tuple[_reducer.Reducer, ...]:
    """The different reducers, in the order of the rules."""
    found = [rule.reducer for rule in self.rules]
    # Equal reducers share a call, and so their small leaves share a message.
    return tuple(dict.fromkeys([*found, self.default]))

  def reducer_of(self, path: str, leaf: Any) -> _reducer.Reducer:
    """Returns the reducer of a leaf."""
    for rule in self.rules:
      if rule.matches(path, leaf):
        return rule.reducer
    return self.default

  def init(self, like: PyTree, axis: collectives.Axis) -> PyTree:
    leaves = dict(self._named(like))
    groups = self._groups(like)
    return tuple(
      reducer.init({name: leaves[name] for name in names}, axis)
      for reducer, names in groups.items()
    )

  def reduce(
    self, tree: PyTree, state: PyTree, key: jax.Array, axis: collectives.Axis
  ) -> _reducer.Reduced:

    def reduced(i: int, reducer: _reducer.Reducer, group: Any) -> Any:
      # Without it, equal leaves of two reducers would round alike.
      own_key = jax.random.fold_in(key, i)
      return reducer.reduce(group, state[i], own_key, axis)

    return _reducer.Reduced(*self._each(tree, state, reduced, 2))

  def flush(
    self, state: PyTree, like: PyTree, axis: collectives.Axis
  ) -> tuple[PyTree, PyTree]:

    def flushed(i: int, reducer: _reducer.Reducer, group: Any) -> Any:
      return reducer.flush(state[i], group, axis)

    residuals, states = self._each(like, state, flushed, 1)
    return residuals, states

  def num_bits(self, like: PyTree, num_workers: int) -> _reducer.Bits:
    """Adds up the reducers."""
    leaves = dict(self._named(like))
    return _reducer.Bits.total(
      reducer.num_bits([leaves[name] for name in names], num_workers)
      for reducer, names in self._groups(like).items()
      if names
    )

  def check_chunks(self) -> None:
    reason = "its rules go by a leaf's path and shape, which a chunk has not."
    raise _reducer.unsuited(self, "chunks", reason)

  def __str__(self) -> str:
    """Prints the rules, one on each line."""
    lines = [*map(str, self.rules), f"else: {self.default}"]
    return "\n  ".join(["PerLeaf:", *lines])

  def _each(
    self, tree: PyTree, state: PyTree, call: Callable[..., Any], num_trees: int
  ) -> list[Any]:
    """Calls each reducer that has leaves; returns trees and the states."""
    named = self._named(tree)
    leaves, states = dict(named), []
    found: list[dict[str, Any]] = [{} for _ in range(num_trees)]
    for i, (reducer, names) in enumerate(self._groups(tree).items()):
      if not names:
        states.append(state[i])
        continue
      # Leaves are in a dict, so that errors name them.
      *trees, new = call(i, reducer, {name: leaves[name] for name in names})
      states.append(new)
      for one, part in zip(found, trees, strict=True):
        one |= part
    treedef = jax.tree.structure(tree)
    merged = [
      jax.tree.unflatten(treedef, [one[name] for name, _ in named])
      for one in found
    ]
    return [*merged, tuple(states)]

  def _named(self, tree: PyTree) -> list[tuple[str, Any]]:
    paths, leaves = collectives.leaf_paths(tree), jax.tree.leaves(tree)
    named = list(zip(paths, leaves, strict=True))
    # A key "a/b" and a nested {"a": {"b": ...}} have the same path.
    if len(dict(named)) < len(named):
      raise ValueError(
        "`tree` must have leaves of different paths, and some are equal with "
        f"'/' between their parts: {sorted(name for name, _ in named)}. Use "
        "keys without '/'."
      )
    return named

  def _groups(self, tree: PyTree) -> dict[_reducer.Reducer, list[str]]:
    groups: dict[_reducer.Reducer, list[str]] = {r: [] for r in self.reducers}
    for name, leaf in self._named(tree):
      groups[self.reducer_of(name, leaf)].append(name)
    return groups
