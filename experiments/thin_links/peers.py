r"""Seconds of a round by a server, and by peers that merge themselves.

    sudo python scripts/slow_network.py --hosts 5 --rate 16mbit \
      --timeout-s 1800 -- python experiments/thin_links/peers.py
    python experiments/thin_links/report.py

It runs on all hosts of the network, with a link of the same rate each.  Host 0
has the server, and each other host a worker.  DiLoCo takes four steps of little
arithmetic a round, so that messages take nearly all of its time.  A row that is
there is not made again.
"""

import dataclasses
import functools
import hashlib
import os
import pathlib
from typing import Any

import jax.numpy as jnp
import nodes
import numpy as np
import optax
import run as thin

from jdist import codecs, elastic, methods, reducers, server, training

ROWS = thin.FOLDER / "results" / "peers.jsonl"


@dataclasses.dataclass(frozen=True)
class Setting:
  """A run.

  Attributes:
    peers: whether workers merge each other's messages.
    bits: bits of a parameter in a worker's message; 32 are exact.
    rounds: rounds, of which the first is not counted.
    tensors: number of equal tensors, of float32.
    entries: entries of a tensor.
    workers: number of workers, one on each host but the server's.
  """

  peers: bool
  bits: int
  rounds: int = 12
  tensors: int = 4
  entries: int = 250_000
  workers: int = 4

  @property
  def params(self) -> Any:
    """The first parameters."""
    return [np.zeros(self.entries, np.float32) for _ in range(self.tensors)]

  @property
  def method(self) -> elastic.Rounds:
    """The method, as every process makes it."""
    compression = None
    if self.bits < 32:
      compression = reducers.Compression(
        codecs.Quantize(self.bits), reducers.ErrorFeedback()
      )
    method = methods.diloco(
      optax.sgd(0.01), 4, axis=None, compression=compression
    )
    names = tuple(f"worker{i}" for i in range(self.workers))
    return elastic.Rounds(
      method, self.params, workers=names,
      samples=8, quorum=1.0, peers=self.peers,
    )  # fmt: skip


class Batches:
  """Numbers of each worker's own."""

  shared = False

  def batch(
    self, worker: int, start: int, count: int, *, size: int | None = None
  ) -> Any:
    """Returns numbers that follow from the worker and their place."""
    numbers = 1000 * worker + np.arange(start, start + (size or count))
    return {"x": np.sin(np.float32(numbers))}


def loss_fn(params: Any, model_state: Any, batch: Any, key: Any) -> Any:
  """Returns a loss of little arithmetic, with a gradient for each entry."""
  del key
  aims = jnp.linspace(-1.0, 1.0, params[0].size)
  total = sum(jnp.mean((x - batch["x"].mean() * aims) ** 2) for x in params)
  return total * params[0].size, (model_state, {})


def counted() -> tuple[int, int]:
  """Returns the bytes that this host's interface has received and sent."""
  found = [0, 0]
  for line in pathlib.Path("/proc/net/dev").read_text().splitlines()[2:]:
    name, _, numbers = line.partition(":")
    if name.strip() != "lo":
      found[0] += int(numbers.split()[0])
      found[1] += int(numbers.split()[8])
  return found[0], found[1]


def work(setting: Setting, channel: Any, name: str) -> None:
  """Works until the server ends the run."""
  setting.method.work(channel, name, loss_fn, Batches())


class Placed(server.RayEngine):
  """Starts the server on host 0, and a worker on each other host."""

  def _server_actor(self, name: str) -> Any:
    return super()._server_actor(name, resources={"near": 0.01})

  def _worker_actor(self) -> Any:
    return super()._worker_actor(resources={"far": 1})


def measure(setting: Setting, engine: Placed) -> dict[str, Any]:
  """Trains, and returns the row."""
  session = setting.method.session(
    engine, functools.partial(work, setting), shared=False,
    model=(setting.params, {}), startup_s=600.0,
  )  # fmt: skip
  before, final = counted(), []
  server.ServerRun(session).fit(
    setting.rounds, evaluate=lambda model: final.append(model.params) or {}
  )
  after, summary = counted(), session.summary()
  ends_s = [at_s for at_s, _, _ in summary["merges"]]
  digest = hashlib.sha256()
  for leaf in final[-1]:
    digest.update(np.asarray(leaf).tobytes())
  config = dataclasses.asdict(setting) | {
    "bits_per_s": float(os.environ["JDIST_BITS_PER_S"])
  }
  return training.make_row(
    config, 0, rounds_s=np.diff(ends_s).tolist(),
    merges=[x[1:] for x in summary["merges"]],
    pushed_bytes=summary["pushed_bytes"], pulled_bytes=summary["pulled_bytes"],
    server_received=after[0] - before[0], server_sent=after[1] - before[1],
    parameters=digest.hexdigest()[:16],
  )  # fmt: skip


def main() -> None:
  """Runs on this host."""
  if "JDIST_COORDINATOR" not in os.environ:
    raise SystemExit("Start it by scripts/slow_network.py.")
  known = training.read_rows(ROWS) if ROWS.exists() else []
  there = {(x["config"]["peers"], x["config"]["bits"]) for x in known}
  folder = nodes.shared_folder()
  workers = Setting(False, 4).workers
  address = nodes.start(folder, 1, far=workers, resources=("near", "far"))
  if address is not None:
    engine = Placed(workers, address=address)
    try:
      for bits in (4, 32):
        for peers in (False, True):
          if (peers, bits) in there:
            continue
          row = measure(Setting(peers, bits), engine)
          training.append_rows(ROWS, [row])
          print(f"peers {peers}, {bits} bits: {row['rounds_s']} s")
    finally:
      engine.stop()
  (folder / "end").touch()


if __name__ == "__main__":
  main()
