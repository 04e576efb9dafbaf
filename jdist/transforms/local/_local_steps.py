"""Local steps: many updates of a worker's own, then a round ends together."""

import dataclasses
from typing import Any, NamedTuple

import jax
import optax

from jdist import checks, collectives, reducers, states
from jdist.transforms import _control, intervals
from jdist.transforms.local import (
  _chunked_stream,
  _clock,
  _delayed,
  _sync_rule,
  _synchronizer,
)

PyTree = Any


@states.declare(drains=True)
class LocalStepsState(NamedTuple):
  """State of `local_steps`.

  Attributes:
    inner: the inner optimizer's state, each worker its own.
    sync: the round's: clock, anchor, and what is under way.
  """

  inner: PyTree
  sync: _synchronizer.SyncState

  @property
  def clock(self) -> _clock.RoundClock:
    """The round's clock."""
    return self.sync.clock

  @property
  def anchor(self) -> PyTree:
    """The parameters all workers agree on, float32."""
    return self.sync.anchor

  @property
  def kept(self) -> Any:
    """How far the worker stands beside the anchor on purpose."""
    return self.sync.kept

  @property
  def streams(self) -> bool:
    """Whether a message is sent in parts, some in every step."""
    held = getattr(self.sync.flight, "held", None)
    return bool(getattr(type(held), "streams", False))

  def ahead(self) -> jax.Array:
    """The next two updates, for a host; see `transforms.rounds_ahead`."""
    return _synchronizer.ahead(self.sync)


def local_steps(
  inner: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  *,
  axis: collectives.Axis,
  rule: _sync_rule.SyncRule | optax.GradientTransformation | None = None,
  overlap: _delayed.Delayed | None = None,
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

  Whether a step ends its round is decided on the device, in a conditional, in
  which nothing overlaps.  A host that knows it (`transforms.rounds_ahead`)
  says so by the static `control=` of `update`: then there is none, and a step
  within a round sends nothing but a streamed round's parts.  What the host says
  holds, also for a round that is shorter or longer then; but of a streamed one
  that ends before everything has arrived the mean is NaN.  `training.Trainer`
  does it.

  Inner schedules count local steps, outer schedules count rounds.  Extra
  arguments of `update` reach the inner optimizer, and with them `anchor`
  (float32) and `interval_steps` (int32 scalar).  Stands last in a chain: the
  anchor takes the updates as done.

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
    overlap: `transforms.Delayed(...)` for a mean that is late, streamed or not;
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
  optimizer, rule = optax.with_extra_args_support(inner), sync.rule

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
    if params is None:
      raise ValueError(
        "`params` must be given to `update` of `local_steps`: call "
        "`optimizer.update(grads, state, params)`."
      )
    if control.drain:
      residuals = control.drain == "residuals"
      step = sync.drain(state.inner, state.sync, params, residuals)
      return step.updates, LocalStepsState(step.inner, step.sync)
    collectives.check_local(updates, axis, what="`updates`")
    sent = sync.send(state.sync, control)
    clock = state.clock
    updates, memory = rule.correct(updates, state.sync.memory, clock.step)
    extra_args |= {"anchor": state.anchor, "interval_steps": clock.interval}
    updates, inner_state = optimizer.update(
      updates, state.inner, params, **extra_args
    )
    moved = state.sync._replace(
      clock=clock.advance(extra_args.get("loss")), memory=memory
    )
    step = _synchronizer.Step(updates, inner_state, moved)
    step = sync.finish(step, params, sent, control)
    return step.updates, LocalStepsState(step.inner, step.sync)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def make_synchronizer(
  inner: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  axis: collectives.Axis,
  rule: Any,
  overlap: _delayed.Delayed | None,
  compression: reducers.Compression | None,
) -> _synchronizer.Synchronizer:
  """Checks the arguments of `local_steps`, one by one and together."""
  checks.check_optimizer("inner", inner)
  collectives.check_axis(axis)
  policy, rule = intervals.as_policy(interval), _sync_rule.as_rule(rule)
  reducers.check_compression(compression)
  if overlap is not None and not isinstance(overlap, _delayed.Delayed):
    raise ValueError(
      "`overlap` must be `transforms.Delayed(...)`, or None for a mean at the "
      f"round's end, got {checks.told(overlap)}."
    )
  if overlap is not None:
    check_late(rule, overlap)
    if overlap.stream is not None:
      steps = policy.constant
      if steps is not None and overlap.steps:
        steps = min(steps, overlap.steps)
      if compression is not None:
        compression = _chunked_stream.in_chunks(
          compression, overlap.stream, steps
        )
      elif overlap.stream.specs is not None:
        specs = rule.like(overlap.stream.specs)
        stream = dataclasses.replace(overlap.stream, specs=specs)
        overlap = dataclasses.replace(overlap, stream=stream)
  return _synchronizer.Synchronizer(
    optimizer=inner,
    policy=policy,
    axis=axis,
    rule=rule,
    overlap=overlap,
    compression=compression,
  )


def check_late(rule: _sync_rule.SyncRule, overlap: _delayed.Delayed) -> None:
  """Raises a ValueError where a rule's mean cannot be late in this way."""
  name = type(rule).__name__
  if overlap.steps == 0:
    if overlap.stream is not None:
      raise ValueError(
        "`stream` splits what is late, and `steps` must be at least 1 with it, "
        "got 0."
      )
    return
  if rule.exact_parts:
    raise ValueError(
      f"`overlap` must be None for `{name}`, which averages something with "
      "every bit that would be a round old: `buffers='average'`. Take "
      "`buffers='maintain'`."
    )
  if overlap.after_step and rule.beside:
    raise ValueError(
      f"`after_step` must be 0 for `{name}`, whose workers stay beside the "
      f"anchor in every round, got {overlap.after_step}."
    )
  departs = type(rule).depart is not _sync_rule.SyncRule.depart
  if overlap.after_step and overlap.steps is not None and departs:
    raise ValueError(
      f"`after_step` must be 0 for `{name}` with `steps`, got "
      f"{overlap.after_step}: its own state changes when a message leaves."
    )
