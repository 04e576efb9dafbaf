"""Layers of a model that is one function, found in its trace."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import primitives

from jdist import checks, cluster, signatures
from jdist.pipeline.planning import _bottleneck, _layer_costs
from jdist.pipeline.runtime import _stages
from jdist.pipeline.runtime._split_backward import (
  evaluate,
  needed,
  run,
  variables,
)
from jdist.states import PyTree

# Other calls, such as a checkpoint or a custom derivative, stay whole.
_OPENED = (primitives.jit_p,)


@signatures.checked
def cut(
  model: Any, cuts: signatures.PositiveInt, inputs: signatures.Shapes
) -> tuple[_stages.Stage, ...]:
  """Cuts a model that is one function into stages of about equal work.

  The function is traced in training.  A layer ends wherever all that follows
  depends on the inputs through one array, such as the residual stream of a
  transformer.  A layer has the parameters that its equations read; one that
  several layers read is tied; state that no input moves, such as a random key,
  is copied to all that read it.  Evaluate with the model's own `apply`.

  Args:
    model: A `models.Model`: for modules of NNX, Linen and Equinox from
      `models.functional`, for others made of nested dicts `params` and `state`
      and of `apply(params, state, x, *, train)`.
    cuts: The number of stages.
    inputs: The inputs of a micro-batch, or their shapes.

  Returns:
    The stages, for both runtimes; their `layers` are those of the model, for
    `layer_costs` and `cut_layers`.

  Raises:
    ValueError: If the model has fewer layers than stages.

  >>> import jax.numpy as jnp
  >>> from jdist import models
  >>> def apply(params, state, x, *, train):
  ...   for name in "abc":
  ...     x = jnp.tanh(x @ params[name])
  ...   return x, state
  >>> model = models.Model({n: jnp.eye(2) for n in "abc"}, {}, apply)
  >>> cut(model, 3, jnp.ones((4, 2)))[1]
  Stage(['b']: 1 layer)
  """
  params, state = (getattr(model, x, None) for x in ("params", "state"))
  if not (isinstance(params, Mapping) and isinstance(state, Mapping)):
    raise ValueError(
      "`model` must have dicts `params` and `state` and an `apply`, as "
      f"`models.Model` has, got {checks.show(model)}. For a module of NNX, "
      "Linen or Equinox, give `models.functional(module)`."
    )
  layers = _layers(model, _stages.shapes_of(inputs))
  if len(layers) < cuts:
    raise ValueError(
      f"`model` must have {cuts} layers between which one array is passed on, "
      f"got {len(layers)}. A scan over layers is one: run them one after the "
      "other, or take fewer stages."
    )
  costs = _layer_costs.layer_costs(
    layers, {"x": inputs}, inputs="x", source="lowered"
  )
  machines = cluster.workers([1.0] * cuts)
  return _stages.cut_layers(layers, _bottleneck.partition(costs, machines).cuts)


def _layers(model: Any, inputs: Any) -> list[_stages.Stage]:
  params = model.params
  shapes = _stages.shapes_of((params, model.state))
  leaves, tree = jax.tree.flatten((*shapes, inputs))
  try:
    closed, (y, after) = jax.make_jaxpr(
      lambda *x: model.apply(*jax.tree.unflatten(tree, x), train=True),
      return_shape=True,
    )(*leaves)
  except Exception as error:
    raise ValueError(
      "`inputs` must be a micro-batch for which `model.apply(params, state, "
      f"inputs, train=True)` returns outputs and a state, got {inputs}, which "
      f"raised {type(error).__name__}: {error}"
    ) from error
  rule = "`model.apply` must return a state of the form that it is given"
  checks.check_form(rule, after, shapes[1], exact=True)
  # The second trace opens what `jit` encloses.
  opened = jax.make_jaxpr(lambda *x: evaluate(closed, x, _OPENED))(*leaves)
  eqns, given = opened.jaxpr.eqns, list(opened.jaxpr.invars)
  own: list[dict[str, Any]] = []
  for names in map(_stages.by_path, shapes):
    own.append(dict(zip(names, given, strict=False)))
    del given[: len(names)]
  x_in, results = given, list(opened.jaxpr.outvars)
  y_out = results[: len(jax.tree.leaves(y))]
  new = dict(zip(_stages.by_path(after), results[len(y_out) :], strict=True))
  reads, ends, moving = _passed_on(eqns, x_in, y_out, own[0])
  # A layer begins at the last end before a parameter is read first.
  begins, begin = dict[int, str](), 0
  seen: set[str] = set()
  for i, read in enumerate(reads):
    begin = i if i in ends and seen else begin
    for path in sorted((read or set()) - seen):
      begins.setdefault(begin, path)
    seen |= read or set()
  edges, found = [*begins, len(eqns)], list[_stages.Stage]()
  updated, held = list[str](), {v for x in own for v in x.values()}
  taken = set[str](), set[str]()
  spans = [*zip(begins.items(), edges[1:], strict=True)]
  for (start, name), stop in reversed(spans):
    inside = [
      x for i, x in enumerate(eqns) if start <= i < stop or reads[i] is None
    ]
    made = {v for x in inside for v in x.outvars}
    outputs = [ends[stop]] if stop < len(eqns) else y_out
    updates = {path: v for path, v in new.items() if v in made & moving}
    wanted = variables([*outputs, *updates.values()])
    needed(inside, wanted)
    # State that no input moves, such as a count of random keys, is updated by
    # all layers that read the same leaves, and by the first one if none does.
    for path, v in new.items():
      if v in made - moving:
        leads = {v, own[1][path]}
        needed(inside, leads)
        if not leads.isdisjoint(wanted & held) or not (
          start or path in updated
        ):
          updates[path] = v
    updated += updates
    wanted |= variables(updates.values())
    chosen = needed(inside, wanted)
    kept = [{p: v for p, v in x.items() if v in wanted} for x in own]
    kept[1] |= {path: own[1][path] for path in updates}
    # The first layer, which is the last one here, has the leaves of no layer.
    for used, mine, every in zip(taken, kept, own, strict=True):
      used.update(mine)
      mine |= {} if start else {p: every[p] for p in every.keys() - used}
    apply = _apply(
      [x for x in inside if id(x) in chosen],
      dict(zip(opened.jaxpr.constvars, opened.consts, strict=True)),
      [ends[start]] if start else x_in,
      outputs,
      updates,
      kept,
      jax.tree.structure(y if stop == len(eqns) else 0),
    )
    trees = _branches(params, kept[0]), _branches(model.state, kept[1])
    found.append(_stages.Stage(name, *trees, apply, ()))
  users = [path for x in found for path in _stages.by_path(x.state)]
  shared = frozenset(path for path in updated if users.count(path) > 1)
  if wrong := sorted(path for path in shared if new[path] in moving):
    raise ValueError(
      "`model` must have a state of which each layer updates its own part, got "
      f"{wrong[0]} in several layers. Give each layer a module of its own."
    )
  return [dataclasses.replace(x, copied=shared) for x in found[::-1]]


def _passed_on(
  eqns: Sequence[Any],
  inputs: Sequence[Any],
  outputs: Sequence[Any],
  params: Mapping[str, Any],
) -> tuple[list[set[str] | None], dict[int, Any], set[Any]]:
  """Finds the equations before which one value alone is passed on.

  Returns the parameters that each equation reads, None for one that depends on
  no input and can run in any layer; the values by equation; and all values that
  depend on inputs.
  """
  paths = {v: {path} for path, v in params.items()}
  moving, last = set(inputs), dict.fromkeys(outputs, len(eqns))
  reads: list[set[str] | None] = []
  for i, eqn in enumerate(eqns):
    read = variables(eqn.invars)
    found = {path for v in read for path in paths.get(v, ())}
    if moving.isdisjoint(read):
      paths |= dict.fromkeys(eqn.outvars, found)
    else:
      last |= {v: max(i, last.get(v, 0)) for v in read & moving}
      moving |= set(eqn.outvars)
    reads.append(None if moving.isdisjoint(read) else found)
  alive, ends = set(inputs), {}
  for i, eqn in enumerate(eqns):
    alive = {v for v in alive if last.get(v, -1) >= i}
    if len(alive) == 1 and alive.isdisjoint(inputs):
      (ends[i],) = alive
    alive |= moving & set(eqn.outvars)
  return reads, ends, moving


def _apply(
  eqns: Sequence[Any],
  constants: Mapping[Any, Any],
  inputs: Sequence[Any],
  outputs: Sequence[Any],
  updates: Mapping[str, Any],
  kept: Sequence[Mapping[str, Any]],
  structure: Any,
) -> Callable[..., tuple[Any, PyTree]]:
  """Returns a layer's `apply`, which runs its equations."""

  def apply(
    params: PyTree,
    state: PyTree,
    x: Any,
    *,
    train: bool,
    mask: Any = None,
    **_: Any,
  ) -> tuple[Any, PyTree]:
    leaves, shapes = jax.tree.leaves(x), [v.aval.shape for v in inputs]
    if not train or mask is not None or [y.shape for y in leaves] != shapes:
      raise ValueError(
        "`microbatch` must be of the shapes that `pipeline.cut` was given and "
        f"without a mask, in training: got {[y.shape for y in leaves]} for "
        f"{shapes}. Evaluate with the model's own `apply`."
      )
    env = {**constants, **dict(zip(inputs, leaves, strict=True))}
    for paths, tree in zip(kept, (params, state), strict=True):
      own = _stages.by_path(tree)
      env |= {v: own[path] for path, v in paths.items()}
    values = run(eqns, env, [*outputs, *updates.values()], _OPENED)
    y, rest = values[: len(outputs)], values[len(outputs) :]
    new = dict(zip(updates, rest, strict=True))
    return jax.tree.unflatten(structure, y), jax.tree_util.tree_map_with_path(
      lambda at, old: new.get(jax.tree_util.keystr(at), old), state
    )

  return apply


def _branches(tree: PyTree, wanted: Collection[str], at: str = "") -> PyTree:
  """Returns the branches of a nested dict on which there are wanted paths."""
  if not isinstance(tree, Mapping):
    return tree
  named = {name: f"{at}[{name!r}]" for name in tree}
  return {
    name: _branches(tree[name], wanted, path)
    for name, path in named.items()
    if any(x.startswith(path) for x in wanted)
  }
