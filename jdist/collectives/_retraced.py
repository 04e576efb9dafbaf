"""Functions of others, traced again so that every value varies over an axis.

A `lax.cond` whose one branch gives a constant and whose other a worker's own
value has branches of unlike types under `shard_map` (`_manual_axes`).  Optax
has such transformations: `reduce_on_plateau`, `MultiSteps`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist.collectives import _manual_axes

PyTree = Any


def for_workers(
  optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Lets a worker run an optimizer whose branches give constants.

  Where JAX refuses its types it is traced without them, and its conditionals
  become selections; else it is run as it is.
  """
  optimizer = optax.with_extra_args_support(optimizer)

  def update(
    updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
  ) -> tuple[PyTree, PyTree]:
    try:
      return optimizer.update(updates, state, params, **extra_args)
    except TypeError as error:
      if "manual axis types do not match" not in str(error):
        raise
    arrays = {k: v for k, v in extra_args.items() if _is_array_tree(v)}
    static = {k: v for k, v in extra_args.items() if k not in arrays}

    return _retraced(
      lambda updates, state, params, arrays: optimizer.update(
        updates, state, params, **arrays, **static
      ),
      updates,
      state,
      params,
      arrays,
    )

  return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _is_array_tree(value: Any) -> bool:
  leaves = jax.tree.leaves(value)
  return bool(leaves) and all(hasattr(x, "dtype") for x in leaves)


def _retraced(function: Callable[..., PyTree], *args: PyTree) -> PyTree:
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), args
  )
  traced, out = jax.make_jaxpr(function, return_shape=True)(*shapes)
  leaves = jax.tree.leaves(args)
  vary = functools.partial(_manual_axes.varying_like, like=leaves)
  found = _evaluate(traced.jaxpr, traced.consts, leaves, vary)
  return jax.tree.unflatten(jax.tree.structure(out), found)


def _evaluate(jaxpr: Any, consts: Any, args: Any, vary: Any) -> list[Any]:
  """Runs a traced function on values that all vary."""
  values: dict[Any, Any] = {}

  def read(atom: Any) -> Any:
    value = atom.val if hasattr(atom, "val") else values[atom]
    return vary(jnp.asarray(value))

  values.update(zip(jaxpr.constvars, consts, strict=True))
  values.update(zip(jaxpr.invars, args, strict=True))
  for eqn in jaxpr.eqns:
    given = [read(atom) for atom in eqn.invars]
    found = _apply(eqn, given, vary)
    values.update(zip(eqn.outvars, found, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _apply(eqn: Any, given: list[Any], vary: Any) -> list[Any]:
  name, params = eqn.primitive.name, eqn.params
  if name in ("pcast", "pvary"):
    return given
  if name == "cond":
    branches = [
      _evaluate(x.jaxpr, x.consts, given[1:], vary) for x in params["branches"]
    ]
    which = jnp.clip(given[0].astype(jnp.int32), 0, len(branches) - 1)
    return [
      jax.lax.select_n(jnp.broadcast_to(which, cases[0].shape), *cases)
      for cases in zip(*branches, strict=True)
    ]
  for key in ("jaxpr", "call_jaxpr"):
    if name not in ("scan", "while") and (body := params.get(key)) is not None:
      inside = getattr(body, "jaxpr", body)
      return _evaluate(inside, getattr(body, "consts", ()), given, vary)
  found = eqn.primitive.bind(*given, **params)
  return list(found) if eqn.primitive.multiple_results else [found]
