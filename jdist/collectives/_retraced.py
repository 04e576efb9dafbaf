"""Optimizers traced again, so that every value in them varies over an axis.

Under `shard_map` the branches of a `lax.cond` have different types where one
returns a constant and the other a worker's own value.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

PyTree: TypeAlias = Any


def update_as_varying(
  optimizer: optax.GradientTransformationExtraArgs,
  varying_like: Callable[..., PyTree],
  given: tuple[PyTree, PyTree, PyTree],
  extra_args: dict[str, Any],
) -> tuple[PyTree, PyTree]:
  """Runs an update in which every value varies as the arguments do.

  `given` are updates, state and parameters, and `varying_like` types a tree as
  another one is.
  """
  arrays = {k: v for k, v in extra_args.items() if _is_array_tree(v)}
  static = {k: v for k, v in extra_args.items() if k not in arrays}
  args = (*given, arrays)
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), args
  )
  traced, out = jax.make_jaxpr(
    lambda updates, state, params, arrays: optimizer.update(
      updates, state, params, **arrays, **static
    ),
    return_shape=True,
  )(*shapes)
  leaves = jax.tree.leaves(args)
  vary = functools.partial(varying_like, like=leaves)
  found = _evaluate(traced.jaxpr, traced.consts, leaves, vary)
  return jax.tree.unflatten(jax.tree.structure(out), found)


def _is_array_tree(value: Any) -> bool:
  leaves = jax.tree.leaves(value)
  return bool(leaves) and all(hasattr(x, "dtype") for x in leaves)


def _evaluate(jaxpr: Any, consts: Any, args: Any, vary: Any) -> list[Any]:
  """Runs a traced function on values that all vary."""
  # As `jax.core.eval_jaxpr`, which cannot be told to cast what it reads.
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
  # Every value varies already, and JAX refuses a repeated cast.
  if name in ("pcast", "pvary"):
    return given
  if name == "cond":
    # Both branches run.  They hold no collective: an optimizer has none.
    branches = [
      _evaluate(x.jaxpr, x.consts, given[1:], vary) for x in params["branches"]
    ]
    which = jnp.clip(given[0].astype(jnp.int32), 0, len(branches) - 1)
    return [
      jax.lax.select_n(jnp.broadcast_to(which, cases[0].shape), *cases)
      for cases in zip(*branches, strict=True)
    ]
  # Calls are inlined, since a cast of their arguments changes their types.
  # Loops keep their bodies.
  for key in ("jaxpr", "call_jaxpr"):
    if name not in ("scan", "while") and (body := params.get(key)) is not None:
      inside = getattr(body, "jaxpr", body)
      return _evaluate(inside, getattr(body, "consts", ()), given, vary)
  found = eqn.primitive.bind(*given, **params)
  return list(found) if eqn.primitive.multiple_results else [found]
