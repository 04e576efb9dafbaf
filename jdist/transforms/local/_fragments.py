"""Fragments of the parameters, each of which has its own rounds."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks, collectives, reducers, states
from jdist.states import PyTree
from jdist.transforms import _control, _shared, intervals
from jdist.transforms.local import (
  _anchor,
  _iterates,
  _round,
  _sync_state,
  _synchronizer,
)

Fragments = int | Callable[[str], int]  # A number, or one for a leaf's path.
# Errors name both, because a user has written one of them.
_NAME = "`fragment_steps` (also as `streaming_diloco`)"


@states.declare(shared=("kept",), rounds=True, drains=True)
class FragmentsState(NamedTuple):
  """State of `fragment_steps`.

  Attributes:
    clock: The clock of rounds in which every fragment is synchronized once; it
      counts a round when the mean of the last fragment is applied.
    inner: The inner optimizer's state, each worker its own.
    fragments: a state for each fragment, in whose trees `optax.MaskedNode()`
      replaces the leaves of the others.
    kept: 1 where the workers keep a distance from the anchor, 0 after a
      `drain`; float32 scalar.
  """

  clock: _round.RoundClock
  inner: PyTree
  fragments: tuple[_sync_state.SyncState, ...]
  kept: jax.Array

  def label(self, walk: Any) -> tuple[Any, bool]:
    """Labels each fragment's state by its own declaration."""
    del walk
    parts = tuple(map(_shared.label_fields, self.fragments))
    return _shared.label_fields(self)._replace(fragments=parts), False

  @property
  def anchor(self) -> PyTree:
    """The parameters all workers agree on, float32."""
    return _merge([part.anchor for part in self.fragments])

  @property
  def streams(self) -> bool:
    """Returns whether a message is sent in parts, some in every step."""
    return self.fragments[0].streams

  def ahead(self) -> jax.Array:
    """The next two updates of every fragment; see `transforms.rounds_ahead`."""
    return jnp.stack([part.ahead() for part in self.fragments], -3)


def fragment_steps(
  inner: optax.GradientTransformation,
  interval: int,
  fragments: Fragments,
  *,
  axis: collectives.Axis,
  rule: _round.SyncRule | optax.GradientTransformation | None = None,
  overlap: Any = None,
  compression: reducers.Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Takes local steps, and synchronizes the parameters in fragments.

  Fragment p of P has its own rounds of H steps, which end after the local
  steps t = t_p, t_p + H, t_p + 2H, ... with
  :math:`t_p = \lfloor H (p+1) / P \rfloor`, so that the network is used
  evenly.  Each ends as a round of `local_steps` does, with its own state of the
  sync rule, overlap and compression.

  With `overlap=Delayed(steps=tau, stream=Stream())` a fragment that has ended
  its round is sent in the next tau steps, and nothing waits for it.  The host
  decides which step sends which part (`training.Trainer`), so that no
  collective is in a conditional.

  Schedules, extra arguments and the place in a chain are those of
  `local_steps`; an outer schedule counts a fragment's rounds.

  Args:
    inner: Any Optax optimizer, which each worker runs with its own gradients.
    interval: H, the number of local steps in a fragment's round.
    fragments: P, at most the interval, splits the leaves in the order of the
      tree into P runs of about equal size; a function maps a leaf's path
      ("block_0/kernel") to the number of its fragment, from 0.
    axis: The workers' axis: None, a name, or (inner, outer).
    rule: How a round ends, as in `local_steps`.
    overlap: a `transforms.Delayed` with `steps` below the interval, or None.
    compression: a `jdist.Compression`; None takes means exactly.

  Raises:
    ValueError: If an argument is out of its range; at `init`, when there
      are fewer leaves than fragments, or fragments are not 0, 1, 2, ...; at
      trace time, when `params` is missing or gradients are already summed.

  >>> optimizer = fragment_steps(optax.sgd(1.0), 2, 2, axis=None)
  >>> w = {"a": jnp.array(0.0), "b": jnp.array(0.0)}
  >>> state = optimizer.init(w)
  >>> for _ in range(3):
  ...   updates, state = optimizer.update(
  ...     {"a": jnp.array(1.0), "b": jnp.array(1.0)}, state, w
  ...   )
  ...   w = optax.apply_updates(w, updates)
  ...   print(state.anchor["a"].item(), state.anchor["b"].item())
  -1.0 0.0
  -1.0 -2.0
  -3.0 -2.0

  References:
    Douillard et al., Streaming DiLoCo (arXiv 2501.18512), algorithm 2.
  """
  if isinstance(interval, intervals.IntervalPolicy):
    raise ValueError(
      f"`interval` must be an int for {_NAME}, whose fragments take their "
      "turns at fixed steps, got an interval policy. Give the number of "
      "steps, or take `local_steps` or `diloco`, which have no fragments."
    )
  sync = _synchronizer.make_synchronizer(
    inner, interval, axis, rule, overlap, compression
  )
  if not callable(fragments):
    fragments = checks.check_structural("fragments", fragments, minimum=1)
    _check_number(fragments, interval)
  if overlap is not None:
    _check_overlap(overlap, interval)
  buffers = getattr(sync.rule, "buffers", "maintain")
  if buffers != "maintain":
    raise ValueError(
      "`buffers` must be 'maintain' with fragments, which share the inner "
      f"optimizer's momenta, got {buffers!r}."
    )
  optimizer = sync.optimizer

  # They differ in their rounds only; the number of fragments depends on the
  # parameters where a function says it.
  def split(
    params: optax.Params,
  ) -> tuple[tuple[int, ...], list[_synchronizer.Synchronizer]]:
    labels = fragments_of(params, fragments)
    number = max(labels) + 1
    _check_number(number, interval)
    return labels, [
      sync.replaced(policy=_staggered(interval * (p + 1) // number, interval))
      for p in range(number)
    ]

  def init_fn(params: optax.Params) -> FragmentsState:
    labels, parts = split(params)
    inner_state = _iterates.own_keys(optimizer.init(params), axis)
    _iterates.refuse_iterates(inner_state, _NAME)
    return FragmentsState(
      clock=_round.start_clock(intervals.fixed(interval)),
      inner=inner_state,
      fragments=tuple(
        one.init(_part(params, labels, p)) for p, one in enumerate(parts)
      ),
      kept=jnp.ones((), jnp.float32),
    )

  def update_fn(
    updates: optax.Updates,
    state: FragmentsState,
    params: optax.Params | None = None,
    *,
    control: _control.Control = _control.DEVICE,
    **extra_args: Any,
  ) -> tuple[optax.Updates, FragmentsState]:
    _anchor.check_params(params, _NAME)
    labels, parts = split(params)
    if control.drain:
      return drain(state, params, labels, parts, control)
    collectives.check_local(updates, axis, what="`updates`", like=params)
    _anchor.check_anchor(state.anchor, params)
    controls = _controls_of(control, len(parts))
    sent = [
      one.send(own, said)
      for one, own, said in zip(parts, state.fragments, controls, strict=True)
    ]
    clock = state.clock
    extra_args |= {"anchor": state.anchor, "interval_steps": clock.interval}
    # The inner optimizer sees all leaves in one update, so that a clipping by
    # the global norm, for instance, is that of the whole gradient.
    corrected = [
      sync.rule.correct(_part(updates, labels, p), own.memory, clock.step)
      for p, own in enumerate(state.fragments)
    ]
    moves, inner_state = optimizer.update(
      _merge([part for part, _ in corrected]), state.inner, params, **extra_args
    )
    # Each fragment ends its own round; most steps end none.
    ended = []
    for p, (one, own) in enumerate(zip(parts, state.fragments, strict=True)):
      own = own._replace(clock=own.clock.advance(None), memory=corrected[p][1])
      step = _sync_state.Step(_part(moves, labels, p), (), own)
      step = one.finish(step, _part(params, labels, p), sent[p], controls[p])
      ended.append(step)
    # The last fragment ends its round at a multiple of the interval.
    last = _arrived(state.fragments[-1], ended[-1].sync)
    return _merge([step.updates for step in ended]), FragmentsState(
      clock=clock._replace(
        step=optax.safe_increment(clock.step),
        round=clock.round + last.astype(jnp.int32),
        synchronized=last,
      ),
      inner=inner_state,
      fragments=tuple(step.sync for step in ended),
      kept=jnp.ones_like(state.kept),
    )

  def drain(
    state: FragmentsState,
    params: optax.Params,
    labels: tuple[int, ...],
    parts: list[_synchronizer.Synchronizer],
    control: _control.Control,
  ) -> tuple[optax.Updates, FragmentsState]:
    """Brings all fragments into the anchor, sent or not."""
    residuals = control.drain == "residuals"
    steps = [
      one.drain((), state.fragments[p], _part(params, labels, p), residuals)
      for p, one in enumerate(parts)
    ]
    clock = state.clock
    begun = (state.kept > 0) & (clock.step > 0)
    state = FragmentsState(
      clock=clock._replace(
        round=clock.round + begun.astype(jnp.int32),
        synchronized=jnp.asarray(True),
      ),
      inner=state.inner,
      fragments=tuple(map(staggered, parts, [step.sync for step in steps])),
      kept=jnp.zeros_like(state.kept),
    )
    updates = _merge([step.updates for step in steps])
    return collectives.varying((updates, state), axis)

  def staggered(
    one: _synchronizer.Synchronizer, own: _sync_state.SyncState
  ) -> _sync_state.SyncState:
    """Lets a round that follows a drain end at the fragment's next turn."""
    # A drain ends all rounds at one step.  A first round that is shorter
    # restores the turns, in which the network is used evenly.
    left, _ = one.policy.next((), own.clock.step, None)
    following = jnp.full_like(left, interval)
    clock = own.clock._replace(interval=left, next_interval=following)
    return own._replace(clock=clock)

  chain = optax.GradientTransformationExtraArgs(init_fn, update_fn)
  return _synchronizer.RoundTransformation.of(
    _anchor.only_floats(chain), sync, overlap, fragments
  )


def fragments_of(tree: PyTree, fragments: Fragments) -> tuple[int, ...]:
  """Returns the fragment of every leaf, in the order of the tree.

  Args:
    tree: Parameters, or their shapes.
    fragments: The number of fragments, or a function, as in `fragment_steps`.

  Raises:
    ValueError: If there are fewer leaves than fragments, or the results of a
      function are not all of 0, 1, 2, ...

  >>> tree = {"a": jnp.ones(4), "b": jnp.ones(2), "c": jnp.ones(2)}
  >>> fragments_of(tree, 2), fragments_of(tree, lambda path: int(path == "b"))
  ((0, 1, 1), (0, 1, 0))
  """
  # `jnp.shape` also takes Python's floats, of which a state may be made.
  sizes = [math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(tree)]
  if not sizes:
    raise ValueError(
      "`fragments` must have a leaf each, and the parameters have none of "
      "floats. Give `init` the parameters that are trained."
    )
  if callable(fragments):
    paths = collectives.leaf_paths(tree)

    def chosen(path: str) -> int:
      found = checks.call("fragments", fragments, path)
      found = int(found) if isinstance(found, bool) else found
      return checks.check_int(f"fragments({path!r})", found, 0)

    labels = tuple(map(chosen, paths))
    if set(labels) != set(range(max(labels) + 1)):
      raise ValueError(
        "`fragments` must return 0, 1, 2, ... with none left out, got "
        f"{sorted(set(labels))}."
      )
    return labels
  remedy = "A leaf is never cut: take at most as many as there are leaves."
  checks.check_int("fragments", fragments, 1, len(sizes), remedy)
  total = sum(sizes)
  cut: list[int] = []
  before = label = 0
  for number, size in enumerate(sizes):
    # A leaf belongs to the run in which its middle lies, unless a fragment
    # would then have no leaf.
    middle = (before + size / 2) / max(total, 1)
    wanted = min(int(middle * fragments), fragments - 1)
    # Each fragment that follows needs one of the remaining leaves.
    last = fragments - (len(sizes) - number)
    label = max(last, min(wanted, label + 1 if number else 0), label)
    cut.append(label)
    before += size
  return tuple(cut)


def _check_number(fragments: int, interval: int) -> None:
  remedy = "One fragment is sent in a step of the `interval`."
  checks.check_int("fragments", fragments, 1, interval, remedy)


def _part(tree: PyTree, labels: tuple[int, ...], fragment: int) -> PyTree:
  """Returns the tree without the leaves of other fragments."""
  leaves, treedef = jax.tree.flatten(tree)
  kept = [
    leaf if label == fragment else optax.MaskedNode()
    for leaf, label in zip(leaves, labels, strict=True)
  ]
  return jax.tree.unflatten(treedef, kept)


def _merge(parts: Sequence[PyTree]) -> PyTree:
  """Returns one tree with the leaves of all fragments."""

  def one(*leaves: Any) -> Any:
    # A wrapper, as `optax.masked`, may have left a leaf out of all parts.
    return next((x for x in leaves if not _anchor.is_masked(x)), leaves[0])

  return jax.tree.map(one, *parts, is_leaf=_anchor.is_masked)


def _arrived(
  before: _sync_state.SyncState, after: _sync_state.SyncState
) -> jax.Array:
  """Returns whether a fragment's mean was applied in this step."""
  # A late mean is applied within a round, and not where the round ends.
  if before.flight == ():
    return after.clock.synchronized
  return before.flight.in_flight & ~after.flight.in_flight


def _staggered(first: int, interval: int) -> intervals.IntervalPolicy:
  """Returns rounds that end after steps first, first + interval, ..."""

  def next_fn(
    state: Any, start_step: jax.Array, loss: jax.Array | None
  ) -> tuple[jax.Array, Any]:
    del loss
    # After a resize or a drain a round may start at any step.
    left = (first - start_step) % interval
    return jnp.where(left == 0, interval, left).astype(jnp.int32), state

  return intervals.IntervalPolicy(lambda: (), next_fn)


def _controls_of(
  control: _control.Control, number: int
) -> tuple[_control.Control, ...]:
  """Returns the control of each fragment."""
  if name := control.chosen("round_ends", "arrives", "stream_steps"):
    raise ValueError(
      f"`control` must say `{name}` for each fragment, in `fragments`, got "
      f"{getattr(control, name)!r} for all. `training.Trainer` does it."
    )
  found = control.fragments
  if found is None:
    return (control,) * number
  if len(found) != number:
    raise ValueError(
      f"`control.fragments` must have one control for each of {number} "
      f"fragments, got {len(found)}."
    )
  return found


def _check_overlap(overlap: Any, interval: int) -> None:
  # A fragment holds one message, which must be applied before the next one.
  if overlap.steps is None or overlap.steps >= interval:
    raise ValueError(
      "`steps` (`delay_steps` of `streaming_diloco`) must be below `interval`, "
      f"{interval}, got {overlap.steps}: a fragment arrives before it is sent "
      "again."
    )
  if overlap.after_step != 0:
    got = overlap.after_step
    raise ValueError(f"`after_step` must be 0 for {_NAME}, got {got}.")
