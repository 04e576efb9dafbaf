"""A round of local steps: its clock, and the rules that end it.

A sync rule is a frozen dataclass of hyper-parameters with pure functions for
one worker.  It sends nothing: the synchronizer takes one mean a round, exactly
or compressed, at once or while the next round is computed.

    correct            in every step: the gradient that the inner optimizer gets
    message            at the round's end: the tree whose mean is taken
    depart             the rule's state once the message is sent
    move               the mean is known: the new anchor
    place              where this worker starts its next round
"""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks, collectives, states
from jdist.states import PyTree
from jdist.transforms import intervals
from jdist.transforms.local import _anchor


@states.declare(
  shared=(
    "step",
    "round",
    "round_step",
    "interval",
    "next_interval",
    "synchronized",
    "interval_state",
  )
)
class RoundClock(NamedTuple):
  """A worker's position in its rounds.

  Attributes:
    step: Local steps so far, int32 scalar.
    round: Rounds so far, int32 scalar.
    round_step: Local steps so far in this round, int32 scalar.
    interval: Local steps of this round, int32 scalar.
    next_interval: Local steps of the next round, int32 scalar, so that a host
      can prepare for it.
    synchronized: Whether the last update ended a round, bool scalar.
    interval_state: The interval policy's state.
    round_loss: Sum of this round's losses, float32 scalar, each worker its
      own; `()` when the interval needs no loss.
  """

  step: jax.Array
  round: jax.Array
  round_step: jax.Array
  interval: jax.Array
  next_interval: jax.Array
  synchronized: jax.Array
  interval_state: PyTree
  round_loss: Any

  def is_over(self) -> jax.Array:
    """Returns whether the round has had all of its steps."""
    return self.round_step >= self.interval

  def is_begun(self) -> jax.Array:
    """Returns whether the round has had a step."""
    return self.round_step > 0

  def mean_loss(self) -> Any:
    """Returns this worker's mean loss of the round; `()` if not needed."""
    if isinstance(self.round_loss, tuple):
      return ()
    return self.round_loss / self.round_step.astype(jnp.float32)

  def advance(self, loss: Any) -> "RoundClock":
    """Counts a local step, and its loss where the interval needs it."""
    clock = self._replace(
      step=optax.safe_increment(self.step),
      round_step=optax.safe_increment(self.round_step),
    )
    if isinstance(self.round_loss, tuple):
      return clock
    return clock._replace(round_loss=self.round_loss + _checked_loss(loss))

  def end(
    self, policy: intervals.IntervalPolicy, mean_loss: Any
  ) -> "RoundClock":
    """Ends a round, and decides the interval after the next one.

    The interval is chosen a round ahead: the host reads it while the device
    computes, and never waits for the loss of the round that just ended.
    """
    # A policy that needs no loss must not depend on one: the program would wait
    # for its all-reduce.
    following, interval_state = _next(
      policy, self, mean_loss if policy.needs_loss else None
    )
    return self._without_loss()._replace(
      round=optax.safe_increment(self.round),
      round_step=jnp.zeros_like(self.round_step), interval=self.next_interval,
      next_interval=following, synchronized=jnp.asarray(True),
      interval_state=interval_state,
    )  # fmt: skip

  def cut_short(self, policy: intervals.IntervalPolicy) -> "RoundClock":
    """Ends the round early; changes nothing in a round without steps.

    The interval is decided as without a loss.
    """
    # A drain may come between two rounds, where there is nothing to end.
    begun = self.is_begun()
    following, interval_state = _next(policy, self, None)
    return self._without_loss()._replace(
      round=self.round + begun.astype(jnp.int32),
      round_step=jnp.zeros_like(self.round_step),
      interval=jnp.where(begun, self.next_interval, self.interval),
      next_interval=jnp.where(begun, following, self.next_interval),
      synchronized=jnp.asarray(True),
      interval_state=optax.tree.where(
        begun, interval_state, self.interval_state
      ),
    )

  def ahead(self) -> jax.Array:
    """Returns the places of the next two updates; see `rounds_ahead`.

    The mean is due at the round's end, so the window is the interval.
    """
    ends = self.round_step + 1 >= self.interval
    now = self.interval
    then = jnp.where(ends, self.next_interval, now)
    before = jnp.where(ends, 0, self.round_step + 1)
    rows = [now, self.round_step, now], [then, before, then]
    return jnp.stack([jnp.stack(row, -1) for row in rows], -2)

  def _without_loss(self) -> "RoundClock":
    if isinstance(self.round_loss, tuple):
      return self
    return self._replace(round_loss=jnp.zeros_like(self.round_loss))


def start_clock(policy: intervals.IntervalPolicy) -> RoundClock:
  """Returns the clock before the first step, equal on all workers."""
  interval_state = policy.init()
  zero = jnp.zeros((), jnp.int32)
  first, interval_state = policy.next(interval_state, zero, None)
  second, interval_state = policy.next(interval_state, first, None)
  # Each leaf needs its own buffer, because the state may be donated.
  first, second, interval_state = jax.tree.map(
    jnp.copy, (first, second, interval_state)
  )
  return RoundClock(
    step=zero, round=jnp.copy(zero), round_step=jnp.copy(zero), interval=first,
    next_interval=second, synchronized=jnp.asarray(True),
    interval_state=interval_state,
    round_loss=jnp.zeros((), jnp.float32) if policy.needs_loss else (),
  )  # fmt: skip


def _next(
  policy: intervals.IntervalPolicy, clock: RoundClock, loss: Any
) -> tuple[jax.Array, PyTree]:
  """Returns the interval of the round after the next one."""
  # A constant keeps the interval out of the program's arithmetic, and the
  # compiler can simplify expressions that depend on it.
  if policy.constant is not None:
    return jnp.asarray(policy.constant, jnp.int32), clock.interval_state
  # The round after the next one begins when the next one has had its steps.
  begins = clock.step + clock.next_interval
  return policy.next(clock.interval_state, begins, loss)


def _checked_loss(loss: Any) -> jax.Array:
  if loss is None:
    raise ValueError(
      "`loss` must be given to `update` when the interval is adaptive: call "
      "`optimizer.update(grads, state, params, loss=loss)`."
    )
  if jnp.shape(loss) != ():
    raise ValueError(
      "`loss` must be a scalar, the mean over this worker's batch, got shape "
      f"{jnp.shape(loss)}."
    )
  return jnp.asarray(loss).astype(jnp.float32)


class Round(NamedTuple):
  """A round at its end, as a sync rule sees it on one worker.

  Attributes:
    anchor: The anchor, float32.
    local: The worker's parameters after its last step, float32.
    progress: Where the round began less `local`: the pseudo-gradient, float32.
    params: The parameters before the last step, in their dtypes.
    inner: The inner optimizer's state.
    memory: The rule's own state.
    step: The number of the last local step, int32 scalar, from 0.
    optimizer: The inner optimizer.
    axis: The workers' axis.
  """

  anchor: PyTree
  local: PyTree
  progress: PyTree
  params: PyTree
  inner: PyTree
  memory: PyTree
  step: jax.Array
  optimizer: optax.GradientTransformation
  axis: collectives.Axis

  @property
  def num_workers(self) -> int:
    """The number of workers, N."""
    return collectives.size(self.axis)

  def position(self, mean: PyTree, relative: bool) -> PyTree:
    """Returns the mean position in a mean of positions or of differences."""
    if not relative:
      return mean
    return jax.tree.map(jnp.subtract, self.anchor, mean)


class SyncRule:
  """Moves the anchor and the workers at the end of a round of local steps.

  A message is `relative` when it is a difference from something that all
  workers know: then it can be compressed, and applied late.  Otherwise it may
  be the value that the rule needs, for instance the parameters, which saves a
  rounding.

  Attributes:
    apart: Whether the workers keep a distance from the anchor.  Their message
      is then their position, and not the progress of one round.
    exact_parts: Whether the rule averages something else uncompressed
      (`exact`); the mean of such a rule cannot be late.
  """

  apart: ClassVar[bool] = False
  exact_parts: ClassVar[bool] = False

  def init(self, anchor: PyTree) -> PyTree:
    """Returns the rule's first state, a NamedTuple of arrays or `()`."""
    del anchor
    return ()

  def correct(
    self, updates: PyTree, memory: PyTree, step: jax.Array
  ) -> tuple[PyTree, PyTree]:
    """Returns the gradients that the inner optimizer gets, and the state."""
    del step
    return updates, memory

  def message(self, end: Round, relative: bool) -> PyTree:
    """Returns the tree whose mean over the workers is taken."""
    del relative
    return end.progress

  def like(self, tree: PyTree) -> PyTree:
    """Returns the form of a relative message, for trees like the anchor."""
    return tree

  def progress_in(self, message: PyTree) -> PyTree:
    """Returns the pseudo-gradient in a relative message."""
    return message

  def exact(self, end: Round) -> PyTree:
    """Returns further trees to average, never compressed; by default none."""
    del end
    return ()

  def depart(self, end: Round) -> PyTree:
    """Returns the rule's state once the message is sent."""
    return end.memory

  def move(
    self, end: Round, mean: PyTree, exact: PyTree, relative: bool
  ) -> Round:
    """Returns the round with the new `anchor`, `memory` and `inner`.

    Args:
      end: The round at its end.
      mean: The workers' mean of `message`, float32, equal on all workers.
      exact: Their mean of `exact`; `()` where the mean is late.
      relative: The value with which `message` was called.
    """
    raise NotImplementedError

  def place(self, before: Round, after: Round) -> PyTree:
    """Returns where this worker starts its next round, float32.

    By default that is the anchor.
    """
    del before
    return after.anchor

  def settle(
    self, end: Round, mean: PyTree, exact: PyTree, relative: bool
  ) -> Round:
    """Returns the round moved by the last mean, for instance in a drain."""
    return self.move(end, mean, exact, relative)


class Average(SyncRule):
  r"""Averages parameters, as local SGD does.

  .. math:: a \leftarrow \tfrac1N \sum_i w_i, \qquad w_i \leftarrow a
  """

  def message(self, end: Round, relative: bool) -> PyTree:
    """Returns the parameters, or the progress where that is asked for."""
    # Progress would be rounded twice, so that the anchor would miss the mean.
    return end.progress if relative else end.local

  def move(
    self, end: Round, mean: PyTree, exact: PyTree, relative: bool
  ) -> Round:
    del exact
    # The mean itself, where it is known, and not the anchor plus a difference,
    # which would be rounded.
    return end._replace(anchor=end.position(mean, relative))


class OuterStep(SyncRule):
  r"""Feeds the mean pseudo-gradient to an outer optimizer, as DiLoCo does.

  .. math:: a \leftarrow a + \mathrm{outer}(\tfrac1N \sum_i (a - w_i)), \qquad
            w_i \leftarrow a

  Schedules of the outer optimizer count rounds.

  Attributes:
    optimizer: Any Optax optimizer; `optax.sgd(1.0)` is `Average` up to
      rounding.

  Source and departures: `methods.diloco`.
  """

  def __init__(self, optimizer: optax.GradientTransformation):
    self.optimizer = _anchor.lenient(optimizer, "rule")

  def init(self, anchor: PyTree) -> PyTree:
    return self.optimizer.init(anchor)

  def move(
    self, end: Round, mean: PyTree, exact: PyTree, relative: bool
  ) -> Round:
    del exact, relative
    updates, memory = self.optimizer.update(mean, end.memory, end.anchor)
    anchor = jax.tree.map(_anchor.moved, end.anchor, updates)
    return end._replace(anchor=anchor, memory=memory)


def as_rule(rule: Any) -> SyncRule:
  """Returns a sync rule; an Optax optimizer becomes the outer optimizer."""
  if rule is None:
    return Average()
  if isinstance(rule, SyncRule):
    return rule
  if isinstance(rule, optax.GradientTransformation | optax.MultiSteps):
    return OuterStep(rule)
  raise ValueError(
    "`rule` must be a sync rule, an Optax optimizer for the outer step, or "
    f"None to average parameters, got {checks.show(rule)}. For DiLoCo write "
    "`rule=optax.sgd(0.7, momentum=0.9, nesterov=True)`."
  )
