"""The anchor: a float32 copy that moves, and workers that go to it.

It is found in the state of any chain, however deep.

An anchor is float32 whatever the parameters are, and a buffer of its own.
What a worker computes with, its local parameters, is widened in the same way,
after the cast to the dtype in which the worker really holds them.
"""

from collections.abc import Callable
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
  """Returns the parameters after `optax.apply_updates`, in float32."""
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


def scalar(x: jax.typing.ArrayLike) -> jax.Array:
  """As float32: injected hyper-parameters come in the parameters' dtype."""
  return jnp.asarray(x).astype(jnp.float32)


def either(which: jax.Array | bool, yes: PyTree, no: PyTree) -> PyTree:
  """Chooses between two trees, leaf by leaf."""
  if which is True:  # Known now: the program need not wait for `no`.
    return yes
  return jax.tree.map(lambda y, n: jnp.where(which, y, n), yes, no)


def check_params(params: Any, method: str) -> None:
  """Raises a ValueError when an update is not given the parameters."""
  if params is None:
    raise ValueError(
      f"`params` must be given to `update` of {method}: call "
      "`optimizer.update(grads, state, params)`."
    )


def declares(name: str) -> Callable[[Any], bool]:
  """Returns a test of what a state's class declares, see `jdist.states`."""
  return lambda x: bool(getattr(type(x), name, False))


def contains(state: PyTree, is_one: Callable[[Any], bool]) -> bool:
  """Returns whether a state, or a part of it, is such a one."""
  return any(map(is_one, jax.tree.leaves(state, is_leaf=is_one)))


def find_rounds(state: PyTree) -> Any:
  """Finds the outermost state with rounds in a chain's state, or None.

  Raises:
    ValueError: when there are several side by side, or a jump beside one.
  """
  rounds, jumps = declares("rounds"), declares("jumps")
  leaves = jax.tree.leaves(state, is_leaf=lambda x: rounds(x) or jumps(x))
  found = [x for x in leaves if rounds(x)]
  if found and any(map(jumps, leaves)):
    raise ValueError(
      "`state` must not hold `nowcast_weights` beside a method with rounds, "
      f"got one beside {type(found[0]).__name__}: the jump would be lost where "
      "a round ends on the anchor. Put it last into the inner chain, as in "
      "`local_sgd(optax.chain(optimizer, nowcast_weights(...)), ...)`."
    )
  if len(found) > 1:
    raise ValueError(
      "`state` must have one `local_steps` at most, side by side there are "
      f"{len(found)}. Put one inside the other's inner chain."
    )
  return found[0] if found else None


def anchor(state: PyTree, params: optax.Params) -> optax.Params:
  """Returns the parameters on which all workers agree: evaluate on these.

  Args:
    state: the optimizer's state.
    params: the parameters, returned when the method keeps the workers equal
      all the time and needs no anchor.

  Returns:
    The anchor in the dtypes of `params`.

  >>> from jdist import transforms
  >>> optimizer = transforms.local_steps(optax.sgd(1.0), 8, axis=None)
  >>> state = optimizer.init(jnp.array(5.0))
  >>> anchor(state, jnp.array(3.0)).item()
  5.0
  """
  found = find_rounds(state)
  if found is None:
    return params
  return jax.tree.map(lambda a, p: a.astype(p.dtype), found.anchor, params)


def apply_updates(
  params: optax.Params, updates: optax.Updates, state: PyTree = ()
) -> optax.Params:
  """Adds updates to the parameters, and ends rounds exactly on the anchor.

  An update is a difference, and after a round the sum may miss the anchor by a
  rounding.  Here it does not: equal parameters stay equal to the bit.

  Args:
    params: the parameters.
    updates: the updates, in any floating dtype.
    state: the state that `update` returned; without it this is
      `optax.apply_updates`.

  Returns:
    The new parameters in their dtypes.

  >>> apply_updates({"w": jnp.array(1.0)}, {"w": jnp.array(-0.5)})["w"].item()
  0.5
  """
  there = jax.tree.map(
    lambda p, u: moved(p, u).astype(p.dtype), params, updates
  )
  found = find_rounds(state)
  if found is None:
    return there
  exact = found.clock.synchronized
  if not isinstance(found.kept, tuple):
    # With a part of its own progress the worker stands beside the anchor on
    # purpose.
    exact = exact & (found.kept == 0)
  return jax.tree.map(
    lambda a, p: jnp.where(exact, a.astype(p.dtype), p), found.anchor, there
  )
