"""Unequal workers in one elastic run: one is sharded, one is slow.

    python experiments/storm/mixed.py            # five seeds of each setting
    python experiments/storm/mixed.py equal 0 3  # of one setting, these seeds
    python experiments/storm/report.py           # the page's figures

Each worker is a process of Ray with a JAX runtime and two devices of its own.
A row that is there is not made again.
"""

import dataclasses
import functools
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np
import run as storm_run

from jdist import data, elastic, server, training

ROWS = pathlib.Path(__file__).resolve().parent / "results" / "mixed.jsonl"
# Local steps are padded to these, so that each is compiled once.
_SIZES = (4, 8, 16, 32, 64)


@dataclasses.dataclass(frozen=True)
class Setting:
  """A run.

  Attributes:
    sharded: the worker whose parameters are divided among its two devices.
    slow: the worker with a quarter of the others' speed.
    samples: of a local step, `"fixed"` or by `"speed"`, with the same total.
    workers: their number.
    merges: length of the run.
    interval: local steps of a round, H.
    rate: the first inner learning rate, which falls to a hundredth.
    decay: weight decay.
    sample_s: seconds for each sample of a step, by sleeping.
  """

  sharded: str | None = None
  slow: str | None = None
  samples: str = "fixed"
  workers: int = 4
  merges: int = 120
  interval: int = 10
  rate: float = 0.02
  decay: float = 0.01
  sample_s: float = 0.1 / 16

  @property
  def names(self) -> tuple[str, ...]:
    """The workers' names."""
    return tuple(f"worker{i}" for i in range(self.workers))


SETTINGS = {
  "equal": Setting(),
  "mixed": Setting(sharded="worker0", slow="worker3"),
  "mixed, by speed": Setting(
    sharded="worker0", slow="worker3", samples="speed"
  ),
}
SEEDS = range(5)


def rounds_of(setting: Setting, seed: int) -> elastic.Rounds:
  """Returns the storm's method as workers and the server run it."""
  samples: Any = 16
  if setting.samples == "speed":
    samples = server.SpeedBatches(16 * setting.workers, maximum=max(_SIZES))
  return elastic.Rounds(
    storm_run.method_of(setting), storm_run.network(seed).params,
    workers=setting.names, samples=samples, seed=seed,
  )  # fmt: skip


class _Samples:
  """Each worker's own samples, in the time that its machine takes."""

  shared = False

  def __init__(self, stream: Any, sample_s: float):
    self._stream, self._sample_s, self._until_s = stream, sample_s, 0.0

  def batch(self, worker: int, start: int, count: int, **size: Any) -> Any:
    time.sleep(max(self._until_s - time.monotonic(), 0.0))
    self._until_s = time.monotonic() + count * self._sample_s
    return self._stream.batch(worker, start, count, **size)


def work(
  setting: Setting,
  seed: int,
  dataset: data.Dataset,
  channel: server.Channel,
  name: str,
) -> None:
  """Trains as a worker, in a process of its own."""
  model = storm_run.network(seed)
  params = model.params
  if name == setting.sharded:
    params = sharded(params)
  stream = data.SampleStream(dataset, setting.workers, seed=seed, owned=True)
  sample_s = setting.sample_s * (4 if name == setting.slow else 1)
  rounds_of(setting, seed).work(
    channel, name, storm_run.loss_of(model, dataset),
    _Samples(stream, sample_s), params=params, sizes=_SIZES,
  )  # fmt: skip


def sharded(params: Any) -> Any:
  """Divides each matrix by rows among two devices; vectors are on both."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("fsdp",))

  def placed(x: jax.Array) -> jax.Array:
    axes = ("fsdp",) if x.ndim > 1 else ()
    spec = jax.sharding.PartitionSpec(*axes)
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

  found = jax.tree.map(placed, params)
  for x in jax.tree.leaves(found):
    assert x.ndim < 2 or x.addressable_shards[0].data.size * 2 == x.size
  return found


def train(setting: Setting, seed: int) -> dict[str, Any]:
  """Runs to the last merge, and returns the row."""
  two = "--xla_force_host_platform_device_count=2"
  engine = server.RayEngine(
    setting.workers, cpus_per_worker=0.1,
    environment={"JAX_PLATFORMS": "cpu", "XLA_FLAGS": two},
  )  # fmt: skip
  model, test = storm_run.network(seed), data.load("digits", "test")
  dataset = data.load("digits")
  batch = {"image": test.images, "label": test.labels}
  loss_fn = storm_run.loss_of(model, dataset)

  @jax.jit
  def evaluate(params: Any) -> dict[str, jax.Array]:
    loss, (_, metrics) = loss_fn(params, model.state, batch, None)
    return {"loss": loss} | metrics

  session = rounds_of(setting, seed).session(
    engine, functools.partial(work, setting, seed, dataset), shared=False,
    model=(model.params, {}),
  )  # fmt: skip
  try:
    records = server.ServerRun(session).fit(
      setting.merges, every=setting.merges // 4,
      evaluate=lambda found: {
        x: float(y) for x, y in evaluate(found.params).items()
      },
    )  # fmt: skip
    summary = session.summary()
  finally:
    engine.stop()
  merged = [x[1] for x in summary["merges"]]
  return training.make_row(
    dataclasses.asdict(setting), seed, metrics=records[-1].metrics,
    final_loss=records[-1].metrics["loss"],
    wall_s=summary["wall_s"], share_of_all=float(np.mean(merged))
    / setting.workers,
    samples={x: y["samples"] for x, y in summary["nodes"].items()},
    events=[x["kind"] for x in summary["events"]],
  )  # fmt: skip


def main(words: list[str]) -> None:
  """Runs the settings, as far as their rows are not there."""
  for name in words[:1] or SETTINGS:
    seeds = map(int, words[1:] or SEEDS)
    storm_run.make(SETTINGS[name], seeds, ROWS, train)


if __name__ == "__main__":
  main(sys.argv[1:])
