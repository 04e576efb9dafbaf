"""A mean loss for optimizers behind a mean of gradients.

Each worker has a loss of its own.  An optimizer that uses it, such as a plateau
schedule or a line search, would update the replicas differently.
"""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import optax

from jdist import collectives

PyTree = Any
# The names under which optimizers receive a loss: ours, and Optax's.
LOSSES = ("loss", "value")


def with_mean_loss(
  optimizer: optax.GradientTransformation, axis: collectives.Axis
) -> optax.GradientTransformationExtraArgs:
  """Gives an optimizer the workers' mean loss, if it uses a loss.

  The loss is passed as `loss` or `value`.

  Raises:
    ValueError: At trace time, if the optimizer uses a given `grad` or
      `value_fn`, as a line search does: these stay each worker's own.
  """
  optimizer = optax.with_extra_args_support(optimizer)
  if axis is None:
    return optimizer

  def update_fn(
    updates: optax.Updates,
    state: PyTree,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, PyTree]:
    if (asked := extra_args.get("value_fn")) is not None:
      # Optax reads from a function's signature which arguments to pass to it,
      # so that the replacement must have the same one.
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
    # An all-reduce that nothing uses would still be counted as traffic and
    # waited for, so that only a loss which reaches the outputs is averaged.
    used = {name: extra_args[name] for name in LOSSES if uses(name)}
    return update(**collectives.mean(used, axis)) if used else update()

  return optax.GradientTransformationExtraArgs(optimizer.init, update_fn)


def _refuse(name: str, *args: Any, **options: Any) -> NoReturn:
  """Raises a ValueError; also stands in for a function that is called."""
  del args, options
  raise ValueError(
    f"`{name}` must not be used behind a mean of gradients: it stays each "
    "worker's own, and the workers would drift apart. Take an optimizer "
    "without a line search, for instance `optax.lbfgs(linesearch=None)`. One "
    "that is equal on all workers passes "
    "`optax.chain(average_gradients(axis), optimizer)`."
  )


def _depends(update: Callable[[PyTree], PyTree], loss: PyTree) -> bool:
  """Returns whether an update uses the loss, by its traced program.

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
