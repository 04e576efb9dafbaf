"""Positions in an inner optimizer's state, which rounds must move.

Schedule-free SGD, for instance, keeps z as well as the parameters y, at which
gradients are taken, and computes the average x of both.  A round that moves y
alone would leave x and z behind, and workers would drift apart.

A round therefore sends more than the parameters: an iterate's distance from
them, d = z - y, and statistics as they are.  The sync rule moves the
parameters, and the rest is averaged, at once, late, streamed or compressed as
the parameters are.  A worker that is placed at y has the iterate y + d
afterwards: differences between positions stay as they are, whatever an outer
optimizer does to the parameters.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import optax

from jdist import collectives, states
from jdist.states import PyTree
from jdist.transforms.local import _anchor, _round

# The parameter of a statistic.
_NONE = -1


class Whole(NamedTuple):
  """The parts of a state that a round moves.

  Attributes:
    params: The parameters, or a tree like them.
    rest: Distances of iterates from their parameters, and statistics, float32;
      one entry for each leaf that `_places` finds.
  """

  params: PyTree
  rest: tuple[jax.Array, ...]


class WholeRule(_round.SyncRule):
  """Follows a sync rule for the parameters, and averages the rest.

  Attributes:
    rule: The rule for the parameters.
  """

  rule: _round.SyncRule

  def __init__(self, rule: _round.SyncRule):
    own: dict[str, Any] = {
      "rule": rule,
      "apart": rule.apart,
      "correct": rule.correct,
      "init": lambda anchor: rule.init(anchor.params),
      "exact": lambda end: rule.exact(_of_params(end)),
      "depart": lambda end: rule.depart(_of_params(end)),
      "like": lambda tree: tree._replace(params=rule.like(tree.params)),
      "progress_in": lambda message: message._replace(
        params=rule.progress_in(message.params)
      ),
      "move": functools.partial(self._moved, rule.move),
      "settle": functools.partial(self._moved, rule.settle),
    }
    vars(self).update(own)

  def message(self, end: _round.Round, relative: bool) -> Whole:
    rest = end.progress if relative else end.local
    return Whole(self.rule.message(_of_params(end), relative), rest.rest)

  def place(self, before: _round.Round, after: _round.Round) -> Whole:
    params = self.rule.place(_of_params(before), _of_params(after))
    return Whole(params, after.anchor.rest)

  def _moved(
    self, move: Any, end: _round.Round, mean: Whole, exact: Any, relative: bool
  ) -> _round.Round:
    after = move(_of_params(end), mean.params, exact, relative)
    rest = mean.rest
    if relative:
      rest = jax.tree.map(jnp.subtract, end.anchor.rest, rest)
    return end._replace(
      anchor=Whole(after.anchor, rest), inner=after.inner, memory=after.memory
    )


def join(state: Any) -> Any:
  """Returns a `SyncState` whose anchor holds the rest, too."""
  whole = Whole(state.anchor, state.iterates)
  return state._replace(anchor=whole, iterates=())


def split(state: Any) -> Any:
  """Undoes `join`; returns a state without iterates as it is."""
  whole = state.anchor
  if not isinstance(whole, Whole):
    return state
  return state._replace(anchor=whole.params, iterates=whole.rest)


def _of_params(end: _round.Round) -> _round.Round:
  return end._replace(
    anchor=end.anchor.params,
    local=end.local.params,
    progress=end.progress.params,
  )


def _moves(state: Any) -> bool:
  """Returns whether a state's class declares leaves that rounds move."""
  laws = (states.field_laws(type(state)) or {}).values()
  return "iterate" in laws or "statistic" in laws


def read(inner: PyTree, local: PyTree) -> tuple[jax.Array, ...]:
  """Returns all that a round moves except the parameters."""
  # A fast way out, as almost no optimizer has any.
  if not _anchor.contains(inner, _moves):
    return ()
  leaves, params = jax.tree.leaves(inner), jax.tree.leaves(local)
  return tuple(
    _anchor.wide(leaves[i]) - (0 if of == _NONE else params[of])
    for i, of in _places(inner, local)
  )


def check_told(
  init: Callable[[PyTree], PyTree], params: PyTree, inner: PyTree
) -> None:
  """Raises a ValueError for a copy of parameters whose law is not known."""
  pair = isinstance(params, optax.LookaheadParams)
  if not pair and _anchor.contains(
    inner, lambda x: isinstance(x, optax.LookaheadState)
  ):
    raise ValueError(
      "`params` must be a pair for `optax.lookahead`, got "
      f"{type(params).__name__}. Give `init` and `update` "
      "`optax.LookaheadParams.init_synced(params)`, and gradients by its "
      "`fast` parameters."
    )
  unknown = states.unknown_floats(inner)
  if not unknown:
    return
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params
  )
  traced = jax.make_jaxpr(init)(shapes).jaxpr
  # Zeros in the form of the parameters depend on none of their values.
  copies = set(traced.invars)
  for equation in traced.eqns:
    if not copies.isdisjoint(x for x in equation.invars if not _is_literal(x)):
      copies.update(equation.outvars)
  known = jax.tree_util.tree_leaves_with_path(params)
  leaves = jax.tree_util.tree_leaves_with_path(inner)
  for number in unknown:
    (path, leaf), out = leaves[number], traced.outvars[number]
    if _is_literal(out) or out not in copies or _fit(path, leaf, known) < 0:
      continue
    raise ValueError(
      f"`inner` keeps a copy of the parameters in `{jax.tree_util.keystr(path)}"
      "`, and a round must know whether to move it. Declare it on the class of "
      "its state, a NamedTuple, by `states.declare(laws={field: law})`: "
      "'iterate' moves with the parameters, as an average of them does, and "
      "'constant' stays."
    )


def _is_literal(x: Any) -> bool:
  return isinstance(x, jax.extend.core.Literal)


def own_keys(state: PyTree, axis: collectives.Axis) -> PyTree:
  """Folds the worker's number into the keys of an optimizer's state.

  Methods with rounds in it have done so when they made their state.
  """
  laws = states.find_laws(state)
  if "random" not in jax.tree.leaves(laws):
    return state
  try:
    several = collectives.size(axis) > 1
  except ValueError:  # No worker runs it: `Workers.replicate` folds its keys.
    several = False
  if not several:
    return state
  rounds, number = _anchor.declares("rounds"), collectives.index(axis)
  return jax.tree.map(
    lambda x, law: (
      x if rounds(x) or law != "random" else states.fold_key(x, number)
    ),
    state, laws, is_leaf=rounds,
  )  # fmt: skip


def refuse_iterates(inner: PyTree, name: str, argument: str = "inner") -> None:
  """Raises a ValueError for a method that cannot move iterates."""
  if _anchor.contains(inner, _moves):
    raise ValueError(
      f"`{argument}` must not keep iterates, as `optax.contrib.schedule_free` "
      f"does, for {name}, which would move the parameters alone. Take a method "
      "with one round for all of them, for instance `jdist.diloco`."
    )


def check_exact(inner: PyTree, compression: Any) -> None:
  """Raises a ValueError where a codec would round sums of an optimizer."""
  if compression is None or "statistic" not in jax.tree.leaves(
    states.find_laws(inner)
  ):
    return
  raise ValueError(
    "`compression` must be None for an inner optimizer whose positions are "
    "computed from sums of gradients, as `optax.contrib.madgrad` and `cocob` "
    "do: a round averages the sums, and a rounded sum of squares may be "
    "negative. Leave it out, or take another inner optimizer."
  )


def write(inner: PyTree, target: Whole, local: Whole) -> PyTree:
  """Returns the inner state of a worker that goes from `local` to `target`."""
  leaves, structure = jax.tree.flatten(inner)
  # A difference, so that a worker that stays keeps its iterates to the bit.
  moved, rest = jax.tree.map(jnp.subtract, target, local)
  moved = jax.tree.leaves(moved)
  places = _places(inner, target.params)
  for (i, of), x in zip(places, rest, strict=True):
    by = x if of == _NONE else moved[of] + x
    leaves[i] = (_anchor.wide(leaves[i]) + by).astype(leaves[i].dtype)
  return jax.tree.unflatten(structure, leaves)


def at_anchor(state: PyTree) -> PyTree:
  """Returns a state in which iterates stand as they do at the anchor.

  It may have an axis of workers in front; states of rounds become those of
  their inner optimizers.
  """

  def has(x: Any) -> bool:
    return hasattr(getattr(x, "sync", None), "iterates")

  def one(x: Any) -> Any:
    if not has(x) or x.sync.iterates == ():
      return x
    there = Whole(x.sync.anchor, x.sync.iterates)
    local = jax.tree.map(_anchor.wide, x.sync.anchor)
    here = Whole(local, read(x.inner, local))
    return write(x.inner, there, here)

  return jax.tree.map(one, state, is_leaf=has)


def _places(inner: PyTree, params: PyTree) -> list[tuple[int, int]]:
  """Returns the leaves that a round moves, and the parameter of each.

  A statistic has `_NONE`.  The parameter of an iterate is the one with whose
  path its own ends, so that parameters that are masked may be missing.
  """
  known = jax.tree_util.tree_leaves_with_path(params)
  laws = jax.tree.leaves(states.find_laws(inner))
  found: list[tuple[int, int]] = []
  leaves = jax.tree_util.tree_leaves_with_path(inner)
  for number, ((path, leaf), law) in enumerate(zip(leaves, laws, strict=True)):
    if law == "statistic":
      found.append((number, _NONE))
    if law != "iterate":
      continue
    of = _fit(path, leaf, known)
    if of == _NONE:
      name = jax.tree_util.keystr(path)
      raise ValueError(
        "`inner` must keep its iterates in the form of the parameters, so that "
        f"a round can move both, but `{name}` {list(leaf.shape)} is none of "
        "them. Take wrappers that change the form of the parameters, as "
        "`optax.flatten`, out of the method."
      )
    found.append((number, of))
  return found


def _fit(path: Any, leaf: Any, known: list[tuple[Any, Any]]) -> int:
  """Returns the number of the parameter that a leaf corresponds to."""
  fits = [
    (len(end), number)
    for number, (end, like) in enumerate(known)
    if path[len(path) - len(end) :] == end
    and jnp.shape(like) == jnp.shape(leaf)
  ]
  return max(fits)[1] if fits else _NONE
