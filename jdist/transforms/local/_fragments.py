"""Fragments of the parameters, each with rounds of its own.

All workers take local steps; one part of the parameters after the other is
brought together, at staggered steps, so that the network is used evenly.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks, collectives
from jdist.transforms import _control, intervals
from jdist.transforms.local import _anchor

PyTree = Any
Fragments = int | Callable[[str], int]
# For errors: whoever reads them has written the one or the other.
_NAME = "`fragment_steps` (also as `streaming_diloco`)"


class FragmentsState(NamedTuple):
  """State of `fragment_steps`.

  Attributes:
    step: local steps so far, int32 scalar.
    round: how often all fragments were brought together, int32 scalar.
    interval: steps between two meetings of a fragment, int32 scalar.
    synchronized: whether the last update brought in the last fragment of a
      round, bool scalar.
    anchor: the parameters all workers agree on, float32.
    inner: the inner optimizer's state, each worker its own.
    outer: the outer optimizer's states, one for each fragment, in which
      `optax.MaskedNode()` stands for the others; `()` without one.
    pending: this worker's progress that is under way, float32, a fragment's
      from the step in which it is sent; `()` without a delay.
    kept: whether the workers stand beside the anchor, 1, or on it after a
      `drain`, 0; float32 scalar.
    drained_step: local steps before the last `drain`, int32 scalar: what was
      sent until then has arrived.
  """

  step: jax.Array
  round: jax.Array
  interval: jax.Array
  synchronized: jax.Array
  anchor: PyTree
  inner: PyTree
  outer: PyTree
  pending: PyTree
  kept: jax.Array
  drained_step: jax.Array


def fragment_steps(
  inner: optax.GradientTransformation,
  interval: int,
  fragments: Fragments,
  *,
  axis: collectives.Axis,
  outer: optax.GradientTransformation | None = None,
  delay_steps: int = 0,
  mix: jax.typing.ArrayLike = 0.0,
) -> optax.GradientTransformationExtraArgs:
  r"""Takes local steps, and brings the workers together in fragments.

  Fragment p of P is sent after the local steps t = t_p, t_p + H, t_p + 2H, ...
  with :math:`t_p = \lfloor H (p+1) / P \rfloor`, and arrives
  :math:`\tau` steps later.  After step t a fragment that is sent holds the
  progress since its anchor, and one that arrives moves its anchor:

  .. math:: \Delta_{i,p}^{(t)} = a_p - w_{i,p}, \qquad
            a_p \leftarrow a_p + \mathrm{outer}_p(\tfrac1N \sum_i
            \Delta_{i,p}^{(t-\tau)}), \qquad
            w_{i,p} \leftarrow \alpha w_{i,p} + (1 - \alpha) a_p

  Each fragment has an outer state of its own.  With a delay the mean is that
  of progress in the state, and depends on nothing in the present step.  It
  stands in a conditional, one a fragment, in the step of its arrival.

  Counted bytes are those of whole rounds: a round counts when its last fragment
  arrives, so that in between those of its other fragments are missing, up to
  (P-1)/P of a round where fragments are of equal size.  At the end of a round
  the count is exact.

  `update` with the static `drain=True` takes no local step, ignores the
  updates, and brings all that was done into the anchor; see `drain`.

  Inner schedules count local steps, outer schedules count a fragment's
  meetings.  Extra arguments of `update` reach the inner optimizer, and with
  them `anchor` (float32) and `interval_steps` (int32 scalar).

  Stands last in a chain: the anchor takes the updates as done.

  Args:
    inner: any Optax optimizer, run by each worker for itself.
    interval: H, steps between two meetings of a fragment.
    fragments: P at most the interval: leaves in the order of the tree, cut
      into P runs of about equal size; or a function from a leaf's path
      ("block_0/kernel") to its fragment, from 0.
    axis: the workers' axis: None, a name, or (inner, outer).
    outer: any Optax optimizer, fed with a fragment's mean progress; None
      makes the anchor the mean of what was sent.
    delay_steps: tau, at most interval - 1.
    mix: alpha in [0, 1], how much of its own parameters a worker keeps when
      the anchor arrives; 1 never listens.

  Returns:
    A transformation; `update` needs `params`.

  Raises:
    ValueError: when an argument is out of its range; at `init`, when there
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
  """
  checks.check_optimizer("inner", inner)
  if outer is not None:
    checks.check_optimizer("outer", outer)
  collectives.check_axis(axis)
  if isinstance(interval, intervals.IntervalPolicy):
    raise ValueError(
      f"`interval` must be an int for {_NAME}, whose fragments take their "
      "turns at fixed steps, got an interval policy. Give the number of "
      "steps, or take `local_steps` or `diloco`, which have no fragments."
    )
  intervals.fixed(interval)  # Checks it.
  if not callable(fragments):
    checks.check_structural("fragments", fragments, minimum=1)
    _check_number(fragments, interval)
  checks.check_structural("delay_steps", delay_steps, minimum=0)
  if delay_steps >= interval:
    raise ValueError(
      f"`delay_steps` must be below `interval`, {interval}, got {delay_steps}: "
      "a fragment arrives before it is sent again."
    )
  checks.check_continuous("mix", mix, high=1.0)
  inner = optax.with_extra_args_support(inner)

  def offset(fragment: int, number: int) -> int:
    return interval * (fragment + 1) // number

  def due(step: jax.Array, first: int) -> jax.Array:
    """Whether step number `step`, from 1, is first, first + H, ..."""
    return (step >= first) & ((step - first) % interval == 0)

  def init_fn(params: optax.Params) -> FragmentsState:
    anchor = jax.tree.map(_anchor.wide_copy, params)
    labels = fragments_of(params, fragments)
    number = max(labels) + 1
    _check_number(number, interval)
    parts = [_part(anchor, labels, p) for p in range(number)]
    return FragmentsState(
      step=jnp.zeros((), jnp.int32),
      round=jnp.zeros((), jnp.int32),
      interval=jnp.asarray(interval, jnp.int32),
      synchronized=jnp.asarray(True),  # All workers begin alike.
      anchor=anchor,
      inner=inner.init(params),
      outer=() if outer is None else tuple(map(outer.init, parts)),
      pending=jax.tree.map(jnp.zeros_like, anchor) if delay_steps else (),
      kept=jnp.ones((), jnp.float32),
      drained_step=jnp.zeros((), jnp.int32),
    )

  def update_fn(
    updates: optax.Updates,
    state: FragmentsState,
    params: optax.Params | None = None,
    *,
    drain: bool = False,
    **extra_args: Any,
  ) -> tuple[optax.Updates, FragmentsState]:
    if params is None:
      raise ValueError(
        f"`params` must be given to `update` of {_NAME}: call "
        "`optimizer.update(grads, state, params)`."
      )
    if drain:
      return bring_all(state, params)
    _control.check_told(_NAME, extra_args, state.inner)
    collectives.check_local(updates, axis, what="`updates`")
    labels = fragments_of(params, fragments)
    number = max(labels) + 1
    step = optax.safe_increment(state.step)
    arrives = [
      due(step, offset(p, number) + delay_steps) for p in range(number)
    ]
    extra_args |= {"anchor": state.anchor, "interval_steps": state.interval}
    if delay_steps:  # From the state, and before anything of this step.
      sent_since = step - delay_steps > state.drained_step
      arrives = [arrived & sent_since for arrived in arrives]
      state = arrive(state, state.pending, labels, arrives)
    updates, inner_state = inner.update(
      updates, state.inner, params, **extra_args
    )
    local = jax.tree.map(_anchor.moved, params, updates)
    if not delay_steps:
      progress = jax.tree.map(jnp.subtract, state.anchor, local)
      state = arrive(state, progress, labels, arrives)
    own = _anchor.scalar(mix)

    def mixed(w: jax.Array, a: jax.Array, arrived: jax.Array) -> jax.Array:
      alpha = own.astype(a.dtype)
      return jnp.where(arrived, alpha * w + (1 - alpha) * a, w)

    target = jax.tree.map(
      mixed, local, state.anchor, _each(arrives, labels, params)
    )
    updates = _anchor.towards(updates, target, local)
    if delay_steps:
      sends = [due(step, offset(p, number)) for p in range(number)]
      pending = jax.tree.map(
        lambda old, a, t, sent: jnp.where(sent, a - t, old),
        state.pending, state.anchor, target, _each(sends, labels, params),
      )  # fmt: skip
      state = state._replace(pending=pending)
    state = state._replace(
      step=step,
      round=state.round + arrives[-1].astype(jnp.int32),
      synchronized=arrives[-1],
      inner=inner_state,
      kept=jnp.ones_like(state.kept),
    )
    return collectives.varying((updates, state), axis)

  def bring_all(
    state: FragmentsState, params: optax.Params
  ) -> tuple[optax.Updates, FragmentsState]:
    """Brings all fragments together: what is under way, and what is not."""
    labels = fragments_of(params, fragments)
    number = max(labels) + 1
    begun = state.step > state.drained_step
    start = state.anchor  # Of what has not been sent.
    if delay_steps:
      under_way = [
        is_under_way(state, offset(p, number)) for p in range(number)
      ]
      start = jax.tree.map(
        lambda a, p, sent: jnp.where(sent, a - p, a),
        start, state.pending, _each(under_way, labels, params),
      )  # fmt: skip
      state = arrive(state, state.pending, labels, under_way)
    progress = jax.tree.map(lambda a, w: a - _anchor.wide(w), start, params)
    state = arrive(state, progress, labels, [begun] * number)
    state = state._replace(
      round=state.round + begun.astype(jnp.int32),
      synchronized=jnp.asarray(True),
      kept=jnp.zeros_like(state.kept),
      drained_step=jnp.copy(state.step),
    )
    updates = _anchor.onto(state.anchor, params)
    return collectives.varying((updates, state), axis)

  def is_under_way(state: FragmentsState, first: int) -> jax.Array:
    """Whether a fragment sent after steps first, first + H, ... is so now."""
    age = (state.step - first) % interval
    sent = (state.step >= first) & (state.step - age > state.drained_step)
    return sent & (age < delay_steps)

  def arrive(
    state: FragmentsState,
    progress: PyTree,
    labels: tuple[int, ...],
    arrives: list[jax.Array],
  ) -> FragmentsState:
    """Moves the anchors of the fragments that arrive."""
    anchors, outers = [], []
    for p, arrived in enumerate(arrives):
      anchor, outer_state = jax.lax.cond(
        collectives.agreed(arrived, axis),
        join,
        keep,
        _part(state.anchor, labels, p),
        () if outer is None else state.outer[p],
        _part(progress, labels, p),
      )
      anchors.append(anchor)
      outers.append(outer_state)
    return state._replace(
      anchor=_whole(anchors, labels, jax.tree.structure(state.anchor)),
      outer=() if outer is None else tuple(outers),
    )

  def join(
    anchor: PyTree, outer_state: PyTree, progress: PyTree
  ) -> tuple[PyTree, PyTree]:
    mean = collectives.mean(progress, axis)
    moved = _anchor.outer_step(outer, outer_state, mean, anchor)
    return collectives.varying(moved, axis)

  def keep(
    anchor: PyTree, outer_state: PyTree, progress: PyTree
  ) -> tuple[PyTree, PyTree]:
    del progress
    return collectives.varying((anchor, outer_state), axis)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def fragments_of(tree: PyTree, fragments: Fragments) -> tuple[int, ...]:
  """The fragment of every leaf, in the order of the tree.

  Args:
    tree: parameters, or their shapes.
    fragments: as of `fragment_steps`.

  Raises:
    ValueError: when there are fewer leaves than fragments, or a function's
      fragments are no ints or not all of 0, 1, 2, ...

  >>> tree = {"a": jnp.ones(4), "b": jnp.ones(2), "c": jnp.ones(2)}
  >>> fragments_of(tree, 2), fragments_of(tree, lambda path: int(path == "b"))
  ((0, 1, 1), (0, 1, 0))
  """
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  if callable(fragments):
    labels = tuple(
      _label(fragments, jax.tree_util.keystr(path, simple=True, separator="/"))
      for path, _ in leaves
    )
    if set(labels) != set(range(max(labels) + 1)):
      raise ValueError(
        "`fragments` must return 0, 1, 2, ... with none left out, got "
        f"{sorted(set(labels))}."
      )
    return labels
  if fragments > len(leaves):
    raise ValueError(
      f"`fragments` must be at most the number of leaves, {len(leaves)}, got "
      f"{fragments}: a leaf is never cut."
    )
  total = sum(leaf.size for _, leaf in leaves)
  cut: list[int] = []
  before = label = 0
  for number, (_, leaf) in enumerate(leaves):
    # Where its middle lies, but no fragment is left without a leaf.
    middle = (before + leaf.size / 2) / max(total, 1)
    wanted = min(int(middle * fragments), fragments - 1)
    last = fragments - (len(leaves) - number)  # One for each that follows.
    label = max(last, min(wanted, label + 1 if number else 0), label)
    cut.append(label)
    before += leaf.size
  return tuple(cut)


def _label(fragments: Callable[[str], int], path: str) -> int:
  """The fragment of one leaf, as a function says."""
  label = fragments(path)
  try:
    return operator.index(label)
  except TypeError:
    raise ValueError(
      f"`fragments` must return an int for every leaf, got {label!r} for "
      f"{path!r}. Return 0, 1, 2, ..., the number of the leaf's fragment."
    ) from None


def _check_number(fragments: int, interval: int) -> None:
  if fragments > interval:
    raise ValueError(
      f"`fragments` must be at most `interval`, {interval}, got {fragments}: "
      "one fragment is sent in a step."
    )


def _each(
  flags: list[jax.Array], labels: tuple[int, ...], like: PyTree
) -> PyTree:
  """A fragment's flag at each of its leaves."""
  return jax.tree.unflatten(
    jax.tree.structure(like), [flags[p] for p in labels]
  )


def _part(tree: PyTree, labels: tuple[int, ...], fragment: int) -> PyTree:
  """The tree with nothing in place of other fragments' leaves."""
  leaves, treedef = jax.tree.flatten(tree)
  kept = [
    leaf if label == fragment else optax.MaskedNode()
    for leaf, label in zip(leaves, labels, strict=True)
  ]
  return jax.tree.unflatten(treedef, kept)


def _whole(
  parts: list[PyTree], labels: tuple[int, ...], treedef: Any
) -> PyTree:
  """Puts the parts of all fragments together."""
  leaves = [iter(jax.tree.leaves(part)) for part in parts]
  return jax.tree.unflatten(treedef, [next(leaves[label]) for label in labels])
