"""The leaves of a state that are equal on all workers: a checkpoint stores one.

States declare them (`jdist.states`): `shared` names the fields, `averages` says
that the updates that come out are equal, too.  A state that wraps others may
have a method `label(walk)`.  What says nothing counts as each worker's own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

PyTree = Any


class Sharing(NamedTuple):
  """Marks the leaves that are equal on all workers.

  Attributes:
    params: whether the parameters are, at every step.
    state: a tree of bools like the optimizer's state.
  """

  params: bool
  state: PyTree


def sharing(state: PyTree) -> Sharing:
  """Labels the leaves of a state that are equal on all workers.

  Behind `average_gradients` in a chain everything is, with a compression too:
  the parameters begin equal, and all workers do the same to them.  Of local
  steps the anchor, the outer optimizer and the clock are; the rest is each
  worker's own.  Optax's other wrappers are walked into but never trusted to
  keep the parameters equal.

  Args:
    state: the optimizer's state, or its shapes.

  >>> from jdist import transforms
  >>> optimizer = optax.chain(
  ...   optax.trace(0.9), transforms.average_gradients(None), optax.trace(0.9)
  ... )
  >>> found = sharing(optimizer.init(jax.numpy.array(0.0)))
  >>> found.params, [s.trace for s in (found.state[0], found.state[2])]
  (True, [False, True])
  """
  labels, equal = _walk(state, False)
  return Sharing(equal, labels)


def label_all(tree: PyTree, label: bool) -> PyTree:
  """Labels all leaves alike."""
  mark: Callable[[Any], bool] = lambda _: label  # noqa: E731
  return jax.tree.map(mark, tree)


def label_fields(state: Any) -> Any:
  """Labels the fields that a state's class declares as `shared`, and no others.

  A value that declares its own, also in a tuple or a dict, is labelled by that.
  An inner optimizer's state is the worker's own, whatever stands in it.
  """

  def one(name: str) -> PyTree:
    value = getattr(state, name)
    label = label_all if name == "inner" else _label
    return label(value, name in type(state).shared)

  return type(state)(**{name: one(name) for name in state._fields})


def _label(value: PyTree, shared: bool) -> PyTree:
  if hasattr(type(value), "shared"):
    return label_fields(value)
  if type(value) is tuple:
    return tuple(_label(one, shared) for one in value)
  if isinstance(value, dict):
    return {name: _label(one, shared) for name, one in value.items()}
  return label_all(value, shared)


def _walk(state: PyTree, equal: bool) -> tuple[PyTree, bool]:
  """Labels a state behind updates that are equal, or not; as it leaves them."""
  kind = type(state)
  if hasattr(kind, "label"):
    return state.label(_walk)
  if hasattr(kind, "shared"):
    return label_fields(state), equal or getattr(kind, "averages", False)
  if kind is tuple:  # A chain: one after the other.
    labels = []
    for element in state:
      label, equal = _walk(element, equal)
      labels.append(label)
    return tuple(labels), equal
  if isinstance(state, dict):  # Not in order: each for itself.
    return kind({k: _walk(v, equal)[0] for k, v in state.items()}), equal
  if not hasattr(state, "_fields"):
    return label_all(state, equal), equal
  injects = isinstance(state, optax.InjectStatefulHyperparamsState)
  walked, out = {}, equal
  for name in state._fields:
    if injects and name != "inner_state":
      walked[name] = label_all(getattr(state, name), True)
      continue
    walked[name], inside = _walk(getattr(state, name), equal)
    out |= injects and inside
  return kind(**walked), out
