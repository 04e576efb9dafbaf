"""`jdist train --protocol NAME --driver ray`: a server's run in real time."""

import contextlib
import dataclasses
import functools
import math
import pathlib
import time
from typing import Any

import numpy as np

from jdist import server, training
from jdist.cli import (
  _commands,
  _composition,
  _datasets,
  _experiment,
  _interrupts,
  _run_end,
)
from jdist.cli.servers import _server_parts
from jdist.storage import json_lines

# Batches are padded to these parts of a round's samples, of 8.
_EIGHTHS = (1, 2, 3, 5, 8)
_RECORDS = "records.json"


def batch_sizes(protocol: server.Protocol, name: str) -> tuple[int, ...]:
  """Returns the sizes to which a worker's batches are padded.

  None is larger than what its memory holds at once.
  """
  batches = protocol.batches
  total = getattr(batches, "total", None)
  if total is None:
    return tuple(batches.sizes([None]))
  limit = (getattr(protocol, "limits", None) or {}).get(name)
  largest = getattr(batches, "maximum", None)
  most = min(total, largest or total, limit or total)
  return tuple(dict.fromkeys(math.ceil(most * i / 8) for i in _EIGHTHS))


def make_server(
  options: _commands.Train, plans: server.BitPlans | None, plan: server.LivePlan
) -> server.LiveServer:
  """Builds the server, in its process."""
  parts = _server_parts.assemble(options, plans)
  protocol = parts.protocol
  common: dict[str, Any] = {
    "workers": parts.machines.names,
    "shared": parts.samples.shared,
    "model_state": parts.model.state,
  }
  if isinstance(protocol, server.DecoupledDiLoCo):
    syncer = server.FragmentSyncer(
      parts.model.params,
      outer=_composition.outer_optimizer(options),
      fragments=protocol.fragments,
      push_codec=parts.push_codec,
      **common,
    )
    protocol = dataclasses.replace(protocol, parts=syncer.parts)
    return server.LiveServer(protocol, syncer, plan)
  learner = server.GradientServer(
    parts.optimizer,
    parts.model.params,
    server.message_plans(parts.push_codec, parts.plans),
    seed=options.seed,
    **common,
  )
  return server.LiveServer(protocol, learner, plan)


def work(
  options: _commands.Train,
  plans: server.BitPlans | None,
  name: str,
  channel: server.Channel,
) -> None:
  """Works for the server, in a worker's process."""
  parts = _server_parts.assemble(options, plans)
  learner = _worker_learner(parts, name)
  learner.prepare()
  pace = None
  if options.paced:
    pace = server.Pace(parts.machines.node(name), parts.profile, options.seed)
  server.WorkerLoop(
    channel, name, learner, depth=parts.protocol.depth, pace=pace
  ).run()


def _worker_learner(
  parts: _server_parts.Parts, name: str
) -> server.WorkerLearner:
  protocol, names = parts.protocol, parts.machines.names
  common: dict[str, Any] = {
    "number": names.index(name),
    "num_workers": len(names),
    "sizes": batch_sizes(protocol, name),
    "model_state": parts.model.state,
    "seed": parts.options.seed,
  }
  if isinstance(protocol, server.DecoupledDiLoCo):
    return server.FragmentRunner(
      parts.loss,
      parts.optimizer,
      parts.model.params,
      parts.samples,
      fragments=protocol.fragments,
      push_codec=parts.push_codec,
      **common,
    )
  return server.GradientWorker(
    parts.loss,
    parts.model.params,
    parts.samples,
    server.message_plans(parts.push_codec, parts.plans),
    local_step=parts.local_step,
    **common,
  )


def train(options: _commands.Train) -> None:
  """Trains on Ray's actors, and leaves a row."""
  parts = _server_parts.assemble(options)
  machines = parts.machines
  away = [node.name for node in machines.nodes if node.outages]
  if away:
    raise ValueError(
      f"`outages` must be left out with `--driver ray`, got some of {away[0]}: "
      "real workers fail by themselves."
    )
  samples = round(options.epochs * len(parts.workload.train))
  every = min(
    samples, options.evaluate_every_epochs * len(parts.workload.train)
  )
  marks = [every * (i + 1) for i in range(math.ceil(samples / every - 1e-9))]
  marks[-1] = samples
  _experiment.make_directories(options)
  plan = server.LivePlan(
    workers=machines.names,
    machines=machines,
    samples=samples,
    marks=tuple(marks),
    record=options.record,
    checkpoints=options.checkpoints,
    identity=_server_parts.identity(options),
    versions=server.versions(),
  )
  output = _experiment.output_directory(options, "train")
  watch = _Watch(parts)
  try:
    with _interrupts.raised_by_sigterm():
      result = _run(parts, plan, watch)
  except training.OtherRunError as error:
    raise _run_end.refusal(error) from None
  except server.LostRunError as error:
    kept = "last checkpoint" if options.checkpoints else "beginning"
    raise _run_end.LostError(
      f"{error} The same command begins from the {kept}."
    ) from None
  except _interrupts.SigtermError:
    raise _run_end.TerminatedError(watch.ended) from None
  more = {"workers": len(machines.nodes), "driver": "ray"}
  more |= {"events": result.events} | result.summary
  _run_end.write_row(output, options, options.protocol, watch.records, **more)
  _run_end.check(watch.records, options.learning_rate)


def _run(
  parts: _server_parts.Parts, plan: server.LivePlan, watch: "_Watch"
) -> server.LiveResult:
  options = parts.options
  engine = server.RayEngine(
    len(plan.workers),
    address=options.address,
    cpus_per_worker=options.cpus_per_worker,
    gpus_per_worker=options.gpus_per_worker,
  )
  try:
    run = server.LiveRun(
      engine,
      functools.partial(make_server, options, parts.plans, plan),
      {
        name: functools.partial(work, options, parts.plans, name)
        for name in plan.workers
      },
      can_resume=options.checkpoints is not None,
    )
    return run.run(on_record=watch.record, on_status=watch.status)
  except _interrupts.SigtermError:
    if options.checkpoints is not None:
      with contextlib.suppress(Exception):  # A server that is not there yet.
        watch.saved = engine.ask("save")
    raise
  finally:
    engine.stop()


class _Watch:
  """Evaluates at each mark, and tells how the run goes."""

  def __init__(self, parts: _server_parts.Parts):
    self._parts = parts
    self._evaluate = parts.workload.evaluator(parts.model.apply)
    self._samples = 0
    self._told_s = time.monotonic()
    # After which update it stands, and was saved upon SIGTERM.
    self._update, self.saved = 0, -1
    self._resumed: int | None = None
    self.records: list[training.Record] = []
    folder = parts.options.checkpoints
    # Evaluations are made here, and the server's checkpoints have none.
    self._path = None if folder is None else pathlib.Path(folder) / _RECORDS
    self._before: dict[float, training.Record] = {}
    if self._path is not None and self._path.is_file():
      found = [training.Record(*x) for x in json_lines.read(self._path)]
      self._before = {record.train_s: record for record in found}

  @property
  def ended(self) -> str:
    """Tells of a run that SIGTERM has ended."""
    if self.saved >= 0:
      return (
        f"ended after update {self.saved}, which is saved in "
        f"{self._parts.options.checkpoints}: the same command goes on."
      )
    kept = "its last checkpoint" if self._path else "nothing"
    return f"ended after update {self._update}, of which {kept} is saved."

  def record(self, found: dict[str, Any], snapshot: np.ndarray) -> None:
    """Evaluates a snapshot, here and not at the server."""
    parts, before = self._parts, self._before.get(found["now_s"])
    if before is not None:
      # Of a mark before the run was resumed.
      self.records.append(before)
      self._samples = found["samples"]
      return
    if not len(snapshot):
      print(
        f"update {found['updates']}  {found['now_s']:.4g} s  not evaluated: "
        "the run was lost meanwhile",
        flush=True,
      )
      return
    model = server.tree_of_bytes(
      snapshot, (parts.model.params, parts.model.state)
    )
    metrics = self._evaluate.measure(*model)
    losses = [x for count, x in found["losses"] if count > self._samples]
    self._samples = found["samples"]
    now_s = found["now_s"]
    loss = float(np.mean(losses)) if losses else math.nan
    record = training.Record(
      step=found["updates"],
      rounds=found["updates"],
      sent_bytes=found["pushed_bytes"] / len(parts.machines.nodes),
      train_loss=loss,
      metrics=metrics,
      train_s=now_s,
      samples_per_s=found["samples"] / now_s if now_s else 0.0,
      clock="wall",
      diverged=training.is_diverged(metrics, losses),
    )
    self.records.append(record)
    if self._path is not None:
      json_lines.write(self._path, map(list, self.records))
    print(
      f"update {record.step}  {now_s:.4g} s  "
      f"{_datasets.quality(metrics)}  train loss {loss:.4f}  "
      f"staleness {_mean_of(found['staleness']):.2f}  "
      f"{training.format_bytes(record.sent_bytes)} pushed per worker  "
      f"{_datasets.speed(record, parts.workload.train)}/s",
      flush=True,
    )

  def status(self, status: dict[str, Any]) -> None:
    """Tells from where it goes on, and of workers that are away."""
    if self._resumed is None and status.get("resumed") is not None:
      self._resumed = status["resumed"]
      print(f"Goes on from update {self._resumed}.", flush=True)
    num = len(self._parts.machines.nodes)
    now = time.monotonic()
    self._update = status["updates"]
    if status["members"] < num and now - self._told_s > 5.0:
      self._told_s = now
      print(
        f"update {status['updates']}  {status['now_s']:.4g} s  "
        f"{status['members']} of {num} workers are there",
        flush=True,
      )


def _mean_of(counts: dict[Any, int]) -> float:
  total = sum(counts.values())
  return sum(int(k) * v for k, v in counts.items()) / total if total else 0.0
