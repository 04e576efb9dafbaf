"""Taking a mean by few bytes: a reducer, a feedback and a seed as one."""

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jdist import checks, codecs, collectives
from jdist.reducers import (
  _feedback,
  _ledger,
  _reducer,
  _sharded,
  _sharded_feedback,
)

PyTree: TypeAlias = Any


class ReductionState(NamedTuple):
  """What a mean by few bytes remembers.

  Attributes:
    step: means so far, int32 scalar, equal on all workers; the random numbers
      of the next one come from it.
    shared: those leaves of the reducer's state that are equal on all workers;
      None in the places of the others.
    own: the others, each worker its own; None in the places of the shared.
    feedback: the feedback's state, `()` without one.
  """

  step: jax.Array
  shared: PyTree
  own: PyTree
  feedback: PyTree


class Reduction:
  """The workers' mean through a reducer, with feedback, and its state."""

  def __init__(
    self,
    axis: collectives.Axis,
    reducer: _reducer.Reducer,
    feedback: _feedback.Feedback | None = None,
    seed: int | None = None,
    specs: PyTree = None,
  ):
    check_reducer("reducer", reducer)
    _feedback.check_feedback("feedback", feedback)
    if feedback is not None and feedback.keeps_rest and not reducer.averages:
      raise ValueError(
        "`feedback` keeps what is not in a worker's share of the mean, and "
        f"must be `Smoothing()` or None with {reducer!r}, whose mean is not "
        f"made of shares (it is decided by vote), got {feedback}."
      )
    left = getattr(reducer, "owner_feedback", None) == "own_share"
    if left and feedback is None:
      raise ValueError(
        "`reducer` leaves what its owners round away to a feedback "
        f"(`owner_feedback='own_share'`) and needs one, got {reducer!r} and "
        "feedback=None. Take `feedback=ErrorFeedback()`, or "
        "owner_feedback=True."
      )
    if specs is not None:
      reducer = _sharded.Sharded(reducer, specs)
      if feedback is not None:
        feedback = _sharded_feedback.ShardedFeedback(feedback, reducer)
    # Not 0 by default: `optax.inject_hyperparams` would make it an array.
    seed = 0 if seed is None else seed
    checks.check_structural("seed", seed, minimum=0)
    self._axis, self.reducer = axis, reducer
    self._feedback, self._seed = feedback, seed

  def init(self, like: PyTree) -> ReductionState:
    """The first state, for trees like `like`; the axis must be bound."""
    sent = like
    if self._feedback is not None:
      sent = jax.tree.map(_wide_shape, like)
    shared, own = self._parted(self.reducer.init(sent, self._axis))
    return ReductionState(
      step=jnp.zeros((), jnp.int32),
      shared=shared,
      own=own,
      feedback=() if self._feedback is None else self._feedback.init(like),
    )

  def mean(
    self, tree: PyTree, state: ReductionState
  ) -> tuple[PyTree, ReductionState]:
    """The mean in the tree's dtypes, equal on all workers; collective.

    Args:
      tree: this worker's floats.
      state: this worker's.
    """
    key = self.key(state)
    wanted, feedback = self.prepared(tree, state)
    _ledger.note(self.reducer, wanted, self._axis)
    reduced = self.reducer.reduce(wanted, self.joined(state), key, self._axis)
    mean, feedback = self.finished(
      reduced.mean, reduced.own_share, wanted, feedback
    )
    mean, feedback = self._cast(mean, tree, feedback)
    new = self.with_states(state, reduced.state)._replace(
      step=optax.safe_increment(state.step), feedback=feedback
    )
    return collectives.varying((mean, new), self._axis)

  def exact_mean(
    self, tree: PyTree, state: ReductionState
  ) -> tuple[PyTree, ReductionState]:
    """The same with every bit sent, and what the workers and owners hold back.

    Of a vote or of low ranks the state stays as it is: no mass is in it.
    """
    wanted, feedback = self.prepared(tree, state)
    held, kept = self.reducer.release(self.joined(state), wanted, self._axis)
    mean = jax.tree.map(
      lambda m, h: (m + h).astype(m.dtype),
      collectives.mean(wanted, self._axis),
      held,
    )
    mean, feedback = self.finished(mean, wanted, wanted, feedback)
    mean, feedback = self._cast(mean, tree, feedback)
    new = self.with_states(state, kept)._replace(feedback=feedback)
    return collectives.varying((mean, new), self._axis)

  def handed_over(self, like: PyTree, state: ReductionState) -> ReductionState:
    """What owners hold back goes to the feedback of all; collective.

    Nothing is reduced, and `step` stays.  Without a feedback that has a place
    for it the state stays as it is.

    Args:
      like: what is reduced, for shapes and dtypes.
      state: this worker's.
    """
    if self._feedback is None:
      return state
    held, kept = self.reducer.release(
      self.joined(state), jax.tree.map(_wide_shape, like), self._axis
    )
    feedback = self._feedback.absorb(held, state.feedback)
    if feedback is None:
      return state
    new = self.with_states(state, kept)._replace(feedback=feedback)
    return collectives.varying(new, self._axis)

  @property
  def has_feedback(self) -> bool:
    """Whether what is left out is remembered."""
    return self._feedback is not None

  def key(self, state: ReductionState) -> jax.Array:
    """The random key of the next mean, equal on all workers."""
    return jax.random.fold_in(jax.random.key(self._seed), state.step)

  def joined(self, state: ReductionState) -> PyTree:
    """The reducer's state."""
    return _joined(state.shared, state.own)

  def with_states(
    self, state: ReductionState, states: PyTree
  ) -> ReductionState:
    """With another state of the reducer."""
    shared, own = self._parted(states)
    return state._replace(shared=shared, own=own)

  def prepared(
    self, tree: PyTree, state: ReductionState
  ) -> tuple[PyTree, PyTree]:
    """What is wanted to be sent, and the feedback's state."""
    if self._feedback is None:
      return tree, ()
    return self._feedback.prepare(tree, state.feedback)

  def finished(
    self, mean: PyTree, own_share: PyTree, wanted: PyTree, feedback: PyTree
  ) -> tuple[PyTree, PyTree]:
    """What comes out, and the feedback's new state."""
    if self._feedback is None:
      return mean, ()
    return self._feedback.finish(mean, own_share, wanted, feedback)

  def _cast(
    self, mean: PyTree, tree: PyTree, feedback: PyTree
  ) -> tuple[PyTree, PyTree]:
    """The mean in the dtypes of the tree; the feedback keeps the rest."""
    out = like(mean, tree)
    pairs = zip(jax.tree.leaves(mean), jax.tree.leaves(out), strict=True)
    if self._feedback is None or all(m.dtype == o.dtype for m, o in pairs):
      return out, feedback

    def left(mean: jax.Array, out: jax.Array) -> jax.Array:
      found = mean - out.astype(mean.dtype)
      return jnp.where(jnp.isfinite(found), found, 0.0)

    rest = jax.tree.map(left, mean, out)
    return out, self._feedback.keep_cast(rest, feedback)

  def _parted(self, state: PyTree) -> tuple[PyTree, PyTree]:
    labels = self.reducer.shared(state)
    shared = jax.tree.map(lambda x, s: x if s else None, state, labels)
    own = jax.tree.map(lambda x, s: None if s else x, state, labels)
    return shared, own


def make(
  axis: collectives.Axis,
  reducer: _reducer.Reducer | None,
  feedback: _feedback.Feedback | None,
  seed: int | None,
  specs: PyTree = None,
) -> Reduction | None:
  """A reduction; None without a reducer.

  Raises:
    ValueError: when an argument is of another kind, or there is nothing that
      the feedback could be of.
  """
  _feedback.check_feedback("feedback", feedback)
  if seed is not None:
    checks.check_structural("seed", seed, minimum=0)
  if reducer is not None:
    return Reduction(axis, reducer, feedback, seed, specs)
  if specs is not None:
    raise ValueError(
      "`specs` says how leaves are split that a reducer reduces and needs "
      "`reducer`; an exact mean needs none. Got reducer=None."
    )
  if feedback is not None:
    raise ValueError(
      "`feedback` keeps what a reducer leaves out and needs `reducer`, for "
      "instance `reducer=_compressed.compressed(codecs.TopK(0.01))`, got "
      f"reducer=None, {feedback=}."
    )
  return None


def check_reducer(name: str, value: Any) -> None:
  """Raises a ValueError unless `value` is a reducer."""
  if isinstance(value, _reducer.Reducer):
    return
  remedy = "for instance `reducers.Exact()`"
  if isinstance(value, codecs.Codec):
    remedy = "`reducers.compressed(codec)` makes one of a codec"
  raise ValueError(
    f"`{name}` must be a `reducers.Reducer`, {remedy}; got {value!r}."
  )


def _joined(shared: PyTree, own: PyTree) -> PyTree:
  return jax.tree.map(
    lambda s, o: o if s is None else s,
    shared,
    own,
    is_leaf=lambda x: x is None,
  )


def _wide_shape(x: Any) -> jax.ShapeDtypeStruct:
  dtype = jnp.float32 if x.dtype.itemsize < 4 else x.dtype
  return jax.ShapeDtypeStruct(jnp.shape(x), dtype)


def like(mean: PyTree, tree: PyTree) -> PyTree:
  """A mean in the dtypes of what it is of."""
  return jax.tree.map(lambda m, x: m.astype(x.dtype), mean, tree)
