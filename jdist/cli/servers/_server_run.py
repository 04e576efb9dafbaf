"""`jdist train --protocol`: a parameter server's run on the virtual clock."""

import dataclasses

from jdist import collectives, models, server, training
from jdist.cli import (
  _commands,
  _composition,
  _datasets,
  _experiment,
  _groups,
  _options,
  _run_end,
)
from jdist.cli.servers import _protocols, _ray_run, _server_parts
from jdist.training import comparison

# Options that a server's run takes of those that are of some methods only.
_COMPRESSION = ("codec", "feedback", "ratio")
# And those of local steps.
_ROUNDS = (
  *_COMPRESSION,
  "interval",
  "outer",
  "outer_learning_rate",
  "outer_momentum",
)
_OF_METHODS = (
  *_groups.MethodOptions.__dataclass_fields__,
  "predictor",
)
# Of runs without a server; workers are the cluster's machines.
_UNUSED = (
  "method", "workers", "substrate", "accumulate", "host_rounds", "steps",
  "coordinator_address", "num_processes", "process_id", "skip_nonfinite",
  "final_params", "tensorboard", "stages", "table", "microbatches", "window",
  "chunks", "cuts",
)  # fmt: skip


def train(options: _commands.Train) -> None:
  """Trains by a protocol, and leaves a row."""
  options = _datasets.named(options)
  _check(options)
  if options.driver == "ray":
    _ray_run.train(options)
    return
  parts = _server_parts.assemble(options)
  if isinstance(parts.protocol, server.DecoupledDiLoCo):
    _train_fragments(parts)
    return
  message = parts.push_codec
  learner = server.GradientLearner(
    parts.loss,
    parts.optimizer,
    parts.model.params,
    parts.samples,
    workers=parts.machines.names,
    model_state=parts.model.state,
    seed=options.seed,
    push_codec=message,
    plans=parts.plans,
    local_step=parts.local_step,
  )
  _simulate(parts, parts.protocol, learner)


def _train_fragments(parts: _server_parts.Parts) -> None:
  """Trains by local steps, whose fragments a quorum merges."""
  options, protocol = parts.options, parts.protocol
  assert isinstance(protocol, server.DecoupledDiLoCo)
  learner = server.FragmentLearner(
    parts.loss,
    parts.optimizer,
    parts.model.params,
    parts.samples,
    workers=parts.machines.names,
    outer=_composition.outer_optimizer(options),
    fragments=protocol.fragments,
    model_state=parts.model.state,
    seed=options.seed,
    push_codec=parts.push_codec,
  )
  protocol = dataclasses.replace(protocol, parts=learner.server.parts)
  _simulate(parts, protocol, learner)


def _simulate(
  parts: _server_parts.Parts,
  protocol: server.Protocol,
  learner: server.Pair,
) -> None:
  profile = parts.profile
  if parts.push_codec is not None:
    size = parts.push_codec.num_bytes(parts.model.params)
    profile = dataclasses.replace(profile, push_bytes=size)
  run = server.Simulation(
    parts.machines, protocol, profile, seed=parts.options.seed, learner=learner
  )
  _fit(parts.options, parts.workload, parts.model, run)


def _fit(
  options: _commands.Train,
  workload: comparison.Workload,
  model: models.Model,
  run: server.Simulation,
) -> None:
  _experiment.make_directories(options)
  output = _experiment.output_directory(options, "train")
  checkpoints = (
    None
    if options.checkpoints is None
    else training.Checkpoints(options.checkpoints, collectives.workers(1))
  )
  evaluate = workload.evaluator(model.apply)
  samples = round(options.epochs * len(workload.train))
  resumed: dict[str, int] = {}
  shown: list[training.Record] = []

  def resume(record: training.Record) -> None:
    resumed["resumed_from_step"] = record.step
    print(f"Goes on from update {record.step}.", flush=True)

  def show(record: training.Record) -> None:
    shown.append(record)
    _show(record, workload.train)

  try:
    records = server.VirtualTrainer(run).fit(
      samples,
      "samples",
      every=min(samples, options.evaluate_every_epochs * len(workload.train)),
      evaluate=lambda found: evaluate.measure(found.params, found.model_state),
      on_record=show,
      label=options.protocol,
      checkpoints=checkpoints,
      metadata=_server_parts.identity(options),
      on_resume=resume,
      stop_on_sigterm=True,
    )
  except training.OtherRunError as error:
    raise _run_end.refusal(error) from None
  except KeyboardInterrupt:
    # Its checkpoints count events, which nobody is told of.
    what = "the last checkpoint"
    raise _run_end.interrupt(checkpoints, options, what) from None
  except training.PreemptedError as stop:
    raise _run_end.TerminatedError(
      f"ended after update {stop.step}, "
      + (
        f"which is saved in {options.checkpoints}: the same command goes on."
        if stop.saved
        else "of which nothing is saved."
      )
    ) from None
  finally:
    if checkpoints is not None:
      checkpoints.close()
  if not shown:
    last = records[-1]
    resumed["resumed_from_step"] = last.step
    print(f"Nothing left to train: update {last.step}.")
    _show(last, workload.train)
  _run_end.write_row(
    output, options, options.protocol, records, **run.summary(), **resumed
  )
  if run.ended and run.applied_samples < samples:
    raise ValueError(
      "`--cluster` must have a machine that is there until the end: after "
      f"{run.applied_samples:,} of {samples:,} samples all are away for good. "
      "Give an outage an `end_s`, or add machines."
    )
  kept = checkpoints is not None and checkpoints.latest_step() is not None
  saved = options.checkpoints if kept else None
  _run_end.check(records, options.learning_rate, saved, skips=False)


def _show(record: training.Record, dataset: _datasets.AnyDataset) -> None:
  print(
    f"update {record.step}  {record.train_s:.4g} virtual s  "
    f"{_datasets.quality(record.metrics)}  "
    f"train loss {_datasets.loss(record)}  "
    f"{training.format_bytes(record.sent_bytes)} pushed per worker  "
    f"{_datasets.speed(record, dataset)} a virtual s",
    flush=True,
  )


def _check(options: _commands.Train) -> None:
  assert options.protocol is not None
  _protocols.check_names("--protocol", (options.protocol,))
  if options.cluster is None:
    raise ValueError(
      "`--cluster` must be given with `--protocol`: a TOML file of the "
      "machines, see `cluster.load_cluster`."
    )
  fragments = options.protocol == "decoupled_diloco"
  used = _ROUNDS if fragments else _COMPRESSION
  _options.check_left_out(
    options,
    (x for x in (*_UNUSED, *_OF_METHODS) if x not in used),
    "with `--protocol"
    + (" decoupled_diloco" if fragments else "")
    + "`, which does not use it",
  )
  if options.reducer is not None:
    raise ValueError(
      "`--reducer` must be left out with `--protocol`: a push goes to one "
      f"server, got {options.reducer}."
    )
  if options.protocol == "h_ps" and options.codec is not None:
    raise ValueError(
      "`--codec` must be left out with `--protocol h_ps`, which chooses each "
      f"message's bits, got {options.codec}. Take `--protocol bsp`."
    )
