"""`jdist train --protocol`: a parameter server's run on any engine."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from jdist import methods, server, training
from jdist.cli import (
  _commands,
  _interrupts,
  _methods,
  _options,
  _run_end,
  _workload,
)
from jdist.cli.report import _status
from jdist.cli.servers import _protocols, _server_parts

# Options of runs without a server. With one, the cluster's machines are the
# workers, and each evaluation saves a checkpoint. `check_used` does not refuse
# these options: they fill no argument, or one that a protocol has as well.
_UNUSED = (
  "method", "workers", "substrate", "accumulate", "host_rounds", "steps",
  "interval_policy", "reducer", "coordinator_address", "num_processes",
  "process_id", "skip_nonfinite", "checkpoint_every_epochs", "final_params",
  "tensorboard", "stages",
)  # fmt: skip
# Options of methods that an elastic run uses, too.
_OF_METHODS = ("method", "workers", "interval_policy")


def train(options: _commands.Train) -> None:
  """Trains by a protocol or an elastic method, and leaves a row."""
  options = _workload.named(options)
  _check(options)
  parts = _server_parts.assemble(options)
  filled = parts.options
  heading = _workload.heading(filled, parts.workload, filled.method)
  label = f"train-{options.dataset}"
  # As given: the parts' options have `--method` and `--workers` filled in, and
  # a command that resumes the run with them would be refused.
  command = functools.partial(_options.command_line, options)
  with _status.Status(vars(filled), command, label, heading) as status:
    _fit(parts, status)


def _fit(parts: _server_parts.Parts, status: _status.Status) -> None:
  """Trains, and writes the row also of a run that has ended early."""
  options, workload = parts.options, parts.workload
  evaluate = workload.evaluator(parts.model.apply)
  epoch = len(workload.train)
  samples = max(1, round(options.epochs * epoch))
  more: dict[str, Any] = {"driver": options.driver}
  shown: list[int] = []

  def resume(update: int) -> None:
    more["resumed_from_step"] = update
    print(f"Resumes from update {update}.", flush=True)

  with _session(parts) as session:
    # The session ends with its processes, so that the summary is asked within.
    run = server.ServerRun(session)

    def newest() -> str | None:
      return "the last checkpoint" if run.saved else None

    def show(record: training.Record) -> None:
      assert run.mark is not None
      shown.append(record.step)
      for *_, living in run.mark.changes[-1:]:
        status.note(workers=living)
      status.record(record)
      _print_record(record, run.mark, workload.train)

    with _run_end.explained(
      options.checkpoints, newest, "update", None, status
    ):
      records = run.fit(
        samples,
        "samples",
        every=min(samples, max(1, options.evaluate_every_epochs * epoch)),
        evaluate=lambda m: evaluate.measure(m.params, m.model_state),
        on_record=show,
        on_resume=resume,
        checkpoints=options.checkpoints,
        metadata=_identity(options),
        stop_on_sigterm=True,
      )
      more |= session.summary()
  if not shown:  # The checkpoint is of the run's end.
    print(f"Nothing left to train: update {records[-1].step}.")
    show(records[-1])
  status.end(records, **more)
  _run_end.check(options, records, run.saved)
  if run.mark is not None and run.mark.ended:
    raise ValueError(
      "`--cluster` must have a machine that is there until the end: after "
      f"{run.mark.samples:,} of {samples:,} samples all are away for good. "
      "Give an outage an `end_s`, or add machines."
    )


def _print_record(
  record: training.Record, mark: Any, dataset: _workload.AnyDataset
) -> None:
  for at_s, update, kind, worker, living in mark.changes:
    print(f"{worker} {kind} at {at_s:.4g} s, update {update}; living: {living}")
  share = ""
  if mark.merged_share is not None:
    share = f"{100 * mark.merged_share:.1f} % of the living in a merge  "
  second = "virtual s" if record.clock == "virtual" else "s"
  print(
    f"update {record.step}  {record.train_s:.4g} {second}  "
    f"{_workload.quality(record.metrics)}  "
    f"train loss {_workload.loss(record)}  staleness {mark.staleness:.2f}  "
    f"{share}{training.format_bytes(record.sent_bytes)} pushed per worker  "
    f"{_workload.speed(record, dataset)} a {second}",
    flush=True,
  )


def _identity(options: _commands.Train) -> dict[str, object]:
  """Returns the metadata that must be the same when a run is resumed."""
  elsewhere = (
    "checkpoints", "checkpoint_every_epochs", "address", "cpus_per_worker",
    "gpus_per_worker", "record",
  )  # fmt: skip
  return _options.identity(options, elsewhere)


def _print_event(event: dict[str, Any]) -> None:
  reason = f": {event['reason']}" if event["reason"] else ""
  print(f"{event['worker']} {event['kind']}{reason}", flush=True)


@contextlib.contextmanager
def _session(parts: _server_parts.Parts) -> Iterator[Any]:
  """Yields the server and its workers on the engine that the options name."""
  options, names = parts.options, parts.machines.names
  machines = _server_parts.shared_links(parts)
  if options.driver == "clock":
    yield server.ClockSession(_server_parts.simulation(parts))
    return
  # Each process builds its parts from the options; threads share one copy.
  made = options, parts.plans
  plan = server.LivePlan(
    workers=names,
    machines=None if options.cluster is None else machines,
    record=options.record,
    shards=options.shards,
    versions=server.versions(),
  )
  try:
    # Ray's processes must not outlive a SIGTERM before or after the time in
    # which the run itself looks for one.
    with _interrupts.raised_once(), contextlib.ExitStack() as stack:
      engine: Any
      if options.driver == "threads":
        engine = server.ThreadEngine()
      else:
        print(f"Starting {len(names) + 1} processes on Ray.", flush=True)
        engine = server.RayEngine(
          len(names),
          address=options.address,
          cpus_per_worker=options.cpus_per_worker,
          gpus_per_worker=options.gpus_per_worker,
        )
      stack.callback(engine.stop)
      yield server.LiveSession(
        engine,
        functools.partial(_server_parts.make_server, *made),
        {x: functools.partial(_server_parts.work, *made, x) for x in names},
        plan,
        model=(parts.model.params, parts.model.state),
        on_event=_print_event,
        survive=options.elastic,
      )
  except _interrupts.SigtermError:
    raise _run_end.TerminatedError("ended outside of the training.") from None


def _check(options: _commands.Train) -> None:
  if options.elastic:
    _check_elastic(options)
    return
  assert options.protocol is not None
  _protocols.check_used("--protocol", (options.protocol,), options)
  if options.cluster is None:
    raise ValueError(
      "`--cluster` must be given with `--protocol`: a TOML file of the "
      "machines, see `cluster.load_cluster`."
    )
  _options.check_left_out(
    options, _UNUSED, "with `--protocol`, which does not use it"
  )


def _check_elastic(options: _commands.Train) -> None:
  if options.protocol is not None:
    raise ValueError(
      "`--protocol` must be left out with `--elastic`, which has a protocol of "
      f"its own, got {options.protocol}."
    )
  names = ("workers",) if options.cluster is not None else ()
  unused = [x for x in _UNUSED if x not in _OF_METHODS]
  where = "with `--elastic`, which does not use it"
  _options.check_left_out(options, (*unused, *names), where)
  if options.interval_policy not in ("method", "fixed"):
    raise ValueError(
      "`--interval-policy` must be fixed with `--elastic`, whose server gives "
      f"tasks of as many steps, got {options.interval_policy}."
    )
  _options.check_name("--method", options.method, methods.registry)
  served = {"quorum", "grace", "timeout_s", "peers"}
  _options.check_used(
    options, (options.method,), methods.registry,
    lambda name: (_methods.takes(options, name) | served) - {"growth"},
  )  # fmt: skip
