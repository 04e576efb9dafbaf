"""A pipeline in one compiled program, over an axis of the workers' mesh."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from jdist import checks, collectives, training, transforms
from jdist.pipeline.runtime import (
  _device_program,
  _grid,
  _stages,
  _tick_times,
  _ticks,
)
from jdist.pipeline.schedule import Op, Table

PyTree = Any


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

  >>> import jax.numpy as jnp
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
  >>> found = pipe.times(lambda op, stage: 1.0, 0.5)
  >>> found.ticks, found.step_s, found.exposed_s
  (14, 12.0, 2.0)
  """

  def __init__(
    self,
    stages: Sequence[_stages.LayerLike],
    loss: _stages.OutputLoss,
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
    self.table, self.stages, self.stage_axis = table, tuple(stages), axis
    # One device sends nothing: its next stage may begin with the next tick.
    late_sends = late_sends and len(table.devices) > 1
    self._late = late_sends
    sent = 2 if late_sends else 1
    self.grid = _grid.make_grid(table, send_ticks=sent)
    self._ticks = _ticks.Ticks(
      stages,
      loss,
      self.grid,
      _stages.make_inputs(inputs),
      microbatch,
      late=late_sends,
      axis=axis,
    )
    self._program = _device_program.DeviceProgram(
      self._ticks, self.stages, clip_norm=clip_norm, axis=axis
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
    """Returns whether the stages' parameters are stacked, and not packed."""
    return self._ticks.params.stacked

  @property
  def spec(self) -> PartitionSpec:
    """Placement of parameters and the model's state on the mesh."""
    return self._program.spec

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
    inner = self._program.chain(inner)
    joined, model_state = self.join(params, model_state)
    state = training.init_state(
      team, optax.identity(), joined, model_state, seed=seed, specs=self.spec
    )
    state = state._replace(model_state=team.replicate(model_state, self.spec))

    def init(params: PyTree) -> PyTree:
      return self._program.init(inner, params)

    shapes = jax.eval_shape(team.spmd(init), state.params)
    specs = self._program.optimizer_specs(shapes)
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
    return self._program.abstract_state(team, self._program.chain(inner))

  def continue_from(
    self,
    state: training.TrainState,
    team: collectives.Workers,
    inner: optax.GradientTransformation,
  ) -> training.TrainState:
    """Returns the state in which this program goes on from another table's.

    For a run that begins with a flush, while its rate is high and a late
    gradient costs most, and ends without one.  A window's first iterations,
    in a pipeline that is empty yet, all read the same parameters.

    Args:
      state: of a program of the same stages on as many devices: with a flush
        after any step, without one after `make_drain`.
      team: as of `init_state`.
      inner: the optimizer that `make_step` is given, whose state has to be that
        of the other program's.  `predict_weights(optimizer, grid.delay)` is
        that for both: it predicts nothing where nothing is late.

    Raises:
      ValueError: when stages or optimizers are others.
    """
    fresh = self.init_state(team, inner)
    return self._program.carried_over(fresh, state)

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
        state, gradient = self._program.gradient(state, batch, rows, axis)
        return update(state, gradient, control)

      return self._program.run(device, state, batch)

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
    device = functools.partial(self._program.drain, update, axis)
    return lambda state: self._program.run(device, state, ())[0]

  def _optimizer(
    self, inner: optax.GradientTransformation
  ) -> optax.GradientTransformationExtraArgs:
    return self._program.optimizer(self._program.chain(inner))

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

  def _check_mesh(self, team: collectives.Workers) -> None:
    shape = {} if team.mesh is None else dict(team.mesh.shape)
    if shape.get(self.stage_axis) != self.grid.num_devices:
      raise ValueError(
        f"`team` must be on a mesh whose axis {self.stage_axis!r} has the "
        f"table's {self.grid.num_devices} devices, got {shape or 'no mesh'}. "
        "Make it with `collectives.workers(n, mesh=jax.make_mesh((n, "
        f"{self.grid.num_devices}), ('worker', {self.stage_axis!r}), ...))`."
      )
