"""Set-ups on real workers: what runs at the server and at each worker.

A module of its own, as workers' processes import it.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import config
import jax
import optax

from jdist import (
  cluster,
  codecs,
  data,
  models,
  reducers,
  server,
  training,
)

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
CACHE = str(pathlib.Path.home() / ".cache" / "jdist" / "h_ps")
LEARNING_RATE = 0.02
MEAN_RATE = 500.0  # Samples a second of a worker, on the average.
VARIANTS = config.VARIANTS | {"decoupled_diloco": config.FRAGMENTS}
# Of the latter's pushes.
FOUR_BITS = reducers.MessageCodec(codecs.Quantize(4), reducers.ErrorFeedback())


@dataclasses.dataclass(frozen=True)
class Setup:
  """A run: workers, links, protocol.

  Attributes:
    speeds: of the workers, relative to each other; their mean is 1.
    ratio: r, seconds of a pull and a push in 32 bits over those in which all
      together compute a round.
    variant: a name of `VARIANTS`.
    rounds: so many rounds' samples.
    total: samples of a round.
    hidden: widths of the network.
    paced: whether workers sleep to their speeds.
  """

  speeds: tuple[float, ...] = config.SPEEDS["8x"]
  ratio: float = 1.0
  variant: str = "h_ps"
  rounds: int = 16
  total: int = 256
  hidden: tuple[int, ...] = (256, 256)
  paced: bool = True

  @property
  def names(self) -> tuple[str, ...]:
    """The workers' names."""
    return tuple(f"worker{i}" for i in range(len(self.speeds)))

  @property
  def round_s(self) -> float:
    """Seconds of a round by all workers that never wait."""
    return self.total / (MEAN_RATE * len(self.speeds))

  def costs(self, latency_s: float = 0.0) -> cluster.Profile:
    """The model's costs on a machine of the mean speed."""
    del latency_s
    size = float(message_bytes(self.hidden))
    return cluster.Profile(
      seconds_per_sample=1.0 / MEAN_RATE, pull_bytes=size, push_bytes=size
    )

  def machines(self, latency_s: float = 0.0) -> cluster.Cluster:
    """Workers on a link of their own each; the server's is no bottleneck."""
    mean = sum(self.speeds) / len(self.speeds)
    size = message_bytes(self.hidden)
    link = cluster.Link(8 * 2 * size / (self.ratio * self.round_s), latency_s)
    return cluster.workers(
      [speed / mean for speed in self.speeds],
      link=link,
      server_link=cluster.Link(1e15),
    )

  def protocol(self) -> server.Protocol:
    """The protocol, with the network's own plans of bits."""
    variant = VARIANTS[self.variant]
    plans = None
    if variant.parts is not None and "bits" in variant.parts:
      plans = bit_plans(self.hidden)
    return config.build(variant, self.total, len(self.speeds), plans)


@functools.cache
def network(hidden: tuple[int, ...]) -> tuple[Any, Any, Any]:
  """The data, the model and its loss."""
  train = data.load("digits")
  model = models.build(
    "mlp", input_shape=train.input_shape, num_classes=train.num_classes,
    hidden_sizes=hidden,
  )  # fmt: skip
  loss = training.classification_loss(model.apply, normalize=train.normalize)
  return train, model, loss


@functools.cache
def message_bytes(hidden: tuple[int, ...]) -> int:
  """Bytes of an exact message's payload."""
  _, model, _ = network(hidden)
  return server.message_plans().push[0].num_bytes(model.params)


@functools.cache
def bit_plans(hidden: tuple[int, ...]) -> server.BitPlans:
  """The plans that a first gradient allows."""
  train, model, loss = network(hidden)
  batch = data.SampleStream(train, 1, seed=0).batch(0, 0, 64)
  gradient = jax.jit(training.make_gradient(loss))(
    model.params, model.state, batch, jax.random.key(0)
  )
  return server.fit_bit_plans(gradient.grads)


@functools.cache
def optimizer() -> optax.GradientTransformation:
  return optax.sgd(LEARNING_RATE, momentum=0.9, nesterov=True)


def plans_of(setup: Setup) -> Any:
  return server.message_plans(plans=getattr(setup.protocol(), "plans", None))


def server_learner(setup: Setup, seed: int = 0) -> server.ServerLearner:
  """The server's side, at its beginning."""
  _, model, _ = network(setup.hidden)
  if setup.variant == "decoupled_diloco":
    return server.FragmentSyncer(
      model.params, workers=setup.names, fragments=setup.protocol().fragments,
      push_codec=FOUR_BITS,
    )  # fmt: skip
  return server.GradientServer(
    optimizer(), model.params, plans_of(setup), workers=setup.names, seed=seed
  )


def worker_learner(setup: Setup, name: str) -> server.WorkerLearner:
  """A worker's side, at its beginning."""
  train, model, loss = network(setup.hidden)
  samples = data.SampleStream(train, len(setup.names), seed=0)
  common: dict[str, Any] = {
    "number": setup.names.index(name),
    "num_workers": len(setup.names),
    "sizes": sizes(setup),
  }
  if setup.variant == "decoupled_diloco":
    return server.FragmentRunner(
      loss, optimizer(), model.params, samples,
      fragments=setup.protocol().fragments, push_codec=FOUR_BITS, **common,
    )  # fmt: skip
  return server.GradientWorker(
    loss, model.params, samples, plans_of(setup), **common
  )


def make_server(
  setup: Setup, protocol: Any, plan: server.LivePlan
) -> server.LiveServer:
  """Runs at the server."""
  return server.LiveServer(
    protocol or setup.protocol(), server_learner(setup), plan
  )


def sizes(setup: Setup) -> list[int]:
  """To which batches are padded."""
  if VARIANTS[setup.variant].parts is None:
    return [setup.total // len(setup.speeds)]
  return [setup.total * i // 8 for i in (1, 2, 3, 5, 8)]


def work(setup: Setup, name: str, channel: server.Channel) -> None:
  """Runs at a worker."""
  learner = worker_learner(setup, name)
  learner.prepare()
  pace = None
  if setup.paced:
    pace = server.Pace(setup.machines().node(name), setup.costs())
  depth = setup.protocol().depth
  server.WorkerLoop(channel, name, learner, depth=depth, pace=pace).run()


class Result(NamedTuple):
  """The end of a live run: its records, its figures and its state."""

  records: list[training.Record]
  summary: dict[str, Any]
  payload: Any


def run(
  engine: server.RayEngine,
  setup: Setup,
  total: float | None = None,
  unit: Any = "samples",
  *,
  record: str | None = None,
  protocol: Any = None,
  on_status: Callable[[dict[str, Any]], None] = lambda status: None,
  **fit: Any,
) -> Result:
  """Runs a set-up on Ray, by default to its rounds' samples."""
  plan = server.LivePlan(
    workers=setup.names,
    machines=setup.machines(),
    record=record,
    versions=server.versions(),
  )
  works = {x: functools.partial(work, setup, x) for x in setup.names}
  make = functools.partial(make_server, setup, protocol)
  _, model, _ = network(setup.hidden)
  session = server.LiveSession(
    engine, make, works, plan, model=(model.params, model.state),
    on_status=on_status,
  )  # fmt: skip
  total = setup.rounds * setup.total if total is None else total
  records = server.ServerRun(session).fit(total, unit, **fit)
  return Result(records, session.summary(), session.payload)


def simulated(setup: Setup, latency_s: float) -> dict[str, Any]:
  """The same on the virtual clock, with a latency for each message."""
  simulation = server.Simulation(
    setup.machines(latency_s), setup.protocol(), setup.costs()
  )
  simulation.run(samples=setup.rounds * setup.total)
  ages = {name: node.ages for name, node in simulation.nodes.items()}
  return simulation.summary() | {"ages": ages}


def empty_server(num_bytes: int, plan: server.LivePlan) -> server.LiveServer:
  return server.LiveServer(
    server.ASP(batches=server.FixedBatches(1)),
    server.EmptyServer(num_bytes),
    plan,
  )


def empty_work(name: str, channel: server.Channel) -> None:
  server.WorkerLoop(channel, name, server.EmptyWorker(), depth=1).run()


# Rows and engines, in the process of the command.


def write(command: str, setup: Any, seed: int = 0, **measured: Any) -> None:
  """Adds a row to a command's file."""
  row = training.make_row(
    dataclasses.asdict(setup) if dataclasses.is_dataclass(setup) else setup,
    seed,
    ray=_ray_version(),
    **measured,
  )
  training.append_rows(RESULTS / f"ray_{command}.jsonl", [row])


def _ray_version() -> str:
  import importlib.metadata

  return importlib.metadata.version("ray")


def engine_for(
  workers: int, spares: int = 0, gpus: float = 0.0
) -> server.RayEngine:
  cpus = 0.95 * (os.cpu_count() or 1) / (workers + 1 + spares)
  if gpus:
    cpus = min(1.0, cpus)
  return server.RayEngine(
    workers, cpus_per_worker=cpus, gpus_per_worker=gpus, spares=spares,
    cache=CACHE,
  )  # fmt: skip
