"""Slow momentum: a momentum over rounds, around the inner optimizer's."""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jdist import checks, signatures, states
from jdist.states import PyTree
from jdist.transforms.local import _anchor, _round

Buffers = Literal["maintain", "reset", "average"]  # Momenta after a round.


@states.declare(shared=("velocity", "learning_rate"))
class SlowMomentumState(NamedTuple):
  """State of `SlowMomentum`.

  Attributes:
    velocity: The slow momentum times the learning rate of its last round,
      float32, so that nothing is divided by a rate of zero.
    learning_rate: That rate, float32 scalar.
  """

  velocity: PyTree
  learning_rate: jax.Array


@signatures.checked
@dataclasses.dataclass(frozen=True, eq=False)
class SlowMomentum(_round.Average):
  r"""Adds a momentum to the mean progress of rounds, as SlowMo does.

  .. math:: u \leftarrow \beta u + \frac1\gamma (a - \tfrac1N \sum_j w_j),
            \qquad a \leftarrow a - \alpha \gamma u, \qquad w_i \leftarrow a

  with the learning rate :math:`\gamma` of the round's last step; a late mean is
  applied with that of the round in which it is due.

  Attributes:
    learning_rate: The inner optimizer's learning rate, a number or a schedule
      of the local step.
    slow_learning_rate: alpha > 0.
    momentum: beta in [0, 1).
    buffers: The treatment of the inner optimizer's moments (`states`) when a
      round's mean is applied: "maintain" leaves each worker its own, "reset"
      initializes them again, "average" takes the workers' mean, never
      compressed.

  Source and departures: `methods.slow_mo`.
  """

  learning_rate: signatures.Rate
  slow_learning_rate: signatures.PositiveScalar = 1.0
  momentum: jax.typing.ArrayLike = 0.5
  buffers: Buffers = "maintain"

  def __post_init__(self) -> None:
    checks.check_continuous(
      "slow_momentum", self.momentum, high=1.0, open_high=True
    )

  @property
  def exact_parts(self) -> bool:  # type: ignore[override]
    """Whether momenta are averaged."""
    return self.buffers == "average"

  def init(self, anchor: PyTree) -> SlowMomentumState:
    zeros = jax.tree.map(jnp.zeros_like, anchor)
    return SlowMomentumState(zeros, jnp.zeros((), jnp.float32))

  def exact(self, end: _round.Round) -> list[jax.Array]:
    """Returns the inner optimizer's momenta, if they are averaged."""
    if self.buffers != "average":
      return []
    return [_anchor.wide(x) for x in _buffers(end.inner)]

  def move(
    self,
    end: _round.Round,
    mean: PyTree,
    exact: list[jax.Array],
    relative: bool,
  ) -> _round.Round:
    # The velocity holds the old rate as a factor, see `SlowMomentumState`.
    rate = self.learning_rate
    rate = _anchor.scalar(rate(end.step) if callable(rate) else rate)
    before = end.memory.learning_rate
    ratio = jnp.where(before > 0, rate / before, 1.0)
    mu = _anchor.scalar(self.momentum) * ratio
    slow = _anchor.scalar(self.slow_learning_rate)
    progress, mean = mean, end.position(mean, relative)
    if not relative:
      progress = jax.tree.map(jnp.subtract, end.anchor, mean)
    velocity = jax.tree.map(
      lambda v, p: mu.astype(p.dtype) * v + p, end.memory.velocity, progress
    )
    # In this order the anchor is the mean to the bit without a momentum and
    # with a slow rate of 1.
    anchor = jax.tree.map(
      lambda m, v, p: m - (slow.astype(p.dtype) * v - p),
      mean, velocity, progress,
    )  # fmt: skip
    inner = end.inner
    if self.buffers == "reset":
      fresh = end.optimizer.init(end.params)
      inner = _with_buffers(inner, _buffers(fresh))
    elif self.buffers == "average":
      inner = _with_buffers(inner, exact)
    memory = SlowMomentumState(velocity, rate)
    return end._replace(anchor=anchor, inner=inner, memory=memory)


def _buffers(state: PyTree) -> list[jax.Array]:
  # Counters stay, so that schedules continue; rounds move iterates.
  laws = jax.tree.leaves(states.find_laws(state))
  pairs = zip(jax.tree.leaves(state), laws, strict=True)
  return [x for x, law in pairs if law == "moment"]


def _with_buffers(state: PyTree, buffers: list[jax.Array]) -> PyTree:
  new = iter(buffers)
  return jax.tree.map(
    lambda x, law: next(new).astype(x.dtype) if law == "moment" else x,
    state, states.find_laws(state),
  )  # fmt: skip
