"""The leaves of a state that are equal on all workers.

Checkpoints store them once.  States declare them (`jdist.states`): `shared`
names the fields, `averages` says that the updates are equal, too.  A state that
wraps others may have a method `label(walk)`.  Undeclared fields count as each
worker's own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from jdist import states
from jdist.states import PyTree


class Sharing(NamedTuple):
  """Marks the leaves that are equal on all workers.

  Attributes:
    params: Whether the parameters are equal at every step.
    state: A tree of bools like the optimizer's state.
  """

  params: bool
  state: PyTree


def sharing(state: PyTree) -> Sharing:
  """Labels the leaves of a state that are equal on all workers.

  Behind `average_gradients` everything in a chain is equal, with a compression
  too: the parameters begin equal, and all workers do the same to them.  Local
  steps share the anchor, the outer optimizer and the clock; the rest is each
  worker's own.  Optax's other wrappers are walked into but never trusted to
  keep the parameters equal.

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
  return jax.tree.map(lambda _: label, tree)


def label_fields(state: Any) -> Any:
  """Labels the fields that a state's class declares as `shared`.

  A nested state with a declaration, also in a tuple or a dict, is labelled by
  its own declaration.
  """

  def one(name: str) -> PyTree:
    value = getattr(state, name)
    # An inner optimizer is fed with the worker's own gradients, so that even
    # states that declare shared fields differ in it.
    label = label_all if name == "inner" else _label
    return label(value, name in type(state).shared)

  return type(state)(**{name: one(name) for name in state._fields})


def _label(value: PyTree, shared: bool) -> PyTree:
  if states.is_declared(type(value)):
    return label_fields(value)
  if type(value) is tuple or isinstance(value, dict):
    return _each(value, lambda one: _label(one, shared))
  return label_all(value, shared)


def _each(tree: PyTree, label: Callable[[PyTree], PyTree]) -> PyTree:
  """Labels what a tree holds one level below it, and keeps its type."""
  return jax.tree.map(label, tree, is_leaf=lambda x: x is not tree)


def _walk(state: PyTree, equal: bool) -> tuple[PyTree, bool]:
  """Labels a state whose input updates are equal or not.

  Returns the labels, and whether the updates that leave it are equal.
  """
  kind = type(state)
  if states.is_declared(kind):
    if hasattr(kind, "label"):
      return state.label(_walk)
    return label_fields(state), equal or getattr(kind, "averages", False)
  if kind is tuple:
    # The elements of a chain follow one another: equality is passed on.
    labels = []
    for element in state:
      label, equal = _walk(element, equal)
      labels.append(label)
    return tuple(labels), equal
  if isinstance(state, dict):
    # The entries of a dict are not in sequence, as for `optax.partition`.
    return _each(state, lambda x: _walk(x, equal)[0]), equal
  if not hasattr(state, "_fields"):
    return label_all(state, equal), equal
  # `optax.inject_hyperparams` computes its numbers from the step alone, and
  # passes on the updates of the inner transformation.
  injects = isinstance(state, optax.InjectStatefulHyperparamsState)
  walked, out = {}, equal
  for name in state._fields:
    if injects and name != "inner_state":
      walked[name] = label_all(getattr(state, name), True)
      continue
    walked[name], inside = _walk(getattr(state, name), equal)
    out |= injects and inside
  return kind(**walked), out
