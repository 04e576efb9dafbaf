"""Schedules of reducers, for a warm-up while gradients change quickly."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks, collectives, states
from jdist.reducers import _compression, _reducer
from jdist.states import PyTree

# Deep Gradient Compression leaves out 75, 93.75, 98.4375 and 99.6 %.
DGC_RATIOS = (0.25, 0.0625, 0.015625, 0.004)


@states.declare(shared=("step",))
class ScheduledState(NamedTuple):
  """State of `Scheduled`.

  Attributes:
    step: The number of means so far, int32 scalar, equal on all workers.
    phases: The state of each reducer.
  """

  step: jax.Array
  phases: tuple[PyTree, ...]


@dataclasses.dataclass(frozen=True)
class Scheduled(_reducer.Reducer):
  """Takes means by a sequence of reducers, each for some steps.

  Shapes are static, so the phases are branches of a conditional, and nothing
  hides their communication.  Each phase starts with the first state of its
  reducer (an owner's residual, a low rank), and the owners' residuals of
  earlier phases stay in the state until `drain` flushes them.  A feedback
  continues.

  Attributes:
    phases: Pairs of the first step after the phase, increasing, and the
      reducer.  The last phase has no end, and its step is None.

  Raises:
    ValueError: If the steps do not increase, or the last one is not None.
  """

  phases: tuple[tuple[int | None, _reducer.Reducer], ...]

  def __post_init__(self) -> None:
    object.__setattr__(self, "phases", tuple(map(tuple, self.phases)))
    ends = [end for end, _ in self.phases]
    if not ends or ends[-1] is not None or None in ends[:-1]:
      raise ValueError(
        "`phases` must end with a phase without an end, `(None, reducer)`, "
        f"and have no other, got ends {ends}."
      )
    before = 0
    for end in ends[:-1]:
      checks.check_structural("phases", end, minimum=before + 1)
      before = end or 0
    for _, reducer in self.phases:
      _reducer.check_reducer("phases", reducer)

  @property
  def reducers(self) -> tuple[_reducer.Reducer, ...]:
    return tuple(reducer for _, reducer in self.phases)

  def init(self, like: PyTree, axis: collectives.Axis) -> ScheduledState:
    return ScheduledState(
      step=jnp.zeros((), jnp.int32),
      phases=tuple(r.init(like, axis) for _, r in self.phases),
    )

  def reduce(
    self,
    tree: PyTree,
    state: ScheduledState,
    key: jax.Array,
    axis: collectives.Axis,
  ) -> _reducer.Reduced:
    """Takes the mean by the phase's reducer."""
    # On an agreed step the switch stays one under vmap; otherwise every phase
    # would send in every step.
    phase = jnp.zeros((), jnp.int32)
    for end, _ in self.phases[:-1]:
      assert end is not None
      over = collectives.agreed(state.step >= end, axis)
      phase = phase + over.astype(jnp.int32)

    def branch(number: int) -> Callable[..., _reducer.Reduced]:
      def one(tree: PyTree, states: Any, key: jax.Array) -> _reducer.Reduced:
        end, reducer = self.phases[number]
        start = 0 if number == 0 else self.phases[number - 1][0]
        assert start is not None
        # The phase is kept in the names of a program, for the count of bytes.
        with collectives.phase(start, end):
          reduced = reducer.reduce(tree, states[number], key, axis)
        share = _compression.widened(reduced.own_share, tree)
        # Every branch returns the states of all phases, because branches must
        # have one type.
        states = (*states[:number], reduced.state, *states[number + 1 :])
        reduced = _reducer.Reduced(reduced.mean, share, states)
        return collectives.varying(reduced, axis)

      return one

    branches = [branch(i) for i in range(len(self.phases))]
    mean, own_share, phases = jax.lax.switch(
      phase, branches, tree, state.phases, key
    )
    new = ScheduledState(optax.safe_increment(state.step), phases)
    return _reducer.Reduced(mean, own_share, new)

  def flush(
    self, state: ScheduledState, like: PyTree, axis: collectives.Axis
  ) -> tuple[PyTree, ScheduledState]:
    # Owners may still hold residuals of a phase that is over.
    pairs = zip(self.reducers, state.phases, strict=True)
    flushed = [reducer.flush(one, like, axis) for reducer, one in pairs]
    residuals, phases = zip(*flushed, strict=True)
    wide = (_compression.widened(x, like) for x in residuals)
    return functools.reduce(optax.tree.add, wide), state._replace(phases=phases)

  def check_chunks(self) -> None:
    """Raises a ValueError, because chunks are sent outside of conditionals."""
    raise _reducer.unsuited(
      self,
      "chunks",
      "its phases are branches of a conditional, which hides nothing.",
    )

  def num_bits(self, like: PyTree, num_workers: int) -> _reducer.Bits:
    """Counts the bits of the last phase."""
    return self.phases[-1][1].num_bits(like, num_workers)


def warm_up(
  make: Callable[[float], _reducer.Reducer],
  steps_per_phase: int,
  final_ratio: float = 0.001,
) -> Scheduled:
  """Sends a smaller part of the gradients in every phase.

  Args:
    make: a function from the part of the entries that is sent to a reducer, for
      instance `lambda ratio: reducers.compressed(codecs.TopK(ratio))`.
    steps_per_phase: The steps of each phase, an epoch in the paper.
    final_ratio: The part that is sent after the last phase, in (0, 1].  Earlier
      phases send those of the paper's 25, 6.25, 1.5625 and 0.4 % that are
      larger.

  References:
    Lin et al., Deep Gradient Compression (arXiv 1712.01887), section 3.3 and
    the authors' code.
  """
  steps_per_phase = checks.check_structural(
    "steps_per_phase", steps_per_phase, minimum=1
  )
  checks.check_continuous("final_ratio", final_ratio, high=1.0, open_low=True)
  before = [ratio for ratio in DGC_RATIOS if ratio > final_ratio]
  phases = [
    (steps_per_phase * (i + 1), make(ratio)) for i, ratio in enumerate(before)
  ]
  return Scheduled((*phases, (None, make(final_ratio))))
