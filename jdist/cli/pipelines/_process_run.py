"""`jdist train --runtime processes`: each stage is a process of its own."""

import contextlib
import functools
import math
import os
import pathlib
import time
import warnings
from typing import Any

import jax
import numpy as np

from jdist import (
  channel,
  collectives,
  methods,
  pipeline,
  reducers,
  training,
  transforms,
)
from jdist.cli import _commands, _methods, _options, _run_end, _workload
from jdist.cli.pipelines import _pipeline_run
from jdist.cli.report import _status
from jdist.storage import array_files, numbered_files, sealed_json

_CONNECT_S, _TIMEOUT_S = 900.0, 3600.0
_FORM, _FREE = 1, ("epochs", "steps")


def train(options: _commands.Train) -> None:
  """Trains this process's stages; the first process saves the row."""
  options = _workload.named(options)
  _methods.check("--method", options, (options.method,))
  _workload.check(options)
  table = _pipeline_run.check(options)
  _check(options, table)
  # Several stages may share a GPU, of which JAX would take most at once.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  with contextlib.ExitStack() as stack:
    run = _Run(options, table, stack)
    total, what = run.budget.num_steps, f"{options.method}, {options.table}"
    heading = _workload.heading(options, run.workload, what)
    command = functools.partial(_options.command_line, options)
    label = f"train-{options.dataset}"
    status = _status.Status(vars(options), command, label, heading, total)
    stack.enter_context(status)
    with _run_end.explained(
      options.checkpoints, run.newest, "step", total, status
    ):
      run.run(status)
    if run.records:  # A run that was over before has them in the first process.
      status.end(run.records, **run.added)
      _run_end.check(options, run.records, run.newest() is not None)


def _check(options: _commands.Train, table: pipeline.Table) -> None:
  where = "with `--runtime processes`"
  without = "late_from", "stream", "tensorboard"
  _options.check_left_out(options, without, where)
  if options.workers > 1 or methods.registry[options.method].in_rounds:
    why = "and workers, whose stages would not skip the same steps"
    _options.check_left_out(options, ("skip_nonfinite",), f"{where} {why}")
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

  Only the first process evaluates and has records.
  """

  def __init__(
    self,
    options: _commands.Train,
    table: pipeline.Table,
    stack: contextlib.ExitStack,
  ):
    """Builds the programs, and then waits for the other processes."""
    self.workload = workload = _workload.build(options, lambda: _team(options))
    self.budget = budget = _methods.make_budget(
      options, options.learning_rate, workload.steps_per_epoch
    )
    count, steps = table.num_iterations, budget.num_steps
    if steps % count:
      raise ValueError(
        f"`--steps` must be a multiple of the {count} iterations of `--table` "
        f"{options.table}, got {steps}. Take {steps + -steps % count}."
      )
    model, team = workload.model(options.seed), workload.workers
    axis, num = team.axis, options.workers
    stages, microbatch = _pipeline_run.cut(workload, options, model, table)
    predicts = options.delay_fix == "prediction"
    self._optimizer = optimizer = _methods.build_method(
      options.method, options, budget, axis,
      predicted_steps=table.window - 1 if predicts else None,
    )  # fmt: skip
    codec, peers = _methods.edge_codec(options), None
    # Feedback adds what other samples have left, see MEASURED.md.
    edges = None if codec is None else reducers.MessageCodec(codec)
    if (number := options.num_processes) is not None:
      # The processes know the address of the first one alone.
      host, _, port = (options.coordinator_address or "").rpartition(":")
      addresses = [(host.strip("[]"), int(port)), *[("", 0)] * (number - 1)]
      peers = stack.enter_context(
        pipeline.connect(
          options.process_id or 0, addresses, channel.identity().key("stages"),
          connect_s=_CONNECT_S, timeout_s=_TIMEOUT_S,
        )
      )  # fmt: skip
    self._process = pipeline.StageProcess(
      stages, training.label_loss, table, microbatch,
      peers=peers, inputs=workload.inputs(), edges=edges, team=team,
    )  # fmt: skip
    self._peers, self._options = self._process.peers, options
    self._identity = _options.identity(options, _workload.ELSEWHERE)
    common = {f"`{_options.word(x)}`": y for x, y in self._identity.items()}
    self._peers.check_agreement(common)
    self._first = not self._peers.device
    self._evaluate = workload.evaluator(model.apply) if self._first else None

    def drained(params: Any, opt_state: Any, kept: Any) -> Any:
      params, opt_state = transforms.drain(optimizer, opt_state, params)
      return transforms.evaluation_params(opt_state, params, kept, axis=axis)

    def update(params: Any, kept: Any) -> Any:
      found = optimizer.update(params, optimizer.init(params), params)
      return found, training.synchronize_statistics(kept, found[1], axis=axis)

    self._drained = team.jit(drained)
    # Codecs see the leaves of one stage at a time.
    self._traffic = [
      collectives.traffic(update, x.params, x.state, axis=axis, num_workers=num)
      for x in stages
    ]
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
        count = self._process.table.num_iterations
        taken = [next(batches) for _ in range(count)]
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
    params, kept = dict(state.params), dict(state.model_state)
    for s, own in state.opt_state.items():
      if own:  # Only the first stage has the state of a chain that sees all.
        params[s], kept[s] = self._drained(params[s], own, kept[s])
    whole = state._replace(params=params, model_state=kept)
    own = state.opt_state[min(params)]
    model, own = self.workload.workers.view((self._process.gather(whole), own))
    metrics = {} if self._evaluate is None else self._evaluate.measure(*model)
    rounds = int(transforms.rounds(own, state.step))
    record = training.Record(
      step=state.step,
      rounds=rounds,
      # Messages between the stages of one worker do not count.
      sent_bytes=sum(x.sent_bytes(state.step, rounds) for x in self._traffic),
      train_loss=float(np.mean(self._losses)),
      metrics=metrics,
      train_s=self._train_s,
      samples_per_s=self._samples / (self._train_s or math.nan),
      diverged=training.is_diverged(metrics, self._losses),
    )
    self._losses = []
    self.records.append(record)
    if self._first:
      status.record(record)
      steps = self.budget.num_steps
      _workload.print_record(record, steps, self.workload.train)

  def _files(self) -> dict[int, pathlib.Path]:
    if self._options.checkpoints is None:
      return {}
    folder = array_files.folder(self._options.checkpoints)
    return numbered_files.find(folder, "step_", ".json")

  def _save(self, state: pipeline.ProcessState) -> bool:
    """Saves the stages, and before them the run's records in the first one."""
    if self._options.checkpoints is None:
      return False
    leaves = jax.tree.leaves((state.params, state.model_state))
    bad = not all(np.isfinite(np.asarray(x, "float32")).all() for x in leaves)
    if self._peers.any(bad, -state.step):
      what = f"The state after step {state.step} is not finite and"
      warnings.warn(f"{what} was not saved.", RuntimeWarning, stacklevel=2)
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
    if (
      files := self._files()
    ):  # Their options are those of one run, of as many workers.
      body = sealed_json.read(files[max(files)], form=_FORM)
      training.check_same_run(body["metadata"], self._identity, free=_FREE)
    state = self._process.restore(self._options.checkpoints, self._optimizer)
    if state is None or not self._first:
      return state
    body = sealed_json.read(files[state.step], form=_FORM)
    found = training.Restored(state.step, state, body["metadata"])
    print(_workload.resumed_text(self._options, found, self), flush=True)
    self.added["resumed_from_step"] = state.step
    self.records = [training.Record(*x) for x in body["records"]]
    self._train_s, self._samples, self._losses = body["sums"]
    return state


def _team(options: _commands.Train) -> collectives.Workers:
  """Returns the workers, on other devices than other stages have, if any."""
  collectives.make_cpu_devices(options.workers)
  devices = jax.local_devices()
  used = math.gcd(options.workers, len(devices))
  first = (options.process_id or 0) * used % len(devices)
  jax.config.update("jax_default_device", devices[first])
  mesh = collectives.make_mesh((used,), ("worker",), devices[first:][:used])
  return collectives.workers(options.workers, mesh=mesh)
