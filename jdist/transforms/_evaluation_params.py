"""Evaluation: the parameters and statistics of all workers together."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist import collectives, states
from jdist.states import PyTree
from jdist.transforms.local import _anchor, _iterates


def evaluation_params(
  state: PyTree,
  params: optax.Params,
  model_state: PyTree = None,
  *,
  axis: collectives.Axis = None,
  samples: jax.typing.ArrayLike | None = None,
  laws: states.Laws | tuple[()] = (),
) -> Any:
  r"""Returns the parameters to evaluate, and the workers' mean statistics.

  The parameters are the anchor, at any step of a round, or follow from it:
  :math:`x = (y - (1 - \beta_1) z) / \beta_1` for `optax.contrib.schedule_free`,
  the slow parameters for `optax.lookahead`, and the field "average" of a state
  that is declared by `states.declare(evaluates="average")`.

  Args:
    state: The optimizer's state.
    params: The parameters, whose dtypes the result has.
    model_state: a model's statistics, if any.
    axis: The workers' axis, over which statistics are averaged; the call then
      belongs into `workers.jit`.
    samples: The number of this worker's samples, by which its statistics
      count; all count alike by default.
    laws: `TrainState.laws`, exceptions to those of `states.find_laws`.

  Returns:
    The parameters; with `model_state` a pair of both.

  >>> from jdist import transforms
  >>> optimizer = transforms.local_steps(optax.sgd(1.0), 8, axis=None)
  >>> state = optimizer.init(jnp.array(5.0))
  >>> evaluation_params(state, jnp.array(3.0)).item()
  5.0
  """
  found = _anchor.anchor(state, params)
  if _anchor.contains(state, _evaluates):
    state = _iterates.at_anchor(state)
  for part in jax.tree.leaves(state, is_leaf=_evaluates):
    if _evaluates(part):
      found = _evaluated(part, found)
  if isinstance(found, optax.LookaheadParams):
    found = found.slow
  if model_state is None:
    return found
  return found, mean_statistics(model_state, axis, samples, laws)


def _evaluates(state: Any) -> bool:
  return states.evaluated_field(type(state)) is not None


def _evaluated(state: Any, params: PyTree) -> PyTree:
  """Returns the parameters to evaluate, where a state keeps others."""
  iterate = getattr(state, states.evaluated_field(type(state)) or "")
  b1 = getattr(state, "b1", None)

  def one(x: jax.Array, y: jax.Array) -> jax.Array:
    if b1 is None:
      return x.astype(y.dtype)
    # With an axis of workers in front it is a row.
    beta = _anchor.wide(b1).reshape(b1.shape + (1,) * (y.ndim - b1.ndim))
    wide = (_anchor.wide(y) - (1 - beta) * _anchor.wide(x)) / beta
    return wide.astype(y.dtype)

  return _anchor.over(iterate, params, one)


def mean_statistics(
  model_state: PyTree,
  axis: collectives.Axis,
  samples: jax.typing.ArrayLike | None = None,
  laws: states.Laws | tuple[()] = (),
) -> PyTree:
  """Averages a worker's statistics; all other leaves stay its own.

  The arguments are those of `evaluation_params`.
  """
  leaves, structure = jax.tree.flatten(model_state)
  found = jax.tree.leaves(states.find_laws(model_state, "statistic", laws))
  chosen = [i for i, law in enumerate(found) if law == "statistic"]
  mine = [leaves[i] for i in chosen]
  if samples is not None:
    share = jnp.asarray(samples, jnp.float32)
    share = share / jnp.maximum(collectives.mean(share, axis), 1e-9)
    mine = [(_anchor.wide(x) * share).astype(x.dtype) for x in mine]
  leaves = collectives.varying(leaves, axis)
  for i, value in zip(chosen, collectives.mean(mine, axis), strict=True):
    leaves[i] = value
  return jax.tree.unflatten(structure, leaves)
