r"""Updates a second of a server whose link is the ceiling, and of its shards.

    sudo python scripts/slow_network.py --hosts 5 --rate 400mbit,16mbit \
      --timeout-s 1800 -- python experiments/thin_links/shards.py 0 1 2
    python experiments/thin_links/report.py

It runs on all hosts of the network.  Host 0 has a fast link, the workers and
what decides; each other host has a slow one, and a server with parameters: one
of them alone, then two and all four, once for each number of the command line.
A row that is there is not made again.
"""

import dataclasses
import functools
import os
import sys
from typing import Any

import jax.numpy as jnp
import nodes
import numpy as np
import optax
import run as thin

from jdist import server, training

ROWS = thin.FOLDER / "results" / "shards.jsonl"


@dataclasses.dataclass(frozen=True)
class Setting:
  """A run.

  Attributes:
    shards: servers with parameters; one is not divided.
    workers: number of workers, enough to keep all links busy.
    tensors: number of equal tensors, of float32.
    entries: entries of a tensor.
    skipped_s: seconds after the first update that are not counted. At first
      all workers receive at the same time and then send at the same time, so
      that each direction of a link rests half of the time, until they differ.
    seconds: seconds that are counted.
  """

  shards: int
  workers: int = 6
  tensors: int = 4
  entries: int = 250_000
  skipped_s: float = 60.0
  seconds: float = 120.0

  @property
  def names(self) -> tuple[str, ...]:
    """The workers' names."""
    return tuple(f"worker{i}" for i in range(self.workers))

  @property
  def params(self) -> Any:
    """The first parameters."""
    return [jnp.zeros(self.entries) for _ in range(self.tensors)]


class Batches:
  """Numbers of which the gradient of every entry is the mean."""

  shared = True

  def batch(
    self, worker: int, start: int, count: int, *, size: int | None = None
  ) -> Any:
    """Returns numbers that follow from their place."""
    del worker
    numbers = np.arange(start, start + (size or count), dtype=np.float32)
    return {"x": np.sin(numbers), "mask": np.ones(size or count, np.float32)}


def loss_fn(params: Any, model_state: Any, batch: Any, key: Any) -> Any:
  """Returns a loss of little arithmetic."""
  del key
  total = sum(jnp.sum(leaf) for leaf in params)
  return jnp.mean(batch["x"]) * total, (model_state, {})


PROTOCOL = server.ASP(batches=server.FixedBatches(8))
PLANS = server.message_plans()


def make_server(setting: Setting, plan: Any) -> Any:
  """Builds the server, or a shard."""
  learner = server.GradientServer(
    optax.sgd(0.01, momentum=0.9), setting.params, PLANS, workers=setting.names
  )
  return server.LiveServer(PROTOCOL, learner, plan)


def work(setting: Setting, name: str, channel: Any) -> None:
  """Works until the server sends it home."""
  learner = server.GradientWorker(
    loss_fn, setting.params, Batches(), PLANS, sizes=[8],
    number=setting.names.index(name), num_workers=setting.workers,
  )  # fmt: skip
  learner.prepare()
  server.WorkerLoop(channel, name, learner, depth=PROTOCOL.depth).run()


class Placed(server.RayEngine):
  """Starts the servers with parameters on the hosts with a slow link."""

  # Shards of the run: a single server has parameters, a coordinator has none.
  num = 1

  def _server_actor(self, name: str) -> Any:
    decides = self.num > 1 and name.endswith("server")
    place = {"near": 0.01} if decides else {"far": 1}
    return super()._server_actor(name, resources=place)

  def _worker_actor(self) -> Any:
    return super()._worker_actor(resources={"near": 0.01})


class Rate:
  """The updates a second between two of the server's states."""

  def __init__(self, setting: Setting):
    self._setting, self._began_s, self.counts = setting, 0.0, []

  def see(self, status: dict[str, Any]) -> None:
    """Notes when the server had made how many updates."""
    now_s = status["now_s"]
    if status["updates"] and not self._began_s:
      self._began_s = now_s
    if self._began_s and now_s > self._began_s + self._setting.skipped_s:
      self.counts.append((now_s, status["updates"]))


def measure(setting: Setting, seed: int, engine: Placed) -> dict[str, Any]:
  """Trains, and returns the row; `seed` is the number of the repetition."""
  rate, engine.num = Rate(setting), setting.shards
  # A run of seconds, which begin when all workers are there.
  whole_s = setting.skipped_s + setting.seconds + 20.0
  session = server.LiveSession(
    engine, functools.partial(make_server, setting),
    {x: functools.partial(work, setting, x) for x in setting.names},
    server.LivePlan(workers=setting.names, shards=setting.shards),
    on_status=rate.see, startup_s=600.0,
  )  # fmt: skip
  server.ServerRun(session).fit(whole_s, "seconds")
  summary = session.summary()
  (first_s, first), *_, (last_s, last) = [
    x for x in rate.counts if x[0] < rate.counts[0][0] + setting.seconds
  ]
  config = dataclasses.asdict(setting) | {
    "bits_per_s": float(os.environ["JDIST_BITS_PER_S"])
  }
  return training.make_row(
    config, seed, updates_per_s=(last - first) / (last_s - first_s),
    counted_s=last_s - first_s, updates=last - first,
    pushed_bytes=summary["pushed_bytes"], pulled_bytes=summary["pulled_bytes"],
    staleness=summary["staleness"]["mean_over_updates"],
    discarded=summary["discarded"],
  )  # fmt: skip


def main(seeds: list[str]) -> None:
  """Runs on this host."""
  if "JDIST_COORDINATOR" not in os.environ:
    raise SystemExit("Start it by scripts/slow_network.py.")
  known = training.read_rows(ROWS) if ROWS.exists() else []
  left = {(int(x), shards) for x in seeds or "0" for shards in (1, 2, 4)} - {
    (x["seed"], x["config"]["shards"])
    for x in known
    if x["config"]["seconds"] == Setting.seconds
  }
  folder = nodes.shared_folder()
  address = nodes.start(
    folder, Setting(1).workers + 1, far=int(os.environ["JDIST_PROCESSES"]) - 1,
    resources=("near", "far"),
  )  # fmt: skip
  if address is not None:
    engine = Placed(Setting(1).workers, address=address)
    try:
      for seed, shards in sorted(left):
        row = measure(Setting(shards), seed, engine)
        training.append_rows(ROWS, [row])
        print(f"{shards} servers: {row['updates_per_s']:.3f} updates a second")
    finally:
      engine.stop()
  (folder / "end").touch()


if __name__ == "__main__":
  main(sys.argv[1:])
