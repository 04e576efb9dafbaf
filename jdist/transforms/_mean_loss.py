"""Agreeing: what all workers must get alike besides their mean gradients.

Each worker has a loss of its own.  An optimizer that is to stay equal on all of
them and uses it (a plateau's, a line search's) would drive them apart.
"""

from collections.abc import Callable
from typing import Any

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
    def update(**changed: jax.Array) -> tuple[optax.Updates, PyTree]:
      given = extra_args | changed
      return optimizer.update(updates, state, params, **given)

    def uses(name: str) -> bool:
      loss = extra_args.get(name)
      return loss is not None and _depends(lambda x: update(**{name: x}), loss)

    used = {name: extra_args[name] for name in LOSSES if uses(name)}
    return update(**collectives.mean(used, axis)) if used else update()

  return optax.GradientTransformationExtraArgs(optimizer.init, update_fn)


def _depends(update: Callable[[jax.Array], PyTree], loss: jax.Array) -> bool:
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
  return any(variable is traced.invars[0] for variable in used)
