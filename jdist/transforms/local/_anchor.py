"""The anchor: the parameters on which all workers agree, and its arithmetic.

It is found in the state of any chain, at any depth.

An anchor is float32, or wider, whatever the dtype of the parameters is, and a
buffer of its own.  A worker's local parameters are widened in the same way,
after the cast to the dtype in which the worker holds them.
"""

import collections
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks, states
from jdist import collectives as workers
from jdist.states import PyTree

_FORM = ("shape", "dtype")


def wide(x: jax.Array) -> jax.Array:
  """Returns at least float32."""
  return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def wide_copy(x: jax.Array) -> jax.Array:
  """Returns a copy, at least float32."""
  # A copy, because parameters and state may both be donated.
  return jnp.array(wide(jnp.asarray(x)), copy=True)


def moved(params: jax.Array, updates: jax.Array) -> jax.Array:
  """Returns the parameters after `optax.apply_updates`, in float32."""
  there = summed(wide(params), wide(updates))
  # The cast rounds as the worker's own parameters are rounded.
  return wide(there.astype(params.dtype))


def towards(updates: PyTree, target: PyTree, local: PyTree) -> PyTree:
  """Returns updates that lead to `target`, where `updates` lead to `local`."""
  # Not `target - params`: where target and local are equal, the updates must
  # not change a bit.
  return jax.tree.map(
    lambda u, t, w: summed(wide(u), difference(t, w)).astype(u.dtype),
    updates, target, local,
  )  # fmt: skip


def summed(x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns x + y."""
  # `jnp.add` traces a program of its own for each of thousands of leaves.
  return jax.lax.add(x, y) if _alike(x, y) else x + y


def difference(x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns x - y."""
  return jax.lax.sub(x, y) if _alike(x, y) else x - y


def _alike(x: jax.Array, y: jax.Array) -> bool:
  return x.dtype == y.dtype and x.shape == y.shape


def behind(anchor: PyTree, part: jax.Array, progress: PyTree) -> PyTree:
  """Returns anchor - part * progress, with equal bits in every program."""
  return jax.tree.map(
    lambda a, p: a - rounded(part.astype(p.dtype) * p), anchor, progress
  )


def rounded(product: jax.Array) -> jax.Array:
  """Returns a product that is rounded before anything is added to it.

  >>> rounded(jnp.float32(0.7) * jnp.float32(3.0)).item()
  2.0999999046325684
  """
  # Otherwise a compiler may merge product and sum into one instruction that
  # rounds once, in one form of a program and not in another, and their bits
  # would differ.  It cannot know that this selects nothing, which costs no pass
  # over the arrays.  `optimization_barrier` and `reduce_precision` are gone
  # before LLVM merges, and would cost a pass on GPUs.
  return jnp.where(product == 0, jnp.zeros_like(product), product)


def onto(anchor: PyTree, params: PyTree) -> PyTree:
  """Returns updates that lead from the parameters to the anchor."""
  return jax.tree.map(
    lambda a, p: (a - wide(p)).astype(p.dtype), anchor, params
  )


def scalar(x: jax.typing.ArrayLike) -> jax.Array:
  """Returns a number as float32."""
  # Injected hyper-parameters have the parameters' dtype.
  if isinstance(x, jax.Array):
    return x.astype(jnp.float32)
  # By NumPy, because JAX refuses integers beyond int32.
  return jnp.asarray(np.asarray(x, np.float32))


def either(which: jax.Array | bool, yes: PyTree, no: PyTree) -> PyTree:
  """Chooses between two trees, leaf by leaf."""
  if which is True:  # The program need not wait for `no`.
    return yes
  return optax.tree.where(which, yes, no)


def check_params(params: Any, method: str) -> None:
  """Raises a ValueError when an update is not given the parameters."""
  if params is None:
    raise ValueError(
      f"`params` must be given to `update` of {method}: call "
      "`optimizer.update(grads, state, params)`."
    )


def transformation(
  init: Callable[..., Any],
  update: Callable[..., Any],
  kind: Any = optax.GradientTransformationExtraArgs,
) -> Any:
  """Makes a transformation whose errors name a state that is not its own."""

  @functools.wraps(update)
  def update_fn(
    updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
  ) -> Any:
    try:
      return update(updates, state, params, **extra_args)
    except Exception as error:
      if not (isinstance(error, ValueError) and "`" in str(error)):
        like = jax.eval_shape(init, updates if params is None else params)
        rule = "`state` must be what `init` of this optimizer returned"
        checks.check_form(rule, state, like)
      raise

  return kind(init, update_fn)


def declares(name: str) -> Callable[[Any], bool]:
  """Returns a test of a flag that states declare, see `jdist.states`."""
  return lambda x: getattr(type(x), name, False) is True


def parts(state: PyTree, is_one: Callable[[Any], bool]) -> list[Any]:
  """Returns the outermost parts of a state that pass a test."""
  return list(filter(is_one, jax.tree.leaves(state, is_leaf=is_one)))


def contains(state: PyTree, is_one: Callable[[Any], bool]) -> bool:
  """Returns whether a state, or a part of it, passes a test."""
  return any(map(is_one, jax.tree.leaves(state, is_leaf=is_one)))


def find_rounds(state: PyTree) -> Any:
  """Finds the outermost state with rounds in a chain's state, or None.

  For `local_steps` it is the synchronizer's part of the state.

  Raises:
    ValueError: If there are several of them, or another transformation
      between it and the parameters.
  """
  found = parts(state, declares("rounds"))
  if not found:
    return None
  if len(found) > 1:
    raise ValueError(
      "`state` must have one `local_steps` at most, side by side there are "
      f"{len(found)}. Put one inside the other's inner chain."
    )
  _check_last(state)
  return getattr(found[0], "sync", found[0])


def _check_last(state: PyTree) -> None:
  """Raises a ValueError unless a method's updates reach the parameters."""
  # The anchor assumes that the updates are applied unchanged.  A chain's state
  # shows later transformations.  A wrapper must be one of Optax's that pass
  # updates on, or say so by `states.declare`.
  rounds = declares("rounds")
  while not rounds(state):
    kind = type(state)
    if kind is optax.MultiStepsState and jax.tree.leaves(state.skip_state):
      raise _not_last("`should_skip_update_fn` skips steps of one worker alone")
    if kind is tuple or isinstance(state, collections.OrderedDict):
      each = list(state.values() if kind is not tuple else state)
      place = next(i for i, x in enumerate(each) if contains(x, rounds))
      if behind := each[place + 1 :]:
        raise _not_last(f"{_kind(behind[0])} stands behind it in a chain")
    elif isinstance(
      state,
      optax.MaskedState
      | optax.transforms.PartitionState
      | optax.InjectStatefulHyperparamsState
      | optax.MultiStepsState
      | dict,
    ) or isinstance(getattr(kind, "shared", None), frozenset):
      each = list(state.values() if isinstance(state, dict) else state)
    else:
      raise _not_last(f"{_kind(state)} stands around it")
    state = next(x for x in each if contains(x, rounds))


def _kind(state: Any) -> str:
  name = type(state).__name__
  if isinstance(state, optax.MaskedState):
    return f"{name} (`optax.masked` or `freeze`)"
  if isinstance(state, optax.EmptyState):
    return f"{name} (`scale`, `add_decayed_weights`, `clip` or the like)"
  return name


def _not_last(what: str) -> ValueError:
  return ValueError(
    "`optimizer` must change nothing that a method with rounds gives, whose "
    f"anchor takes its updates as done, but {what}. Put it into the method, as "
    "in `diloco(optax.chain(optimizer, ...), ...)`; parameters that are not "
    "trained are left out by `optax.transforms.selective_transform(diloco(...),"
    " freeze_mask=mask)` or `optax.partition`."
  )


def is_trained(x: Any) -> bool:
  """Returns whether a leaf has numbers that a gradient can change."""
  dtype = getattr(x, "dtype", None)
  if dtype is None:
    return isinstance(x, float | complex)
  return bool(jnp.issubdtype(dtype, jnp.inexact))


def only_floats(
  optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Leaves integers and bools among the parameters alone.

  They are neither sent nor given a state, and their updates are zeros.  All
  methods of `jdist.methods` do this already.

  Returns:
    A transformation, equal to the bit where all leaves are floats.

  >>> optimizer = only_floats(optax.sgd(0.5))
  >>> w = {"steps": jnp.array(3), "w": jnp.array(1.0)}
  >>> updates, _ = optimizer.update(w, optimizer.init(w), w)
  >>> updates["steps"].item(), updates["w"].item()
  (0, -0.5)
  """
  optimizer = checks.check_optimizer("optimizer", optimizer)

  def part(tree: PyTree, like: PyTree) -> PyTree:
    return jax.tree.map(
      lambda p, x: x if is_trained(p) else optax.MaskedNode(), like, tree
    )

  def init_fn(params: optax.Params) -> PyTree:
    return optimizer.init(part(params, params))

  def update_fn(
    updates: optax.Updates,
    state: PyTree,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, PyTree]:
    like = updates if params is None else params
    if all(map(is_trained, jax.tree.leaves(like))):
      return optimizer.update(updates, state, params, **extra_args)
    workers.check_alike(updates, like, "`updates`")
    given = None if params is None else part(params, like)
    found, state = optimizer.update(
      part(updates, like), state, given, **extra_args
    )
    return jax.tree.map(
      lambda p, u: u if is_trained(p) else jnp.zeros_like(p), like, found
    ), state

  return transformation(init_fn, update_fn)


def by_fast(updates: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
  """Returns gradients and the parameters by which they were taken.

  These are the fast ones of an `optax.LookaheadParams`; the gradient by the
  whole pair, which has zeros for the slow ones, is taken as well.
  """
  pair = optax.LookaheadParams
  if not isinstance(params, pair):
    return updates, params
  fast = updates.fast if isinstance(updates, pair) else updates
  return fast, params.fast


def lenient(
  optimizer: optax.GradientTransformation, argument: str = "optimizer"
) -> optax.GradientTransformationExtraArgs:
  """Withholds arguments that an update does not know; refuses missing ones.

  Updates and a state in another form are refused, too.
  """
  optimizer = checks.check_optimizer(argument, optimizer)
  optimizer = optax.with_extra_args_support(optimizer)

  def init(params: PyTree) -> PyTree:
    state = optimizer.init(params)
    checks.check_arrays(f"{argument}.init(params)", state)
    return state

  def update(
    updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
  ) -> tuple[PyTree, PyTree]:
    try:
      found = optimizer.update(updates, state, params, **extra_args)
    except (AttributeError, TypeError, ValueError) as error:
      # `optax.contrib.sam`, for instance, takes one, and no others.
      for name in extra_args:
        if f"unexpected keyword argument '{name}'" in str(error):
          left = {k: x for k, x in extra_args.items() if k != name}
          return update(updates, state, params, **left)
      needs = r"required keyword-only|attribute '?fast|^\w+ must be provided"
      if not re.search(needs, reason := str(error).rstrip(".")):
        raise
      raise ValueError(
        f"`{argument}` must be an optimizer that needs neither pairs of "
        f"parameters nor arguments of its own, but its update fails: {reason}."
      ) from error
    like = updates if params is None else params
    if layout(found) != layout((like, state)):
      rule, wanted = f"{argument}.update", "updates and a new state"
      moves, after = checks.check_pair(rule, found, wanted)
      hint = "`transforms.only_floats(...)` around it leaves integers alone."
      checks.check_form(f"`{rule}` must update each leaf", moves, like, hint)
      checks.check_form(f"`{rule}` must keep its state's form", after, state)
    return found

  return optax.GradientTransformationExtraArgs(init, update)


def layout(tree: PyTree) -> Any:
  """Returns the structure of a tree, and shapes and dtypes of its arrays."""
  leaves, structure = jax.tree.flatten(tree)
  return structure, [[getattr(x, y, None) for y in _FORM] for x in leaves]


def check_anchor(anchor: PyTree, params: PyTree) -> None:
  """Raises a ValueError for an anchor of other parameters."""
  if workers.same_form(anchor, params):
    return
  wanted = checks.named_leaves(anchor)
  given = checks.named_leaves(params)
  # A leaf that is masked in the anchor may be any.
  if any(map(is_masked, jax.tree.leaves(anchor, is_leaf=is_masked))):
    given = {name: x for name, x in given.items() if name in wanted}
  checks.check_form(
    "`params` must be those of which the optimizer's state was made",
    given, wanted,
    "Make it by `optimizer.init(params)`; `optax.flatten` goes into a method.",
  )  # fmt: skip


def is_masked(x: Any) -> bool:
  """Returns whether a leaf is left out of a tree."""
  return isinstance(x, optax.MaskedNode)


def over(anchor: PyTree, params: PyTree, one: Callable[..., Any]) -> PyTree:
  """Maps both trees; leaves that the anchor lacks stay as in `params`."""
  return jax.tree.map(
    lambda a, p: p if is_masked(a) else one(a, p),
    anchor, params, is_leaf=is_masked,
  )  # fmt: skip


def apply_updates(
  params: optax.Params, updates: optax.Updates, state: PyTree = ()
) -> optax.Params:
  """Adds updates to the parameters, and ends rounds exactly on the anchor.

  An update is a difference, and after a round the sum may differ from the
  anchor by a rounding.  This function returns the anchor itself, so that equal
  parameters stay equal to the bit.

  Args:
    params: The parameters; the new ones have their dtypes.
    updates: The updates, in any floating dtype.
    state: The state that `update` returned; without it this is
      `optax.apply_updates`.

  >>> apply_updates({"w": jnp.array(1.0)}, {"w": jnp.array(-0.5)})["w"].item()
  0.5
  """
  found = find_rounds(state)
  workers.check_alike(updates, params, "`updates`")
  if found is not None and not workers.same_form(found.anchor, params):
    check_anchor(found.anchor, params)
  there = jax.tree.map(
    lambda p, u: moved(p, u).astype(p.dtype) if is_trained(p) else p,
    *jax.tree.map(jnp.asarray, (params, updates)),
  )
  if found is None:
    return there
  exact = found.clock.synchronized
  if not isinstance(found.kept, tuple):
    # A worker that keeps a part of its own progress is not on the anchor.
    exact = exact & (found.kept == 0)
  return over(
    found.anchor, there, lambda a, p: jnp.where(exact, a.astype(p.dtype), p)
  )


@states.declare(shared=("step",))
class PullToAnchorState(NamedTuple):
  """State of `pull_to_anchor`.

  Attributes:
    step: Local steps so far, int32 scalar, for the learning rate's schedule.
  """

  step: jax.Array


def pull_to_anchor(
  strength: jax.typing.ArrayLike, learning_rate: optax.ScalarOrSchedule
) -> optax.GradientTransformationExtraArgs:
  r"""Adds a pull towards the anchor to the gradient.

  .. math:: g \leftarrow g + \frac{\beta}{H \eta_t} (w - a)

  with the anchor a and the interval H of the present round.  Under plain SGD
  with the learning rate :math:`\eta_t` a worker loses beta/H of its distance
  in each of H steps, about :math:`1 - e^{-\beta}` of it in a round, whatever
  the rate and the interval.  A momentum m multiplies that by 1/(1-m).

  It belongs in the inner chain of `local_steps`, which passes the anchor and
  `interval_steps=` to it.

  Args:
    strength: beta >= 0, where 0 is no pull.
    learning_rate: The inner optimizer's learning rate, a number or a schedule
      of the local step.

  Raises:
    ValueError: At trace time, outside of `local_steps`.

  References:
    Ju et al., multi-step delayed parameter update (2025, doi
    10.11918/202407052) names a parameter correction against drift and gives
    no formula: this is a reconstruction after SSD-SGD (arXiv 2012.05396).

  >>> pull = pull_to_anchor(0.5, learning_rate=0.1)
  >>> w, anchor = jnp.array(3.0), jnp.array(1.0)
  >>> updates, _ = pull.update(
  ...   jnp.array(0.0), pull.init(w), w, anchor=anchor, interval_steps=4
  ... )
  >>> round(updates.item(), 6)  # 0.5 / (4 * 0.1) * (3 - 1)
  2.5
  """
  checks.check_continuous("strength", strength)
  checks.check_rate("learning_rate", learning_rate)

  def factor(
    state: PullToAnchorState, interval_steps: jax.typing.ArrayLike
  ) -> tuple[jax.Array, PullToAnchorState]:
    rate: Any = learning_rate
    rate = rate(state.step) if callable(rate) else rate
    distance = scalar(interval_steps) * scalar(rate)
    # A schedule may end at zero, where the quotient would be infinite.
    factor = jnp.where(distance > 0, scalar(strength) / distance, 0.0)
    return factor, PullToAnchorState(optax.safe_increment(state.step))

  def first() -> PullToAnchorState:
    return PullToAnchorState(jnp.zeros((), jnp.int32))

  return pull("pull_to_anchor", first, factor, needs_interval=True)


def pull(
  name: str,
  first: Callable[[], Any],
  factor: Callable[[Any, Any], tuple[jax.Array, Any]],
  needs_interval: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Adds `factor(state, interval_steps)` times the distance from the anchor."""

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    *,
    anchor: optax.Params | None = None,
    interval_steps: jax.typing.ArrayLike | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, Any]:
    del extra_args
    unknown = needs_interval and interval_steps is None
    if params is None or anchor is None or unknown:
      raise ValueError(
        f"`{name}` must stand in the inner chain of `local_steps`, and "
        "`update` must be given `params`: it found no anchor. Write "
        f"`local_steps(optax.chain({name}(...), optax.sgd(...)), ...)`."
      )
    by, state = factor(state, interval_steps)

    def pulled(g: Any, w: Any, a: Any) -> Any:
      if is_masked(g):  # `optax.masked` passes the whole anchor.
        return g
      # The anchor's dtype is at least float32.
      pull = by.astype(a.dtype) * (w.astype(a.dtype) - a)
      return (g.astype(a.dtype) + pull).astype(g.dtype)

    trees = updates, params, anchor
    return jax.tree.map(pulled, *trees, is_leaf=is_masked), state

  return optax.GradientTransformationExtraArgs(
    lambda params: first(), update_fn
  )
