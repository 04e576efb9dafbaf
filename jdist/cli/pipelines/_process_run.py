"""`jdist train --runtime processes`: each stage is a process of its own."""

import contextlib
import functools
import json
import math
import os
import pathlib
import time
import warnings

import jax
import numpy as np

from jdist import channel, pipeline, reducers, training
from jdist.cli import (
  _commands,
  _methods,
  _options,
  _run_end,
  _workload,
)
from jdist.cli.pipelines import _pipeline_run
from jdist.cli.report import _status
from jdist.storage import array_files, numbered_files, sealed_json

_CONNECT_S, _TIMEOUT_S = 120.0, 3600.0
_FORM = 1


def train(options: _commands.Train) -> None:
  """Trains this process's stages; the first process saves the row."""
  options = _workload.named(options)
  _methods.check("--method", options, (options.method,))
  _workload.check(options)
  table = _pipeline_run.check(options)
  _check(options, table)
  # Several stages may share a GPU, of which JAX would take most at once.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  own, devices = options.process_id or 0, jax.local_devices()
  jax.config.update("jax_default_device", devices[own % len(devices)])
  with contextlib.ExitStack() as stack:
    run = _Run(options, table, stack)
    total, label = run.budget.num_steps, f"train-{options.dataset}"
    heading = _workload.heading(options, run.workload, options.table)
    command = functools.partial(_options.command_line, options)
    status = _status.Status(vars(options), command, label, heading, total)
    stack.enter_context(status)
    with _run_end.explained(
      options.checkpoints, run.newest, "step", total, status.output
    ):
      run.run(status)
    if run.records:  # A run that was over before has them in the first process.
      if not own:
        status.end(run.records, **run.added)
      _run_end.check(options, run.records, run.newest() is not None)


def _check(options: _commands.Train, table: pipeline.Table) -> None:
  where = "with `--runtime processes`"
  _options.check_left_out(options, ("late_from", "tensorboard"), where)
  for name, wanted, why in (
    ("workers", 1, "the stages are those of one model"),
    ("method", "ssgd", "a single worker has no others to average with"),
  ):
    if (found := getattr(options, name)) != wanted:
      raise ValueError(
        f"`--{name}` must be {wanted} {where}, as {why}, got {found}."
      )
  if options.delay_fix != "none" and table.weights != "delayed":
    raise ValueError(
      f"`--delay-fix` must be left out for `--table` {options.table}, whose "
      "gradients are not all equally late."
    )
  given = options.coordinator_address, options.num_processes, options.process_id
  address = (given[0] or "").rpartition(":")
  if given != (None, None, None) and (
    given[1] != options.stages
    or given[2] not in range(given[1] or 0)
    or not (address[0] and address[2].isdigit())
  ):
    raise ValueError(
      "`--coordinator-address` host:port, `--num-processes`, the "
      f"{options.stages} stages, and `--process-id` must be given together "
      f"{where}, got {given}. Without them one command starts all here."
    )


class _Run:
  """One process's steps, with records and checkpoints between them.

  Attributes:
    workload: The data and the model.
    budget: The number of steps, and the schedule.
    records: The records so far; only the first process evaluates.
    added: Further entries of the row.
  """

  def __init__(
    self,
    options: _commands.Train,
    table: pipeline.Table,
    stack: contextlib.ExitStack,
  ):
    """Builds the programs, and then waits for the other processes."""
    self.workload = workload = _workload.build(options)
    self.budget = budget = _methods.make_budget(
      options, options.learning_rate, workload.steps_per_epoch
    )
    count, steps = table.num_iterations, budget.num_steps
    if steps % count:
      raise ValueError(
        f"`--steps` must be a multiple of the {count} iterations of `--table` "
        f"{options.table}, got {steps}. Take {steps + -steps % count}."
      )
    model = workload.model(options.seed)
    stages, microbatch = _pipeline_run.cut(workload, options, model, table)
    predicts = options.delay_fix == "prediction"
    self._optimizer = _methods.build_method(
      options.method, options, budget, None,
      predicted_steps=table.window - 1 if predicts else None,
    )  # fmt: skip
    codec, edges = _methods.edge_codec(options), None
    if codec is not None:
      # Feedback adds what other samples have left, see MEASURED.md.
      edges = reducers.MessageCodec(codec)
    self._process = pipeline.StageProcess(
      stages, training.label_loss, table, microbatch,
      peers=_connect(options, stack), inputs=workload.inputs(),
      edges=edges,
    )  # fmt: skip
    self._peers, self._options = self._process.peers, options
    self._identity = _options.identity(options, _workload.ELSEWHERE)
    words = json.dumps(self._identity, sort_keys=True)
    self._peers.check_agreement("Options", words)
    self._first = not self._peers.device
    self._evaluate = workload.evaluator(model.apply) if self._first else None
    self.records: list[training.Record] = []
    self.added = {"edge_bytes": self._process.edge_bytes}
    self._losses: list[float] = []
    self._train_s, self._samples = 0.0, 0

  def newest(self) -> str | None:
    """Names the newest checkpoint."""
    found = self._files()
    return f"step {max(found)}" if found else None

  def run(self, status: _status.Status) -> None:
    """Trains to the last step, from a checkpoint if there is one."""
    state = self._restore()
    if state is None:
      state = self._process.init_state(self._optimizer, seed=self._options.seed)
    options, workload = self._options, self.workload
    last, first = self.budget.num_steps, state.step
    batches = workload.batches(options.seed).iterate(first)
    with training.Preemption() as sigterm:
      while (before := state.step) < last:
        taken = [
          # The axis of workers has one entry.
          jax.tree.map(lambda x: x[0], next(batches))
          for _ in range(self._process.table.num_iterations)
        ]
        start_s = time.perf_counter()
        state, metrics = self._process.run(state, taken)
        # The first run compiles.
        if before > first:
          self._train_s += time.perf_counter() - start_s
          self._samples += len(taken) * workload.batch_size
        self._losses += [x["loss"] for x in metrics]
        record, save = (
          state.step == last or state.step // every > before // every
          for every in (
            workload.steps(options.evaluate_every_epochs),
            workload.steps(options.checkpoint_every_epochs),
          )
        )
        if record:
          self._record(state, status)
        stops = self._peers.any(sigterm.asks_at(state.step), state.step)
        stops = stops and state.step < last
        saved = (save or stops) and self._save(state)
        if stops:
          raise training.PreemptedError(state.step, saved)

  def _record(
    self, state: pipeline.ProcessState, status: _status.Status
  ) -> None:
    model = self._process.gather(state)
    metrics = {} if self._evaluate is None else self._evaluate.measure(*model)
    record = training.Record(
      step=state.step,
      rounds=state.step,
      # Messages between the stages of one worker do not count.
      sent_bytes=0.0,
      train_loss=float(np.mean(self._losses)),
      metrics=metrics,
      train_s=self._train_s,
      samples_per_s=self._samples / (self._train_s or math.nan),
      diverged=training.is_diverged(metrics, self._losses),
    )
    self._losses = []
    self.records.append(record)
    if self._first:
      status.step(record, "")
      status.record(record)
      steps = self.budget.num_steps
      _workload.print_record(record, steps, self.workload.train)

  def _files(self) -> dict[int, pathlib.Path]:
    if self._options.checkpoints is None:
      return {}
    folder = array_files.folder(self._options.checkpoints)
    return numbered_files.find(folder, r"step_(\d{8,})\.json")

  def _save(self, state: pipeline.ProcessState) -> bool:
    """Saves the stages, and before them the run's records in the first one."""
    if self._options.checkpoints is None:
      return False
    leaves = jax.tree.leaves((state.params, state.model_state))
    bad = not all(np.isfinite(np.asarray(x, "float32")).all() for x in leaves)
    if self._peers.any(bad, -state.step):
      warnings.warn(
        f"The state after step {state.step} is not finite and was not saved.",
        RuntimeWarning,
        stacklevel=2,
      )
      return False
    folder = array_files.folder(self._options.checkpoints)
    if self._first:
      body = {
        "metadata": self._identity,
        "records": [list(x) for x in self.records],
        "sums": [self._train_s, self._samples, self._losses],
      }
      path = folder / f"step_{state.step:08d}.json"
      sealed_json.write(path, body, form=_FORM)
    self._process.save(folder, state)
    for path in self._files().values() if self._first else ():
      if not path.with_suffix("").exists():
        path.unlink()
    return True

  def _restore(self) -> pipeline.ProcessState | None:
    if self._options.checkpoints is None:
      return None
    state = self._process.restore(self._options.checkpoints, self._optimizer)
    if state is None or not self._first:
      return state
    body = sealed_json.read(self._files()[state.step], form=_FORM)
    found = training.Restored(state.step, state, body["metadata"])
    training.check_same_run(found.metadata, self._identity, free=_workload.FREE)
    print(_workload.resumed_text(self._options, found, self), flush=True)
    self.added["resumed_from_step"] = state.step
    self.records = [training.Record(*x) for x in body["records"]]
    self._train_s, self._samples, self._losses = body["sums"]
    return state


def _connect(
  options: _commands.Train, stack: contextlib.ExitStack
) -> pipeline.Peers | None:
  """Connects the processes, which know the address of the first one alone."""
  own, number = options.process_id, options.num_processes
  if own is None or number is None:
    return None
  host, _, port = (options.coordinator_address or "").rpartition(":")
  first = host.strip("[]"), int(port)
  peers = pipeline.connect(
    own, [first, *[("", 0)] * (number - 1)], channel.identity().key("stages"),
    connect_s=_CONNECT_S, timeout_s=_TIMEOUT_S,
  )  # fmt: skip
  return stack.enter_context(peers)
