"""Control variates: what a worker's gradient differs by from all workers'."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist.transforms.local import _anchor, _sync_rule

PyTree = Any


class VariatesState(NamedTuple):
  """What `scaffold` remembers.

  Attributes:
    own: this worker's control variate, float32.
    shared: the mean of all workers', float32.
    distance: sum of the learning rates of this round's steps, float32 scalar.
  """

  own: PyTree
  shared: PyTree
  distance: jax.Array


def control_variates(
  learning_rate: optax.ScalarOrSchedule,
  global_learning_rate: jax.typing.ArrayLike,
) -> _sync_rule.Meeting:
  """The corrections and the meeting of `scaffold`."""

  def begin(anchor: PyTree) -> tuple[PyTree, PyTree]:
    zeros = jax.tree.map(jnp.zeros_like, anchor)
    return VariatesState(zeros, zeros, jnp.zeros((), jnp.float32)), ()

  def correct(
    updates: PyTree, outer: VariatesState, step: jax.Array
  ) -> tuple[PyTree, VariatesState]:
    # Where own and shared agree nothing is added, to the bit.
    updates = jax.tree.map(
      lambda g, own, all_: (g.astype(own.dtype) + (all_ - own)).astype(g.dtype),
      updates, outer.own, outer.shared,
    )  # fmt: skip
    rate = learning_rate(step) if callable(learning_rate) else learning_rate
    distance = outer.distance + _anchor.scalar(rate)
    return updates, outer._replace(distance=distance)

  def message(
    ended: _sync_rule.Round, inner: optax.GradientTransformation
  ) -> tuple[PyTree, PyTree]:
    del inner
    return ended.local, renewed(ended)

  def renewed(ended: _sync_rule.Round) -> PyTree:
    distance = ended.outer.distance
    # A schedule may end at zero, where nothing moves and nothing is learned.
    per_rate = jnp.where(distance > 0, 1.0 / distance, 0.0)

    def one(
      own: jax.Array, all_: jax.Array, a: jax.Array, w: jax.Array
    ) -> jax.Array:
      seen = (own - all_) + (a - w) * per_rate.astype(a.dtype)
      return jnp.where(distance > 0, seen, own)

    return jax.tree.map(
      one, ended.outer.own, ended.outer.shared, ended.anchor, ended.local
    )

  def join(
    ended: _sync_rule.Round,
    mean: tuple[PyTree, PyTree],
    inner: optax.GradientTransformation,
  ) -> tuple[_sync_rule.Round, PyTree]:
    del inner
    together, shared = mean
    rate = _anchor.scalar(global_learning_rate)
    # With a rate of 1 the anchor is the mean to the bit.
    anchor = jax.tree.map(
      lambda m, a: m + (rate - 1).astype(a.dtype) * (m - a),
      together, ended.anchor,
    )  # fmt: skip
    outer = VariatesState(renewed(ended), shared, jnp.zeros((), jnp.float32))
    return ended._replace(anchor=anchor, outer=outer), anchor

  ending = _sync_rule.Ending(message, join)
  return _sync_rule.Meeting(begin, ending, correct, last=None)
