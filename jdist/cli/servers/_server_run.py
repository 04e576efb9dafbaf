"""`jdist train --protocol`: a parameter server's run on the virtual clock."""

import dataclasses
import functools
import pathlib
from typing import Any

import jax

from jdist import collectives, data, models, server, training
from jdist.cli import (
  _composition,
  _datasets,
  _divergence,
  _experiment,
  _methods,
  _options,
)
from jdist.cli.servers import _protocols
from jdist.training import comparison

# Options that a server's run takes of those that are of some methods only.
_COMPRESSION = ("codec", "feedback", "ratio")
# Of runs without a server; workers are the cluster's machines.
_UNUSED = (
  "method", "workers", "substrate", "accumulate", "host_rounds", "steps",
  "coordinator_address", "num_processes", "process_id", "skip_nonfinite",
  "stages", "table", "microbatches", "window", "chunks", "cuts",
)  # fmt: skip


def train(options: _options.Train) -> None:
  """Trains by a protocol, and leaves a row."""
  _check(options)
  assert options.protocol is not None and options.cluster is not None
  name = options.protocol
  machines, profile = _protocols.load(options.cluster)
  num = len(machines.nodes)
  options = dataclasses.replace(
    options, method=name, workers=num, substrate="vmap"
  )
  workload = _experiment.build(options)
  batch_size = options.batch_size // num
  samples = data.SampleStream(
    workload.train, num, seed=options.seed, owned=options.owned,
    alpha=options.alpha,
  )  # fmt: skip
  model = workload.model(options.seed)
  loss = workload.loss(model.apply)
  plans = None
  if name == "h_ps" and "bits" in options.parts:
    plans = _fit_plans(options, model, loss, samples.batch(0, 0, batch_size))
  protocol = _protocols.build(
    name, options, batch_size, machines, profile, plans
  )
  taken = _protocols.gradients_per_update(name, options, machines)
  # Schedules count updates.
  budget = _methods.make_budget(
    options,
    options.learning_rate,
    len(workload.train) / (batch_size * taken),
  )
  message = _composition.message(options)
  if message is not None:
    profile = dataclasses.replace(
      profile, push_bytes=message.num_bytes(model.params)
    )
  learner = server.GradientLearner(
    loss,
    _methods.optimizer_of(options, budget),
    model.params,
    samples,
    workers=machines.names,
    model_state=model.state,
    seed=options.seed,
    push_codec=message,
    plans=plans,
    local_rate=_local_rate(options),
  )
  run = server.Simulation(
    machines, protocol, profile, seed=options.seed, learner=learner
  )
  _fit(options, workload, model, run)


def _local_rate(options: _options.Train) -> float | None:
  """Returns the rate of workers' own steps, if they make any."""
  if options.protocol != "h_ps" or "pipeline" not in options.parts:
    return None
  rate = options.local_rate
  return (options.learning_rate if rate is None else rate) or None


def _fit_plans(
  options: _options.Train, model: models.Model, loss: Any, batch: Any
) -> server.BitPlans:
  """Returns the plans that the first gradient allows."""
  key = jax.random.key(options.seed)
  gradient = jax.jit(training.make_gradient(loss))(
    model.params, model.state, batch, key
  )
  return server.fit_bit_plans(
    gradient.grads, error_limit=options.error_limit, seed=options.seed
  )


def _fit(
  options: _options.Train,
  workload: comparison.Workload,
  model: models.Model,
  run: server.Simulation,
) -> None:
  if options.checkpoints is not None:
    _experiment.make_directory("--checkpoints", options.checkpoints)
  output = _experiment.output_directory(options, "train")
  checkpoints = (
    None
    if options.checkpoints is None
    else training.Checkpoints(options.checkpoints, collectives.workers(1))
  )
  evaluate = workload.evaluator(model.apply)
  samples = round(options.epochs * len(workload.train))
  records = server.VirtualTrainer(run).fit(
    samples,
    "samples",
    every=min(samples, options.evaluate_every_epochs * len(workload.train)),
    evaluate=lambda found: evaluate.measure(found.params, found.model_state),
    on_record=functools.partial(_show, dataset=workload.train),
    label=options.protocol,
    checkpoints=checkpoints,
    metadata=_identity(options),
  )
  if checkpoints is not None:
    checkpoints.close()
  row = training.make_row(
    dataclasses.asdict(options),
    options.seed,
    method=options.protocol,
    learning_rate=options.learning_rate,
    workers=options.workers,
    **(comparison.summarize(records) | run.summary()),
  )
  training.append_rows(output / "rows.jsonl", [row])
  print(f"Row: {output / 'rows.jsonl'}")
  _divergence.check(records, options.learning_rate, options.checkpoints)


def _show(record: training.Record, dataset: _datasets.AnyDataset) -> None:
  print(
    f"update {record.step}  {record.train_s:.4g} virtual s  "
    f"{_datasets.quality(record.metrics)}  "
    f"train loss {record.train_loss:.4f}  "
    f"{training.format_bytes(record.sent_bytes)} pushed per worker  "
    f"{_datasets.speed(record, dataset)} a virtual s",
    flush=True,
  )


def _check(options: _options.Train) -> None:
  assert options.protocol is not None
  _protocols.check_names("--protocol", (options.protocol,))
  if options.cluster is None:
    raise ValueError(
      "`--cluster` must be given with `--protocol`: a TOML file of the "
      "machines, see `cluster.load_cluster`."
    )
  _options.check_left_out(
    options,
    (x for x in (*_UNUSED, *_methods.OF_SOME) if x not in _COMPRESSION),
    "with `--protocol`, which does not use it",
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
  _options.check_least(options, seed=0)


def _identity(options: _options.Train) -> dict[str, object]:
  """Returns what must be the same when a run is resumed."""
  elsewhere = {
    "output", "checkpoints", "checkpoint_every_epochs", "preset", "text",
  }  # fmt: skip
  assert options.cluster is not None
  # Time is replayed: the machines must be the same, wherever their file lies.
  machines = {"cluster": pathlib.Path(options.cluster).read_text()}
  return machines | {
    # As a checkpoint, which is JSON, has it.
    name: list(value) if isinstance(value, tuple) else value
    for name, value in dataclasses.asdict(options).items()
    if name not in elsewhere and name != "cluster"
  }
