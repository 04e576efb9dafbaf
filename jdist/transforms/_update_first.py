"""Synchronous training whose steps begin with the update of the last one."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks, collectives, states
from jdist.states import PyTree
from jdist.transforms import _averaging, _control, _shared
from jdist.transforms.local import _anchor


@states.declare(
  shared=("in_flight",), drains=True, averages=True, update_pending=True
)
class UpdateFirstState(NamedTuple):
  """State of `update_first`.

  Attributes:
    pending: This worker's gradients of the last step, in the parameters'
      dtypes, or their mean for leaves that were not held back; with `scatter`
      its share of their mean, a row for each bucket.
    in_flight: Whether gradients are pending, bool scalar.
    loss: This worker's loss of the last step, float32 scalar.
    inner: The optimizer's state.
  """

  pending: PyTree
  in_flight: jax.Array
  loss: jax.Array
  inner: PyTree

  def label(self, walk: Any) -> tuple[Any, bool]:
    """Labels the optimizer's state as equal on all workers, behind the mean."""
    labels = _shared.label_fields(self)
    return labels._replace(inner=walk(self.inner, True)[0]), True


class UpdateFirst(optax.GradientTransformationExtraArgs):
  """An Optax transformation in two halves, made by `update_first`.

  As a whole, `update` is one step late, like `delay_gradients`.  A step that
  calls the two halves has no delay.

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
  max_bytes: int = 4 * 2**20,
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

  The gradients are those of synchronous SGD.  They are sent from the state in
  sub-tensors, front layers first: the forward pass of a layer waits for this
  layer's sub-tensors only, and hides the following ones.  `scatter` splits the
  mean into a reduce-scatter at the end of a step, last layers first, and an
  all-gather at the beginning of the next, so that both passes hide it.
  `pending` below 1 does so, too: it holds back the gradients of the front
  layers, which the backward pass gives last and could not hide; the others are
  averaged within their step, under the rest of the backward pass.

  A transformation that needs all gradients at once makes the first layer wait
  for the last sub-tensor, for instance `optax.clip_by_global_norm` and
  `optax.apply_if_finite`.  The norms of LAMB and LARS, of one leaf each, do
  not.

  `training.make_step` supports it.  In a step of your own write:

  .. code-block:: python

     params, state = optimizer.begin(params, state)
     loss, grads = jax.value_and_grad(loss_fn)(params, batch)
     state = optimizer.hold(grads, state, loss=loss)

  One update is always pending: `drain` applies it, before an evaluation and at
  the end, and training may continue afterwards.  Checkpoints keep it, and
  resume to the bit.  No other transformation may wrap this one: `update` as a
  part of another one is one step late, which `make_step` refuses.

  Args:
    optimizer: Any Optax optimizer.  It receives the mean gradients and, as
      `loss` and `value`, the workers' mean of their step's loss, for which 4
      bytes more are sent if it uses them.  Other arguments of `update` are
      passed on and must be equal on all workers; `grad` and `value_fn` are
      refused.
    axis: The axis of the workers.
    max_bytes: The largest size of a sub-tensor, see `collectives.Buckets.of`.
    in_flight: The number of sub-tensors in flight, the credit; 1 by default.
      XLA merges those that may be in flight together, and the first layer then
      waits for several.  To have several on GPUs, set the option
      `xla_gpu_experimental_parallel_collective_overlap_limit` to their number
      and `xla_gpu_all_reduce_combine_threshold_bytes` to 0.
    order: The priority of the leaves; pass a function of the path if names do
      not sort in the order of the layers.
    scatter: Whether to split the mean in two.
    pending: The share of all elements that is held back, in [0, 1]: whole
      leaves in `order` until they reach it.  1 (the default) holds all of them
      back, 0 none, as `ssgd`; a third fits a backward pass of twice the forward
      pass.  Not with `scatter`.
    specs: The partition of the parameters over the other axes of the mesh, a
      tree of PartitionSpec, for workers that are themselves sharded; not with
      `scatter`.

  References:
    Jayarajan et al., P3 (MLSys 2019) and Peng et al., ByteScheduler (SOSP
    2019): priorities and credits.  Zhang et al., DeAR (arXiv 2302.12445): the
    two halves.  Departure: the compiler schedules one program, without a
    scheduler next to it.

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
  # The loss must be the workers' mean: with its own loss each worker's
  # optimizer would make another update, and the replicas would drift apart.
  optimizer = _anchor.only_floats(_averaging.with_mean_loss(optimizer, axis))
  collectives.check_axis(axis)
  max_bytes = checks.check_structural("max_bytes", max_bytes, minimum=8)
  in_flight = checks.check_structural("in_flight", in_flight, minimum=1)
  collectives.check_order(order)
  if isinstance(pending, jax.Array):
    raise ValueError(
      "`pending` shapes the program and must be a Python number, got an array."
    )
  checks.check_continuous("pending", pending, high=1.0)
  checks.check_choice("scatter", scatter, (True, False))
  if specs is not None:
    collectives.spec_leaves(specs)
  if scatter and pending < 1:
    raise ValueError(
      "`scatter` splits all means in two and cannot be used with "
      f"`pending` below 1, got {pending}. Take one of both."
    )
  if scatter and specs is not None:
    raise ValueError(
      "`scatter` splits flat buckets by rows and cannot be used with `specs`. "
      "Take `scatter=False` for workers that are themselves sharded."
    )

  def buckets_of(like: PyTree) -> collectives.Buckets:
    return collectives.Buckets.of(
      like, order=order, max_bytes=max_bytes,
      num_rows=collectives.size(axis) if scatter else 1,
      specs=_present(specs, like),
    )  # fmt: skip

  def init_fn(params: optax.Params) -> UpdateFirstState:
    if scatter:
      buckets = buckets_of(params).buckets
      zeros: PyTree = tuple(jnp.zeros(b.row_size, b.dtype) for b in buckets)
      zeros = collectives.varying(zeros, axis)
    else:
      zeros = jax.tree.map(jnp.zeros_like, params)
    return UpdateFirstState(
      pending=zeros, in_flight=jnp.asarray(False),
      loss=jnp.zeros((), jnp.float32), inner=optimizer.init(params),
    )  # fmt: skip

  def mean_of_pending(state: UpdateFirstState, params: optax.Params) -> PyTree:
    if scatter:
      rows = _in_turns(
        state.pending, lambda row: collectives.gather(row, axis), in_flight
      )
      return buckets_of(params).unpack(rows, params)
    # The rest was averaged in `hold`, within the step of its gradients.
    held, rest = _split(state.pending, order, pending)
    buckets = buckets_of(held)
    means = _in_turns(
      buckets.pack(held), lambda x: collectives.mean(x, axis), in_flight
    )
    return _merge(buckets.unpack(means, held), rest)

  def reduce_scattered(grads: optax.Updates) -> tuple[jax.Array, ...]:
    # The backward pass computes the gradients of the last layers first.
    rows = _in_turns(
      reversed(buckets_of(grads).pack(grads)),
      lambda x: collectives.reduce_scatter(x, axis).astype(x.dtype),
      in_flight,
    )
    return tuple(reversed(rows))

  def apply_pending(
    state: UpdateFirstState, params: optax.Params, **extra_args: Any
  ) -> tuple[optax.Updates, UpdateFirstState]:
    # The update is selected: a conditional is a wall for XLA, and collectives
    # inside of it would overlap with nothing.
    mean = mean_of_pending(state, params)
    of_step = dict.fromkeys(_averaging.LOSSES, state.loss)
    with collectives.team_of(None):  # The optimizer must not communicate.
      updates, inner = optimizer.update(
        mean, state.inner, params, **(of_step | extra_args)
      )
    nothing = jax.tree.map(jnp.zeros_like, updates)
    updates, inner = _anchor.either(
      state.in_flight, (updates, inner), (nothing, state.inner)
    )
    in_flight = jnp.zeros_like(state.in_flight)
    return updates, state._replace(inner=inner, in_flight=in_flight)

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
    like = None if scatter else state.pending  # Buckets check themselves.
    collectives.check_local(grads, axis, what="`grads`", like=like)
    if scatter:
      grads = reduce_scattered(grads)
      # Buckets are laid out by dtype, and `begin` knows those of the parameters
      # only.
      mine, wanted = (
        [f"{x.dtype.name}{list(x.shape)}" for x in rows]
        for rows in (grads, state.pending)
      )
      if mine != wanted:
        raise ValueError(
          "`grads` must have the parameters' dtypes with `scatter`, got "
          f"buckets of {mine} for {wanted}. Cast the gradients, or take "
          "`scatter=False`."
        )
    elif pending < 1:
      front, rest = _split(grads, order, pending)
      grads = _merge(front, collectives.mean(rest, axis))
    held = UpdateFirstState(
      # Other dtypes in the state would compile a second program.
      pending=optax.tree.cast_like(grads, state.pending),
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
    _anchor.check_params(params, "`update_first`")
    _control.refuse(control, "`update_first`")
    # As a whole the transformation is one step late, because the gradients that
    # it is given are already those of the present parameters.
    late, state = apply_pending(state, params, **extra_args)
    if control.drain:
      nothing = jax.tree.map(jnp.zeros_like, state.pending)
      return late, state._replace(pending=nothing)
    return late, hold(updates, state, loss=loss)

  made = _anchor.transformation(init_fn, update_fn, UpdateFirst)
  made.begin, made.hold = begin, hold
  return made


def _split(
  tree: PyTree, order: collectives.Order, share: float
) -> tuple[PyTree, PyTree]:
  """Splits a tree into the most urgent leaves and the others.

  Each half has None in place of the leaves of the other one.

  >>> _split({"a": jnp.zeros(2), "b": jnp.ones(2)}, "back_first", 0.5)[1]
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


def _merge(front: PyTree, rest: PyTree) -> PyTree:
  return jax.tree.map(
    lambda a, b: b if a is None else a, front, rest, is_leaf=lambda x: x is None
  )


def _present(specs: PyTree, tree: PyTree) -> PyTree:
  """Returns the specs of the leaves of a tree that are not None."""
  if specs is None:
    return None
  leaves = jax.tree.leaves(tree, is_leaf=lambda x: x is None)
  found = collectives.spec_leaves(specs, list(range(len(leaves))))
  pairs = zip(leaves, found, strict=True)
  return [spec for x, spec in pairs if x is not None]


def _in_turns(
  buffers: Iterable[jax.Array],
  send: Callable[[jax.Array], jax.Array],
  in_flight: int,
) -> list[jax.Array]:
  """Sends buffers in order, with at most `in_flight` of them in flight."""
  sent: list[jax.Array] = []
  for i, buffer in enumerate(buffers):
    if i >= in_flight:
      # The barrier ties this send to the completion of an earlier one.  Without
      # it XLA may start all sends at once, in any order.
      before = i - in_flight
      buffer, sent[before] = jax.lax.optimization_barrier(
        (buffer, sent[before])
      )
    sent.append(send(buffer))
  return sent
