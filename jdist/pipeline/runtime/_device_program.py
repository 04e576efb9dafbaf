"""One device's part of a training step, and of all devices together."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jdist import checks, collectives, training
from jdist.pipeline.runtime import (
  _chain_check,
  _device_state,
  _stages,
  _ticks,
  _tied_leaves,
  _whole_model,
)

PyTree = Any


class DeviceProgram:
  """Runs a grid's ticks and an optimizer on each device of a pipeline."""

  def __init__(
    self,
    ticks: _ticks.Ticks,
    stages: Sequence[_stages.LayerLike],
    *,
    clip_norm: float | None,
    axis: str,
  ):
    """Takes what a step is made of.

    Args:
      ticks: the loop over a step's ticks.
      stages: of the model.
      clip_norm: greatest norm of the whole model's mean gradient, or None.
      axis: of the mesh, over which the devices of a pipeline lie.
    """
    self._ticks, self.grid = ticks, ticks.grid
    self._clip_norm, self._axis = clip_norm, axis
    self._stages = stages
    self._layout, self._shapes = (
      _whole_model.Layout(stages, ticks.params, name) for name in (axis, None)
    )

  @property
  def spec(self) -> PartitionSpec:
    """Placement of parameters and the model's state on the mesh."""
    return PartitionSpec(self._axis)

  def chain(
    self, inner: optax.GradientTransformation
  ) -> optax.GradientTransformation:
    """Returns a chain as each device runs it: on its own leaves, or on all.

    Raises:
      ValueError: when it is no optimizer, or needs whole leaves, and packed
        stages have none.
    """
    checks.check_optimizer("inner", inner)
    _chain_check.check_chain(inner, packed=not self._ticks.params.stacked)
    found = _chain_check.needs_all(
      inner,
      num_parts=self.grid.num_devices,
      num_stages=self.grid.num_stages,
      tied=bool(self._ticks.tied),
    )
    return _whole_model.whole_model(inner) if found else inner

  def optimizer_specs(self, shapes: PyTree) -> PyTree:
    """Returns how the workers' optimizer states lie: scalars are of all."""
    return jax.tree.map(
      lambda x: _device_state.spec_of(x.ndim - 1, self.spec), shapes
    )

  def abstract_state(
    self,
    team: collectives.Workers,
    inner: optax.GradientTransformation,
  ) -> training.TrainState:
    """Returns the shapes of the state in which all workers begin.

    Args:
      team: workers on a mesh that has the devices' axis, too.
      inner: the optimizer.
    """
    workers = team.num_workers

    def shape(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
      sharding = team.sharding(spec)
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def replicated(tree: PyTree, spec: PartitionSpec) -> PyTree:
      return jax.tree.map(
        lambda x: shape(
          jax.ShapeDtypeStruct((workers, *x.shape), x.dtype), spec
        ),
        tree,
      )

    ticks, key = self._ticks, jax.random.key_data(jax.random.key(0))
    params, state = (
      replicated(jax.eval_shape(arrays.join, trees), self.spec)
      for arrays, trees in (
        (ticks.params, [x.params for x in self._stages]),
        (ticks.states, [x.state for x in self._stages]),
      )
    )
    opt_state = jax.eval_shape(team.spmd(lambda p: self.init(inner, p)), params)
    opt_state = jax.tree.map(shape, opt_state, self.optimizer_specs(opt_state))
    step, key = replicated((jnp.zeros((), jnp.int32), key), PartitionSpec())
    return training.TrainState(step, params, opt_state, state, key)

  def carried_over(
    self, fresh: training.TrainState, state: training.TrainState
  ) -> training.TrainState:
    """Returns the state in which this program goes on from another table's.

    Args:
      fresh: of this program at a run's beginning.
      state: of the other program.
    """
    return _device_state.carried_over(fresh, state, self.grid.delay)

  def run(
    self,
    function: Callable[..., Any],
    state: training.TrainState,
    batch: PyTree,
  ) -> Any:
    """Runs a function of state, batch and the grid's rows on each device.

    Args:
      function: returns the state, and metrics that all devices have alike.
      state: one worker's.
      batch: its micro-batches, of which all devices get all.
    """

    def device(
      state: training.TrainState, batch: PyTree, rows: jax.Array
    ) -> Any:
      state, metrics = function(
        _device_state.on_device(state), batch, rows[:, 0]
      )
      return _device_state.on_mesh(state), metrics

    specs = _device_state.state_specs(state, self.spec)
    # Without types: methods know the workers' axis only, and nothing that is
    # differentiated holds a collective.
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

    Args:
      state: of the device.
      batch: of the iteration that begins.
      rows: of the grid, this device's.
      axis: the workers' axis.
      begun: iterations that there are; None if this is one more.
    """

    def key_of(iteration: jax.Array) -> jax.Array:
      number = state.step - opt_state.step + iteration
      key = jax.random.wrap_key_data(state.key)
      return jax.random.fold_in(
        jax.random.fold_in(key, number), collectives.index(axis)
      )

    ticks, grid = self._ticks, self.grid
    opt_state = state.opt_state
    flight = opt_state.flight if grid.behind else ticks.start()
    grads, model_state, means, flight = ticks.run(
      (_device_state.read(opt_state, state.params), *opt_state.older),
      state.model_state,
      flight,
      batch,
      opt_state.step,
      rows,
      key_of,
      begun,
    )
    if self._clip_norm is not None:
      grads = _clip_norm(grads, self._clip_norm, ticks.tied, self._axis)
    found = dict(zip(ticks.names, means, strict=True))
    loss = found.pop("loss")
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
    """Brings to its end on one device what has begun.

    Args:
      update: of `training.make_update`, with this program's optimizer.
      axis: the workers' axis.
      state: of the device.
      batch: none.
      rows: of the grid, this device's.
    """
    begun, number = state.opt_state.step, state.step
    for _ in range(self.grid.behind):
      batch = jax.tree.map(
        lambda x: jnp.zeros_like(x[0]), state.opt_state.flight.batches
      )
      state, gradient = self.gradient(state, batch, rows, axis, begun)
      state, _ = update(state, gradient)
    kept = state.opt_state
    empty = jax.tree.map(jnp.zeros_like, kept.flight)
    older = (_device_state.read(kept, state.params),) * self.grid.delay
    kept = _device_state.InFlightState(
      kept.inner, jnp.zeros_like(begun), older, empty
    )
    return state._replace(step=number, opt_state=kept), {}

  def optimizer(
    self, inner: optax.GradientTransformation
  ) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer for one device: keeps versions, skips the first."""
    inner = optax.with_extra_args_support(inner)
    behind = self.grid.behind
    parts = self._axis if self.grid.num_devices > 1 else None

    def update(
      grads: PyTree,
      state: _device_state.InFlightState,
      params: PyTree = None,
      **given: Any,
    ) -> tuple[PyTree, _device_state.InFlightState]:
      with (
        collectives.model_parts(parts),
        _whole_model.layout_of(self._layout),
      ):
        updates, after = inner.update(grads, state.inner, params, **given)
      updates = self._ticks.tied.share(updates)
      read = _device_state.read(state, params)
      older = (read, *state.older[:-1]) if state.older else ()
      if behind:
        there = state.step >= behind
        updates, after, older = jax.tree.map(
          lambda x, y: jnp.where(there, x, y),
          (updates, after, older),
          (jax.tree.map(jnp.zeros_like, updates), state.inner, state.older),
        )
      step = optax.safe_increment(state.step)
      return updates, _device_state.InFlightState(
        after, step, older, state.flight
      )

    return optax.GradientTransformationExtraArgs(inner.init, update)

  def init(
    self, inner: optax.GradientTransformation, params: PyTree
  ) -> _device_state.InFlightState:
    """Makes the optimizer's state and an empty pipeline, of one worker."""

    def device(params: PyTree) -> Any:
      own = jax.tree.map(lambda x: x[0], params)
      with _whole_model.layout_of(self._layout):
        state = inner.init(own)
      flight = self._ticks.start() if self.grid.behind else ()
      return jax.tree.map(lambda x: x[None] if x.ndim else x, state), (
        jax.tree.map(lambda x: x[None], flight)
      )

    local = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params
    )
    with _whole_model.layout_of(self._shapes):
      shapes = jax.eval_shape(inner.init, local)
    split = jax.tree.map(
      lambda x: _device_state.spec_of(x.ndim, self.spec), shapes
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


def _clip_norm(
  grads: PyTree,
  most: float,
  tied: _tied_leaves.TiedLeaves,
  axis: str | None,
) -> PyTree:
  r"""Scales one device's part of a gradient by the norm of all of it.

  .. math:: g \leftarrow g \min(1, c / \lVert g \rVert_2)

  as `optax.clip_by_global_norm` does to the unsplit model.  All devices wait
  for each other's norms.

  Args:
    grads: of one device's stages, tied ones summed.
    most: c.
    tied: leaves that several stages have, each of which counts once.
    axis: of the devices; None for one device.
  """
  total = jnp.zeros((), float)
  for x in jax.tree.leaves(tied.once(grads)):
    total += jnp.sum(jnp.square(jnp.abs(x.astype(total.dtype))))
  if axis is not None:
    total = jax.lax.psum(total, axis)
  norm = jnp.sqrt(total)
  scale = most / jnp.maximum(norm, 1e-16)
  return jax.tree.map(
    lambda x: jnp.where(norm < most, x, x * scale.astype(x.dtype)), grads
  )
