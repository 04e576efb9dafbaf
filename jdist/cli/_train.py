"""`jdist train`: one method, on one host or many, with checkpoints."""

import contextlib
import functools
from typing import Any

import jax

from jdist import collectives, data, training
from jdist.cli import (
  _commands,
  _groups,
  _methods,
  _options,
  _output,
  _run_end,
  _trained,
  _workload,
)
from jdist.training import comparison

# A resumed run may be longer, and have other workers.
_FREE = ("epochs", "steps", "workers")


def train(options: _commands.Train) -> None:
  """Trains with a method and saves a row, or resumes from a checkpoint."""
  options = _workload.named(options)
  _methods.check("--method", options, (options.method,))
  _workload.check(options)
  # Processes are joined after all checks of options, and before JAX looks for
  # devices, which the data and the model need.
  if options.stages is None:
    _join(options, options.workers)
    programs: Any = _workload.Prepared(
      _workload.build(options), options, options.method, options.learning_rate
    )
  else:
    from jdist.cli.pipelines import _pipeline_run

    table = _pipeline_run.check(options)
    _join(options, options.workers * options.stages)
    programs = _pipeline_run.prepare(options, table)
  run(options, programs)


def run(options: _commands.Train, programs: Any) -> None:
  """Trains with prepared programs, and saves rows and checkpoints."""
  workload = programs.workload
  first = jax.process_index() == 0
  if first:
    _workload.make_directories(options)

  def show(record: training.Record) -> None:
    if not first:
      return
    if board is not None:
      board.write(record)
    _print_record(record, programs.budget.num_steps, workload.train)

  resumed: dict[str, int] = {}

  def resume(found: training.Restored) -> None:
    resumed["resumed_from_step"] = found.step
    text = _resumed(options, found, programs)
    if first:
      print(text, flush=True)

  ends = {}
  if options.final_params is not None:
    ends["on_end"] = functools.partial(_save_model, options, workload)
  checkpoints: training.Checkpoints | None = None
  board = None

  def newest() -> str | None:
    step = None if checkpoints is None else checkpoints.latest_step()
    return None if step is None else f"step {step}"

  with contextlib.ExitStack() as stack:
    if options.checkpoints is not None:
      checkpoints = training.Checkpoints(
        options.checkpoints,
        workload.workers,
        other_workers=programs.other_workers(options.seed),
      )
      stack.enter_context(checkpoints)
    # Only the first process writes: all of them have the same records.
    if first and options.tensorboard is not None:
      board = stack.enter_context(training.MetricsWriter(options.tensorboard))
    total = f" of {programs.budget.num_steps}"
    with _run_end.explained(options.checkpoints, newest, "step", total):
      records = programs.run(
        options.seed,
        label=options.method if first else None,
        on_record=show,
        checkpoints=checkpoints,
        checkpoint_every=workload.steps(options.checkpoint_every_epochs),
        metadata=_identity(options),
        on_resume=resume,
        free=_FREE,
        stop_on_sigterm=True,
        **ends,
      )
  if first:
    output = _output.output_directory(
      options.output, f"train-{options.dataset}"
    )
    _run_end.write_row(output, options, records, **resumed)
  _run_end.check(options, records, newest() is not None)


def _print_record(
  record: training.Record, num_steps: int, dataset: _workload.AnyDataset
) -> None:
  print(
    f"step {record.step}/{num_steps}  {_workload.quality(record.metrics)}  "
    f"train loss {_workload.loss(record)}  rounds {record.rounds}  "
    f"{training.format_bytes(record.sent_bytes)} sent per worker  "
    f"{_workload.speed(record, dataset)}/s",
    flush=True,
  )


def _save_model(
  options: _commands.Train,
  workload: comparison.Workload,
  params: Any,
  model_state: Any,
) -> None:
  """Writes the trained model, with everything that is needed to use it."""
  # All processes have the same parameters: one of them writes.
  if jax.process_index() or options.final_params is None:
    return
  train = workload.train
  facts: dict[str, Any] = {
    "build": _workload.build_arguments(options, train),
    "dataset": options.dataset,
    "method": options.method,
  }
  if isinstance(train, data.Dataset):
    facts |= {"mean": train.mean, "std": train.std}
  training.save_model(options.final_params, params, model_state, facts)
  print(f"Model: {options.final_params}")


def _resumed(
  options: _commands.Train, found: training.Restored, programs: Any
) -> str:
  """Returns where a run resumes; it may become longer, but not shorter."""
  before, workers = found.metadata, options.workers
  steps = programs.budget.num_steps
  old_steps = _methods.num_steps(
    before["epochs"], before["steps"], programs.workload.steps_per_epoch
  )
  # A shorter run would have decayed its learning rate earlier.
  if steps < old_steps:
    raise ValueError(
      f"`--{'epochs' if options.steps is None else 'steps'}` must not be less "
      f"than when the run began, {old_steps} steps, got {steps}. Take as many "
      "or more, or start anew in another directory."
    )
  if found.step == steps:
    text = f"Nothing left to train: step {steps} of {steps}"
  else:
    text = f"Resumes from step {found.step}"
  if steps > old_steps:
    text += (
      f", of {steps} steps where it had {old_steps}; the schedule is that of "
      "the longer run"
    )
  if before.get("workers", workers) != workers:
    text += f", with {workers} workers in place of {before['workers']}"
  return f"{text}."


def _join(options: _commands.Train, num_devices: int) -> None:
  """Joins the processes of the run, if there are several."""
  number, own = options.num_processes, options.process_id
  if options.coordinator_address is None:
    if (number, own) != (None, None):
      raise ValueError(
        "`--coordinator-address` must be given with `--num-processes` and "
        "`--process-id`: the host:port of process 0."
      )
    return
  # JAX reads all three from the environment of Slurm or MPI.
  if options.coordinator_address == "auto":
    collectives.start_processes()
    return
  if number is None or own is None:
    raise ValueError(
      "`--num-processes` and `--process-id` must be given with "
      "`--coordinator-address`, unless that is `auto`."
    )
  if own >= number:
    raise ValueError(
      f"`--process-id` must be from 0 to {number - 1}, got {own}."
    )
  _options.check_workers(options.workers, number)
  collectives.start_processes(
    options.coordinator_address,
    number,
    own,
    # On CPUs the devices are virtual, and each process makes its part.
    cpu_devices_per_process=num_devices // number,
    options=_common(options),
  )


def _common(options: _commands.Train) -> dict[str, object]:
  """Returns the options that must be the same in all processes, by word."""
  common = _identity(options)
  for name in ("evaluate_every_epochs", "checkpoint_every_epochs"):
    common[name] = getattr(options, name)
  # Machines may mount a disk at different paths, but all must use it.
  for name in ("checkpoints", "final_params"):
    common[name] = getattr(options, name) is not None
  return {f"`{_options.word(name)}`": x for name, x in common.items()}


def _identity(options: _commands.Train) -> dict[str, object]:
  """Returns the metadata that must be the same when a run is resumed."""
  # A trained network is in the state: the same one may move to another path,
  # and another one at the same path is another run, so that its fingerprint
  # stands for the path.
  elsewhere = ("evaluate_every_epochs", "predictor")
  groups = _groups.CheckpointOptions, _groups.ProcessOptions
  fields = (name for x in groups for name in x.__dataclass_fields__)
  identity = _options.identity(options, (*elsewhere, *fields))
  if options.method == _methods.TRAINED:
    identity["networks"] = _trained.fingerprint(options)
  return identity
