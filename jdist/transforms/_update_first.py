"""Synchronous training whose steps begin with the update of the last one."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jdist import checks, collectives, states
from jdist.transforms import _control, _mean_loss, _shared

PyTree = Any
_MEBIBYTE = 2**20


@states.declare(
  shared=("in_flight",), drains=True, averages=True, update_pending=True
)
class UpdateFirstState(NamedTuple):
  """State of `update_first`.

  Attributes:
    pending: this worker's gradients of the last step, in their dtypes; of
      what was not held back their mean; with `scatter` its share of their
      mean, a row for each message.
    in_flight: whether there are any, bool scalar.
    loss: this worker's loss of the last step, float32 scalar.
    inner: the optimizer's state.
  """

  pending: PyTree
  in_flight: jax.Array
  loss: jax.Array
  inner: PyTree

  def label(self, walk: Any) -> tuple[Any, bool]:
    """Behind the mean the optimizer's state is equal on all workers."""
    labels = _shared.label_fields(self)
    return labels._replace(inner=walk(self.inner, True)[0]), True


class UpdateFirst(optax.GradientTransformationExtraArgs):
  """What `update_first` makes: an Optax transformation in two halves.

  As a whole, `update` is one step late, like `delay_gradients`.  Between its
  halves there is nothing late.

  Attributes:
    begin: `(params, state) -> params, state`, before the gradients are taken:
      applies the mean of the last ones.
    hold: `(grads, state, loss=...) -> state`: keeps the present ones.
  """

  begin: Callable[[optax.Params, PyTree], tuple[optax.Params, PyTree]]
  hold: Callable[..., PyTree]


def update_first(
  optimizer: optax.GradientTransformation,
  *,
  axis: collectives.Axis,
  max_bytes: int = 4 * _MEBIBYTE,
  in_flight: int = 1,
  order: collectives.Order = "front_first",
  scatter: bool = False,
  pending: float = 1.0,
  specs: PyTree = None,
) -> UpdateFirst:
  r"""Exact synchronous SGD, with communication under the forward pass.

  A step begins with the mean of the last step's gradients and the update by
  it, and then takes gradients at the new parameters:

  .. math:: w_t = w_{t-1} + \mathrm{optimizer}(\tfrac1N \sum_i g_i(w_{t-1})),
            \qquad g_i(w_t)

  The weights at which gradients are taken are those of synchronous SGD.  The
  gradients travel in sub-tensors, front layers first, from the state: the
  forward pass of a layer waits for this layer's sub-tensors only, and hides
  those behind it.  With `scatter` the mean is split into a reduce-scatter at
  the end of a step, last layers first, and an all-gather at the beginning of
  the next, so that it hides under both passes.  So it does with `pending`
  below 1: only the front layers' gradients are held back, which the backward
  pass gives last and has nothing left to hide; the others are averaged
  within their step, while it goes on to the front.

  What needs all gradients at once makes the first layer wait for the last
  sub-tensor: `optax.clip_by_global_norm` and `optax.apply_if_finite`, for
  instance.  LAMB's and LARS' norms, of one leaf each, do not.

  `training.make_step` knows what to do with it.  In a step of one's own:

  .. code-block:: python

     params, state = optimizer.begin(params, state)
     loss, grads = jax.value_and_grad(loss_fn)(params, batch)
     state = optimizer.hold(grads, state, loss=loss)

  One update is always pending: `drain` applies it, before an evaluation and at
  the end; going on afterwards changes nothing.  Checkpoints keep it as it is,
  and go on to the bit.  Nothing may stand around the transformation: as a part
  of another one its `update` is one step late, which `make_step` refuses.

  Args:
    optimizer: any Optax optimizer; it sees the mean gradients, and as `loss`
      the workers' mean of their step's, for which 4 bytes more are sent where
      it uses that.  What else is given to `update`, but for a `value`, reaches
      it as it is, and must be equal on all workers.
    axis: the workers' axis.
    max_bytes: the size that a sub-tensor should not exceed, see
      `collectives.plan`.
    in_flight: how many sub-tensors may be under way, the credit; 1 by default:
      XLA merges those that may be under way together, and the first layer then
      waits for several.  To have several on GPUs, set the option
      `xla_gpu_experimental_parallel_collective_overlap_limit` to their number
      and `xla_gpu_all_reduce_combine_threshold_bytes` to 0.
    order: which leaf is most urgent: give a function of the path where names
      do not sort in the order of the layers.
    scatter: whether to split the mean in two.
    pending: which part of the gradients is held back, in [0, 1]: leaves in
      `order`, until they hold this share of all elements (1, the default:
      all of them; 0: none, as `ssgd`).  Where forward and backward pass are
      as long as they usually are, a third.  Not with `scatter`.
    specs: how the parameters are split over the mesh's other axes, a tree of
      PartitionSpec, for workers that are themselves sharded; not with
      `scatter`.

  Returns:
    The transformation.

  Raises:
    ValueError: when an argument is out of its range.

  References:
    Jayarajan et al., P3 (MLSys 2019) and Peng et al., ByteScheduler (SOSP
    2019): priorities and credits.  Zhang et al., DeAR (arXiv 2302.12445): the
    two halves.  Departure: one compiled program in which the compiler
    schedules, instead of a scheduler beside it.

  >>> optimizer = update_first(optax.sgd(0.5), axis=None)
  >>> w = jnp.array(0.0)
  >>> state = optimizer.init(w)
  >>> for x in (2.0, 4.0):
  ...   w, state = optimizer.begin(w, state)
  ...   state = optimizer.hold(w - x, state)
  ...   print(w.item())
  0.0
  1.0
  """
  checks.check_optimizer("optimizer", optimizer)
  collectives.check_axis(axis)
  checks.check_structural("max_bytes", max_bytes, minimum=8)
  checks.check_structural("in_flight", in_flight, minimum=1)
  collectives.check_order(order)
  if isinstance(pending, jax.Array):
    raise ValueError(
      "`pending` shapes the program and must be a Python number, got an array."
    )
  checks.check_continuous("pending", pending, high=1.0)
  if scatter and pending < 1:
    raise ValueError(
      "`scatter` splits all means in two and cannot be used with "
      f"`pending` below 1, got {pending}. Take one of both."
    )
  if scatter and specs is not None:
    raise ValueError(
      "`scatter` deals out flat messages and cannot be used with `specs`. Take "
      "`scatter=False` for workers that are themselves sharded."
    )
  # A worker's own loss would drive the workers apart.
  optimizer = _mean_loss.with_mean_loss(optimizer, axis)

  def plan(like: PyTree) -> collectives.Plan:  # When a program is traced.
    return collectives.plan(
      like,
      max_bytes=max_bytes,
      order=order,
      credit=in_flight,
      shardings=specs if pending == 1 else _like(specs, like),
    )

  def init_fn(params: optax.Params) -> UpdateFirstState:
    pending = jax.tree.map(jnp.zeros_like, params)
    return UpdateFirstState(
      pending=_dealt(plan(params), pending, axis) if scatter else pending,
      in_flight=jnp.asarray(False),
      loss=jnp.zeros((), jnp.float32),
      inner=optimizer.init(params),
    )

  def arrived(state: UpdateFirstState, params: optax.Params) -> PyTree:
    """The mean of what is pending."""
    if not scatter:
      held, rest = _parted(state.pending, order, pending)
      planned = plan(held)
      messages = collectives.pack(planned, held)
      sent = _in_turns(
        planned, messages, lambda message: collectives.mean(message, axis)
      )
      return _joined(collectives.unpack(planned, sent, held), rest)
    planned = plan(params)
    rows = _in_turns(
      planned, state.pending, lambda row: collectives.gather(row, axis)
    )
    shapes = _shapes(planned, params)
    sent = [_shaped(r, s) for r, s in zip(rows, shapes, strict=True)]
    return collectives.unpack(planned, sent, params)

  def apply_pending(
    state: UpdateFirstState, params: optax.Params, **extra_args: Any
  ) -> tuple[optax.Updates, UpdateFirstState]:
    # Selected and not under a conditional, where nothing would overlap.
    updates, inner = optimizer.update(
      arrived(state, params),
      state.inner,
      params,
      **({"loss": state.loss} | extra_args),
    )

    def chosen(new: PyTree, old: PyTree) -> PyTree:
      return jax.tree.map(
        lambda n, o: jnp.where(state.in_flight, n, o), new, old
      )

    updates = chosen(updates, jax.tree.map(jnp.zeros_like, updates))
    return updates, state._replace(
      inner=chosen(inner, state.inner),
      in_flight=jnp.zeros_like(state.in_flight),
    )

  def begin(
    params: optax.Params, state: UpdateFirstState
  ) -> tuple[optax.Params, UpdateFirstState]:
    updates, state = apply_pending(state, params)
    return optax.apply_updates(params, updates), state

  def hold(
    grads: optax.Updates,
    state: UpdateFirstState,
    *,
    loss: jax.typing.ArrayLike = 0.0,
  ) -> UpdateFirstState:
    collectives.check_local(grads, axis, what="`grads`")
    if scatter:
      grads = _dealt(plan(grads), grads, axis)
    elif pending < 1:
      front, rest = _parted(grads, order, pending)
      grads = _joined(front, collectives.mean(rest, axis))
    held = UpdateFirstState(
      pending=grads,
      in_flight=jnp.ones_like(state.in_flight),
      loss=jnp.asarray(loss, jnp.float32),
      inner=state.inner,
    )
    return collectives.varying(held, axis)

  def update_fn(
    updates: optax.Updates,
    state: UpdateFirstState,
    params: optax.Params | None = None,
    *,
    loss: jax.typing.ArrayLike = 0.0,
    control: _control.Control = _control.DEVICE,
    **extra_args: Any,
  ) -> tuple[optax.Updates, UpdateFirstState]:
    if params is None:
      raise ValueError(
        "`params` must be given to `update` of `update_first`: call "
        "`optimizer.update(grads, state, params)`."
      )
    _control.refuse(control, "`update_first`")
    late, state = apply_pending(state, params, **extra_args)
    if control.drain:
      return late, state
    return late, hold(updates, state, loss=loss)

  made = UpdateFirst(init_fn, update_fn)
  made.begin, made.hold = begin, hold
  return made


def _parted(
  tree: PyTree, order: collectives.Order, share: float
) -> tuple[PyTree, PyTree]:
  """The most urgent leaves and the others, None in place of what is not there.

  >>> _parted({"a": jnp.zeros(2), "b": jnp.ones(2)}, "back_first", 0.5)[1]
  {'a': Array([0., 0.], dtype=float32), 'b': None}
  """
  leaves, structure = jax.tree.flatten(tree)
  whole = sum(leaf.size for leaf in leaves)
  front: list[Any] = [None] * len(leaves)
  rest, before = list(leaves), 0
  for i in collectives.leaf_order(tree, order):
    if before >= share * whole:
      break
    front[i], rest[i] = leaves[i], None
    before += leaves[i].size
  return jax.tree.unflatten(structure, front), jax.tree.unflatten(
    structure, rest
  )


def _joined(front: PyTree, rest: PyTree) -> PyTree:
  return jax.tree.map(
    lambda a, b: b if a is None else a, front, rest, is_leaf=lambda x: x is None
  )


def _like(specs: PyTree, tree: PyTree) -> PyTree:
  """The specs of the leaves that there are, None elsewhere."""
  if specs is None or isinstance(specs, PartitionSpec | NamedSharding):
    return specs
  return jax.tree.map(
    lambda x, spec: None if x is None else spec,
    tree,
    specs,
    is_leaf=lambda x: x is None,
  )


def _in_turns(
  plan: collectives.Plan, messages: Any, send: Callable[[Any], Any]
) -> list[Any]:
  """Sends messages in the plan's order, no more at a time than its credit."""
  sent: list[Any] = []
  for i, message in enumerate(messages):
    before = plan.waits_for(i)
    if before is not None:
      message, sent[before] = jax.lax.optimization_barrier(
        (message, sent[before])
      )
    sent.append(send(message))
  return sent


def _dealt(
  plan: collectives.Plan, tree: PyTree, axis: collectives.Axis
) -> tuple[jax.Array, ...]:
  """This worker's rows of the means of a plan's messages."""
  workers = collectives.size(axis)

  def rows(message: jax.Array) -> jax.Array:
    flat = message.reshape(-1)
    flat = jnp.pad(flat, (0, -flat.size % workers))
    return flat.reshape(workers, -1)

  # The last layers' gradients are there first.
  messages = [rows(m) for m in reversed(collectives.pack(plan, tree))]
  dealt = _in_turns(
    plan, messages, lambda m: collectives.reduce_scatter(m, axis)
  )
  return tuple(reversed(dealt))


def _shapes(plan: collectives.Plan, tree: PyTree) -> list[tuple[int, ...]]:
  pack = functools.partial(collectives.pack, plan)
  return [x.shape for x in jax.eval_shape(pack, tree)]


def _shaped(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  return rows.reshape(-1)[: math.prod(shape)].reshape(shape)
