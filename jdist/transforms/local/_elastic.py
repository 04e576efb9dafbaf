"""Elastic rules: the workers keep a distance from the anchor, which pulls."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jdist import signatures, states
from jdist.states import PyTree
from jdist.transforms.local import _anchor, _round


class _Apart(_round.SyncRule):
  """Sends a worker's position."""

  apart: ClassVar[bool] = True

  def message(self, end: _round.Round, relative: bool) -> PyTree:
    """Returns the parameters, or their distance from the anchor."""
    if not relative:
      return end.local
    return jax.tree.map(jnp.subtract, end.anchor, end.local)


@signatures.checked
@dataclasses.dataclass(frozen=True, eq=False)
class Elastic(_Apart):
  r"""Connects every worker to the anchor by a spring, as EASGD does.

  .. math:: w_i \leftarrow w_i - \tfrac{\beta}{N} (w_i - a), \qquad
            a \leftarrow a + \beta (\tfrac1N \sum_j w_j - a)

  A drain relaxes the springs, to :math:`(a + \sum_i w_i) / (N + 1)`.

  Attributes:
    moving_rate: beta in [0, 1].

  Source and departures: `methods.easgd`.
  """

  moving_rate: signatures.UnitFloat = 0.9

  def move(
    self, end: _round.Round, mean: PyTree, exact: PyTree, relative: bool
  ) -> _round.Round:
    del exact
    beta = _anchor.scalar(self.moving_rate)
    mean = end.position(mean, relative)
    # All N springs pull at the anchor, each by beta / N: beta times the mean.
    anchor = jax.tree.map(
      lambda a, m: a + beta.astype(a.dtype) * (m - a), end.anchor, mean
    )
    return end._replace(anchor=anchor)

  def place(self, before: _round.Round, after: _round.Round) -> PyTree:
    """Returns the worker, moved along its spring."""
    # The old anchor, because both ends of a spring are moved at once.
    del after
    alpha = _anchor.scalar(self.moving_rate) / before.num_workers
    return jax.tree.map(
      lambda w, a: w - alpha.astype(a.dtype) * (w - a),
      before.local, before.anchor,
    )  # fmt: skip

  def settle(
    self, end: _round.Round, mean: PyTree, exact: PyTree, relative: bool
  ) -> _round.Round:
    """Returns the springs at rest: the mean of workers and anchor."""
    del exact
    part = end.num_workers / (end.num_workers + 1)
    mean = end.position(mean, relative)
    anchor = jax.tree.map(lambda a, m: a + part * (m - a), end.anchor, mean)
    return end._replace(anchor=anchor)


@states.declare(shared=("velocity",))
class PulledAnchorState(NamedTuple):
  """State of `PulledAnchor`.

  Attributes:
    velocity: The anchor's momentum, float32.
  """

  velocity: PyTree


@signatures.checked
@dataclasses.dataclass(frozen=True, eq=False)
class PulledAnchor(_Apart):
  r"""Pulls the workers to a mean with momentum, as Overlap-Local-SGD does.

  .. math:: v \leftarrow \mu v + \tfrac1N \sum_j w_j - z, \qquad
            z \leftarrow z + v, \qquad
            w_i \leftarrow (1 - \alpha) w_i + \alpha z

  with the anchor z.  The method sends the pulled w, and receives their mean
  one round late.

  Attributes:
    pull: alpha in [0, 1].
    momentum: mu in [0, 1]; 0 makes z the mean.

  Source and departures: `methods.overlap_local_sgd`.
  """

  pull: signatures.UnitFloat = 0.6
  momentum: signatures.UnitFloat = 0.0

  def init(self, anchor: PyTree) -> PulledAnchorState:
    return PulledAnchorState(jax.tree.map(jnp.zeros_like, anchor))

  def move(
    self, end: _round.Round, mean: PyTree, exact: PyTree, relative: bool
  ) -> _round.Round:
    del exact
    mu = _anchor.scalar(self.momentum)
    mean = end.position(mean, relative)
    velocity = jax.tree.map(
      lambda v, m, a: mu.astype(a.dtype) * v + (m - a),
      end.memory.velocity, mean, end.anchor,
    )  # fmt: skip
    # Without a momentum the anchor is the mean to the bit.
    anchor = jax.tree.map(
      lambda m, v, a: m + (v - (m - a)), mean, velocity, end.anchor
    )
    return end._replace(anchor=anchor, memory=PulledAnchorState(velocity))

  def place(self, before: _round.Round, after: _round.Round) -> PyTree:
    """Returns a part of the way to the new anchor."""
    alpha = _anchor.scalar(self.pull)
    return jax.tree.map(
      lambda w, a: w + alpha.astype(a.dtype) * (a - w),
      before.local, after.anchor,
    )  # fmt: skip
