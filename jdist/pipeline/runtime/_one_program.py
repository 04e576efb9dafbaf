"""A pipeline in one compiled program, over an axis of the workers' mesh."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jdist import checks, collectives, states, training, transforms
from jdist.pipeline.runtime import (
  _chain_check,
  _global_norm,
  _grid,
  _stages,
  _tick_times,
  _ticks,
)
from jdist.pipeline.schedule import Op, Table

PyTree = Any


@states.declare()
class InFlightState(NamedTuple):
  """An optimizer's state, and what a pipeline has under way.

  Attributes:
    inner: the optimizer's, of each device's own stages: arrays `[devices, ...]`
      and scalars.
    step: iterations that have begun, int32 scalar.
    older: earlier versions of the parameters, as they were read, the newer
      first.
    flight: micro-batches and gradients under way, arrays `[devices, ...]`; an
      empty tuple where each step ends with an empty pipeline.
  """

  inner: PyTree
  step: jax.Array
  older: tuple[PyTree, ...]
  flight: Any


class OneProgram:
  r"""A pipeline whose devices run one program, tick by tick.

  Every device of the `stage` axis runs the table's actions of its stages by
  conditionals in a loop, and passes on what it made at the end of each tick.  A
  backward pass runs its stage's forward pass again from the saved input: the
  only activations that are kept are those between stages.

  Parameters are arrays `[devices, ...]`: stacked where all stages have the same
  shapes, so that each device's optimizer sees its stages' own leaves (in a
  tuple where it has several stages); else packed, a buffer `[devices, chunks,
  size]` for each dtype, which takes optimizers that act on each number alone.
  Parameters that several stages have are packed, too: each of these stages has
  a copy, all with one update.

  An asynchronous table gives its window W and its micro-batches; its ticks are
  those of 1F1B without a flush.  The gradient of iteration k is taken at the
  parameters after :math:`\max(0, k - W + 1)` updates, as `transforms.
  delay_gradients(optimizer, W - 1)` has it on one device; at parameters that
  are predicted, where the optimizer holds a `transforms.predict_weights`.

  >>> from jdist import models, pipeline
  >>> layers = [
  ...   models.Layer(
  ...     n, {n: jnp.ones(())}, {}, lambda p, s, x, *, n=n, **_: (x * p[n], s)
  ...   )
  ...   for n in "ab"
  ... ]
  >>> pipe = OneProgram(
  ...   pipeline.cut_layers(layers, 2),
  ...   lambda y, batch: (jnp.mean(y), {}),
  ...   pipeline.make_table("1f1b", 2, 4),
  ...   {"x": jnp.ones(3)},
  ...   inputs="x",
  ... )
  >>> pipe
  OneProgram(1f1b: 2 stages on 2 devices, 4 micro-batches, 14 ticks)
  """

  def __init__(
    self,
    stages: Sequence[_stages.LayerLike],
    loss: _ticks.OutputLoss,
    table: Table,
    microbatch: PyTree,
    *,
    inputs: str | Callable[..., Any] = "image",
    late_sends: bool = True,
    clip_norm: float | None = None,
    axis: str = "stage",
  ):
    """Traces the stages' shapes.

    Args:
      stages: of the model, from `cut_layers`; stage s lies on device s modulo
        their number.
      loss: `(outputs, microbatch) -> loss, metrics`, means over the
        micro-batch's samples.
      table: which `check_table` passes; asynchronous ones with delayed weights.
      microbatch: one worker's, of arrays or `jax.ShapeDtypeStruct`.
      inputs: of the first stage: a key of the micro-batch, or a function of it,
        which gets a random key too, if it takes one as `key`.
      late_sends: whether sends run beside the next tick's computation, which
        takes a tick more to arrive; else between ticks.
      clip_norm: greatest norm of the whole model's mean gradient; a larger one
        is scaled to it, as `optax.clip_by_global_norm` does.  A worker clips
        its own gradient, before the optimizer.
      axis: of the mesh, over which the devices of a pipeline lie.

    Raises:
      ValueError: when the table does not fit the stages or this runtime.
    """
    if len(stages) != table.num_stages:
      raise ValueError(
        f"`stages` must be the table's {table.num_stages}, got {len(stages)}."
      )
    checks.check_function("loss", loss, "outputs and a micro-batch")
    if clip_norm is not None:
      clip_norm = checks.check_number("clip_norm", clip_norm, open_low=True)
    self.clip_norm = clip_norm
    self.table, self.stages, self.stage_axis = table, tuple(stages), axis
    # One device sends nothing: its next stage may begin with the next tick.
    late_sends = late_sends and len(table.devices) > 1
    self._late = late_sends
    sent = 2 if late_sends else 1
    if table.num_iterations == 1 and table.window == 1:
      self.grid = _grid.synchronous_grid(table, send_ticks=sent)
    else:
      self.grid = _continuous(table, sent)
    self._ticks = _ticks.Ticks(
      stages,
      loss,
      self.grid,
      _stages.make_inputs(inputs),
      microbatch,
      late=late_sends,
      axis=axis,
    )

  def __repr__(self) -> str:
    grid = self.grid
    return (
      f"OneProgram({self.table.name}: {grid.num_stages} stages on "
      f"{grid.num_devices} devices, {grid.num_microbatches} micro-batches, "
      f"{len(grid.rows)} ticks)"
    )

  @property
  def stacked(self) -> bool:
    """Whether the stages' parameters are stacked, and not packed."""
    return self._ticks.params.stacked

  @property
  def spec(self) -> PartitionSpec:
    """How parameters and the model's state lie on the mesh."""
    return PartitionSpec(self.stage_axis)

  @property
  def sent_bytes(self) -> int:
    """Bytes that a device sends in a tick, each way."""
    return self._ticks.sent_bytes

  def times(
    self,
    seconds: Callable[[Op, int], float],
    send_s: float,
    *,
    between_s: float = 0.0,
  ) -> _tick_times.TickTimes:
    """Forecasts a step's ticks; each device waits for its neighbours.

    Args:
      seconds: of an op of a stage, as this runtime runs it: a backward pass
        has the forward pass in it, and the last stage has no other.
      send_s: of `sent_bytes` on a link between two devices.
      between_s: of each tick on each device, beside its ops.

    >>> from jdist import models, pipeline
    >>> layers = [
    ...   models.Layer(
    ...     n, {n: jnp.ones(())}, {}, lambda p, s, x, *, n=n, **_: (x * p[n], s)
    ...   )
    ...   for n in "ab"
    ... ]
    >>> pipe = OneProgram(
    ...   pipeline.cut_layers(layers, 2),
    ...   lambda y, batch: (jnp.mean(y), {}),
    ...   pipeline.make_table("gpipe", 2, 4),
    ...   {"x": jnp.ones(3)},
    ...   inputs="x",
    ... )
    >>> found = pipe.times(lambda op, stage: 1.0, 0.5)
    >>> found.ticks, found.step_s, found.exposed_s
    (12, 11.0, 1.0)
    """
    return _tick_times.tick_times(
      self.grid, seconds, send_s, late=self._late, between_s=between_s
    )

  def join(
    self, params: PyTree = None, state: PyTree = None
  ) -> tuple[PyTree, PyTree]:
    """Turns a model's parameters and state into arrays `[devices, ...]`.

    Args:
      params: nested dict of the whole model; the stages' own if None.
      state: likewise.
    """
    return (
      self._ticks.params.join(
        [x.params if params is None else _stages.pick(params, x.params)
         for x in self.stages]
      ),
      self._ticks.states.join(
        [x.state if state is None else _stages.pick(state, x.state)
         for x in self.stages]
      ),
    )  # fmt: skip

  def split(self, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
    """Undoes `join`: nested dicts of the whole model."""
    return (
      _stages.merge(self._ticks.params.split(params)),
      _stages.merge(self._ticks.states.split(state)),
    )

  def apply(
    self, params: PyTree, state: PyTree, x: Any, **options: Any
  ) -> tuple[Any, PyTree]:
    """Runs the whole model on joined parameters, to evaluate them."""
    parts = self._ticks.params.split(params)
    before = self._ticks.states.split(state)
    after = []
    for stage, part, one in zip(self.stages, parts, before, strict=True):
      x, one = stage.apply(part, one, x, **options)
      after.append(one)
    return x, self._ticks.states.join(after)

  def init_state(
    self,
    team: collectives.Workers,
    inner: optax.GradientTransformation,
    params: PyTree = None,
    model_state: PyTree = None,
    *,
    seed: int = 0,
  ) -> training.TrainState:
    """Makes the state in which all workers begin alike, `[workers, ...]`.

    Args:
      team: workers on a mesh that has the stages' axis, too.
      inner: the optimizer that `make_step` is given.
      params: nested dict of the whole model; the stages' own if None.
      model_state: likewise.
      seed: of the run's random key.

    Raises:
      ValueError: when the mesh has no such axis of the table's devices, or the
        optimizer needs whole leaves, or all of them, and does not have them.
    """
    self._check_mesh(team)
    self._check_chain(inner)
    joined, model_state = self.join(params, model_state)
    state = training.init_state(
      team, optax.identity(), joined, model_state, seed=seed, specs=self.spec
    )
    state = state._replace(model_state=team.replicate(model_state, self.spec))

    def init(params: PyTree) -> InFlightState:
      return self._init(inner, params)

    shapes = jax.eval_shape(team.spmd(init), state.params)
    # Without the axis of workers scalars are of all devices.
    specs = jax.tree.map(lambda x: self._spec(x.ndim - 1), shapes)
    opt_state = team.jit(init, out_specs=specs)(state.params)
    return state._replace(opt_state=opt_state)

  def abstract_state(
    self, team: collectives.Workers, inner: optax.GradientTransformation
  ) -> training.TrainState:
    """Returns the shapes of `init_state`, to compile without any array.

    For stages and devices that are described only, as `models.build(...,
    abstract=True)` and `profiling.gpu_target` do.

    Args:
      team: as of `init_state`.
      inner: the optimizer that `make_step` is given.
    """
    self._check_mesh(team)
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
        (ticks.params, [x.params for x in self.stages]),
        (ticks.states, [x.state for x in self.stages]),
      )
    )
    opt_state = jax.eval_shape(
      team.spmd(lambda p: self._init(inner, p)), params
    )
    opt_state = jax.tree.map(
      lambda x: shape(x, self._spec(x.ndim - 1)), opt_state
    )
    step, key = replicated((jnp.zeros((), jnp.int32), key), _ALL)
    return training.TrainState(step, params, opt_state, state, key)

  def make_step(
    self, inner: optax.GradientTransformation, *, axis: collectives.Axis
  ) -> training.Step:
    """Makes one worker's training step, of one iteration's ticks.

    Args:
      inner: any Optax chain whose collectives are over the workers and whose
        norms are of leaves, see `clip_norm`; of packed stages one that acts on
        each number alone, or in blocks.
      axis: the workers' axis.

    Returns:
      `(state, batch, control=None) -> state, metrics` as of
      `training.make_step`.  A batch's samples are cut into micro-batches.  Of
      an asynchronous table the metrics are those of the iteration whose
      gradient the step applied; in the first `grid.behind` steps, which apply
      none, of the first iteration so far.

    Raises:
      ValueError: when the chain is another.
    """
    update = training.make_update(self._optimizer(inner), axis=axis)

    def step(
      state: training.TrainState,
      batch: PyTree,
      control: transforms.Control | None = None,
    ) -> tuple[training.TrainState, dict[str, jax.Array]]:
      batch = jax.tree.map(self._cut, batch)

      def device(
        state: training.TrainState, batch: PyTree, rows: jax.Array
      ) -> Any:
        state, gradient = self._gradient(state, batch, rows, axis)
        return update(state, gradient, control)

      return self._on_devices(device, state, batch)

    return step

  def make_drain(
    self, inner: optax.GradientTransformation, *, axis: collectives.Axis
  ) -> Callable[[training.TrainState], training.TrainState]:
    """Makes what brings to its end all that one worker's pipeline has begun.

    After it the pipeline is empty, and begins anew with the next step: at the
    newest parameters.  At the end of a run, or to change the plan.

    Args:
      inner: as of `make_step`.
      axis: the workers' axis.
    """
    update = training.make_update(self._optimizer(inner), axis=axis)

    def device(
      state: training.TrainState, batch: tuple[()], rows: jax.Array
    ) -> Any:
      begun, number = state.opt_state.step, state.step
      for _ in range(self.grid.behind):
        batch = jax.tree.map(
          lambda x: jnp.zeros_like(x[0]), state.opt_state.flight.batches
        )
        state, gradient = self._gradient(state, batch, rows, axis, begun)
        state, _ = update(state, gradient)
      kept = state.opt_state
      empty = jax.tree.map(jnp.zeros_like, kept.flight)
      older = (_read(kept, state.params),) * self.grid.delay
      kept = InFlightState(kept.inner, jnp.zeros_like(begun), older, empty)
      return state._replace(step=number, opt_state=kept), {}

    return lambda state: self._on_devices(device, state, ())[0]

  def _on_devices(
    self,
    function: Callable[..., Any],
    state: training.TrainState,
    batch: PyTree,
  ) -> Any:
    """Runs a function of state, batch and a grid's rows on each device."""

    def device(
      state: training.TrainState, batch: PyTree, rows: jax.Array
    ) -> Any:
      state, metrics = function(_on_device(state), batch, rows[:, 0])
      return _on_mesh(state), metrics

    specs = self._specs(state)
    # Without types: methods know the workers' axis only, and nothing that is
    # differentiated holds a collective.
    return jax.shard_map(
      device,
      in_specs=(specs, _ALL, PartitionSpec(None, self.stage_axis)),
      out_specs=(specs, _ALL),
      axis_names={self.stage_axis},
      check_vma=False,
    )(state, batch, jnp.asarray(self.grid.rows))

  def _gradient(
    self,
    state: training.TrainState,
    batch: PyTree,
    rows: jax.Array,
    axis: collectives.Axis,
    begun: jax.Array | None = None,
  ) -> tuple[training.TrainState, training.Gradient]:
    """Runs a step's ticks on one device; `begun` iterations if no more are."""

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
      (_read(opt_state, state.params), *opt_state.older),
      state.model_state,
      flight,
      batch,
      opt_state.step,
      rows,
      key_of,
      begun,
    )
    if self.clip_norm is not None:
      grads = _global_norm.clip_norm(
        grads, self.clip_norm, ticks.tied, self.stage_axis
      )
    found = dict(zip(ticks.names, means, strict=True))
    loss = found.pop("loss")
    samples = training.num_samples(
      jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
    )
    gradient = training.Gradient(grads, loss, samples, model_state, found)
    kept = opt_state._replace(flight=flight if grid.behind else ())
    return state._replace(opt_state=kept), gradient

  def _optimizer(
    self, inner: optax.GradientTransformation
  ) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer for one device: keeps versions, skips the first."""
    self._check_chain(inner)
    inner = optax.with_extra_args_support(inner)
    behind = self.grid.behind

    def update(
      grads: PyTree, state: InFlightState, params: PyTree = None, **given: Any
    ) -> tuple[PyTree, InFlightState]:
      updates, after = inner.update(grads, state.inner, params, **given)
      updates = self._ticks.tied.share(updates)
      read = _read(state, params)
      older = (read, *state.older[:-1]) if state.older else ()
      if behind:
        there = state.step >= behind
        updates, after, older = jax.tree.map(
          lambda x, y: jnp.where(there, x, y),
          (updates, after, older),
          (jax.tree.map(jnp.zeros_like, updates), state.inner, state.older),
        )
      step = optax.safe_increment(state.step)
      return updates, InFlightState(after, step, older, state.flight)

    return optax.GradientTransformationExtraArgs(inner.init, update)

  def _init(
    self, inner: optax.GradientTransformation, params: PyTree
  ) -> InFlightState:
    """Makes the optimizer's state and an empty pipeline, of one worker."""

    def device(params: PyTree) -> Any:
      own = jax.tree.map(lambda x: x[0], params)
      state = inner.init(own)
      flight = self._ticks.start() if self.grid.behind else ()
      return jax.tree.map(lambda x: x[None] if x.ndim else x, state), (
        jax.tree.map(lambda x: x[None], flight)
      )

    local = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params
    )
    shapes = jax.eval_shape(inner.init, local)
    split = jax.tree.map(lambda x: self._spec(x.ndim), shapes)
    state, flight = jax.shard_map(
      device,
      in_specs=self.spec,
      out_specs=(split, self.spec),
      axis_names={self.stage_axis},
      check_vma=False,
    )(params)
    older = (params,) * self.grid.delay
    return InFlightState(state, jnp.zeros((), jnp.int32), older, flight)

  def _specs(self, state: training.TrainState) -> training.TrainState:
    """Returns how one worker's state lies on its devices."""
    kept = state.opt_state
    inner = jax.tree.map(lambda x: self._spec(x.ndim), kept.inner)
    opt_state = InFlightState(inner, _ALL, self.spec, self.spec)  # type: ignore[arg-type]
    return training.TrainState(_ALL, self.spec, opt_state, self.spec, _ALL)  # type: ignore[arg-type]

  def _spec(self, ndim: int) -> PartitionSpec:
    return self.spec if ndim else _ALL

  def _cut(self, x: jax.Array) -> jax.Array:
    """Cuts a batch into micro-batches."""
    number = self.grid.num_microbatches
    if x.ndim == 0 or x.shape[0] % number:
      raise ValueError(
        f"`batch` must divide into the table's {number} micro-batches, got an "
        f"array of shape {list(x.shape)}. Take a multiple of {number} samples "
        "for each worker, or another table."
      )
    return x.reshape(number, x.shape[0] // number, *x.shape[1:])

  def _check_chain(self, inner: optax.GradientTransformation) -> None:
    checks.check_optimizer("inner", inner)
    _chain_check.check_chain(
      inner, packed=not self.stacked, num_devices=self.grid.num_devices
    )

  def _check_mesh(self, team: collectives.Workers) -> None:
    shape = {} if team.mesh is None else dict(team.mesh.shape)
    if shape.get(self.stage_axis) != self.grid.num_devices:
      raise ValueError(
        f"`team` must be on a mesh whose axis {self.stage_axis!r} has the "
        f"table's {self.grid.num_devices} devices, got {shape or 'no mesh'}. "
        "Make it with `collectives.workers(n, mesh=jax.make_mesh((n, "
        f"{self.grid.num_devices}), ('worker', {self.stage_axis!r}), ...))`."
      )


_ALL = PartitionSpec()


def _read(state: InFlightState, params: PyTree) -> PyTree:
  """Returns the newest parameters as an iteration reads them: predicted."""
  return transforms.predicted_weights(state.inner, params)


def _on_device(state: training.TrainState) -> training.TrainState:
  """Takes the axis of devices from the arrays of one worker's state.

  Scalars are computed anew, as an argument that is passed on untouched is
  still typed as varying over the workers, and what is computed here is not:
  conditionals would refuse both together.
  """
  state = _mapped(state, lambda x: x[0])
  return jax.tree.map(lambda x: x if x.ndim else x.reshape(1)[0], state)


def _on_mesh(state: training.TrainState) -> training.TrainState:
  """Undoes `_on_device`."""
  return _mapped(state, lambda x: x[None])


def _mapped(
  state: training.TrainState, change: Callable[[jax.Array], jax.Array]
) -> training.TrainState:
  kept = state.opt_state
  inner = jax.tree.map(lambda x: change(x) if x.ndim else x, kept.inner)
  arrays = (state.params, state.model_state, kept.older, kept.flight)
  params, model_state, older, flight = jax.tree.map(change, arrays)
  return state._replace(
    params=params,
    model_state=model_state,
    opt_state=InFlightState(inner, kept.step, older, flight),
  )


def _continuous(table: Table, send_ticks: int) -> _grid.Grid:
  if table.weights != "delayed" or len(table.devices) != table.num_stages:
    raise ValueError(
      "`table` must be synchronous, or have delayed weights and a stage on "
      f"each device in one program, got {table}, weights {table.weights!r}. "
      "Run it with each stage in a process of its own."
    )
  return _grid.continuous_grid(
    table.num_stages,
    table.num_microbatches,
    window=table.window,
    send_ticks=send_ticks,
  )
