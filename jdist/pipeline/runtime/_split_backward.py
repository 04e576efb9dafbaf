"""A backward pass split into gradients of the input and of the parameters."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
from jax.extend.core import primitives

from jdist.states import PyTree

# Calls are inlined, so that the equations inside can go to different parts.
_CALLS = {
  primitives.call_p,
  primitives.closed_call_p,
  primitives.custom_jvp_call_p,
  primitives.custom_vjp_call_p,
  primitives.jit_p,
  primitives.remat_p,
}
# Primitives that are cheap enough to run in both parts if that keeps fewer
# bytes between them: elementwise ones and changes of shape.
_CHEAP = {
  *("abs", "add", "add_any", "and", "broadcast_in_dim", "concatenate"),
  *("convert_element_type", "copy", "cos", "div", "eq", "erf", "exp", "exp2"),
  *("expand_dims", "expm1", "ge", "gt", "integer_pow", "iota", "is_finite"),
  *("le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg"),
  *("not", "or", "pad", "pow", "reshape", "rev", "rsqrt", "select_n", "sign"),
  *("sin", "slice", "sqrt", "square", "squeeze", "sub", "tanh", "transpose"),
}


class SplitBackward(NamedTuple):
  """The two parts of a backward pass.

  Attributes:
    input_part: `(residuals, cotangent) -> (gradient, stash)`: the gradient of
      the input, with None for integer leaves, and the arrays that wait for the
      weight part.
    weight_part: `(residuals, cotangent, stash) -> grads` of the parameters.
    prune: Replaces the leaves of `(residuals, cotangent)` that `weight_part`
      does not read by None, to free them after `input_part`.
  """

  input_part: Callable[[PyTree, PyTree], tuple[PyTree, list[Any]]]
  weight_part: Callable[[PyTree, PyTree, list[Any]], PyTree]
  prune: Callable[[list[Any], PyTree], tuple[list[Any], PyTree]]


def split_backward(
  pull: Callable[[Any, PyTree], tuple[PyTree, PyTree]],
  residuals: PyTree,
  cotangent: PyTree,
) -> SplitBackward:
  """Splits a backward pass into an input part and a weight part.

  The input part has the equations of the traced backward pass that the gradient
  of the input needs, and the weight part has the rest: together they cost as
  much as the whole.  Values of the input part that the weight part reads wait
  in between, about one cotangent for each dense layer.  A cheap value, such as
  an elementwise product, is computed again instead if its operands wait anyway.

  `jit` and `jax.checkpoint` are inlined.  The recomputation of a checkpoint
  belongs to the input part, and its results wait.

  `pull(residuals, cotangent)` returns the gradients of the parameters and of
  the input, as a flattened function from `jax.vjp` does.  If the input has no
  gradient, the weight part has everything.  Shapes suffice for both arguments.

  Raises:
    ValueError: If a loop or a conditional computes gradients of both.

  >>> import jax.numpy as jnp
  >>> w, x = jnp.array([[2.0]]), jnp.array([[3.0]])
  >>> y, pull = jax.vjp(lambda w, x: x @ w, w, x)
  >>> residuals, structure = jax.tree.flatten(pull)
  >>> parts = split_backward(
  ...   lambda leaves, ct: jax.tree.unflatten(structure, leaves)(ct),
  ...   residuals,
  ...   y,
  ... )
  >>> gradient, stash = parts.input_part(residuals, jnp.ones_like(y))
  >>> grads = parts.weight_part(residuals, jnp.ones_like(y), stash)
  >>> float(gradient[0, 0]), float(grads[0, 0]), stash
  (2.0, 3.0, [])

  References:
    Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, arXiv:2401.10241.
    Departure: the paper splits each layer by hand.
  """

  def pulled(residuals: list[jax.Array], cotangent: PyTree) -> Any:
    grads, gradient = pull(residuals, cotangent)
    return grads, jax.tree.map(
      lambda x: None if x.dtype == jax.dtypes.float0 else x, gradient
    )

  leaves, structure = jax.tree.flatten((residuals, cotangent))
  given: Any = structure
  traced, shapes = jax.make_jaxpr(pulled, return_shape=True)(
    residuals, cotangent
  )
  # The first trace may still hold calls; evaluating it under a second trace
  # inlines them.
  opened = jax.make_jaxpr(lambda *x: evaluate(traced, x))(*leaves)
  jaxpr = opened.jaxpr
  constants = dict(zip(jaxpr.constvars, opened.consts, strict=True))
  of_params, of_input = (jax.tree.structure(x) for x in shapes)
  number = len(jax.tree.leaves(shapes[0]))
  to_params, to_input = jaxpr.outvars[:number], jaxpr.outvars[number:]
  first, second, waiting = _cut(jaxpr, to_params, to_input)
  # Both parts know the order of the equations, so a list is enough.
  stashed = [v for eqn in first for v in eqn.outvars if v in waiting]

  def named(residuals: list[Any], cotangent: PyTree) -> dict[Any, Any]:
    leaves = given.flatten_up_to((residuals, cotangent))
    return dict(zip(jaxpr.invars, leaves, strict=True))

  def input_part(
    residuals: list[jax.Array], cotangent: PyTree
  ) -> tuple[PyTree, list[Any]]:
    env = constants | named(residuals, cotangent)
    gradient = jax.tree.unflatten(of_input, run(first, env, to_input))
    return gradient, [env[v] for v in stashed]

  def weight_part(
    residuals: list[Any], cotangent: PyTree, stash: list[Any]
  ) -> PyTree:
    env = constants | named(residuals, cotangent)
    env |= dict(zip(stashed, stash, strict=True))
    return jax.tree.unflatten(of_params, run(second, env, to_params))

  def prune(
    residuals: list[Any], cotangent: PyTree
  ) -> tuple[list[Any], PyTree]:
    pairs = named(residuals, cotangent).items()
    return given.unflatten([x if v in waiting else None for v, x in pairs])

  return SplitBackward(input_part, weight_part, prune)


def _cut(
  jaxpr: Any, to_params: Sequence[Any], to_input: Sequence[Any]
) -> tuple[list[Any], list[Any], set[Any]]:
  """Returns both parts' equations and the variables that wait in between."""
  # 1. The input part has everything that the gradient of the input needs.
  for_input = variables(to_input)
  first = needed(jaxpr.eqns, for_input)
  # 2. The weight part has what the other gradients need of the rest.  Values
  # that it reads and does not compute itself have to wait.
  waiting = variables(to_params)
  rest = [x for x in jaxpr.eqns if id(x) not in first]
  second = needed(rest, waiting)
  for eqn in rest:
    if id(eqn) in second:
      waiting.difference_update(eqn.outvars)
  # 3. Move cheap equations into both parts, from the last one backwards, as a
  # moved equation makes its own operands wait.
  for eqn in reversed(jaxpr.eqns):
    made = waiting.intersection(eqn.outvars)
    if id(eqn) not in first or not made:
      continue
    # An equation with a jaxpr inside, such as a scan over layers, cannot be
    # divided; the weight part's work would all be done in the input part.
    if made - for_input and list(jex.jaxprs_in_params(eqn.params)):
      raise ValueError(
        "A backward pass in two parts must compute gradients of the input and "
        f"of parameters apart, got a {eqn.primitive.name!r} that computes "
        "both. Write its layers one after the other, or take a table whose "
        "backward pass is whole, such as 1f1b."
      )
    operands = variables(eqn.invars)
    if eqn.primitive.name in _CHEAP and (
      _num_bytes(operands - waiting) < _num_bytes(made)
    ):
      second.add(id(eqn))
      waiting = (waiting - made) | operands
  return (
    [x for x in jaxpr.eqns if id(x) in first],
    [x for x in jaxpr.eqns if id(x) in second],
    waiting,
  )


def needed(eqns: Sequence[Any], wanted: set[Any]) -> set[int]:
  """Returns the equations that variables need; adds what these read."""
  found = set()
  for eqn in reversed(eqns):
    if not wanted.isdisjoint(eqn.outvars):
      found.add(id(eqn))
      wanted |= variables(eqn.invars)
  return found


def variables(atoms: Iterable[Any]) -> set[Any]:
  """Returns the atoms that are no literals."""
  return {x for x in atoms if not isinstance(x, jex.Literal)}


def _num_bytes(variables: Iterable[Any]) -> int:
  return sum(x.aval.size * x.aval.dtype.itemsize for x in variables)


def evaluate(
  jaxpr: Any, args: Sequence[Any], calls: Collection[Any] = _CALLS
) -> list[Any]:
  """Evaluates a jaxpr, closed or not, with its calls inlined."""
  inner = getattr(jaxpr, "jaxpr", jaxpr)
  consts = getattr(jaxpr, "consts", ())
  env = dict(zip(inner.constvars, consts, strict=True))
  env |= dict(zip(inner.invars, args, strict=True))
  return run(inner.eqns, env, inner.outvars, calls)


def run(
  eqns: Sequence[Any],
  env: dict[Any, Any],
  outputs: Sequence[Any],
  calls: Collection[Any] = _CALLS,
) -> list[Any]:
  """Runs equations, adds their results to `env`, returns the outputs."""

  def read(x: Any) -> Any:
    return x.val if isinstance(x, jex.Literal) else env[x]

  for eqn in eqns:
    args, params = [read(x) for x in eqn.invars], eqn.params
    if eqn.primitive in calls:
      called = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
      results = evaluate(called, args, calls)
    else:
      # The context holds what a `with` block set when the equation was traced,
      # such as the dtype promotion.
      with eqn.ctx.manager:
        results = eqn.primitive.bind(
          *args, **eqn.primitive.get_bind_params(params)
        )
      if not eqn.primitive.multiple_results:
        results = [results]
    env.update(zip(eqn.outvars, results, strict=True))
  return [read(x) for x in outputs]
