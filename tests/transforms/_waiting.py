"""What collectives wait for, and what waits for them: read off the trace."""

import jax
from jax.extend import core

SENDING = (
  "psum", "psum_invariant", "psum_scatter", "reduce_scatter", "all_gather",
  "all_to_all", "ppermute",
)  # fmt: skip


def sends(eqn):
  """Whether an equation sends numbers, itself or inside of it."""
  return _holds(
    eqn,
    lambda e: e.primitive.name in SENDING and e.invars[0].aval.shape,
  )


def waiting(function, on, *rest):
  """Of each collective, in order, whether it depends on `on`.

  Args:
    function: what one worker does, `(on, *rest)`; its axis is "worker".
    on: a tree of arrays.
    *rest: trees that do not count.
  """
  jaxpr, first = _traced(function, on, *rest)
  late = set(first)
  found = []
  for eqn in jaxpr.eqns:
    if sends(eqn):
      found.append(_takes(eqn, late))
    if _takes(eqn, late):
      late |= set(eqn.outvars)
  assert found
  return found


def waits(function, on, *rest):
  """Whether any collective depends on `on`; see `waiting`."""
  return any(waiting(function, on, *rest))


def is_held_up(name, function, *arguments):
  """Whether a primitive, by its name, depends on any collective."""
  jaxpr, _ = _traced(function, *arguments)
  late = set()
  found = []
  for eqn in jaxpr.eqns:
    if _holds(eqn, lambda e: e.primitive.name == name):
      found.append(_takes(eqn, late) or sends(eqn))
    if _takes(eqn, late) or sends(eqn):
      late |= set(eqn.outvars)
  assert found
  return any(found)


def _traced(function, on, *rest):
  closed = jax.make_jaxpr(function, axis_env=[("worker", 2)])(on, *rest)
  return closed.jaxpr, closed.jaxpr.invars[: len(jax.tree.leaves(on))]


def _takes(eqn, variables):
  return any(isinstance(x, core.Var) and x in variables for x in eqn.invars)


def _holds(eqn, is_one):
  if is_one(eqn):
    return True
  inside = core.jaxprs_in_params(eqn.params)
  return any(_holds(e, is_one) for jaxpr in inside for e in jaxpr.eqns)
