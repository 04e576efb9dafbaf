"""The anchor: a float32 copy that moves, and workers that go to it.

An anchor is float32 whatever the parameters are, and a buffer of its own.
What a worker computes with, its local parameters, is widened in the same way,
after the cast to the dtype in which the worker really holds them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

PyTree = Any


def wide(x: jax.Array) -> jax.Array:
  """At least float32."""
  return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def wide_copy(x: jax.Array) -> jax.Array:
  """At least float32, and a copy: parameters and state may both be donated."""
  return jnp.array(wide(jnp.asarray(x)), copy=True)


def moved(params: jax.Array, updates: jax.Array) -> jax.Array:
  """Where `optax.apply_updates` takes the parameters, in float32."""
  there = wide(params) + wide(updates)
  # The cast is what the worker really holds afterwards.
  return wide(there.astype(params.dtype))


def towards(updates: PyTree, target: PyTree, local: PyTree) -> PyTree:
  """Updates that lead to `target`, where `updates` alone lead to `local`.

  Not `target - params`: where both are the same, the updates stay what they
  are to the bit.
  """
  return jax.tree.map(
    lambda u, t, w: (wide(u) + (t - w)).astype(u.dtype), updates, target, local
  )


def rounded(product: jax.Array) -> jax.Array:
  """A product that is rounded before anything is added to it.

  Else a compiler may merge both into one instruction that rounds once, in one
  form of a program and not in another, and their bits would differ.  It does
  not see that nothing is selected here, and does so within the same pass over
  the arrays.  (`optimization_barrier` and `reduce_precision` are gone before
  LLVM merges, and would cost a pass on GPUs.)

  >>> rounded(jnp.float32(0.7) * jnp.float32(3.0)).item()
  2.0999999046325684
  """
  return jnp.where(product == 0, jnp.zeros_like(product), product)


def onto(anchor: PyTree, params: PyTree) -> PyTree:
  """Updates that lead from the parameters to the anchor."""
  return jax.tree.map(
    lambda a, p: (a - wide(p)).astype(p.dtype), anchor, params
  )


def outer_step(
  outer: optax.GradientTransformation | None,
  outer_state: PyTree,
  gradient: PyTree,
  anchor: PyTree,
) -> tuple[PyTree, PyTree]:
  """Moves an anchor by the mean pseudo-gradient.

  Args:
    outer: any Optax optimizer; None goes all the way.
    outer_state: its state, `()` for None.
    gradient: the mean of `anchor - local`, float32.
    anchor: the anchor, float32.

  Returns:
    The new anchor, float32, and the new state.
  """
  if outer is None:
    return jax.tree.map(jnp.subtract, anchor, gradient), ()
  updates, outer_state = outer.update(gradient, outer_state, anchor)
  return jax.tree.map(moved, anchor, updates), outer_state


def scalar(x: jax.typing.ArrayLike) -> jax.Array:
  """As float32: injected hyper-parameters come in the parameters' dtype."""
  return jnp.asarray(x).astype(jnp.float32)


def either(which: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
  """Chooses between two trees, leaf by leaf."""
  return jax.tree.map(lambda y, n: jnp.where(which, y, n), yes, no)
