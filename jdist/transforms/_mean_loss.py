"""Agreeing: what all workers must get alike besides their mean gradients.

Each worker has a loss of its own.  An optimizer that is to stay equal on all of
them and uses it (a plateau's, a line search's) would drive them apart.
"""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import optax

from jdist import collectives

PyTree = Any
# By these names optimizers are given it: ours, and Optax's own.
LOSSES = ("loss", "value")


def with_mean_loss(
  optimizer: optax.GradientTransformation, axis: collectives.Axis
) -> optax.GradientTransformationExtraArgs:
  """An optimizer behind a mean of gradients, whose loss is a mean as well.

  By the name of `loss` or `value`.  Whether the optimizer uses it is read from
  its traced update, so that no mean is counted, or waited for, of what nobody
  asks.

  Raises:
    ValueError: at trace time, when the optimizer uses a `grad` or a `value_fn`
      that is given, as a line search does: these stay each worker's own.
  """
  optimizer = collectives.for_workers(optimizer)
  if axis is None:
    return optimizer

  def update_fn(
    updates: optax.Updates,
    state: PyTree,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, PyTree]:
    if (asked := extra_args.get("value_fn")) is not None:
      # Optax reads from a function's signature what to give it.
      refuse = functools.partial(_refuse, "value_fn")
      extra_args["value_fn"] = functools.update_wrapper(refuse, asked)

    def update(**changed: Any) -> tuple[optax.Updates, PyTree]:
      given = extra_args | changed
      return optimizer.update(updates, state, params, **given)

    def uses(name: str) -> bool:
      loss = extra_args.get(name)
      return loss is not None and _depends(lambda x: update(**{name: x}), loss)

    if uses("grad"):
      _refuse("grad")
    used = {name: extra_args[name] for name in LOSSES if uses(name)}
    return update(**collectives.mean(used, axis)) if used else update()

  return optax.GradientTransformationExtraArgs(optimizer.init, update_fn)


def _refuse(name: str, *args: Any, **options: Any) -> NoReturn:
  """Raises a ValueError; also in place of a function that is called."""
  del args, options
  raise ValueError(
    f"`{name}` must not be used behind a mean of gradients: it stays each "
    "worker's own, and the workers would drift apart. Take an optimizer "
    "without a line search, for instance `optax.lbfgs(linesearch=None)`. One "
    "that is equal on all workers passes "
    "`optax.chain(average_gradients(axis), optimizer)`."
  )


def _depends(update: Callable[[PyTree], PyTree], loss: PyTree) -> bool:
  """Returns whether an update uses the loss, as hardly any does.

  >>> _depends(lambda loss: 2 * loss, jax.numpy.ones(()))
  True
  >>> _depends(lambda loss: jax.numpy.ones(()), jax.numpy.ones(()))
  False
  """
  traced = jax.make_jaxpr(update)(loss).jaxpr
  used = list(traced.outvars)
  for equation in traced.eqns:
    used += equation.invars
  return any(one is given for one in used for given in traced.invars)
