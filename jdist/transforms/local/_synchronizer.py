"""The synchronizer: local steps, and means that bring workers together."""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jdist import checks, collectives, reducers
from jdist.states import PyTree
from jdist.transforms import _control, intervals
from jdist.transforms.intervals import _policy
from jdist.transforms.local import (
  _anchor,
  _chunked_stream,
  _delayed,
  _iterates,
  _late_mean,
  _round,
  _sync_state,
)

Step: TypeAlias = _sync_state.Step
SyncState: TypeAlias = _sync_state.SyncState
LocalStepsState: TypeAlias = _sync_state.LocalStepsState
# The number of steps in which a message is streamed, and this step's part.
Sending: TypeAlias = tuple[int | None, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Synchronizer:
  """Synchronizes one tree of parameters by a mean for each round.

  It is composed of a sync rule, which says how anchor and workers move, a
  compression, which takes the mean, and a late mean, if it is not applied at
  the end of its own round.

  Attributes:
    optimizer: The inner optimizer.
    policy: The interval policy.
    axis: The workers' axis.
    rule: The sync rule.
    compression: How a mean is taken; None takes it exactly.
    late: Applies a mean later; None at the round's end.
    mix: The worker's own part where a round ends on a mixture.
  """

  optimizer: optax.GradientTransformationExtraArgs
  policy: intervals.IntervalPolicy
  axis: collectives.Axis
  rule: _round.SyncRule
  compression: reducers.Compression | None
  late: _late_mean.LateMean | None = None
  mix: jax.typing.ArrayLike | None = None

  def replaced(self, **fields: Any) -> "Synchronizer":
    """Returns the same with another `rule` or `policy`, also when late."""
    late = self.late and dataclasses.replace(self.late, **fields)
    return dataclasses.replace(self, late=late, **fields)

  def for_whole(self) -> "Synchronizer":
    """Returns the same for `Whole` trees, which hold iterates, too."""
    return self.replaced(rule=_iterates.WholeRule(self.rule))

  def init(self, params: optax.Params, inner: PyTree = ()) -> SyncState:
    """Returns the state before the first step, on the anchor."""
    _iterates.check_told(self.optimizer.init, params, inner)
    anchor = jax.tree.map(_anchor.wide_copy, params)
    if rest := _iterates.read(inner, anchor):
      _iterates.check_exact(inner, self.compression)
      whole = _iterates.Whole(anchor, tuple(map(_anchor.wide_copy, rest)))
      return _iterates.split(self.for_whole()._first(whole))
    return self._first(anchor)

  def _first(self, anchor: PyTree) -> SyncState:
    """Returns the state on an anchor."""
    memory: Any = ()
    if self.compression is not None:
      memory = self.compression.init(self.rule.like(anchor), self.axis)
    apart = self.rule.apart or self.mix is not None
    state = SyncState(
      clock=_round.start_clock(self.policy),
      anchor=anchor,
      # Each leaf needs its own buffer, because the state may be donated and an
      # optimizer may return the anchor itself, as an average of iterates does.
      memory=jax.tree.map(jnp.copy, self.rule.init(anchor)),
      kept=jnp.ones((), jnp.float32) if apart else (),
      flight=(),
      compression=memory,
    )
    return state if self.late is None else self.late.init(state)

  def update(
    self,
    updates: optax.Updates,
    state: LocalStepsState,
    params: optax.Params | None = None,
    *,
    control: _control.Control = _control.DEVICE,
    **extra_args: Any,
  ) -> tuple[optax.Updates, LocalStepsState]:
    """Takes a local step, and ends the round if it is over."""
    if params is None:
      _anchor.check_params(params, "`local_steps`")
    if state.sync.iterates != ():
      state = state._replace(sync=_iterates.join(state.sync))
      updates, state = self.for_whole().update(
        updates, state, params, control=control, **extra_args
      )
      return updates, state._replace(sync=_iterates.split(state.sync))
    sync, anchor = state.sync, state.sync.anchor
    anchor = anchor.params if isinstance(anchor, _iterates.Whole) else anchor
    # A drain passes zeros for gradients, which the inner optimizer must not
    # see.
    if control.drain:
      residuals = control.drain == "residuals"
      step = self.drain(state.inner, sync, params, residuals)
      return step.updates, LocalStepsState(step.inner, step.sync)
    if control.fragments is not None:
      _control.refuse(control, "a method without fragments", "fragments")
    # It is first in a step and reads the state: no message waits for the
    # gradients of this step, and they do not wait for it.
    sending = self.send(sync, control)
    like: Any = params
    if isinstance(params, optax.LookaheadParams):
      updates, like = _anchor.by_fast(updates, params)
    collectives.check_local(updates, self.axis, what="`updates`", like=like)
    if not collectives.same_form(anchor, params):
      _anchor.check_anchor(anchor, params)
    if like is not params:
      zeros = jax.tree.map(jnp.zeros_like, like)
      updates = optax.LookaheadParams(updates, zeros)
    updates, memory = self.rule.correct(updates, sync.memory, sync.clock.step)
    if like is not params:
      updates = updates.fast
    # The clock counts before the round may end, and so `step - 1` is the number
    # of the last local step in a `Round`.
    clock = sync.clock.advance(extra_args.get("loss"))
    interval = sync.clock.interval
    extra_args |= {"anchor": anchor, "interval_steps": interval}
    updates, inner = self.optimizer.update(
      updates, state.inner, params, **extra_args
    )
    step = Step(updates, inner, sync._replace(clock=clock, memory=memory))
    step = self.finish(step, params, sending, control)
    return step.updates, LocalStepsState(step.inner, step.sync)

  def send(self, state: SyncState, control: _control.Control) -> Sending:
    """Starts the next parts of a streamed message."""
    if self.late is None or self.late.delay.stream is None:
      if control.stream_steps not in ("fixed", None):
        raise ValueError(
          "`stream_steps` must be left out of the control of a method that "
          f"streams nothing, got {control.stream_steps}. Build it with "
          "`overlap=Delayed(stream=Stream())` to stream."
        )
      return None, None
    steps = self.late.stream_steps(control)
    if steps is None:
      return None, None
    return steps, self.late.sender.send(state, steps)

  def finish(
    self,
    step: Step,
    params: optax.Params,
    sending: Sending,
    control: _control.Control,
  ) -> Step:
    """Ends the round if it is over, after the local step."""
    late, (steps, sent), ends = self.late, sending, control.round_ends
    if late is None:
      return self._end_if(step, params, control)
    if late.delay.steps is not None:
      # The mean is applied before the round may end, because a round sends its
      # message at its end, and holds one at a time.
      step = late.receive_last(step, sent)
      step = self._arrive_if_due(late, step, params, steps, control)
      return self._end_if(step, params, control, steps)
    if ends is None:
      return self._end_if(step, params, control, steps, sent)
    step = late.receive_last(step, sent)
    if ends and steps is not None:
      step = late.lost_unless_there(step)
    elif ends and late.delay.stream is None:
      step = late.move_last(step)
    return self._end_if(step, params, control, steps)

  def _end_if(
    self,
    step: Step,
    params: optax.Params,
    control: _control.Control,
    steps: int | None = None,
    sent: Any = None,
  ) -> Step:
    """Ends the round where the host says so, or by a conditional.

    `sent` is a part of a message, streamed in `steps`, that is not stored yet.
    """
    # A host that ends rounds compiles a program for each kind of step, and none
    # of them has a conditional, in which nothing overlaps.
    if control.round_ends is not None:
      if control.round_ends:
        return self._end(step, params, steps)
      return self._go_on(step)
    over = step.sync.clock.is_over()
    late = self.late
    if late is not None and late.delay.steps is not None:
      over &= ~step.sync.flight.in_flight
    if late is not None and sent is not None:
      over &= late.sender.complete(step.sync, sent)

    # The message is stored in the conditional: see `ChunkedStream.receive`.
    def received(step: Step, sent: Any) -> Step:
      if late is None or sent is None:
        return step
      return step._replace(sync=late.sender.receive(step.sync, sent))

    return jax.lax.cond(
      collectives.agreed(over, self.axis),
      lambda step, sent, params: self._end(received(step, sent), params, steps),
      lambda step, sent, params: self._go_on(received(step, sent)),
      step, sent, params,
    )  # fmt: skip

  def _go_on(self, step: Step) -> Step:
    """Ends a step within a round."""
    clock = step.sync.clock._replace(synchronized=jnp.asarray(False))
    step = step._replace(sync=step.sync._replace(clock=clock))
    return collectives.varying(step, self.axis)

  def _end(
    self, step: Step, params: optax.Params, steps: int | None = None
  ) -> Step:
    """Ends a round; a late message was streamed in `steps`, if it was."""
    state = step.sync
    end = self._round(step, params)
    if self.late is None:
      after, target, loss, state = self._end_now(end, state)
    else:
      after, target, loss, state = self.late.end(end, state, steps)
    state = state._replace(clock=state.clock.end(self.policy, loss))
    return self._placed(step, state, end, after, target)

  def _end_now(
    self, end: _round.Round, state: SyncState
  ) -> tuple[_round.Round, PyTree, Any, SyncState]:
    """Ends a round with the mean of its own messages."""
    rule, relative = self.rule, self.compression is not None
    message = rule.message(end, relative)
    # The loss and a rule's exact means are sent with the message where that is
    # exact, too: one all-reduce.
    mean, (loss, exact), memory = reducers.mean_of(
      self.compression, message, (state.clock.mean_loss(), rule.exact(end)),
      state.compression, self.axis,
    )  # fmt: skip
    departed = end._replace(memory=rule.depart(end))
    after = rule.move(departed, mean, exact, relative)
    if self.mix is None:
      target = rule.place(end, after)
    else:
      target = _late_mean.mixed(self.mix, end.local, after.anchor)
    state = state._replace(
      anchor=after.anchor, memory=after.memory,
      kept=jax.tree.map(jnp.ones_like, state.kept), compression=memory,
    )  # fmt: skip
    return after, target, loss, state

  def _arrive_if_due(
    self,
    late: _late_mean.LateMean,
    step: Step,
    params: optax.Params,
    steps: int | None,
    control: _control.Control,
  ) -> Step:
    """Applies the mean of the last round within this one, if it is due."""
    arrives = control.arrives
    # One of them in a conditional would hide nothing of the other.
    if (arrives is None) != (control.round_ends is None):
      raise ValueError(
        "`control` must say both `round_ends` and `arrives`, or none of them, "
        "where a mean arrives within a round, got "
        f"round_ends={control.round_ends} and {arrives=}."
      )

    def arrive(step: Step, params: optax.Params, found: Any = None) -> Step:
      end = self._round(step, params)
      after, target, state = late.arrive(end, step.sync, steps, found)
      return self._placed(step, state, end, after, target)

    if arrives is None:
      # The mean is taken in one conditional and applied in another, which alone
      # waits for the step.
      due = collectives.agreed(late.is_due(step.sync, steps), self.axis)
      found = late.mean_if(due, step.sync, steps)
      return jax.lax.cond(
        due,
        lambda step, params: arrive(step, params, found),
        lambda step, params: collectives.varying(step, self.axis),
        step, params,
      )  # fmt: skip
    if not arrives:
      return step
    if steps is not None:
      step = late.lost_unless_there(step)
    return arrive(step, params)

  def drain(
    self, inner: PyTree, state: SyncState, params: optax.Params, residuals: bool
  ) -> Step:
    """Brings all that was begun into the anchor, the oldest first; no step."""
    begun = state.clock.is_begun()
    # Residuals are brought in between two rounds, too, by a mean of their own.
    if residuals and self.compression is not None:
      begun = jnp.ones_like(begun)
    rule: Any = type(getattr(self.rule, "rule", self.rule))
    # Some rules settle in another way than they move.
    relaxes = rule.settle is not _round.SyncRule.settle
    if self.rule.apart and (self.late is None or relaxes):
      # The workers keep a distance from the anchor between rounds, too.
      begun |= state.kept > 0
    end = self._round(Step(None, inner, state), params)
    if self.late is not None:
      end, state = self.late.flush(end, state)
    # The late mean comes first: a rule may measure a message from the anchor.
    end, state = self._settle(begun, end, state)
    state = state._replace(
      clock=state.clock.cut_short(self.policy), anchor=end.anchor,
      memory=end.memory, kept=jax.tree.map(jnp.zeros_like, state.kept),
    )  # fmt: skip
    if self.late is not None:
      state = self.late.clear(state)
    anchor, inner = state.anchor, end.inner
    if isinstance(anchor, _iterates.Whole):
      inner = _iterates.write(inner, anchor, end.local)
      anchor = anchor.params
    updates = _anchor.onto(anchor, params)
    return collectives.varying(Step(updates, inner, state), self.axis)

  def _settle(
    self, begun: jax.Array, end: _round.Round, state: SyncState
  ) -> tuple[_round.Round, SyncState]:
    """Moves by the exact mean of the present round, if it is `begun`."""
    rule = self.rule
    relative = self.compression is not None or not rule.apart
    message = rule.message(end, relative)
    mean, memory = reducers.flush_of(
      self.compression, message, state.compression, self.axis
    )
    memory = _anchor.either(begun, memory, state.compression)
    exact = collectives.mean(rule.exact(end), self.axis)

    def moved(end: _round.Round) -> _round.Round:
      departed = end._replace(memory=rule.depart(end))
      return rule.settle(departed, mean, exact, relative)

    end = _late_mean.change_if(begun, end, moved, self.axis)
    return end, state._replace(compression=memory)

  def _placed(
    self,
    step: Step,
    state: SyncState,
    end: _round.Round,
    after: _round.Round,
    target: PyTree,
  ) -> Step:
    """Returns the step that places the worker and its iterates."""
    local, inner = end.local, after.inner
    if isinstance(target, _iterates.Whole):
      inner = _iterates.write(inner, target, local)
      local, target = local.params, target.params
    # A worker that stays where it is keeps its inner update to the bit.
    updates = _anchor.towards(step.updates, target, local)
    return collectives.varying(Step(updates, inner, state), self.axis)

  def _round(self, step: Step, params: optax.Params) -> _round.Round:
    """Returns a rule's view, with the progress since the round's start."""
    state = step.sync
    if step.updates is None:  # A drain takes no step.
      local = jax.tree.map(_anchor.wide, params)
    else:
      local = jax.tree.map(_anchor.moved, params, step.updates)
    if isinstance(state.anchor, _iterates.Whole):
      local = _iterates.Whole(local, _iterates.read(step.inner, local))
    start = state.anchor if self.late is None else self.late.start(state)
    return _round.Round(
      anchor=state.anchor, local=local,
      progress=jax.tree.map(_anchor.difference, start, local), params=params,
      inner=step.inner, memory=state.memory, step=state.clock.step - 1,
      optimizer=self.optimizer, axis=self.axis,
    )  # fmt: skip


class RoundTransformation(optax.GradientTransformationExtraArgs):
  """An Optax transformation that synchronizes workers in rounds.

  Attributes:
    parts: Its synchronizer, which `elastic.Rounds` reads.
    overlap: The `Delayed` of late means, or None.
    fragments: As in `fragment_steps`; 1 for a single message.
  """

  parts: Synchronizer
  overlap: _delayed.Delayed | None
  fragments: Any

  @property
  def outer(self) -> optax.GradientTransformation | None:
    """The outer optimizer, SGD(1) for a mean; None of a rule with more."""
    rule = self.parts.rule
    if type(rule) is _round.Average:
      return optax.sgd(1.0)
    return rule.optimizer if type(rule) is _round.OuterStep else None

  @classmethod
  def of(
    cls,
    optimizer: optax.GradientTransformationExtraArgs,
    parts: Synchronizer,
    overlap: _delayed.Delayed | None,
    fragments: Any = 1,
  ) -> "RoundTransformation":
    found = cls(*optimizer)
    found.parts, found.overlap, found.fragments = parts, overlap, fragments
    return found


def make_synchronizer(
  inner: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  axis: collectives.Axis,
  rule: Any,
  overlap: Any,
  compression: reducers.Compression | None,
) -> Synchronizer:
  """Checks the arguments of `local_steps`, and builds its synchronizer."""
  optimizer = _anchor.lenient(inner, "inner")
  collectives.check_axis(axis)
  reducers.Compression.check(compression)
  policy, rule = _policy.as_policy(interval), _round.as_rule(rule)
  wanted = "`transforms.Delayed(...)`, or None for a mean at the round's end"
  checks.check_type("overlap", overlap, _delayed.Delayed | None, wanted)
  late, mix = None, None
  if overlap is not None:
    overlap.check_rule(rule)
    mix = overlap.mix
    if overlap.steps != 0:
      late, compression = _late(overlap, policy, axis, rule, compression)
  return Synchronizer(optimizer, policy, axis, rule, compression, late, mix)


def _late(
  overlap: _delayed.Delayed,
  policy: intervals.IntervalPolicy,
  axis: collectives.Axis,
  rule: _round.SyncRule,
  compression: reducers.Compression | None,
) -> tuple[_late_mean.LateMean, reducers.Compression | None]:
  """Builds a late mean and its sender, and the compression that this uses."""
  # A late mean of parameters would undo the steps that were taken since, unless
  # the workers stay apart from it.
  relative = compression is not None or not rule.apart
  sender: Any = _delayed.Sender(compression, axis)
  stream = overlap.stream
  if stream is not None:
    if compression is not None:
      steps = policy.constant
      if steps is not None and overlap.steps is not None:
        steps = min(steps, overlap.steps)
      compression = stream.chunks(compression, steps)
    elif stream.specs is not None:
      stream = dataclasses.replace(stream, specs=rule.like(stream.specs))

    def like(tree: PyTree) -> PyTree:
      if isinstance(tree, _iterates.Whole):
        return tree._replace(params=rule.like(tree.params))
      return rule.like(tree)

    sender = _chunked_stream.ChunkedStream(
      stream, compression, axis, like, policy.needs_loss
    )
  late = _late_mean.LateMean(overlap, sender, rule, policy, axis, relative)
  return late, compression
