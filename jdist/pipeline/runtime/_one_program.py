"""A pipeline in one compiled program, over an axis of the workers' mesh."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from jdist import collectives, signatures, training, transforms
from jdist.pipeline.runtime import (
  _device_program,
  _device_state,
  _grid,
  _stages,
  _ticks,
  _traced_model,
)
from jdist.pipeline.schedule._checker import check_table
from jdist.pipeline.schedule._table import Op, Table
from jdist.states import PyTree


@signatures.checked
class OneProgram(signatures.Explained):
  r"""A pipeline whose devices run one program, tick by tick.

  In each tick every device of the `stage` axis runs the table's actions of its
  stages by conditionals, and then passes on their results.  A backward pass
  runs its stage's forward pass again from the saved input: the only activations
  that are kept are those between stages.  If a table splits it, the input part
  does so and keeps what the weight part reads, in memory of `stash_bytes`.

  Parameters are arrays `[devices, ...]`.  If all stages have the same shapes
  they are stacked, so that each device's optimizer sees its stages' own leaves
  (in a tuple if it has several stages).  Otherwise, or if stages share
  parameters, they are packed: a buffer `[devices, chunks, size]` for each
  dtype, which needs an optimizer that acts on each number alone.  A shared
  parameter has a copy in each of its stages, all with the same update.

  An asynchronous table contributes its window W and its micro-batches; the
  ticks are those of 1F1B without a flush.  The gradient of iteration k is taken
  at the parameters after :math:`\max(0, k - W + 1)` updates, as in `transforms.
  delay_gradients(optimizer, W - 1)` on one device, or at their prediction if
  the optimizer holds a `transforms.predict_weights`.

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
    stages: _stages.Layers,
    loss: _traced_model.OutputLoss,
    table: Table,
    microbatch: signatures.Shapes,
    *,
    inputs: str | Callable[..., Any] = "image",
    late_sends: bool = True,
    clip_norm: float | None = None,
    axis: str = "stage",
  ):
    """Checks the table and traces the stages' shapes.

    Args:
      stages: The stages of the model, from `cut_layers`; stage s lies on device
        s modulo their number.
      loss: `(outputs, microbatch) -> loss, metrics`, which are means over the
        micro-batch's samples.
      table: A table that `check_table` accepts; an asynchronous one must have
        delayed weights.
      microbatch: One worker's micro-batch, of arrays or
        `jax.ShapeDtypeStruct`.
      inputs: The inputs of the first stage: a key of the micro-batch, or a
        function of it, which may take a random key as `key`.
      late_sends: Whether sends overlap the next tick's computation, and so
        arrive a tick later; otherwise they run between ticks.
      clip_norm: The greatest norm of the whole model's mean gradient; a larger
        one is scaled to it, as by `optax.clip_by_global_norm`.  A worker clips
        its own gradient, before the optimizer.
      axis: The mesh axis over which the devices of a pipeline lie.

    Raises:
      ValueError: If the table cannot run, or does not fit the stages or this
        runtime.
    """
    # The loop over ticks would deadlock or read garbage with a wrong table.
    check_table(table)
    self._model = _traced_model.trace_model(
      stages, loss, table, microbatch, inputs, clip_norm
    )
    self.table, self.stages, self.stage_axis = table, self._model.stages, axis
    # With one device nothing is sent: its next stage may begin in the next
    # tick.
    self._late = late_sends and len(table.devices) > 1
    self.grid = _grid.make_grid(table, send_ticks=2 if self._late else 1)
    self._ticks = _ticks.Ticks(
      self._model, self.grid, late=self._late, axis=axis
    )
    self._program = _device_program.DeviceProgram(self._ticks)

  def __repr__(self) -> str:
    grid = self.grid
    return (
      f"OneProgram({self.table.name}: {grid.num_stages} stages on "
      f"{grid.num_devices} devices, {grid.num_microbatches} micro-batches, "
      f"{len(grid.rows)} ticks)"
    )

  @property
  def sent_bytes(self) -> int:
    """The bytes that a device sends in a tick, each way."""
    return self._ticks.message.size * self._ticks.message.dtype.itemsize

  def times(
    self,
    seconds: Callable[[Op, int], float],
    send_s: float,
    *,
    between_s: float = 0.0,
    all_wait: bool = False,
  ) -> _grid.TickTimes:
    """Forecasts the ticks of a step, in which devices wait for each other.

    Args:
      seconds: Returns the seconds of an op of a stage as this runtime runs it:
        a backward pass, or the input part of a split one, includes a forward
        pass, and the last stage has no other.
      send_s: The seconds of `sent_bytes` on a link between two devices.
      between_s: The seconds of each tick on each device without its ops.
      all_wait: Whether a device waits for all others, as on CPUs, and not for
        its neighbours only.
    """
    return _grid.tick_times(
      self.grid, seconds, send_s, late=self._late, between_s=between_s,
      all_wait=all_wait,
    )  # fmt: skip

  def join(
    self, params: PyTree = None, state: PyTree = None
  ) -> tuple[PyTree, PyTree]:
    """Turns a model's parameters and state into arrays `[devices, ...]`.

    They are nested dicts of the whole model; by default the stages' own.
    """
    own = [_stages.part_of(params, x.params) for x in self.stages]
    states = [_stages.part_of(state, x.state) for x in self.stages]
    return self._ticks.params.join(own), self._ticks.states.join(states)

  def split(self, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
    """Undoes `join`: returns nested dicts of the whole model."""
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
    """Makes the initial state, equal for all workers, `[workers, ...]`.

    Args:
      team: Workers on a mesh that also has the stages' axis.
      inner: The optimizer that `make_step` will receive.
      params: Nested dict of the whole model; by default the stages' own.
      model_state: Nested dict of the whole model; by default the stages' own.
      seed: The seed of the run's random key.

    Raises:
      ValueError: If the mesh has no such axis of the table's devices, or the
        optimizer needs leaves that it cannot see in a pipeline.
    """
    self._check_mesh(team)
    inner = self._program.chain(inner)
    joined, model_state = self.join(params, model_state)
    # The optimizer's state has its own placement, which is known only once its
    # shapes are; so it is made separately.
    spec = self._program.spec
    state = training.init_state(
      team, optax.identity(), joined, model_state, seed=seed, specs=spec
    )
    state = state._replace(model_state=team.replicate(model_state, spec))
    init = functools.partial(self._program.init, inner)
    shapes = jax.eval_shape(team.spmd(init), state.params)
    specs = self._program.optimizer_specs(shapes)
    opt_state = team.jit(init, out_specs=specs)(state.params)
    return state._replace(opt_state=opt_state)

  def abstract_state(
    self, team: collectives.Workers, inner: optax.GradientTransformation
  ) -> training.TrainState:
    """Returns the shapes of `init_state`, to compile without any array.

    Stages and devices may be abstract, from `models.build(..., abstract=True)`
    and `profiling.gpu_target`.
    """
    self._check_mesh(team)
    return self._program.abstract_state(team, self._program.chain(inner))

  def continue_from(
    self,
    state: training.TrainState,
    team: collectives.Workers,
    inner: optax.GradientTransformation,
  ) -> training.TrainState:
    """Returns the state in which this program continues another table's run.

    Use it for a run that begins with a flush, while the learning rate is high
    and a late gradient costs most, and ends without one.  The first iterations
    of a window, while the pipeline fills, all read the same parameters.

    Args:
      state: The state of a program of the same stages on as many devices: with
        a flush after any step, without one after `make_drain`.
      team: Workers on a mesh that also has the stages' axis.
      inner: The optimizer that `make_step` will receive.  Its state must be
        that of the other program's; `predict_weights(optimizer, grid.delay)`
        fits both, as it predicts nothing without a delay.

    Raises:
      ValueError: If the stages or the optimizer are different.
    """
    # Only its shapes and its empty pipeline are used.
    fresh = self.init_state(team, inner)
    return _device_state.carried_over(fresh, state, self.grid.delay)

  def make_step(
    self, inner: optax.GradientTransformation, *, axis: collectives.Axis
  ) -> training.Step:
    """Makes one worker's training step, which runs one iteration's ticks.

    Args:
      inner: Any Optax chain whose collectives are over the workers; packed
        stages need one that acts on each number alone, or in blocks.
      axis: The workers' axis.

    Returns:
      `(state, batch, control=None) -> state, metrics` as
      `training.make_step` returns it.  A batch's samples are cut into
      micro-batches.  The metrics of an asynchronous table belong to the
      iteration whose gradient the step applied.  The first `grid.behind` steps
      apply none and return those of the first iteration so far.

    Raises:
      ValueError: If the optimizer is not that of `init_state`.
    """
    # The update runs on each device, on its own stages' leaves, so its
    # collectives over the workers' axis send these only.
    update = training.make_update(self._program.optimizer(inner), axis=axis)

    def step(
      state: training.TrainState,
      batch: PyTree,
      control: transforms.Control | None = None,
    ) -> tuple[training.TrainState, dict[str, jax.Array]]:
      # Every device gets the whole batch: the first stage reads inputs, and the
      # last one labels.
      batch = self._model.cut(batch, self.grid.num_microbatches, "batch")

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
    """Returns a function that drains one worker's pipeline.

    Call it at the end of a run or before a change of plan.  Afterwards the
    pipeline is empty, and the next step begins at the newest parameters.  The
    arguments are those that `make_step` has received.
    """
    update = training.make_update(self._program.optimizer(inner), axis=axis)
    device = functools.partial(self._program.drain, update, axis)
    return lambda state: self._program.run(device, state, ())[0]

  def _check_mesh(self, team: collectives.Workers) -> None:
    shape = {} if team.mesh is None else dict(team.mesh.shape)
    if shape.get(self.stage_axis) != self.grid.num_devices:
      raise ValueError(
        f"`team` must be on a mesh whose axis {self.stage_axis!r} has the "
        f"table's {self.grid.num_devices} devices, got {shape or 'no mesh'}. "
        "Make it with `collectives.workers(n, mesh=jax.make_mesh((n, "
        f"{self.grid.num_devices}), ('worker', {self.stage_axis!r}), ...))`."
      )
