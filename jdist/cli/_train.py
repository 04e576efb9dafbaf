"""`jdist train`: one method, on one host or many, with checkpoints."""

import contextlib
import functools
from typing import Any

import jax

from jdist import data, training
from jdist.cli import (
  _commands,
  _methods,
  _options,
  _output,
  _run_end,
  _trained,
  _workload,
)
from jdist.cli.report import _status
from jdist.training import comparison


def train(options: _commands.Train) -> None:
  """Trains with a method and saves a row, or resumes from a checkpoint."""
  options = _workload.named(options)
  _methods.check("--method", options, (options.method,))
  _workload.check(options)
  # Metadata that must be the same when a run is resumed.
  identity = _options.identity(options, _workload.ELSEWHERE)
  if options.method == _methods.TRAINED and options.stages is None:
    identity["networks"] = _trained.fingerprint(options)
  common = functools.partial(_common, options, identity)
  # Processes are joined after all checks of options, and before JAX looks for
  # devices, which the data and the model need.
  if options.stages is None:
    _options.join_processes(options, options.workers, common)
    with _output.doing("preparing data and model"):
      programs: Any = _workload.Prepared(
        _workload.build(options), options, options.method, options.learning_rate
      )
  else:
    from jdist.cli.pipelines import _pipeline_run

    table = _pipeline_run.check(options)
    _options.join_processes(options, options.workers * options.stages, common)
    with _output.doing("preparing data and model"):
      programs = _pipeline_run.prepare(options, table)
  _run(options, programs, identity)


def _run(
  options: _commands.Train, programs: Any, identity: dict[str, object]
) -> None:
  """Trains with prepared programs, and saves rows and checkpoints."""
  workload = programs.workload
  first = jax.process_index() == 0
  num_steps = programs.budget.num_steps

  def show(record: training.Record) -> None:
    status.record(record)
    if board is not None:
      board.write(record)
    if first:
      _workload.print_record(record, num_steps, workload.train)

  resumed: dict[str, int] = {}

  def resume(found: training.Restored) -> None:
    resumed["resumed_from_step"] = found.step
    text = _workload.resumed_text(options, found, programs)
    if first:
      print(text, flush=True)

  ends: dict[str, Any] = {}
  if options.final_params is not None:
    ends["on_end"] = functools.partial(_save_model, options, workload)
  checkpoints: training.Checkpoints | None = None
  board = None

  def newest() -> str | None:
    step = None if checkpoints is None else checkpoints.latest_step()
    return None if step is None else f"step {step}"

  with contextlib.ExitStack() as stack:
    heading = _workload.heading(options, workload, options.method)
    label = f"train-{options.dataset}"
    command = functools.partial(_options.command_line, options)
    status = _status.Status(vars(options), command, label, heading, num_steps)
    stack.enter_context(status)
    if options.checkpoints is not None:
      checkpoints = training.Checkpoints(
        options.checkpoints,
        workload.workers,
        other_workers=programs.other_workers(options.seed),
      )
      stack.enter_context(checkpoints)
      every = workload.steps(options.checkpoint_every_epochs)
      ends["checkpoint_every"] = every
    # Only the first process writes: all of them have the same records.
    if first and options.tensorboard is not None:
      board = training.MetricsWriter(
        options.tensorboard,
        settings=vars(options),
        learning_rate=programs.budget.learning_rate,
      )
      stack.enter_context(board)
    with _run_end.explained(
      options.checkpoints, newest, "step", num_steps, status
    ):
      records = programs.run(
        options.seed, label=status.step, on_record=show,
        checkpoints=checkpoints,
        metadata=identity, on_resume=resume, free=_workload.FREE,
        stop_on_sigterm=True, **ends,
      )  # fmt: skip
    status.end(records, **resumed)
    _run_end.check(options, records, newest() is not None)


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


def _common(
  options: _commands.Train, identity: dict[str, object]
) -> dict[str, object]:
  """Returns the options that must be the same in all processes, by word."""
  common = dict(identity)
  for name in ("evaluate_every_epochs", "checkpoint_every_epochs"):
    common[name] = getattr(options, name)
  # Machines may mount a disk at different paths, but all must use it.
  for name in ("checkpoints", "final_params"):
    common[name] = getattr(options, name) is not None
  return {f"`{_options.word(name)}`": x for name, x in common.items()}
