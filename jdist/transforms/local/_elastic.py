"""Pulling workers towards an anchor, and the anchor towards the workers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import collectives
from jdist.transforms.local import _anchor, _sync_rule

PyTree = Any


def elastic(
  moving_rate: jax.typing.ArrayLike, axis: collectives.Axis
) -> _sync_rule.Meeting:
  """The meeting of `easgd`: an elastic force between workers and anchor."""

  def begin(anchor: PyTree) -> tuple[PyTree, PyTree]:
    del anchor
    return (), ()

  def message(
    ended: _sync_rule.Round, inner: optax.GradientTransformation
  ) -> PyTree:
    del inner
    return ended.local

  def join(
    ended: _sync_rule.Round, mean: PyTree, inner: optax.GradientTransformation
  ) -> tuple[_sync_rule.Round, PyTree]:
    del inner
    beta = _anchor.scalar(moving_rate)
    alpha = beta / collectives.size(axis)
    # Both ends of the spring feel the old positions.
    target = jax.tree.map(
      lambda w, a: w - alpha.astype(a.dtype) * (w - a),
      ended.local, ended.anchor,
    )  # fmt: skip
    anchor = jax.tree.map(
      lambda a, m: a + beta.astype(a.dtype) * (m - a), ended.anchor, mean
    )
    return ended._replace(anchor=anchor), target

  def stretch(
    ended: _sync_rule.Round, inner: optax.GradientTransformation
  ) -> PyTree:
    del inner
    return jax.tree.map(jnp.subtract, ended.local, ended.anchor)

  def relax(
    ended: _sync_rule.Round, mean: PyTree, inner: optax.GradientTransformation
  ) -> tuple[_sync_rule.Round, PyTree]:
    del inner
    # Where the springs are at rest: at the mean of the workers and the anchor.
    workers = collectives.size(axis)
    anchor = jax.tree.map(
      lambda a, m: a + workers / (workers + 1) * m, ended.anchor, mean
    )
    return ended._replace(anchor=anchor), anchor

  return _sync_rule.Meeting(
    begin,
    _sync_rule.Ending(message, join),
    _sync_rule.uncorrected,
    last=_sync_rule.Ending(stretch, relax),
  )


class LateAnchorState(NamedTuple):
  """What `overlap_local_sgd` remembers.

  Attributes:
    velocity: the anchor's momentum, float32.
  """

  velocity: PyTree


def late_anchor(
  pull: jax.typing.ArrayLike, momentum: jax.typing.ArrayLike
) -> _sync_rule.Meeting:
  """The meeting of `overlap_local_sgd`: a pull to an anchor one round late."""

  def begin(anchor: PyTree) -> tuple[PyTree, PyTree]:
    # What is under way at first is what all workers begin with.
    return LateAnchorState(jax.tree.map(jnp.zeros_like, anchor)), anchor

  def message(
    ended: _sync_rule.Round, inner: optax.GradientTransformation
  ) -> PyTree:
    del inner
    return ended.pending  # Of the last round: from the state.

  def join(
    ended: _sync_rule.Round, mean: PyTree, inner: optax.GradientTransformation
  ) -> tuple[_sync_rule.Round, PyTree]:
    del inner
    anchor, velocity = arrive(ended.anchor, ended.outer.velocity, mean)
    alpha = _anchor.scalar(pull)
    target = jax.tree.map(
      lambda w, a: w + alpha.astype(a.dtype) * (a - w), ended.local, anchor
    )
    ended = ended._replace(
      anchor=anchor, outer=LateAnchorState(velocity), pending=target
    )
    return ended, target

  def arrive(
    anchor: PyTree, velocity: PyTree, mean: PyTree
  ) -> tuple[PyTree, PyTree]:
    mu = _anchor.scalar(momentum)
    velocity = jax.tree.map(
      lambda v, m, a: mu.astype(a.dtype) * v + (m - a), velocity, mean, anchor
    )
    # Without a momentum the anchor is the mean to the bit.
    anchor = jax.tree.map(
      lambda m, v, a: m + (v - (m - a)), mean, velocity, anchor
    )
    return anchor, velocity

  def all_messages(
    ended: _sync_rule.Round, inner: optax.GradientTransformation
  ) -> tuple[PyTree, PyTree]:
    del inner
    return ended.pending, ended.local

  def arrive_all(
    ended: _sync_rule.Round,
    mean: tuple[PyTree, PyTree],
    inner: optax.GradientTransformation,
  ) -> tuple[_sync_rule.Round, PyTree]:
    del inner
    late, present = mean
    first = arrive(ended.anchor, ended.outer.velocity, late)
    # Between two rounds both are the same, and it arrives once.
    anchor, velocity = _anchor.either(
      ended.begun, arrive(*first, present), first
    )
    ended = ended._replace(
      anchor=anchor, outer=LateAnchorState(velocity), pending=anchor
    )
    return ended, anchor

  return _sync_rule.Meeting(
    begin,
    _sync_rule.Ending(message, join),
    _sync_rule.uncorrected,
    last=_sync_rule.Ending(all_messages, arrive_all),
  )
