"""Parts of a server's run, made from its options, for every engine."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import optax

from jdist import (
  cluster,
  data,
  elastic,
  methods,
  models,
  reducers,
  server,
  states,
  training,
  transforms,
)
from jdist.cli import _commands, _methods, _workload
from jdist.cli.servers import _protocols
from jdist.training import comparison
from jdist.transforms import intervals

# Batches are padded to these eighths of the largest one, so that five programs
# are compiled whatever sizes a protocol gives out.
_EIGHTHS = (1, 2, 3, 5, 8)


@dataclasses.dataclass(frozen=True)
class Parts:
  """The parts of a server's run, whatever its engine."""

  options: _commands.Train
  machines: cluster.Cluster
  profile: cluster.Profile
  workload: comparison.Workload
  model: models.Model
  loss: Any
  samples: data.SampleStream
  protocol: server.Protocol
  optimizer: optax.GradientTransformation
  push_codec: reducers.MessageCodec | None
  plans: server.BitPlans | None
  local_step: server.LocalStep | None
  rounds: elastic.Rounds | None = None


def assemble(
  options: _commands.Train, plans: server.BitPlans | None = None
) -> Parts:
  """Builds a run's parts from its options, and with given plans if any."""
  name = options.protocol or options.method
  # Without a file: equal machines, whose links nothing models.
  machines, profile = (
    cluster.workers([1.0] * options.workers),
    cluster.Profile(seconds_per_sample=0.001),
  )
  if options.cluster is not None:
    machines, profile = _protocols.load(options.cluster)
  num = len(machines.nodes)
  away = [node.name for node in machines.nodes if node.outages]
  if away and options.driver != "clock":
    raise ValueError(
      f"`outages` must be left out with `--driver {options.driver}`, got some "
      f"of {away[0]}: real workers fail by themselves. Take `--driver clock`."
    )
  options = dataclasses.replace(
    options, method=name, workers=num, substrate="vmap"
  )
  _workload.check(options)
  workload = _workload.build(options)
  batch_size = options.batch_size // num
  samples = data.SampleStream(
    workload.train, num, seed=options.seed, owned=options.owned,
    alpha=options.alpha,
  )  # fmt: skip
  model = workload.model(options.seed)
  loss = workload.loss(model.apply)
  if plans is None and name == "h_ps" and "bits" in options.parts:
    plans = _fit_plans(options, model, loss, samples.batch(0, 0, batch_size))
  taken = num
  if options.protocol is not None:
    taken = _protocols.gradients_per_update(name, options, num)
  # Schedules count updates, of which a protocol that makes one of each gradient
  # has as many more in the same samples.
  budget = _methods.make_budget(
    options, options.learning_rate, len(workload.train) / (batch_size * taken)
  )
  rounds = None
  if options.protocol is None:
    rounds = _rounds(options, budget, model, machines.names, batch_size)
    protocol = rounds.protocol
  else:
    protocol = _protocols.build(
      name, options, batch_size, machines, profile, plans, budget.num_steps
    )
  return Parts(
    options, machines, profile, workload, model, loss, samples, protocol,
    _methods.optimizer_of(options, budget), _methods.message(options),
    plans, _local_step(options, budget.learning_rate), rounds,
  )  # fmt: skip


def _rounds(
  options: _commands.Train,
  budget: methods.Run,
  model: models.Model,
  names: Sequence[str],
  batch_size: int,
) -> elastic.Rounds:
  """Returns a method with rounds, for workers that come and go."""
  method = methods.registry[options.method]
  interval: Any = options.interval
  if method.interval_policy is not None:
    interval = intervals.fixed(interval)
  given = {"interval": interval} if method.in_rounds else {}
  # Their own delays are of one step, and a server's messages are between tasks.
  if options.delay_steps is None and method.late is not None:
    given["overlap"] = transforms.Delayed(carry=options.carry or 1.0)
  elif options.delay_steps is None and "delay_steps" in method.arguments:
    given["delay_steps"] = 0
  options = dataclasses.replace(options, interval_policy="fixed")
  chain = _methods.build_method(
    options.method, options, budget, None, model, **given
  )
  chosen = {x: getattr(options, x) for x in ("quorum", "grace", "peers")}
  return elastic.Rounds(
    chain, model.params, workers=names, samples=batch_size,
    timeout_s=options.timeout_s, model_state=model.state, seed=options.seed,
    **{name: x for name, x in chosen.items() if x is not None},
  )  # fmt: skip


def _local_step(
  options: _commands.Train, schedule: optax.Schedule
) -> server.LocalStep | None:
  """Returns the workers' own step that anticipates the server's update."""
  late = options.protocol == "h_ps" and "pipeline" in options.parts
  if not late or options.local_rate == 0:
    return None
  # The step must fall with the server's rate to anticipate its updates.
  scale = (options.local_rate or options.learning_rate) / options.learning_rate
  sgd, momentum = options.optimizer == "sgd", options.local_momentum
  if momentum is None:
    momentum = options.momentum if sgd else 0.0
  return server.LocalStep(
    lambda count: scale * schedule(count), momentum,
    nesterov=sgd and momentum > 0,
  )  # fmt: skip


def _fit_plans(
  options: _commands.Train, model: models.Model, loss: Any, batch: Any
) -> server.BitPlans:
  """Returns the plans that the first gradient allows."""
  # Every process gets these plans, as another compiler may round the gradient
  # otherwise, and messages of other plans could not be decoded.
  key = jax.random.key(options.seed)
  gradient = jax.jit(training.make_gradient(loss))(
    model.params, model.state, batch, key
  )
  return server.fit_bit_plans(
    gradient.grads, error_limit=options.error_limit, seed=options.seed
  )


def _server_learner(parts: Parts) -> tuple[server.Protocol, Any]:
  """Returns the protocol and the server's side of its gradients."""
  protocol, options = parts.protocol, parts.options
  if parts.rounds is not None:
    return protocol, parts.rounds.syncer(shared=parts.samples.shared)
  common: dict[str, Any] = {
    "workers": parts.machines.names,
    "shared": parts.samples.shared,
    "model_state": parts.model.state,
  }
  if not isinstance(protocol, server.DecoupledDiLoCo):
    return protocol, server.GradientServer(
      parts.optimizer,
      parts.model.params,
      server.message_plans(parts.push_codec, parts.plans),
      seed=options.seed,
      **common,
    )
  syncer = server.FragmentSyncer(
    parts.model.params,
    outer=_methods.outer_optimizer(options),
    fragments=protocol.fragments,
    push_codec=parts.push_codec,
    **common,
  )
  # Only the syncer knows the sizes of the model's fragments.
  return dataclasses.replace(protocol, parts=syncer.parts), syncer


def _worker_learner(parts: Parts, name: str) -> server.WorkerLearner:
  """Returns a worker's side of the gradients."""
  protocol, names = parts.protocol, parts.machines.names
  if parts.rounds is not None:
    sizes, found = batch_sizes(protocol, name), parts.rounds
    return found.runner(name, parts.loss, parts.samples, sizes=sizes)
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
      outer=_methods.outer_optimizer(parts.options) if protocol.peers else None,
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


def batch_sizes(protocol: server.Protocol, name: str) -> tuple[int, ...]:
  """Returns the sizes to which a worker's batches are padded.

  None is larger than what its memory holds at once.
  """
  batches = protocol.batches
  total = getattr(batches, "total", None)
  if total is None:
    return tuple(batches.sizes([None]))
  bounds = [getattr(x, "limits", None) or {} for x in (protocol, batches)]
  limit = (bounds[0] | bounds[1]).get(name)
  largest = getattr(batches, "maximum", None)
  most = min(total, largest or total, limit or total)
  return tuple(dict.fromkeys(math.ceil(most * i / 8) for i in _EIGHTHS))


def shared_links(parts: Parts) -> cluster.Cluster:
  """Returns the machines, the server's link as fast as those of its shards."""
  machines, num = parts.machines, parts.options.shards
  if num == 1:
    return machines
  # Refused before an engine starts, if the parameters cannot be divided.
  _, learner = _server_learner(parts)
  sizes = [states.num_bytes(x["params"]) for x in server.divide(learner, num)]
  if machines.topology is None:
    return machines
  links = {
    ends: dataclasses.replace(
      link,
      bandwidth_bits_per_s=link.bandwidth_bits_per_s * sum(sizes) / max(sizes),
    )
    if machines.server in ends
    else link
    for ends, link in machines.topology.links.items()
  }
  return dataclasses.replace(machines, topology=cluster.Topology(links))


def simulation(parts: Parts) -> server.Simulation:
  """Builds the server and its workers on the virtual clock."""
  protocol, learner = _server_learner(parts)
  workers = {
    name: _worker_learner(parts, name) for name in parts.machines.names
  }
  profile, codec, params = parts.profile, parts.push_codec, parts.model.params
  if codec is not None or parts.options.cluster is None:
    # Real links carry the payload that was encoded; the clock must know it.
    count = states.num_bytes if codec is None else codec.num_bytes
    size = count(params)
    profile = dataclasses.replace(profile, push_bytes=size)
  return server.Simulation(
    shared_links(parts),
    protocol,
    profile,
    seed=parts.options.seed,
    learner=server.Pair(learner, workers),
  )


# Compiled programs are kept by their functions: threads that share the parts
# of a run compile once. Other processes have one copy of the parts each.
_assemble_once = functools.lru_cache(maxsize=1)(assemble)


def make_server(
  options: _commands.Train, plans: server.BitPlans | None, plan: server.LivePlan
) -> server.LiveServer:
  """Builds the server, in its process or thread."""
  parts = _assemble_once(options, plans)
  return server.LiveServer(*_server_learner(parts), plan)


def work(
  options: _commands.Train,
  plans: server.BitPlans | None,
  name: str,
  channel: server.Channel,
) -> None:
  """Works for the server, in a worker's process or thread."""
  parts = _assemble_once(options, plans)
  learner = _worker_learner(parts, name)
  # Compiling is not part of a task, whose measured time decides batch sizes.
  learner.prepare()
  pace = None
  if parts.options.paced and parts.options.cluster is not None:
    pace = server.Pace(
      parts.machines.node(name), parts.profile, parts.options.seed
    )
  server.WorkerLoop(
    channel, name, learner, depth=parts.protocol.depth, pace=pace
  ).run()
