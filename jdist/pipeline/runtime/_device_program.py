"""One device's part of a training step, and the step of all devices."""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jdist import checks, collectives, training, transforms
from jdist.pipeline.runtime import (
  _chain_check,
  _device_state,
  _stage_arrays,
  _stages,
  _ticks,
  _traced_model,
)
from jdist.states import PyTree


class Layout:
  """Converts between a device's leaves and those of the whole model.

  An optimizer's state of the whole model is stored in equal parts on the
  devices: an array as `[size / devices]`, a scalar as it is.
  """

  def __init__(
    self,
    stages: Sequence[_stages.LayerLike],
    params: _stage_arrays.StageArrays,
    axis: str | None,
  ):
    """Takes the layout of parameters; `axis` is None to find shapes alone."""
    self._stages, self._params, self._axis = stages, params, axis

  def whole(self, own: PyTree) -> PyTree:
    """Gathers all stages' leaves, nested as in the unsplit model."""
    return _stages.merge(self._params.split(jax.tree.map(self._gather, own)))

  def own(self, whole: PyTree) -> PyTree:
    """Undoes `whole`."""
    arrays = self._params.join(
      [_stages.pick(whole, x.params) for x in self._stages]
    )
    device = collectives.index(self._axis)
    return jax.tree.map(lambda x: x[device], arrays)

  def cut(self, state: PyTree) -> PyTree:
    """Returns a device's part of a state that all of them have."""
    number = self._params.num_devices
    device = collectives.index(self._axis)

    def part(x: jax.Array) -> jax.Array:
      if not x.ndim:
        return x
      # Parts are padded, as all devices must hold arrays of one size.
      size = math.ceil(x.size / number)
      flat = jnp.pad(jnp.ravel(x), (0, number * size - x.size))
      return flat.reshape(number, size)[device]

    return jax.tree.map(part, state)

  def joined(self, parts: PyTree, like: PyTree) -> PyTree:
    """Undoes `cut`, given the shapes of the whole state."""

    def join(x: jax.Array, one: Any) -> jax.Array:
      if not one.ndim:
        return x
      return jnp.ravel(self._gather(x))[: one.size].reshape(one.shape)

    return jax.tree.map(join, parts, like)

  def _gather(self, x: jax.Array) -> jax.Array:
    if self._axis is not None:
      return jax.lax.all_gather(x, self._axis)
    return jnp.broadcast_to(x, (self._params.num_devices, *x.shape))


# An Optax chain has no argument by which a layout could reach a transformation
# inside of it, so the layout is a variable of the trace.
_LAYOUT: contextvars.ContextVar[Layout | None] = contextvars.ContextVar(
  "layout of a model over devices", default=None
)


@contextlib.contextmanager
def layout_of(layout: Layout | None) -> Iterator[None]:
  """Sets the layout for the optimizers that are traced inside."""
  token = _LAYOUT.set(layout)
  try:
    yield
  finally:
    _LAYOUT.reset(token)


def whole_model(
  optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  r"""Gives an optimizer the leaves of all stages, under their own names.

  In a pipeline of one program a device's optimizer sees the leaves of its own
  stages and communicates nothing, which suffices for most chains.  A chain that
  decides by all leaves (a global norm, a flag, a line search) or by a layer's
  name (a mask, a partition) would act differently than on the unsplit model.
  Inside of this wrapper it acts the same.

  `OneProgram` wraps chains with such a part of Optax's automatically.  Wrap by
  hand a transformation of your own, or one that stages of unlike shapes refuse
  (Muon, LARS).  Put the wrapper inside of a transformation that communicates,
  `local_sgd(whole_model(optimizer), 8, axis=axis)`: then workers exchange each
  device's own leaves only.

  The cost: in every step each device gathers gradients, parameters and this
  optimizer's state from the others and computes the update of all stages.
  Between steps the state is stored in equal parts on the devices.  To clip by
  the global norm, `OneProgram(clip_norm=...)` sends a single number instead.

  Args:
    optimizer: Any Optax chain without rounds or predicted weights; those
      belong outside of the wrapper.

  Returns:
    A transformation, which outside of a pipeline is `optimizer`.  In a pipeline
    `update` needs `params`.

  >>> clip = whole_model(optax.clip_by_global_norm(1.0))
  >>> g = {"a": jnp.array(3.0), "b": jnp.array(4.0)}
  >>> clipped, _ = clip.update(g, clip.init(g))
  >>> [round(x.item(), 6) for x in jax.tree.leaves(clipped)]
  [0.6, 0.8]
  """
  optimizer = optax.with_extra_args_support(
    checks.check_optimizer("optimizer", optimizer)
  )

  def init_fn(params: optax.Params) -> PyTree:
    layout = _LAYOUT.get()
    if layout is None:
      return optimizer.init(params)
    # A nested `whole_model` sees the whole model already.
    with layout_of(None):
      state = optimizer.init(layout.whole(params))
    _chain_check.check_state(state)
    return layout.cut(state)

  def update_fn(
    updates: optax.Updates,
    state: PyTree,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, PyTree]:
    layout = _LAYOUT.get()
    if layout is None:
      return optimizer.update(updates, state, params, **extra_args)
    # A transformation that agrees over stages by a collective has all of them
    # here already.
    with layout_of(None), collectives.model_parts(None):
      whole = layout.whole(params)
      like = jax.eval_shape(optimizer.init, whole)
      new, state = optimizer.update(
        layout.whole(updates), layout.joined(state, like), whole, **extra_args
      )
    return layout.own(new), layout.cut(state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class DeviceProgram:
  """Runs a grid's ticks and an optimizer on each device of a pipeline."""

  def __init__(self, ticks: _ticks.Ticks):
    self._ticks, self.grid, self._axis = ticks, ticks.grid, ticks.axis
    self._layout, self._shapes = (
      Layout(ticks.model.stages, ticks.params, axis)
      for axis in (ticks.axis, None)
    )
    self.spec = PartitionSpec(ticks.axis)

  def chain(
    self, inner: optax.GradientTransformation
  ) -> optax.GradientTransformation:
    """Returns a chain as each device runs it: on its own leaves, or on all."""
    checks.check_optimizer("inner", inner)
    if not self._ticks.params.stacked:
      _chain_check.check_chain(inner)
    found = _chain_check.needs_all(
      inner,
      num_parts=self.grid.num_devices,
      num_stages=self.grid.num_stages,
      tied=bool(self._ticks.tied.leaves),
      one_program=True,
    )
    return whole_model(inner) if found else inner

  def optimizer_specs(self, shapes: PyTree) -> PyTree:
    """Returns the placement of the workers' optimizer states."""
    return jax.tree.map(
      lambda x: self.spec if x.ndim > 1 else _device_state.ALL, shapes
    )

  def abstract_state(
    self, team: collectives.Workers, inner: optax.GradientTransformation
  ) -> training.TrainState:
    """Returns the shapes and placement of the initial state."""
    ticks = self._ticks

    def shape(x: Any, spec: PartitionSpec, *front: int) -> Any:
      sharding = team.sharding(spec)
      shape = *front, *x.shape
      return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    def replicated(tree: PyTree, spec: PartitionSpec) -> PyTree:
      return jax.tree.map(lambda x: shape(x, spec, team.num_workers), tree)

    stages = ticks.model.stages
    params = jax.eval_shape(ticks.params.join, [x.params for x in stages])
    state = jax.eval_shape(ticks.states.join, [x.state for x in stages])
    params, state = replicated((params, state), self.spec)
    opt_state = jax.eval_shape(team.spmd(lambda p: self.init(inner, p)), params)
    opt_state = jax.tree.map(shape, opt_state, self.optimizer_specs(opt_state))
    key = jax.random.key_data(jax.random.key(0))
    step, key = replicated((jnp.zeros((), jnp.int32), key), _device_state.ALL)
    return training.TrainState(step, params, opt_state, state, key)

  def run(
    self,
    function: Callable[..., Any],
    state: training.TrainState,
    batch: PyTree,
  ) -> Any:
    """Runs a function of state, batch and the grid's rows on each device.

    It returns the state, and metrics that are equal on all devices.
    """

    def device(
      state: training.TrainState, batch: PyTree, rows: jax.Array
    ) -> Any:
      own = _device_state.on_device(state)
      state, metrics = function(own, batch, rows[:, 0])
      return _device_state.on_mesh(state), metrics

    specs = _device_state.state_specs(state, self.spec)
    # `check_vma=False`, as the types of methods know the workers' axis only.
    # It is safe here: nothing that is differentiated holds a collective.
    return jax.shard_map(
      device,
      in_specs=(specs, _device_state.ALL, PartitionSpec(None, self._axis)),
      out_specs=(specs, _device_state.ALL),
      axis_names={self._axis},
      check_vma=False,
    )(state, batch, jnp.asarray(self.grid.rows))

  def gradient(
    self,
    state: training.TrainState,
    batch: PyTree,
    rows: jax.Array,
    axis: collectives.Axis,
    begun: jax.Array | None = None,
  ) -> tuple[training.TrainState, training.Gradient]:
    """Runs a step's ticks on one device.

    A drain gives the number of iterations that have `begun`; by default one
    more begins, with `batch`.
    """
    opt_state = state.opt_state

    def key_of(iteration: jax.Array, microbatch: jax.Array) -> jax.Array:
      # A drain restarts the pipeline's count of iterations, not the run's.
      number = state.step - opt_state.step + iteration
      return _traced_model.microbatch_key(
        jax.random.wrap_key_data(state.key),
        number,
        collectives.index(axis),
        microbatch,
        self.grid.num_microbatches,
      )

    ticks, grid = self._ticks, self.grid
    # With a flush nothing is in progress between steps, so nothing is stored.
    flight = opt_state.flight if grid.behind else ticks.start()
    grads, model_state, means, flight = ticks.run(
      (
        transforms.predicted_weights(opt_state.inner, state.params),
        *opt_state.older,
      ),
      state.model_state,
      flight,
      batch,
      opt_state.step,
      rows,
      key_of,
      begun,
    )
    if (most := ticks.model.clip_norm) is not None:
      # Each tied leaf counts once; a device has a part of the norm's square.
      squared = _traced_model.squared_norm(ticks.tied.once(grads))
      squared = jax.lax.psum(squared, self._axis)
      scale = _traced_model.clip_scale(squared, most)
      grads = jax.tree.map(lambda x: x * scale.astype(x.dtype), grads)
    found = dict(zip(ticks.model.metric_names, means, strict=True))
    loss = found.pop("loss")
    # All devices know the batch, and so the number of its samples.
    samples = training.num_samples(
      jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
    )
    gradient = training.Gradient(grads, loss, samples, model_state, found)
    kept = opt_state._replace(flight=flight if grid.behind else ())
    return state._replace(opt_state=kept), gradient

  def drain(
    self,
    update: Callable[..., Any],
    axis: collectives.Axis,
    state: training.TrainState,
    batch: tuple[()],
    rows: jax.Array,
  ) -> Any:
    """Completes all iterations in progress on one device, without a batch."""
    begun, number = state.opt_state.step, state.step
    for _ in range(self.grid.behind):
      # The steps need a batch's shape; no micro-batch of it is run.
      batches = state.opt_state.flight.batches
      batch = jax.tree.map(lambda x: jnp.zeros_like(x[0]), batches)
      state, gradient = self.gradient(state, batch, rows, axis, begun)
      state, _ = update(state, gradient)
    kept = state.opt_state
    empty = jax.tree.map(jnp.zeros_like, kept.flight)
    older = (
      transforms.predicted_weights(kept.inner, state.params),
    ) * self.grid.delay
    kept = kept._replace(step=jnp.zeros_like(begun), older=older, flight=empty)
    return state._replace(step=number, opt_state=kept), {}

  def optimizer(
    self, inner: optax.GradientTransformation
  ) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer for one device: it keeps older versions.

    The first `behind` steps complete no gradient and must not change the
    optimizer's state either, such as its count of steps.
    """
    inner = optax.with_extra_args_support(self.chain(inner))
    behind = self.grid.behind
    parts = self._axis if self.grid.num_devices > 1 else None

    def update(
      grads: PyTree,
      state: _device_state.InFlightState,
      params: PyTree = None,
      **given: Any,
    ) -> tuple[PyTree, _device_state.InFlightState]:
      with collectives.model_parts(parts), layout_of(self._layout):
        updates, after = inner.update(grads, state.inner, params, **given)
      # This follows the collectives over workers, whose codecs may round copies
      # differently.
      updates = self._ticks.tied.share(updates)
      read = transforms.predicted_weights(state.inner, params)
      older = (read, *state.older[:-1]) if state.older else ()
      # Select, as a NaN of the incomplete gradient would survive a product.
      if behind:
        there = state.step >= behind
        updates, after, older = jax.tree.map(
          lambda x, y: jnp.where(there, x, y),
          (updates, after, older),
          (jax.tree.map(jnp.zeros_like, updates), state.inner, state.older),
        )
      step = optax.safe_increment(state.step)
      return updates, state._replace(inner=after, step=step, older=older)

    return optax.GradientTransformationExtraArgs(inner.init, update)

  def init(
    self, inner: optax.GradientTransformation, params: PyTree
  ) -> _device_state.InFlightState:
    """Makes one worker's optimizer state and an empty pipeline."""

    def device(params: PyTree) -> Any:
      own = jax.tree.map(lambda x: x[0], params)
      with layout_of(self._layout):
        state = inner.init(own)
      flight = self._ticks.start() if self.grid.behind else ()
      return jax.tree.map(lambda x: x[None] if x.ndim else x, state), (
        jax.tree.map(lambda x: x[None], flight)
      )

    # The placement of each leaf must be known before the program is traced, so
    # shapes are found outside of the mesh first.
    own = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params
    )
    with layout_of(self._shapes):
      shapes = jax.eval_shape(inner.init, own)
    split = jax.tree.map(
      lambda x: self.spec if x.ndim else _device_state.ALL, shapes
    )
    state, flight = jax.shard_map(
      device,
      in_specs=self.spec,
      out_specs=(split, self.spec),
      axis_names={self._axis},
      check_vma=False,
    )(params)
    older = (params,) * self.grid.delay
    return _device_state.InFlightState(
      state, jnp.zeros((), jnp.int32), older, flight
    )
