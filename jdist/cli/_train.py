"""`jdist train`: one method, on one host or many, with checkpoints."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax

from jdist import collectives, data, methods, training
from jdist.cli import (
  _datasets,
  _experiment,
  _methods,
  _options,
  _run_end,
  _trained,
)
from jdist.training import comparison

# A resumed run may be longer, and have other workers.
_FREE = ("epochs", "steps", "workers")


def train(options: _options.Train) -> None:
  """Trains, saves rows, and goes on from a checkpoint if there is one."""
  options = _datasets.named(options)
  if options.protocol is not None:
    from jdist.cli.servers import _server_run

    _server_run.train(options)
    return
  _options.check_left_out(options, _options.OF_SERVERS, "without `--protocol`")
  _methods.check("--method", options, (options.method,))
  _options.check_seeds("--seed", options.seed)
  _options.check_positive(options, "checkpoint_every_epochs")
  _experiment.check(options)
  _methods.check_rate(options.learning_rate)
  if options.stages is None:
    _options.check_left_out(options, _options.OF_STAGES, "without `--stages`")
    _join(options, options.workers)
    programs: _Prepared = _experiment.Prepared(
      _experiment.build(options), options, options.method, options.learning_rate
    )
  else:
    from jdist.cli.pipelines import _pipeline_run

    _options.check_left_out(options, ("final_params",), "with `--stages`")
    table = _pipeline_run.check(options)
    _join(options, options.workers * options.stages)
    programs = _pipeline_run.prepare(options, table)
  run(options, programs)


def run(options: _options.Train, programs: "_Prepared") -> None:
  """Trains what has been prepared, saves rows and checkpoints."""
  workload = programs.workload
  first = jax.process_index() == 0
  if first:  # Now and not after hours of training.
    _experiment.make_directories(options)

  def tell(record: training.Record) -> None:
    if first:
      if board is not None:
        board.write(record)
      print(
        f"step {record.step}/{programs.budget.num_steps}  "
        f"{_datasets.quality(record.metrics)}  "
        f"train loss {_datasets.loss(record)}  rounds {record.rounds}  "
        f"{training.format_bytes(record.sent_bytes)} sent per worker  "
        f"{_datasets.speed(record, workload.train)}/s",
        flush=True,
      )

  resumed: dict[str, int] = {}

  def resume(found: training.Restored) -> None:
    resumed["resumed_from_step"] = found.step
    told = _resumed(options, found, programs)
    if first:
      print(told, flush=True)

  ends = {}
  if options.final_params is not None:
    ends["on_end"] = functools.partial(_save_model, options, workload)
  checkpoints = board = None
  with contextlib.ExitStack() as stack:
    if options.checkpoints is not None:
      checkpoints = training.Checkpoints(
        options.checkpoints,
        workload.workers,
        other_workers=programs.other_workers(options.seed),
      )
      stack.enter_context(checkpoints)
    if first and options.tensorboard is not None:
      board = stack.enter_context(training.MetricsWriter(options.tensorboard))
    try:
      records = programs.run(
        options.seed,
        label=options.method if first else None,
        on_record=tell,
        checkpoints=checkpoints,
        checkpoint_every=workload.steps(options.checkpoint_every_epochs),
        metadata=_identity(options),
        on_resume=resume,
        free=_FREE,
        stop_on_sigterm=True,
        **ends,
      )
    except training.OtherRunError as error:
      raise _run_end.refusal(error) from None
    except KeyboardInterrupt:
      raise _run_end.interrupt(checkpoints, options) from None
    except training.PreemptedError as stop:
      raise _run_end.TerminatedError(
        f"ended after step {stop.step} of {programs.budget.num_steps}, "
        + (
          f"which is saved in {options.checkpoints}: the same command goes on."
          if stop.saved
          else "of which nothing is saved."
        )
      ) from None
  if first:
    output = _experiment.output_directory(options, "train")
    _run_end.write_row(output, options, options.method, records, **resumed)
  kept = checkpoints is not None and checkpoints.latest_step() is not None
  _run_end.check(
    records, options.learning_rate, options.checkpoints if kept else None
  )


def _save_model(
  options: _options.Train,
  workload: comparison.Workload,
  params: Any,
  model_state: Any,
) -> None:
  """Writes the trained model, and what is needed to use it."""
  if jax.process_index() or options.final_params is None:
    return
  train = workload.train
  told: dict[str, Any] = {
    "build": _datasets.build_arguments(options, train),
    "dataset": options.dataset,
    "method": options.method,
  }
  if isinstance(train, data.Dataset):
    told |= {"mean": train.mean, "std": train.std}
  training.save_model(options.final_params, params, model_state, told)
  print(f"Model: {options.final_params}")


def _resumed(
  options: _options.Train, found: training.Restored, programs: "_Prepared"
) -> str:
  """Returns from where a run goes on; it may be longer, but not shorter."""
  before, workers = found.metadata, options.workers
  steps = programs.budget.num_steps
  old_steps = _methods.num_steps(
    before["epochs"], before["steps"], programs.workload.steps_per_epoch
  )
  if steps < old_steps:
    raise ValueError(
      f"`--{'epochs' if options.steps is None else 'steps'}` must not be less "
      f"than when the run began, {old_steps} steps, got {steps}. Take as many "
      "or more, or start anew in another directory."
    )
  if found.step == steps:
    told = f"Nothing left to train: step {steps} of {steps}"
  else:
    told = f"Goes on from step {found.step}"
  if steps > old_steps:
    told += (
      f", of {steps} steps where it had {old_steps}; the schedule is that of "
      "the longer run"
    )
  if before.get("workers", workers) != workers:
    told += f", with {workers} workers in place of {before['workers']}"
  return f"{told}."


class _Prepared(Protocol):
  """A run's programs: of whole models, or of stages."""

  workload: comparison.Workload
  budget: methods.Run

  def run(self, seed: int, **fit: Any) -> list[training.Record]: ...

  def other_workers(
    self, seed: int
  ) -> Callable[[int], training.OtherWorkers] | None: ...


def _join(options: _options.Train, num_devices: int) -> None:
  """Joins the processes of the run, if there are several."""
  numbers = (options.num_processes, options.process_id)
  if options.coordinator_address is None:
    if numbers != (None, None):
      raise ValueError(
        "`--coordinator-address` must be given with `--num-processes` and "
        "`--process-id`: the host:port of process 0."
      )
    return
  if options.coordinator_address == "auto":
    collectives.start_processes()
    return
  if options.num_processes is None or options.process_id is None:
    raise ValueError(
      "`--num-processes` and `--process-id` must be given with "
      "`--coordinator-address`, unless that is `auto`."
    )
  _options.check_least(options, num_processes=1)
  if not 0 <= options.process_id < options.num_processes:
    raise ValueError(
      f"`--process-id` must be from 0 to {options.num_processes - 1}, got "
      f"{options.process_id}."
    )
  if options.workers % options.num_processes:
    raise ValueError(
      f"`--workers` must be a multiple of the {options.num_processes} "
      f"processes, got {options.workers}."
    )
  collectives.start_processes(
    options.coordinator_address,
    options.num_processes,
    options.process_id,
    cpu_devices_per_process=num_devices // options.num_processes,
  )


def _identity(options: _options.Train) -> dict[str, object]:
  """Returns what must be the same when a run is resumed."""
  # The data set's name has a hash of a text.  Networks that were trained before
  # are in the state: another path to the same ones will do, and the same path
  # to others will not.
  elsewhere = {"output", "evaluate_every_epochs", "preset", "text"}
  elsewhere |= {"predictor"}
  elsewhere |= {*_options.OF_CHECKPOINTS, *_options.OF_PROCESSES}
  identity = {
    name: value
    for name, value in dataclasses.asdict(options).items()
    if name not in elsewhere
  }
  networks = _trained.fingerprint(options, options.method)
  return identity if networks is None else identity | {"networks": networks}
