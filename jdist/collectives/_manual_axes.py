"""JAX's typing rules for values along the workers' axis.

In a `shard_map` with `check_vma=True` JAX types every value as *varying* over a
mesh axis or equal along it; under `vmap` and with `check_vma=False` it does
not.  The convention of this library: **everything a worker holds varies over
the axis**.  Results of collectives are equal on all workers but typed as
varying, so that a `lax.cond` or a `scan` carry takes them together with a
worker's own values.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jdist import checks

PyTree: TypeAlias = Any
Axis: TypeAlias = str | tuple[str, str] | None
# The axis of the team whose step is traced; None outside, and where its
# workers are meant to stay apart.
_team: contextvars.ContextVar[Axis] = contextvars.ContextVar(
  "team", default=None
)


@contextlib.contextmanager
def team_of(axis: Axis) -> Iterator[None]:
  """Traces what one worker of several does, who speak over an axis.

  With None nobody objects to a worker that speaks to nobody.
  """
  token = _team.set(axis)
  try:
    yield
  finally:
    _team.reset(token)


def check_axis(axis: Axis) -> None:
  """Raises a ValueError unless `axis` is None, a name, or (inner, outer)."""
  if axis is None or (isinstance(axis, str) and axis):
    return
  if (
    isinstance(axis, tuple)
    and len(axis) == 2
    and all(isinstance(name, str) and name for name in axis)
    and axis[0] != axis[1]
  ):
    return
  raise ValueError(
    "`axis` must be None, a name, or two different names (inner, outer), got "
    f"{axis!r}."
  )


def axis_names(axis: Axis) -> tuple[str, ...]:
  """Returns the names to reduce over one after the other, innermost first.

  Some of JAX's collectives refuse a tuple of a vmap and a shard_map name.
  """
  check_axis(axis)
  if axis is None:
    return ()
  return (axis,) if isinstance(axis, str) else axis


def bound_names(axis: Axis) -> tuple[str, ...]:
  """Returns the names, of which each must be one of a step's workers."""
  for name in (names := axis_names(axis)):
    try:
      jax.lax.axis_size(name)
    except (NameError, AssertionError, KeyError):
      known = _team.get()
      here = f"the workers' is {known!r}" if known else "there is none"
      raise ValueError(
        f"`axis` must be the axis of the workers that run this, got {name!r}; "
        f"{here}. Pass `axis=workers.axis`, and call it inside "
        "`workers.jit(...)`; `axis=None` is one worker alone."
      ) from None
  return names


def _varying_over(x: Any) -> frozenset[str]:
  return jax.typeof(x).manual_axis_type.varying


def _tracks_varying(name: str) -> bool:
  """Returns whether values are typed as varying or not over `name`.

  Read off a worker's index, which always varies where anything does.
  """
  if name not in jax.sharding.get_abstract_mesh().manual_axes:
    return False
  return name in _varying_over(jax.lax.axis_index(name))


def varying(tree: PyTree, axis: Axis) -> PyTree:
  """Types every leaf as a worker's own value; moves no data.

  For constants and shared inputs that are combined with varying values;
  outside a `shard_map` with `check_vma=True` it returns `tree`.
  """
  for name in axis_names(axis):
    if _tracks_varying(name):
      # jax reports a repeated cast as an error, hence the test per leaf.
      tree = jax.tree.map(
        lambda x, name=name: (
          x
          if name in _varying_over(x)
          else jax.lax.pcast(x, name, to="varying")
        ),
        tree,
      )
  return tree


def varying_like(tree: PyTree, like: PyTree) -> PyTree:
  """Types every leaf as varying over all axes that leaves of `like` vary over.

  For the carry of a loop over the shards of a worker, which varies over the
  mesh's other axes, too.
  """
  names = frozenset[str]().union(*map(_varying_over, jax.tree.leaves(like)))
  return jax.tree.map(
    lambda x: (
      jax.lax.pcast(x, missing, to="varying")
      if (missing := tuple(sorted(names - _varying_over(x))))
      else x
    ),
    tree,
  )


def check_local(
  tree: PyTree, axis: Axis, *, what: str, like: PyTree = None
) -> None:
  """Raises a ValueError if a leaf is typed as equal on all workers.

  Under `shard_map` the gradient with respect to parameters that are *shared*
  over the axis is already **summed** over it: a mean of it would send
  everything a second time and leave the sum.  `what` names the tree in the
  error.  So it does for a tree that is not like `like`, if that is given, for
  what JAX gives of integers, for an axis that is not bound, and for no axis
  where several workers run.
  """
  if like is not None:
    check_alike(tree, like, what)
  if any(
    getattr(x, "dtype", None) == jax.dtypes.float0
    for x in jax.tree.leaves(tree)
  ):
    checks.check_gradients(what.strip("`"), tree)
  team = _team.get()
  if axis is None and team is not None:
    raise ValueError(
      f"`axis` must be {team!r} where several workers run, got None: nothing "
      "would be sent, and each would train a model of its own. Pass "
      "`axis=workers.axis`, or to `make_step` `independent=True` if that is "
      "meant. In a loop of your own that is `with jdist.collectives."
      "team_of(None):` around the update."
    )
  for name in bound_names(axis):
    if not _tracks_varying(name):
      continue
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
      if name not in _varying_over(leaf):
        raise ValueError(
          f"{what} must be each worker's own, but leaf "
          f"`{jax.tree_util.keystr(path)}` is the same on all workers of axis "
          f"{name!r}. This usually means that the parameters are shared over "
          "the axis (`in_specs=P()`), where `jax.grad` has already summed the "
          "gradients. Give every worker its own slice of the parameters "
          "(`jdist.collectives.workers(...).replicate(params)`), or call "
          "`jdist.collectives.varying(params, axis)` before differentiating."
        )


def same_form(tree: PyTree, like: PyTree) -> bool:
  """Returns whether two trees of arrays have one structure, and its shapes."""
  form: Any
  ours, form = jax.tree.flatten(tree)
  theirs, wanted = jax.tree.flatten(like)
  return bool(form == wanted) and all(
    isinstance(x, jax.Array) and getattr(y, "shape", None) == x.shape
    for x, y in zip(ours, theirs, strict=True)
  )


def check_alike(tree: PyTree, like: PyTree, what: str) -> None:
  """Raises a ValueError unless a tree has the leaves of another, by shape.

  Whatever stands for the gradient of an integer is right.
  """
  if same_form(tree, like):
    return
  structures = [jax.tree.structure(t) for t in (tree, like)]
  for name, one in ((what.strip("`"), tree), ("params", like)):
    checks.check_arrays(name, one)
  if [jnp.shape(x) for x in jax.tree.leaves(tree)] == [
    jnp.shape(x) for x in jax.tree.leaves(like)
  ] and str(structures[0]) == str(structures[1]):
    return
  named, wanted = map(checks.named_leaves, (tree, like))
  ours = {
    name: jnp.shape(x)
    for name, x in wanted.items()
    if jnp.issubdtype(jnp.result_type(x), jnp.inexact)
  }
  rest = wanted.keys() - ours.keys()
  rule = f"{what} must be a tree like the parameters, but"
  remedy = "Take the loss's gradient by these very parameters."
  given = {name: x for name, x in named.items() if name not in rest}
  checks.check_shapes(rule, remedy, given, ours)
  # In place of an integer's gradient there may be nothing.
  left_out = _left_out(tree), _left_out(like)
  if not rest or left_out[0] != left_out[1]:
    raise ValueError(
      f"{rule} it is {checks.show(structures[0])} and not "
      f"{checks.show(structures[1])}. {remedy}"
    )


def _left_out(tree: PyTree) -> Any:
  """Returns a tree's structure, with leaves where nothing stands for one."""
  return jax.tree.structure(
    tree, is_leaf=lambda x: x is None or isinstance(x, optax.MaskedNode)
  )


def agreed(flag: jax.Array, axis: Axis) -> jax.Array:
  """Makes a flag one that vmap knows to be the same on all workers.

  A `lax.cond` on a mapped flag becomes a select under vmap: both branches run
  in every step, with their collectives.  On an agreed flag it stays a
  conditional.  Nothing is sent between devices.

  >>> def step(x):
  ...   done = agreed(x > 0, "worker")
  ...   return jax.lax.cond(done, lambda: x, lambda: -x)
  >>> program = jax.make_jaxpr(jax.vmap(step, axis_name="worker"))(
  ...   jnp.ones(2)
  ... )
  >>> "cond" in str(program)
  True
  """
  manual = jax.sharding.get_abstract_mesh().manual_axes
  for name in bound_names(axis):
    if name not in manual:
      flag = jax.lax.pmax(flag.astype(jnp.int32), name) > 0
  return flag


# Functions of others, traced again so that every value varies over an axis: a
# `lax.cond` whose one branch gives a constant and whose other a worker's own
# value has branches of unlike types under `shard_map`.


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
  vary = functools.partial(varying_like, like=leaves)
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
