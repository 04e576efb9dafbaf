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
from collections.abc import Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

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
  """Raises a ValueError unless `axis` is None, a name, or (inner, outer).

  >>> check_axis(("worker", "worker"))
  Traceback (most recent call last):
  ValueError: `axis` must be None, a name, or two different names (inner,
  outer), got ('worker', 'worker').
  """
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
  """Returns the names, of which each must be one of a step's workers.

  Raises:
    ValueError: when a name is not bound where this is traced.
  """
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
  an axis that is not bound, and for no axis where several workers run.
  """
  if like is not None:
    check_alike(tree, like, what)
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


def check_alike(tree: PyTree, like: PyTree, what: str) -> None:
  """Raises a ValueError unless a tree has the leaves of another, by shape.

  Whatever stands for the gradient of an integer is right.
  """
  for name, one in ((what.strip("`"), tree), ("params", like)):
    checks.check_arrays(name, one)
  shapes = [[jnp.shape(x) for x in jax.tree.leaves(t)] for t in (tree, like)]
  structures: list[Any] = [jax.tree.structure(t) for t in (tree, like)]
  if structures[0] == structures[1] and shapes[0] == shapes[1]:
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
  if not rest:
    raise ValueError(
      f"{rule} it is {checks.show(structures[0])} and not "
      f"{checks.show(structures[1])}. {remedy}"
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
