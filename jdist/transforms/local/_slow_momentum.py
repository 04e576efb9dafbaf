"""Slow momentum: a momentum of the rounds around the steps' own."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist.transforms.local import _anchor, _sync_rule

PyTree = Any
Buffers = Literal["maintain", "reset", "average"]
BUFFERS: tuple[Buffers, ...] = ("maintain", "reset", "average")


class SlowMomentumState(NamedTuple):
  """What `slow_mo` remembers.

  Attributes:
    velocity: the slow momentum times the learning rate of the round that made
      it, float32: in units of parameters, so that no rate of zero divides.
    learning_rate: that rate, float32 scalar.
  """

  velocity: PyTree
  learning_rate: jax.Array


def slow_momentum(
  learning_rate: optax.ScalarOrSchedule,
  slow_learning_rate: jax.typing.ArrayLike,
  momentum: jax.typing.ArrayLike,
  buffers: Buffers,
) -> _sync_rule.Meeting:
  """The meeting of `slow_mo`."""

  def begin(anchor: PyTree) -> tuple[PyTree, PyTree]:
    zeros = jax.tree.map(jnp.zeros_like, anchor)
    return SlowMomentumState(zeros, jnp.zeros((), jnp.float32)), ()

  def message(
    ended: _sync_rule.Round, inner: optax.GradientTransformation
  ) -> tuple[PyTree, list[jax.Array]]:
    del inner
    sent = _buffers(ended.inner) if buffers == "average" else []
    sent = [_anchor.wide(x) for x in sent]
    return ended.local, sent

  def join(
    ended: _sync_rule.Round,
    mean: tuple[PyTree, list[jax.Array]],
    inner: optax.GradientTransformation,
  ) -> tuple[_sync_rule.Round, PyTree]:
    together, averaged = mean
    rate = learning_rate
    rate = rate(ended.step) if callable(rate) else rate
    rate = _anchor.scalar(rate)
    before = ended.outer.learning_rate
    ratio = jnp.where(before > 0, rate / before, 1.0)
    mu = _anchor.scalar(momentum) * ratio
    slow = _anchor.scalar(slow_learning_rate)
    progress = jax.tree.map(jnp.subtract, ended.anchor, together)
    velocity = jax.tree.map(
      lambda v, p: mu.astype(p.dtype) * v + p, ended.outer.velocity, progress
    )
    # With no momentum and a rate of 1 the anchor is the mean to the bit.
    anchor = jax.tree.map(
      lambda m, v, p: m - (slow.astype(p.dtype) * v - p),
      together, velocity, progress,
    )  # fmt: skip
    state = ended.inner
    if buffers == "reset":
      state = _with_buffers(state, _buffers(inner.init(ended.params)))
    elif buffers == "average":
      state = _with_buffers(state, averaged)
    outer = SlowMomentumState(velocity, rate)
    return ended._replace(anchor=anchor, inner=state, outer=outer), anchor

  ending = _sync_rule.Ending(message, join)
  return _sync_rule.Meeting(begin, ending, _sync_rule.uncorrected, last=None)


def _is_buffer(x: jax.Array) -> bool:
  # Counters go on, so that schedules do.
  return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _buffers(state: PyTree) -> list[jax.Array]:
  return [x for x in jax.tree.leaves(state) if _is_buffer(x)]


def _with_buffers(state: PyTree, buffers: list[jax.Array]) -> PyTree:
  leaves, treedef = jax.tree.flatten(state)
  new = iter(buffers)
  leaves = [next(new).astype(x.dtype) if _is_buffer(x) else x for x in leaves]
  return jax.tree.unflatten(treedef, leaves)
