"""Compiled programs of a learner's local steps, pushes and merges."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist import states, training, transforms
from jdist.server.gradients import _gradient_messages
from jdist.server.gradients._merge import Pushed

PyTree = Any
Leaves = list[jax.Array]


@functools.lru_cache(maxsize=16)
def programs(
  loss_fn: Callable[..., Any],
  optimizer: optax.GradientTransformation,
  codec: _gradient_messages.Codec,
  decoded: bool,
  interval: int,
  mix: float | None,
  shardings: tuple[Any, ...],
) -> tuple[Callable[..., Any], ...]:
  """Compiles a local step, the receipt of merged fragments, and a push."""
  chain = transforms.lenient(optimizer)
  compute = training.make_gradient(loss_fn)

  def step(
    params: PyTree,
    opt_state: PyTree,
    model_state: PyTree,
    batch: PyTree,
    key: jax.Array,
    anchor: PyTree,
  ) -> tuple[PyTree, PyTree, PyTree, jax.Array]:
    # All workers have the server's keys, for instance of dropout.
    model_state = states.fold_keys(model_state, jax.random.bits(key))
    found = compute(params, model_state, batch, key)
    updates, opt_state = chain.update(
      found.grads, opt_state, params, loss=found.loss, value=found.loss,
      anchor=anchor, interval_steps=interval,
    )  # fmt: skip
    params = optax.apply_updates(params, updates)
    if all(shardings):
      # The compiler might choose others, and gather what is sharded.
      leaves, structure = jax.tree.flatten(params)
      kept = map(jax.lax.with_sharding_constraint, leaves, shardings)
      params = jax.tree.unflatten(structure, kept)
    return params, opt_state, found.model_state, found.loss

  def push(
    base: Leaves,
    leaves: Leaves,
    model_state: PyTree,
    loss: jax.Array,
    push_state: PyTree,
  ) -> tuple[Leaves, PyTree, Leaves, jax.Array, PyTree]:
    now = [states.wide(x) for x in leaves]
    progress = [b - x for b, x in zip(base, now, strict=True)]
    message, sent, loss, push_state = _gradient_messages.message_of_push(
      codec, decoded, Pushed(progress, model_state), loss, push_state
    )
    return now, message, sent.grads, loss, push_state

  def take(
    leaves: Leaves, base: Leaves, anchor: Leaves, unmerged: list[Leaves]
  ) -> tuple[Leaves, Leaves]:
    params, bases = [], []
    for i, (x, b, a) in enumerate(zip(leaves, base, anchor, strict=True)):
      start = a - sum(each[i] for each in unmerged) if unmerged else a
      now = states.wide(x)
      if mix is not None:
        params.append((mix * now + (1 - mix) * start).astype(x.dtype))
        bases.append(start)
        continue
      # The progress b - x is formed before it is taken off: a small number
      # loses nothing to the rounding of the large ones.
      params.append((start - (b - now)).astype(x.dtype))
      # Progress that is not pushed yet stays the same.
      bases.append(states.wide(params[-1]) + (b - now))
    return params, bases

  return jax.jit(step), jax.jit(take), jax.jit(push)


def with_count(opt_state: PyTree, steps: int) -> PyTree:
  """Returns an optimizer's state whose schedules have made some steps."""
  kinds = (
    optax.ScaleByScheduleState, optax.InjectStatefulHyperparamsState,
    transforms.PullToAnchorState,
  )  # fmt: skip

  def counted(state: Any) -> Any:
    if not isinstance(state, kinds):
      return state
    # Every tuple has a method called `count`, too.
    name = "count" if "count" in state._fields else "step"
    return state._replace(**{name: jnp.full_like(getattr(state, name), steps)})

  return jax.tree.map(
    counted, opt_state, is_leaf=lambda x: isinstance(x, kinds)
  )
