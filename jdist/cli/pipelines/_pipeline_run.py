"""`jdist train --stages`: each worker's model is cut over several devices."""

import dataclasses
from typing import Any

import jax

from jdist import (
  cluster,
  collectives,
  models,
  pipeline,
  profiling,
  training,
  transforms,
)
from jdist.cli import _experiment, _methods, _options, _trained
from jdist.cli.pipelines import _tables
from jdist.training import comparison


def check(options: _options.Train) -> pipeline.Table:
  """Checks the options of stages, and makes their table.

  Raises:
    ValueError: when an option is wrong.
  """
  _options.check_least(options, stages=1, microbatches=1)
  _options.check_left_out(
    options, ("accumulate", "substrate"), "with `--stages`"
  )
  if options.method in _trained.NEEDS:
    raise ValueError(
      "`--stages` must be left out with a method whose networks know a whole "
      f"model, got {options.stages} for {options.method}."
    )
  assert options.stages is not None
  table = _tables.of_options(options)
  parts = options.workers * table.num_microbatches
  if options.batch_size % parts:
    below = max(options.batch_size // parts, 1) * parts
    raise ValueError(
      f"`--batch-size` must divide evenly over {options.workers} workers times "
      f"{table.num_microbatches} micro-batches, got {options.batch_size}. Take "
      f"{below} or {below + parts}, or other `--microbatches`."
    )
  return table


def prepare(options: _options.Train, table: pipeline.Table) -> "PreparedStages":
  """Loads the data and builds the run's programs.

  Raises:
    ValueError: when an option is wrong, or devices are missing.
    ImportError: when an extra is missing.
  """
  assert options.stages is not None
  shape = options.workers, options.stages

  def team() -> collectives.Workers:
    needed = shape[0] * shape[1]
    if not jax.distributed.is_initialized():
      collectives.make_cpu_devices(needed)
    if jax.device_count() < needed:
      raise ValueError(
        f"`--stages` times `--workers` must be at most the {jax.device_count()}"
        f" devices that there are, got {shape[1]} times {shape[0]}."
      )
    mesh = collectives.make_mesh(shape, ("worker", "stage"))
    return collectives.workers(shape[0], mesh=mesh)

  return PreparedStages(_experiment.build(options, team), options, table)


@dataclasses.dataclass
class PreparedStages:
  """A pipeline's programs: compiled once, used for every seed."""

  workload: comparison.Workload
  options: _options.Train
  table: pipeline.Table

  def __post_init__(self) -> None:
    workload, options, team = self.workload, self.options, self.workload.workers
    self.budget = _methods.make_budget(
      options, options.learning_rate, workload.steps_per_epoch
    )
    self.pipe = self._pipe(workload.model(0))
    self.optimizer = _methods.build_method(
      options.method, options, self.budget, team.axis
    )
    self.trainer = training.Trainer(
      team,
      self.pipe.make_step(self.optimizer, axis=team.axis),
      stream_steps=self._stream_steps(),
      host_rounds=None if options.host_rounds else False,
    )
    self.evaluate = workload.evaluator(self.pipe.apply)

  def other_workers(self, seed: int) -> None:
    """Returns None: the stages of other workers are not put together."""
    del seed

  def run(
    self, seed: int, *, label: str | None = None, **fit: Any
  ) -> list[training.Record]:
    """Trains from the seed's initial parameters; see `Trainer.fit`.

    What is under way at the end is brought to its end: then the last record is
    of parameters with every gradient in them.
    """
    workload, model = self.workload, self.workload.model(seed)
    team = workload.workers
    state = self.pipe.init_state(
      team, self.optimizer, model.params, model.state, seed=seed
    )
    state, records = self.trainer.fit(
      state,
      workload.batches(seed).iterate,
      self.budget.num_steps,
      evaluate=self.evaluate,
      evaluate_every=workload.steps(self.options.evaluate_every_epochs),
      label=label,
      **fit,
    )
    if records and self.pipe.grid.behind:
      drain = self.pipe.make_drain(self.optimizer, axis=team.axis)
      metrics = self.evaluate(team.jit(drain)(state))
      records[-1] = records[-1]._replace(metrics=metrics)
    return records

  def _pipe(self, model: models.Model) -> pipeline.OneProgram:
    workload, options, table = self.workload, self.options, self.table
    layers = [cast_layer(x, options.dtype) for x in model.layers]
    inputs = workload.inputs()
    batch = workload.batches(0)[0]
    size = workload.batch_size // workload.workers.num_workers
    size //= table.num_microbatches
    if options.cuts and len(options.cuts) + 1 != table.num_stages:
      raise ValueError(
        f"`--cuts` must be {table.num_stages - 1} layers for the "
        f"{table.num_stages} stages of `--table` {table.name}, got "
        f"{options.cuts}."
      )
    microbatch = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((size, *x.shape[2:]), x.dtype), batch
    )
    cuts = options.cuts or _balanced(
      layers, table.num_stages, microbatch, lambda x, key: inputs(x, key)
    )
    return pipeline.OneProgram(
      pipeline.cut_layers(layers, cuts),
      training.label_loss,
      table,
      microbatch,
      inputs=lambda batch, key: inputs(batch, key),
    )

  def _stream_steps(self) -> tuple[int, ...]:
    model = self.workload.model(0)
    state = profiling.abstract_state(
      self.workload.workers, self.optimizer, model.params, model.state
    )
    streams = self.options.stream and transforms.streams(state.opt_state)
    return _methods.STREAM_STEPS if streams else ()


def _balanced(
  layers: list[models.Layer], num_stages: int, microbatch: Any, inputs: Any
) -> int | tuple[int, ...]:
  """Returns the cuts of stages of about equally many operations.

  They are counted before anything is compiled, so that a run that goes on,
  also elsewhere, is cut as before.
  """
  if len(layers) <= num_stages:  # `cut_layers` tells what is wrong, if it is.
    return num_stages
  costs = pipeline.layer_costs(
    layers, microbatch, inputs=inputs, source="lowered"
  )
  machines = cluster.workers([1.0] * num_stages)
  return pipeline.even_partition(costs, machines, by="compute").cuts


def cast_layer(layer: models.Layer, dtype: str) -> models.Layer:
  """Makes a layer compute in another dtype; its parameters stay as they are."""

  def apply(params: Any, state: Any, x: Any, **options: Any) -> Any:
    return layer.apply(training.cast(params, dtype), state, x, **options)

  if dtype == "float32":
    return layer
  return dataclasses.replace(layer, apply=apply)
