"""Local steps: many updates of a worker's own, then a round ends together."""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jdist import checks, collectives, reducers
from jdist.transforms import _control, intervals
from jdist.transforms.local import _anchor, _round_state, _sync_rule

PyTree = Any
Step: TypeAlias = _round_state.Step
SyncState: TypeAlias = _round_state.SyncState
LocalStepsState: TypeAlias = _round_state.LocalStepsState


@dataclasses.dataclass(frozen=True, eq=False)
class Synchronizer:
  """Brings one tree of parameters together, each mean at its round's end.

  How anchor and workers move is the sync rule's, by how many bytes the
  compression's.
  """

  optimizer: optax.GradientTransformation
  policy: intervals.IntervalPolicy
  axis: collectives.Axis
  rule: _sync_rule.SyncRule
  compression: reducers.Compression | None
  mix: jax.typing.ArrayLike | None = None

  @property
  def relative(self) -> bool:
    """Returns whether a message is a difference to something that all know."""
    return self.compression is not None

  @property
  def unknown_loss(self) -> Any:
    """The loss of no round: infinite, or `()` when the interval needs none."""
    if not self.policy.needs_loss:
      return ()
    return jnp.full((), intervals.UNKNOWN_LOSS, jnp.float32)

  def init(self, params: optax.Params) -> SyncState:
    """Returns the state before the first step, on the anchor."""
    anchor = jax.tree.map(_anchor.wide_copy, params)
    memory: Any = ()
    if self.compression is not None:
      memory = self.compression.init(self.rule.like(anchor), self.axis)
    beside = self.rule.beside or self.mix is not None
    return SyncState(
      clock=_round_state.start_clock(self.policy),
      anchor=anchor,
      # Each leaf a buffer of its own, because the state may be donated.
      memory=jax.tree.map(jnp.copy, self.rule.init(anchor)),
      kept=jnp.ones((), jnp.float32) if beside else (),
      flight=(),
      compression=memory,
    )

  def send(
    self, state: SyncState, control: _control.Control
  ) -> tuple[Any, ...]:
    """Starts the next parts of what is under way: nothing is."""
    del state
    if control.stream_steps not in ("fixed", None):
      raise ValueError(
        "`stream_steps` must be left out of the control of a method that "
        f"streams nothing, got {control.stream_steps}. Build it with "
        "`overlap=Delayed(stream=Stream())` to stream."
      )
    return ()

  def finish(
    self,
    step: Step,
    params: optax.Params,
    sent: tuple[Any, ...],
    control: _control.Control,
  ) -> Step:
    """Ends the round if it is over, after the local step."""
    del sent
    if control.round_ends is not None:
      return self.end(step, params) if control.round_ends else self.go_on(step)
    return jax.lax.cond(
      collectives.agreed(step.sync.clock.is_over(), self.axis),
      self.end,
      lambda step, params: self.go_on(step),
      step,
      params,
    )

  def go_on(self, step: Step) -> Step:
    """Ends a step within a round."""
    clock = step.sync.clock._replace(synchronized=jnp.asarray(False))
    step = step._replace(sync=step.sync._replace(clock=clock))
    return collectives.varying(step, self.axis)

  def end(self, step: Step, params: optax.Params) -> Step:
    """Ends a round with the mean of its messages."""
    state, rule = step.sync, self.rule
    local = jax.tree.map(_anchor.moved, params, step.updates)
    end = self.round(step, params, local)
    mean, loss, exact, memory = self._mean(
      rule.message(end, self.relative), state.clock.mean_loss(),
      rule.exact(end), state.compression,
    )  # fmt: skip
    departed = end._replace(memory=rule.depart(end))
    after = rule.move(departed, mean, exact, self.relative)
    target = self.mixed(end, after)
    if target is None:
      target = rule.place(end, after)
    state = state._replace(
      clock=state.clock.end(self.policy, loss),
      anchor=after.anchor,
      memory=after.memory,
      kept=jax.tree.map(jnp.ones_like, state.kept),
      compression=memory,
    )
    # A worker that goes nowhere keeps its inner update to the bit.
    updates = _anchor.towards(step.updates, target, local)
    return collectives.varying(Step(updates, after.inner, state), self.axis)

  def drain(
    self, inner: PyTree, state: SyncState, params: optax.Params, residuals: bool
  ) -> Step:
    """Brings in everything that was begun; takes no step."""
    begun = self._begun(state, residuals)
    if self.rule.beside:
      begun |= state.kept > 0  # The workers stand apart between rounds, too.
    local = jax.tree.map(_anchor.wide, params)
    end = self.round(Step((), inner, state), params, local)
    relative = self.relative or not self.rule.beside
    end, state = self.settle(
      begun, end, self.rule.message(end, relative), relative, state
    )
    state = state._replace(
      clock=state.clock.cut_short(self.policy),
      anchor=end.anchor,
      memory=end.memory,
      kept=jax.tree.map(jnp.zeros_like, state.kept),
    )
    updates = _anchor.onto(state.anchor, params)
    return collectives.varying(Step(updates, end.inner, state), self.axis)

  def round(
    self, step: Step, params: optax.Params, local: PyTree
  ) -> _sync_rule.Round:
    """Returns what a rule sees, with the progress since `start`."""
    state = step.sync
    return _sync_rule.Round(
      anchor=state.anchor,
      local=local,
      progress=jax.tree.map(jnp.subtract, self.start(state), local),
      params=params,
      inner=step.inner,
      memory=state.memory,
      step=state.clock.step - 1,
      optimizer=self.optimizer,
      num_workers=collectives.size(self.axis),
    )

  def start(self, state: SyncState) -> PyTree:
    """Returns where this worker's round began."""
    return state.anchor

  def mixed(
    self, before: _sync_rule.Round, after: _sync_rule.Round
  ) -> PyTree | None:
    """Returns a part of the worker's own and of the anchor, if they mix."""
    if self.mix is None:
      return None
    own = _anchor.scalar(self.mix)

    def one(w: jax.Array, a: jax.Array) -> jax.Array:
      alpha = own.astype(a.dtype)
      return alpha * w + (1 - alpha) * a

    return jax.tree.map(one, before.local, after.anchor)

  def settle(
    self,
    begun: jax.Array,
    end: _sync_rule.Round,
    message: PyTree,
    relative: bool,
    state: SyncState,
  ) -> tuple[_sync_rule.Round, SyncState]:
    """Takes the mean with every bit, and moves by it, if `begun`."""
    memory: Any = ()
    if self.compression is None:
      mean = collectives.mean(message, self.axis)
    else:
      mean, memory = self.compression.flush(
        message, state.compression, self.axis
      )
    memory = _anchor.either(begun, memory, state.compression)
    exact = collectives.mean(self.rule.exact(end), self.axis)

    def moved(end: _sync_rule.Round) -> _sync_rule.Round:
      departed = end._replace(memory=self.rule.depart(end))
      return self.rule.settle(departed, mean, exact, relative)

    return self.change_if(begun, end, moved), state._replace(compression=memory)

  def change_if(
    self, flag: jax.Array, end: _sync_rule.Round, change: Any
  ) -> _sync_rule.Round:
    """Applies a change, or nothing; `flag` is equal on all workers."""

    # A conditional and not a selection: a compiler cannot merge it with what
    # comes before, and so rounds alike in every form of the program.
    def moving(end: _sync_rule.Round) -> PyTree:
      parts = end.anchor, end.memory, end.inner
      return collectives.varying(parts, self.axis)

    anchor, memory, inner = jax.lax.cond(
      collectives.agreed(flag, self.axis),
      lambda: moving(change(end)),
      lambda: moving(end),
    )
    return end._replace(anchor=anchor, memory=memory, inner=inner)

  def _mean(
    self, message: PyTree, loss: Any, exact: PyTree, memory: PyTree
  ) -> tuple[PyTree, Any, PyTree, PyTree]:
    """Takes the workers' means; a few numbers go with every bit."""
    if self.compression is None:
      found = collectives.mean((message, loss, exact), self.axis)
      return *found, memory
    mean, memory = self.compression.mean(message, memory, self.axis)
    return mean, *collectives.mean((loss, exact), self.axis), memory

  def _begun(self, state: SyncState, residuals: bool) -> jax.Array:
    begun = state.clock.is_begun()
    if residuals and self.compression is not None:
      begun = jnp.ones_like(begun)
    return begun


def local_steps(
  inner: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  *,
  axis: collectives.Axis,
  rule: _sync_rule.SyncRule | optax.GradientTransformation | None = None,
  overlap: Any = None,
  compression: reducers.Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Takes local steps with `inner`, and brings the workers together.

  Every worker i updates its own parameters with its own gradients,
  :math:`w_i \leftarrow w_i + \mathrm{inner}(g_i)`.  After the H-th step of a
  round the sync rule moves the anchor a, the parameters on which all workers
  agree, and says where each worker goes on from; with an outer optimizer

  .. math:: \Delta_i = a - w_i, \qquad
            a \leftarrow a + \mathrm{outer}(\tfrac1N \sum_i \Delta_i), \qquad
            w_i \leftarrow a

  The mean of the messages (the pseudo-gradients :math:`\Delta_i`) is taken at
  the round's end; with `overlap` while the next round is computed; with
  `compression` by few bytes, where all workers decode the same ones, so that
  anchors stay equal to the bit.  The loss of an adaptive interval is averaged
  exactly.  With a compression the first state may depend on the number of
  workers: make it where the axis is bound.

  The device decides whether a step ends its round, in a conditional, in which
  nothing overlaps; or the host says so by the static `control=` of `update`
  (`transforms.rounds_ahead`), as `training.Trainer` does.  What the host says
  holds; of a streamed round that ends before everything has arrived the mean is
  NaN.

  Inner schedules count local steps, outer schedules count rounds.  Extra
  arguments of `update` reach the inner optimizer, and with them `anchor`
  (float32) and `interval_steps` (int32 scalar).  Stands last in a chain: the
  anchor takes the updates as done, and what changes them behind it is refused.

  An Optax update is a difference, so after a round the local parameters equal
  the anchor up to rounding; `jdist.apply_updates` makes them equal to the bit.
  Evaluate on the anchor: `jdist.anchor(state, params)`.

  Args:
    inner: any Optax optimizer, run by each worker for itself.
    interval: local steps of a round, or a policy from
      `jdist.transforms.intervals`.
    axis: the workers' axis: None, a name, or (inner, outer).
    rule: how a round ends, a `transforms.SyncRule`; an Optax optimizer is the
      outer one, fed with the mean pseudo-gradient once a round; None averages
      parameters.
    overlap: a `transforms.Delayed` for a mean that is late, streamed or not;
      None for a mean at the round's end.
    compression: `jdist.Compression(...)`; None takes the mean exactly.

  Returns:
    A transformation; `update` takes `loss=` (this worker's, float32 scalar)
    when the interval policy needs it, and needs `params`.

  Raises:
    ValueError: when an argument is of another kind, or two do not go together;
      at trace time, when `params`, or a needed `loss`, is missing.

  >>> import jax.numpy as jnp
  >>> optimizer = local_steps(optax.sgd(0.1), 2, axis=None)
  >>> w = jnp.array(1.0)
  >>> state = optimizer.init(w)
  >>> for gradient in (1.0, 2.0):
  ...   updates, state = optimizer.update(jnp.array(gradient), state, w)
  ...   w = optax.apply_updates(w, updates)
  >>> round(w.item(), 6), round(state.anchor.item(), 6)
  (0.7, 0.7)
  >>> state.clock.round.item()
  1

  References:
    Stich, Local SGD Converges Fast and Communicates Little (arXiv
    1805.09767); Douillard et al., DiLoCo (arXiv 2311.08105), algorithm 1: the
    pseudo-gradient and the outer optimizer; Sarfi et al., SparseLoCo (arXiv
    2508.15706): pseudo-gradients compressed, with feedback.
  """
  sync = make_synchronizer(inner, interval, axis, rule, overlap, compression)
  optimizer = collectives.for_workers(sync.optimizer)

  def init_fn(params: optax.Params) -> LocalStepsState:
    return LocalStepsState(optimizer.init(params), sync.init(params))

  def update_fn(
    updates: optax.Updates,
    state: LocalStepsState,
    params: optax.Params | None = None,
    *,
    control: _control.Control = _control.DEVICE,
    **extra_args: Any,
  ) -> tuple[optax.Updates, LocalStepsState]:
    _anchor.check_params(params, "`local_steps`")
    if control.drain:
      residuals = control.drain == "residuals"
      step = sync.drain(state.inner, state.sync, params, residuals)
      return step.updates, LocalStepsState(step.inner, step.sync)
    collectives.check_local(updates, axis, what="`updates`", like=params)
    _anchor.check_anchor(state.anchor, params)
    sent = sync.send(state.sync, control)
    clock = state.clock
    updates, memory = sync.rule.correct(updates, state.sync.memory, clock.step)
    extra_args |= {"anchor": state.anchor, "interval_steps": clock.interval}
    updates, inner_state = optimizer.update(
      updates, state.inner, params, **extra_args
    )
    moved = state.sync._replace(
      clock=clock.advance(extra_args.get("loss")), memory=memory
    )
    step = Step(updates, inner_state, moved)
    step = sync.finish(step, params, sent, control)
    return step.updates, LocalStepsState(step.inner, step.sync)

  return _anchor.only_floats(
    optax.GradientTransformationExtraArgs(init_fn, update_fn)
  )


def make_synchronizer(
  inner: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  axis: collectives.Axis,
  rule: Any,
  overlap: Any,
  compression: reducers.Compression | None,
) -> Synchronizer:
  """Checks the arguments of `local_steps`, and builds its engine."""
  inner = checks.check_optimizer("inner", inner)
  collectives.check_axis(axis)
  reducers.check_compression(compression)
  engine = Synchronizer(
    optimizer=inner,
    policy=intervals.as_policy(interval),
    axis=axis,
    rule=_sync_rule.as_rule(rule),
    compression=compression,
  )
  if overlap is None:
    return engine
  # Without its parentheses the class has one, too.
  if isinstance(overlap, type) or not hasattr(overlap, "engine"):
    raise ValueError(
      "`overlap` must be `transforms.Delayed(...)`, or None for a mean at the "
      f"round's end, got {checks.show(overlap)}."
    )
  return overlap.engine(engine)
