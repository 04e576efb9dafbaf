"""Workers on one CPU core: one gradient after the other, the rest as vectors.

`vmap` turns a product by every worker's own weights into a batched one, which
XLA's CPU compiler runs slowly, and eight virtual devices on one core change
threads all the time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist import collectives, training, transforms
from jdist.training import comparison

PyTree = Any


def one_by_one(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
  """Lets `jax.vmap` run a function for one row after the other.

  >>> jax.vmap(one_by_one(lambda x: x + 1))(jnp.array([1, 2])).tolist()
  [2, 3]
  """
  mapped = jax.custom_batching.custom_vmap(function)

  @mapped.def_vmap
  def rule(axis_size: int, in_batched: PyTree, *args: PyTree) -> Any:
    spread = jax.tree.map(
      lambda x, b: x if b else jnp.broadcast_to(x, (axis_size, *x.shape)),
      args,
      tuple(in_batched),
    )
    whole = jax.lax.map(lambda row: function(*row), spread)
    return whole, jax.tree.map(lambda _: True, whole)

  return mapped


class OneCoreWorkload(comparison.Workload):
  """A problem whose workers share one core."""

  def programs(
    self,
    optimizer: optax.GradientTransformation,
    apply: Callable[..., Any],
    **trainer: Any,
  ) -> comparison.VariantPrograms:
    """Builds a variant's programs, with one gradient after the other."""
    axis = self.workers.axis
    gradient = one_by_one(
      training.make_gradient(self.loss(apply), accumulate=self.accumulate)
    )
    update = training.make_update(optimizer, axis=axis)

    def step(
      state: training.TrainState,
      batch: PyTree,
      control: transforms.Control | None = None,
    ) -> Any:
      key = jax.random.wrap_key_data(state.key)
      key = jax.random.fold_in(key, state.step)
      key = jax.random.fold_in(key, collectives.index(axis))
      read = transforms.predicted_weights(state.opt_state, state.params)
      found = gradient(read, state.model_state, batch, key)
      return update(state, found, control)

    plain = one_by_one(lambda *args: apply(*args, train=False))

    def applied(*args: PyTree, train: bool) -> Any:
      return apply(*args, train=True) if train else plain(*args)

    evaluate = self.evaluator(applied, optimizer)
    loop = training.Trainer(self.workers, step, **trainer)
    return comparison.VariantPrograms(self, optimizer, step, loop, evaluate)


class OneCoreChains(comparison.Chains):
  """Chains whose workers share one core."""

  def _load(self) -> comparison.Workload:
    found = super()._load()
    given = {
      field.name: getattr(found, field.name)
      for field in dataclasses.fields(found)
    }
    given["workers"] = collectives.workers(
      self.options.workers, substrate="vmap"
    )
    return OneCoreWorkload(**given)
