"""Workers on one CPU core: gradients in turn, everything else vectorized.

`vmap` turns a product by every worker's own weights into a batched product,
which XLA's CPU compiler runs slowly. Eight virtual devices on one core would
switch threads all the time.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist import collectives, training
from jdist.training import comparison
from optax_chains import _chains

PyTree = Any


def _one_by_one(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
  """Makes `jax.vmap` run a function for one row after the other.

  >>> jax.vmap(_one_by_one(lambda x: x + 1))(jnp.array([1, 2])).tolist()
  [2, 3]
  """
  mapped = jax.custom_batching.custom_vmap(function)

  @mapped.def_vmap
  def rule(axis_size: int, in_batched: PyTree, *args: PyTree) -> Any:
    # `lax.map` takes rows of every argument, so that shared ones are repeated.
    spread = jax.tree.map(
      lambda x, b: x if b else jnp.broadcast_to(x, (axis_size, *x.shape)),
      args,
      tuple(in_batched),
    )
    whole = jax.lax.map(lambda row: function(*row), spread)
    return whole, jax.tree.map(lambda _: True, whole)

  return mapped


class _OneCoreWorkload(comparison.Workload):
  """A problem whose workers share one core."""

  def gradient(self, apply: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the gradient, computed for one worker after the other."""
    return _one_by_one(super().gradient(apply))

  def evaluator(
    self,
    apply: Callable[..., Any],
    optimizer: optax.GradientTransformation | None = None,
  ) -> training.Evaluator:
    """Returns an evaluator that runs one worker's model after the other."""
    plain = _one_by_one(lambda *args: apply(*args, train=False))
    return super().evaluator(lambda *args, train: plain(*args), optimizer)


class _OneCoreChains(_chains.Chains):
  def _load(self) -> comparison.Workload:
    found = super()._load()
    # Virtual devices would share the core anyway, and switch threads.
    team = collectives.workers(self.options.workers, substrate="vmap")
    return _OneCoreWorkload(**vars(found) | {"workers": team})


def on_one_core(chains: type[_chains.Chains]) -> type[_chains.Chains]:
  """Returns a class of chains whose workers share a core of a CPU.

  Computing their gradients in turn takes half the time of `vmap` with small
  convolutions. On other backends the class is returned unchanged.
  """
  if jax.default_backend() != "cpu":
    return chains
  return type(f"OneCore{chains.__name__}", (_OneCoreChains, chains), {})
