"""Pulling workers towards an anchor, and the anchor towards the workers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import collectives
from jdist.transforms import _anchoring, _meeting

PyTree = Any


def elastic(
  moving_rate: jax.typing.ArrayLike, axis: collectives.Axis
) -> _meeting.Meeting:
  """The meeting of `easgd`: an elastic force between workers and anchor."""

  def begin(anchor: PyTree) -> tuple[PyTree, PyTree]:
    del anchor
    return (), ()

  def message(
    ended: _meeting.Round, inner: optax.GradientTransformation
  ) -> PyTree:
    del inner
    return ended.local

  def join(
    ended: _meeting.Round, mean: PyTree, inner: optax.GradientTransformation
  ) -> tuple[_meeting.Round, PyTree]:
    del inner
    beta = _anchoring.scalar(moving_rate)
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

  return _meeting.Meeting(
    begin, message, join, _meeting.uncorrected, lands=False
  )


class LateAnchorState(NamedTuple):
  """What `overlap_local_sgd` remembers.

  Attributes:
    velocity: the anchor's momentum, float32.
  """

  velocity: PyTree


def late_anchor(
  pull: jax.typing.ArrayLike, momentum: jax.typing.ArrayLike
) -> _meeting.Meeting:
  """The meeting of `overlap_local_sgd`: a pull to an anchor one round late."""

  def begin(anchor: PyTree) -> tuple[PyTree, PyTree]:
    # What is under way at first is what all workers begin with.
    return LateAnchorState(jax.tree.map(jnp.zeros_like, anchor)), anchor

  def message(
    ended: _meeting.Round, inner: optax.GradientTransformation
  ) -> PyTree:
    del inner
    return ended.pending  # Of the last round: from the state.

  def join(
    ended: _meeting.Round, mean: PyTree, inner: optax.GradientTransformation
  ) -> tuple[_meeting.Round, PyTree]:
    del inner
    mu, alpha = _anchoring.scalar(momentum), _anchoring.scalar(pull)
    velocity = jax.tree.map(
      lambda v, m, a: mu.astype(a.dtype) * v + (m - a),
      ended.outer.velocity, mean, ended.anchor,
    )  # fmt: skip
    # Without a momentum the anchor is the mean to the bit.
    anchor = jax.tree.map(
      lambda m, v, a: m + (v - (m - a)), mean, velocity, ended.anchor
    )
    target = jax.tree.map(
      lambda w, a: w + alpha.astype(a.dtype) * (a - w), ended.local, anchor
    )
    ended = ended._replace(
      anchor=anchor, outer=LateAnchorState(velocity), pending=target
    )
    return ended, target

  return _meeting.Meeting(
    begin, message, join, _meeting.uncorrected, lands=False
  )
