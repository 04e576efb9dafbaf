"""Compression: a reducer of the workers' trees, with its feedback."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks, codecs, collectives, signatures, states
from jdist.reducers import _compressed, _feedback, _reducer, _sharded
from jdist.states import PyTree


@states.declare(shared=("step",), averages=True)
class CompressionState(NamedTuple):
  """State of a `Compression`.

  Attributes:
    step: The number of means so far, int32 scalar, equal on all workers, from
      which the random numbers of the next one are drawn.
    reducer: The reducer's state.
    feedback: The feedback's state, `()` without one.
  """

  step: jax.Array
  reducer: PyTree
  feedback: PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Compression:
  """Takes the workers' mean of a tree by fewer bytes.

  All workers decode the same bytes in the same way, so that the mean is equal
  to the bit on all of them.  The first state may depend on the number of
  workers: make it where the axis is bound, for instance
  `workers.jit(optimizer.init)(params)`.

  Attributes:
    reducer: How the mean is taken; a codec becomes
      `reducers.compressed(codec)`.
    feedback: How the part of a tree that is not sent is used later:
      `ErrorFeedback()`, `EF21()`, `MomentumCorrection()`; None drops it.
      `MajorityVote` leaves nothing out and takes `Smoothing()` or None.
    seed: The seed of codecs that draw random numbers; None is 0.
    specs: For workers that are themselves sharded, `Workers.specs(params)`:
      every device then reduces its own shards, with its part of a feedback's
      state.  With None the compiler gathers leaves first.

  Raises:
    ValueError: If an argument is of another kind, or the feedback does not
      suit the reducer; when the state is made, and the reducer does not suit
      the parameters.

  >>> compression = Compression(codecs.TopK(k=1))
  >>> tree = {"w": jnp.array([1.0, -3.0])}
  >>> mean, _ = compression.mean(tree, compression.init(tree, None), None)
  >>> mean["w"].tolist()
  [0.0, -3.0]
  """

  reducer: Any
  feedback: _feedback.Feedback | None = None
  seed: int | None = dataclasses.field(default=None, kw_only=True)
  specs: PyTree = dataclasses.field(default=None, kw_only=True)

  def __post_init__(self) -> None:
    reducer, feedback = self.reducer, self.feedback
    if isinstance(reducer, codecs.Codec):
      reducer = _compressed.compressed(reducer)
    wanted = "a `Reducer` or a codec, for instance `codecs.Quantize(4)`"
    checks.check_type("reducer", reducer, _reducer.Reducer, wanted)
    checks.check_type(
      "feedback", feedback, _feedback.Feedback | None,
      "a feedback or None, for instance `reducers.ErrorFeedback()`",
    )  # fmt: skip
    # The default is None, because `optax.inject_hyperparams` would convert a
    # number to an array.
    seed = 0 if self.seed is None else self.seed
    seed = checks.check_structural("seed", seed, minimum=0, maximum=2**63 - 1)
    # Both checks are made here, because neither a reducer nor a feedback knows
    # with which other one it is used.
    if feedback is not None and feedback.keeps_rest and not reducer.averages:
      raise ValueError(
        "`feedback` keeps the part outside a worker's share of the mean, and "
        f"must be `Smoothing()` or None with {reducer!r}, whose mean is not "
        f"made of shares (it is decided by vote), got {feedback}."
      )
    if feedback is not None and feedback.keeps_rest and not reducer.contractive:
      raise feedback.divergence_error("reducer", reducer)
    # Without a feedback the part would be lost without a word.
    left = getattr(reducer, "owner_feedback", None) == "own_share"
    if left and feedback is None:
      raise ValueError(
        "`reducer` leaves the rounding errors of its owners to a feedback "
        f"(`owner_feedback='own_share'`) and needs one, got {reducer!r} and "
        "feedback=None. Take `feedback=ErrorFeedback()`, or "
        "owner_feedback=True."
      )
    # Feedback acts on shards, too: on whole leaves the compiler would gather
    # them before each mean.
    if self.specs is not None and not isinstance(reducer, _sharded.Sharded):
      reducer = _sharded.Sharded(reducer, self.specs)
      if feedback is not None:
        feedback = _sharded.ShardedFeedback(feedback, reducer)
    object.__setattr__(self, "reducer", reducer)
    object.__setattr__(self, "feedback", feedback)
    object.__setattr__(self, "seed", seed)

  @staticmethod
  def check(value: Any) -> None:
    """Raises a ValueError unless `value` is a compression or None."""
    wanted = (
      "a `jdist.Compression`, for instance "
      "`jdist.Compression(codecs.Quantize(4), reducers.ErrorFeedback())`, or "
      "None to take the mean exactly"
    )
    checks.check_type("compression", value, Compression | None, wanted)

  def init(self, like: PyTree, axis: collectives.Axis) -> CompressionState:
    """Returns the first state for trees like `like`; the axis must be bound."""
    like = jax.eval_shape(lambda x: x, like)  # Numbers of Python, too.
    # A feedback sends at least float32, whatever the dtype of the tree.
    sent = (
      like if self.feedback is None else jax.tree.map(states.wide_like, like)
    )
    return CompressionState(
      step=jnp.zeros((), jnp.int32),
      reducer=self.reducer.init(sent, axis),
      feedback=() if self.feedback is None else self.feedback.init(like),
    )

  def mean(
    self, tree: PyTree, state: CompressionState, axis: collectives.Axis
  ) -> tuple[PyTree, CompressionState]:
    """Takes the mean in the tree's dtypes; a collective operation."""
    wanted, feedback = self.prepare(tree, state)
    note(self.reducer, wanted, axis)
    # The order is that of the papers: feedback before, reduction, feedback
    # after.
    reduce = signatures.plain(type(self.reducer).reduce)
    reduced = reduce(self.reducer, wanted, state.reducer, self.key(state), axis)
    mean, feedback = self.finish(
      reduced.mean, reduced.own_share, wanted, feedback, tree
    )
    step = optax.safe_increment(state.step)
    new = CompressionState(step, reduced.state, feedback)
    return collectives.varying((mean, new), axis)

  def flush(
    self, tree: PyTree, state: CompressionState, axis: collectives.Axis
  ) -> tuple[PyTree, CompressionState]:
    """Takes the exact mean of a tree and of all residuals."""
    # A vote and low ranks hold no residual, and keep their state.
    wanted, feedback = self.prepare(tree, state)
    held, kept = self.reducer.flush(state.reducer, wanted, axis)
    mean = jax.tree.map(
      lambda m, h: m + h.astype(m.dtype), collectives.mean(wanted, axis), held
    )
    mean, feedback = self.finish(mean, wanted, wanted, feedback, tree)
    new = state._replace(reducer=kept, feedback=feedback)
    return collectives.varying((mean, new), axis)

  def absorb(
    self, like: PyTree, state: CompressionState, axis: collectives.Axis
  ) -> CompressionState:
    """Moves the owners' residuals into the feedback of all; collective.

    Nothing is reduced, and `step` stays.  The state stays as it is without a
    feedback that can hold residuals.
    """
    if self.feedback is None:
      return state
    held, kept = self.reducer.flush(
      state.reducer, jax.tree.map(states.wide_like, like), axis
    )
    feedback = self.feedback.absorb(held, state.feedback)
    if feedback is None:
      return state
    new = state._replace(reducer=kept, feedback=feedback)
    return collectives.varying(new, axis)

  # The methods below are for streams, which take the mean in parts.

  def key(self, state: CompressionState) -> jax.Array:
    """Returns the random key of the next mean, equal on all workers."""
    # Under `vmap` other generators draw different numbers from equal keys.
    key = jax.random.key(self.seed or 0, impl="threefry2x32")
    return jax.random.fold_in(key, state.step)

  def prepare(
    self, tree: PyTree, state: CompressionState
  ) -> tuple[PyTree, PyTree]:
    """Returns the tree that a worker should send, and the feedback's state."""
    if self.feedback is None:
      return tree, ()
    prepare = signatures.plain(type(self.feedback).prepare)
    return prepare(self.feedback, tree, state.feedback)

  def finish(
    self, mean: PyTree, share: PyTree, wanted: PyTree, state: PyTree, like: Any
  ) -> tuple[PyTree, PyTree]:
    """Returns the result in the dtypes of `like`, and the feedback's state."""
    if self.feedback is None:
      return optax.tree.cast_like(mean, like), ()
    finish = signatures.plain(type(self.feedback).finish)
    mean, share = (widened(x, wanted) for x in (mean, share))
    mean, feedback = finish(self.feedback, mean, share, wanted, state)
    out = optax.tree.cast_like(mean, like)
    wide, narrow = jax.tree.leaves(mean), jax.tree.leaves(out)
    if [x.dtype for x in wide] == [x.dtype for x in narrow]:
      return out, feedback
    out = jax.tree.map(lambda m, x: states.rounded(m, x.dtype), mean, like)

    def left(mean: jax.Array, out: jax.Array) -> jax.Array:
      found = mean - out.astype(mean.dtype)
      return jnp.where(jnp.isfinite(found), found, 0.0)

    # Without this a mean of bfloat16 parameters would lose a part of its bits
    # in each round, which no residual would hold.
    rest = jax.tree.map(left, mean, out)
    return out, self.feedback.keep_cast(rest, feedback)


def widened(tree: PyTree, like: PyTree) -> PyTree:
  """Returns a tree in the dtypes of another one where these are wider."""
  # Codecs send float32 for float64, which strict promotion refuses to add.
  return jax.tree.map(
    lambda x, y: x.astype(max(x.dtype, y.dtype, key=lambda d: d.itemsize)),
    tree, like,
  )  # fmt: skip


def mean_of(
  compression: Compression | None,
  tree: PyTree,
  exact: PyTree,
  state: PyTree,
  axis: collectives.Axis,
) -> tuple[PyTree, PyTree, PyTree]:
  """Takes the workers' mean of a tree, compressed or not; collective.

  Args:
    compression: How the mean of `tree` is taken; None takes it exactly.
    tree: The tree of this worker.
    exact: A few numbers whose mean is always taken exactly.
    state: The state of the compression; `()` without one.
    axis: The axis of the workers.

  Returns:
    The means of both trees, and the new state.
  """
  # One all-reduce for both where none is compressed.
  if compression is None:
    mean, others = collectives.mean((tree, exact), axis)
    return mean, others, state
  mean, state = compression.mean(tree, state, axis)
  return mean, collectives.mean(exact, axis), state


def flush_of(
  compression: Compression | None,
  tree: PyTree,
  state: PyTree,
  axis: collectives.Axis,
) -> tuple[PyTree, PyTree]:
  """Takes the exact mean of a tree and of all residuals; collective."""
  if compression is None:
    return collectives.mean(tree, axis), state
  return compression.flush(tree, state, axis)


# A context variable, because programs may be traced in several threads.
_OPEN: contextvars.ContextVar[list[_reducer.Bits] | None] = (
  contextvars.ContextVar("reductions", default=None)
)


@contextlib.contextmanager
def reductions() -> Iterator[list[_reducer.Bits]]:
  """Collects the bits of every reduction that is traced in this context.

  Reductions in a conditional count as well.

  >>> with reductions() as found:
  ...   note(_reducer.Exact(), jax.ShapeDtypeStruct((25,), "float32"), None)
  >>> found
  [Bits(payload=800, sent=0.0)]
  """
  found: list[_reducer.Bits] = []
  token = _OPEN.set(found)
  try:
    yield found
  finally:
    _OPEN.reset(token)


def note(
  reducer: _reducer.Reducer, like: PyTree, axis: collectives.Axis
) -> None:
  """Adds a reduction to an open `reductions`; call it with a reducer."""
  found = _OPEN.get()
  if found is not None:
    found.append(reducer.num_bits(like, reducer.num_workers(axis)))
