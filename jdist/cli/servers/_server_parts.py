"""Parts of a server's run, made from its options, for every driver."""

import dataclasses
import pathlib
from typing import Any

import jax
import optax

from jdist import cluster, data, models, server, training
from jdist.cli import _commands, _composition, _experiment, _methods
from jdist.cli.servers import _protocols
from jdist.training import comparison


@dataclasses.dataclass(frozen=True)
class Parts:
  """All that a server's run is made of, whatever drives it."""

  options: _commands.Train
  machines: cluster.Cluster
  profile: cluster.Profile
  workload: comparison.Workload
  model: models.Model
  loss: Any
  samples: data.SampleStream
  protocol: server.Protocol
  optimizer: optax.GradientTransformation
  push_codec: server.MessageCodec | None
  plans: server.BitPlans | None
  local_step: server.LocalStep | None


def assemble(
  options: _commands.Train, plans: server.BitPlans | None = None
) -> Parts:
  """Builds a run's parts from its options, and with given plans if any."""
  assert options.protocol is not None and options.cluster is not None
  name = options.protocol
  machines, profile = _protocols.load(options.cluster)
  num = len(machines.nodes)
  options = dataclasses.replace(
    options, method=name, workers=num, substrate="vmap"
  )
  _experiment.check(options)
  workload = _experiment.build(options)
  batch_size = options.batch_size // num
  samples = data.SampleStream(
    workload.train, num, seed=options.seed, owned=options.owned,
    alpha=options.alpha,
  )  # fmt: skip
  model = workload.model(options.seed)
  loss = workload.loss(model.apply)
  if plans is None and name == "h_ps" and "bits" in options.parts:
    plans = _fit_plans(options, model, loss, samples.batch(0, 0, batch_size))
  taken = _protocols.gradients_per_update(name, options, machines)
  # Schedules count updates.
  budget = _methods.make_budget(
    options,
    options.learning_rate,
    len(workload.train) / (batch_size * taken),
  )
  protocol = _protocols.build(
    name, options, batch_size, machines, profile, plans, budget.num_steps
  )
  return Parts(
    options, machines, profile, workload, model, loss, samples, protocol,
    _methods.optimizer_of(options, budget), _composition.message(options),
    plans, _local_step(options, budget.learning_rate),
  )  # fmt: skip


def _local_step(
  options: _commands.Train, schedule: optax.Schedule
) -> server.LocalStep | None:
  """Returns workers' own steps in front of what they are sent, if any."""
  if options.protocol != "h_ps" or "pipeline" not in options.parts:
    return None
  sgd = options.optimizer == "sgd"
  rate = schedule
  if options.local_rate is not None:
    if not options.local_rate:
      return None
    scale = options.local_rate / options.learning_rate

    def rate(count: Any) -> Any:
      return scale * schedule(count)

  momentum = options.local_momentum
  if momentum is None:
    momentum = options.momentum if sgd else 0.0
  return server.LocalStep(rate, momentum, nesterov=sgd and momentum > 0)


def _fit_plans(
  options: _commands.Train, model: models.Model, loss: Any, batch: Any
) -> server.BitPlans:
  """Returns the plans that the first gradient allows."""
  key = jax.random.key(options.seed)
  gradient = jax.jit(training.make_gradient(loss))(
    model.params, model.state, batch, key
  )
  return server.fit_bit_plans(
    gradient.grads, error_limit=options.error_limit, seed=options.seed
  )


def identity(options: _commands.Train) -> dict[str, object]:
  """Returns what must be the same when a run is resumed."""
  elsewhere = {
    "output", "checkpoints", "checkpoint_every_epochs", "preset", "text",
    "address", "cpus_per_worker", "gpus_per_worker", "record",
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
