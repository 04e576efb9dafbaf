"""Control variates: estimates of how a worker's gradient is biased."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdist import signatures, states
from jdist.states import PyTree
from jdist.transforms.local import _anchor, _round


@states.declare(shared=("mean", "distance", "lag"))
class ControlVariatesState(NamedTuple):
  """State of `ControlVariates`.

  Attributes:
    own: This worker's control variate, float32.
    mean: The mean of all workers' control variates, float32.
    distance: Sum of the learning rates of this round's steps, float32 scalar.
    lag: Sum over this round's steps of their learning rate times (the mean with
      which they were corrected - `mean`), float32; zero unless a late mean was
      applied within the round.
  """

  own: PyTree
  mean: PyTree
  distance: jax.Array
  lag: PyTree


@signatures.checked
@dataclasses.dataclass(frozen=True, eq=False)
class ControlVariates(_round.SyncRule):
  r"""Corrects gradients for the drift of unequal workers, as SCAFFOLD does.

  .. math:: g_i &\leftarrow g_i - c_i + c \text{ in every step; at the end} \\
            c_i &\leftarrow c_i + \frac{\Delta_i - \sum_s \eta_s c_s}
                    {\sum_s \eta_s}, \qquad
            c \leftarrow \tfrac1N \sum_j c_j, \qquad
            a \leftarrow a - \eta_g \tfrac1N \sum_j \Delta_j

  where :math:`c_s` is the c of step s, constant in a round unless a late mean
  is applied within it.  A message is twice as long as the parameters.  With a
  compression the *change* of the variates is sent, as in the paper; a late
  change moves c when it is applied.

  Attributes:
    learning_rate: The inner optimizer's learning rate, a number or a schedule
      of the local step.
    global_learning_rate: eta_g > 0; with 1 the anchor becomes the mean.

  Source and departures: `methods.scaffold`.
  """

  learning_rate: signatures.Rate
  global_learning_rate: signatures.PositiveScalar = 1.0

  def init(self, anchor: PyTree) -> ControlVariatesState:
    zeros = jax.tree.map(jnp.zeros_like, anchor)
    return ControlVariatesState(zeros, zeros, jnp.zeros((), jnp.float32), zeros)

  def correct(
    self, updates: PyTree, memory: ControlVariatesState, step: jax.Array
  ) -> tuple[PyTree, ControlVariatesState]:
    # In this order equal variates add exactly zero.
    updates = jax.tree.map(
      lambda g, own, all_: (g.astype(own.dtype) + (all_ - own)).astype(g.dtype),
      updates, memory.own, memory.mean,
    )  # fmt: skip
    rate = self.learning_rate
    rate = rate(step) if callable(rate) else rate
    distance = memory.distance + _anchor.scalar(rate)
    return updates, memory._replace(distance=distance)

  def message(self, end: _round.Round, relative: bool) -> tuple[PyTree, PyTree]:
    """Returns the parameters and the variate, or the changes of both."""
    renewed = _renewed(end)
    if not relative:
      return end.local, renewed
    changes = jax.tree.map(jnp.subtract, renewed, end.memory.own)
    return end.progress, changes

  def like(self, tree: PyTree) -> tuple[PyTree, PyTree]:
    return tree, tree

  def progress_in(self, message: tuple[PyTree, PyTree]) -> PyTree:
    return message[0]

  def depart(self, end: _round.Round) -> ControlVariatesState:
    """Returns the state with the worker's new variate."""
    # Only the mean of the variates waits for the other workers.
    memory = end.memory
    return memory._replace(
      own=_renewed(end),
      distance=jnp.zeros((), jnp.float32),
      lag=jax.tree.map(jnp.zeros_like, memory.lag),
    )

  def move(
    self,
    end: _round.Round,
    mean: tuple[PyTree, PyTree],
    exact: PyTree,
    relative: bool,
  ) -> _round.Round:
    del exact
    (first, variate), memory = mean, end.memory
    rate = _anchor.scalar(self.global_learning_rate)
    if relative:
      first = jax.tree.map(jnp.subtract, end.anchor, first)
      variate = jax.tree.map(jnp.add, memory.mean, variate)
      # The steps of this round so far were corrected with the old mean.
      lag = jax.tree.map(
        lambda x, old, new: x + memory.distance.astype(x.dtype) * (old - new),
        memory.lag, memory.mean, variate,
      )  # fmt: skip
      memory = memory._replace(lag=lag)
    # With a rate of 1 the anchor is the mean to the bit.
    anchor = jax.tree.map(
      lambda m, a: m + (rate - 1).astype(a.dtype) * (m - a), first, end.anchor
    )
    return end._replace(anchor=anchor, memory=memory._replace(mean=variate))


def _renewed(end: _round.Round) -> PyTree:
  """Returns this worker's control variate after the round."""
  memory, distance = end.memory, end.memory.distance
  # A schedule may end at zero, where the quotient would be infinite.
  per_rate = jnp.where(distance > 0, 1.0 / distance, 0.0)

  def one(
    own: jax.Array, all_: jax.Array, progress: jax.Array, lag: jax.Array
  ) -> jax.Array:
    seen = (own - all_) + (progress - lag) * per_rate.astype(progress.dtype)
    return jnp.where(distance > 0, seen, own)

  return jax.tree.map(one, memory.own, memory.mean, end.progress, memory.lag)
