"""`jdist train --stages`: each worker's model is cut over several devices."""

import dataclasses
from typing import Any, NamedTuple

import jax
import optax

from jdist import checks, cluster, collectives, models, pipeline, training
from jdist.cli import _commands, _methods, _options, _workload
from jdist.cli.pipelines import _tables
from jdist.training import comparison, loop


def check(options: _commands.Train) -> pipeline.Table:
  """Checks the options of stages, and makes their table."""
  _options.check_left_out(
    options, ("accumulate", "substrate", "final_params"), "with `--stages`"
  )
  # MP² predicts layers that would be on other devices.
  if options.method == _methods.TRAINED:
    raise ValueError(
      "`--stages` must be left out with a method whose network predicts a "
      f"whole model, got {options.stages} for {options.method}."
    )
  table = _tables.of_options(options)
  # With a window of 1 an update waits for all gradients of its iteration.
  if table.window == 1:
    _options.check_left_out(
      options,
      ("late_from", "delay_fix"),
      f"with `--table` {options.table}, whose gradients are in time "
      "(take ours)",
    )
  number = table.num_microbatches
  _workload.check_batch(
    options.batch_size, options.workers, number,
    f" times {number} micro-batches", ", or other `--microbatches`",
  )  # fmt: skip
  return table


def prepare(
  options: _commands.Train, table: pipeline.Table
) -> "PreparedStages":
  """Loads the data and builds the run's programs."""
  assert options.stages is not None
  shape = options.workers, options.stages
  needed = options.workers * options.stages

  def team() -> collectives.Workers:
    # In a run of several processes each one has made its devices already.
    if not jax.distributed.is_initialized():
      collectives.make_cpu_devices(needed)
    if jax.device_count() < needed:
      raise ValueError(
        "`--stages` times `--workers` must be at most the "
        f"{jax.device_count()} available devices, got {shape[1]} times "
        f"{shape[0]}."
      )
    mesh = collectives.make_mesh(shape, ("worker", "stage"))
    return collectives.workers(shape[0], mesh=mesh)

  return PreparedStages(_workload.build(options, team), options, table)


class _Phase(NamedTuple):
  """The programs of a part of a run, with one table."""

  pipe: pipeline.OneProgram
  optimizer: optax.GradientTransformation
  trainer: training.Trainer


@dataclasses.dataclass
class PreparedStages:
  """A pipeline's programs: compiled once, used for every seed.

  With `--late-from` a run has two phases: 1f1b, which leaves nothing in flight
  at its end, and then the table without a flush.
  """

  workload: comparison.Workload
  options: _commands.Train
  table: pipeline.Table

  def __post_init__(self) -> None:
    workload, options = self.workload, self.options
    self.budget = _methods.make_budget(
      options, options.learning_rate, workload.steps_per_epoch
    )
    # The late table is built first: its refusals should not wait for the other.
    self.late = self._phase(self.table)
    self.first: _Phase | None = None
    if options.late_from is not None:
      if self.budget.num_steps < 2:
        raise ValueError(
          "`--late-from` must have a step before it and one after it, got 1 "
          "step in all. Take more by `--steps` or `--epochs`."
        )
      shape = self.table.num_stages, self.table.num_microbatches
      self.first = self._phase(pipeline.make_table("1f1b", *shape))
    self.evaluate = workload.evaluator(self.late.pipe.apply)

  def other_workers(self, seed: int) -> None:
    """Returns None, because stages cannot be redistributed to other workers."""
    del seed

  def run(self, seed: int, **fit: Any) -> list[training.Record]:
    """Trains from a seed's initial parameters; see `Trainer.fit`."""
    num_steps, team = self.budget.num_steps, self.workload.workers
    state, first, share = None, self.first, self.options.late_from
    if first is not None and share is not None:
      change = min(max(1, round(share * num_steps)), num_steps - 1)
      # A longer run is another run here: it would change tables elsewhere.
      fit = fit | {"free": ()}
      if not self._is_late(first, fit, seed, change):
        state, before = self._fit(
          first, self._state(first, seed), seed, change, fit
        )
        # 1f1b is drained by its own flush, so that only parameters and the
        # optimizer's state are carried over.
        state = self.late.pipe.continue_from(state, team, self.late.optimizer)
        fit = fit | {"continues": before}
    if state is None:
      state = self._state(self.late, seed)
    state, records = self._fit(self.late, state, seed, num_steps, fit)
    # Without a flush the last gradients are still in flight.  The last record
    # is of parameters to which all of them have been applied.
    if records and self.late.pipe.grid.behind:
      drain = self.late.pipe.make_drain(self.late.optimizer, axis=team.axis)
      metrics = self.evaluate(team.jit(drain)(state))
      records[-1] = records[-1]._replace(metrics=metrics)
    return records

  def _is_late(
    self, first: "_Phase", fit: dict[str, Any], seed: int, change: int
  ) -> bool:
    """Returns whether a resumed run is beyond its first table."""
    checkpoints: training.Checkpoints | None = fit.get("checkpoints")
    if checkpoints is None:
      return False
    # Both tables have other arrays in flight, so that the step of a checkpoint
    # decides which state it can hold.
    found = checkpoints.restore(
      lambda step: self._state(self.late if step > change else first, seed),
      # With other options the tables would change at another step.
      check=lambda saved: loop.check_metadata(saved, fit.get("metadata") or {}),
    )
    return found is not None and found.step > change

  def _state(self, phase: "_Phase", seed: int) -> training.TrainState:
    model = self.workload.model(seed)
    return phase.pipe.init_state(
      self.workload.workers, phase.optimizer, model.params, model.state,
      seed=seed,
    )  # fmt: skip

  def _fit(
    self,
    phase: "_Phase",
    state: training.TrainState,
    seed: int,
    num_steps: int,
    fit: dict[str, Any],
  ) -> tuple[training.TrainState, list[training.Record]]:
    workload = self.workload
    return phase.trainer.fit(
      state, workload.batches(seed).iterate, num_steps, evaluate=self.evaluate,
      evaluate_every=workload.steps(self.options.evaluate_every_epochs), **fit,
    )  # fmt: skip

  def _phase(self, table: pipeline.Table) -> "_Phase":
    """Builds the programs of a table."""
    options, team = self.options, self.workload.workers
    model = self.workload.model(0)
    stages, microbatch = cut(self.workload, options, model, table)
    pipe = pipeline.OneProgram(
      stages, training.label_loss, table, microbatch,
      inputs=self.workload.inputs(),
    )  # fmt: skip
    predicts = options.delay_fix == "prediction"
    optimizer = _methods.build_method(
      options.method, options, self.budget, team.axis,
      predicted_steps=pipe.grid.delay if predicts else None,
    )  # fmt: skip
    trainer = training.Trainer(
      team,
      pipe.make_step(optimizer, axis=team.axis),
      **_workload.of_trainer(options, team, optimizer, model),
    )
    return _Phase(pipe, optimizer, trainer)


def cut(
  workload: comparison.Workload,
  options: _commands.Train,
  model: models.Model,
  table: pipeline.Table,
) -> tuple[tuple[Any, ...], Any]:
  """Returns a model's stages for a table, and the shapes of a micro-batch."""
  # A stage computes alone: a whole model's cast of its inputs is not enough.
  layers = [_tables.cast_layer(x, options.dtype) for x in model.layers]
  batch = workload.batches(0)[0]
  size = workload.batch_size // workload.workers.num_workers
  size //= table.num_microbatches
  if options.cuts and len(options.cuts) + 1 != table.num_stages:
    raise ValueError(
      f"`--cuts` must be {checks.counted(table.num_stages - 1, 'layer')} for "
      f"the {table.num_stages} stages of `--table` {table.name}, got "
      f"{options.cuts}."
    )
  microbatch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((size, *x.shape[2:]), x.dtype), batch
  )
  # Cuts follow from shapes alone, so that all processes find the same ones.
  cuts = options.cuts or _balanced(
    layers, table.num_stages, microbatch, workload.inputs()
  )
  return pipeline.cut_layers(layers, cuts), microbatch


def _balanced(
  layers: list[models.Layer], num_stages: int, microbatch: Any, inputs: Any
) -> int | tuple[int, ...]:
  """Returns the cuts of stages with about equally many operations."""
  if len(layers) <= num_stages:  # `cut_layers` refuses too few of them.
    return num_stages
  # They are counted before XLA optimizes them, so that a run that is resumed on
  # another machine is cut in the same way.
  costs = pipeline.layer_costs(
    layers, microbatch, inputs=inputs, source="lowered"
  )
  return pipeline.partition(costs, cluster.workers([1.0] * num_stages)).cuts
