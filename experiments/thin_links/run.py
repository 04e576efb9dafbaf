r"""An elastic run, and synchronous SGD, of two hosts over a thin link.

    sudo python scripts/slow_network.py --hosts 2 --rate 10mbit \
      --timeout-s 900 -- python experiments/thin_links/run.py late
    ... python experiments/thin_links/run.py ssgd      # one more process a host
    ... python experiments/thin_links/run.py waiting   # without the overlap
    ... python experiments/thin_links/run.py unpaced   # payloads in one piece
    python experiments/thin_links/report.py

It runs on both hosts of the network.  Each has a Ray node of its own: host 0
has the server and a worker, host 1 the other worker.  A row that is there is
not made again; an option after the name is the seed.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import nodes
import numpy as np
import optax

from jdist import (
  codecs,
  collectives,
  data,
  elastic,
  methods,
  models,
  reducers,
  server,
  training,
  transforms,
)
from jdist.server.runtime.ray_actors import _ray_actors

FOLDER = pathlib.Path(__file__).resolve().parent
ROWS = FOLDER / "results" / "rows.jsonl"
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
  """A run of two hosts.

  Attributes:
    method: `"ssgd"`; or Local SGD in four bits with feedback, whose merges are
      one round late (`"late"`), or awaited (`"waiting"`).
    steps: local steps in all.
    interval: local steps of a round, H.
    hidden: sizes of the network's layers.
    batch: images of a worker's step.
    step_s: seconds to which a step is lengthened by sleeping: two workers,
      their server and Ray share two cores.
    alone: steps without any message, of which their time is measured.
    timeout_s: seconds after which a worker without a push counts as lost.
    heartbeat_s: seconds between two calls of each worker.
    patience_s: seconds after which a call without an answer counts as lost.
    paced: whether payloads are sent in pieces.
  """

  method: str
  steps: int
  interval: int = 128
  hidden: tuple[int, ...] = (1000, 1000)
  batch: int = 16
  step_s: float = 0.04
  alone: int = 128
  timeout_s: float = 20.0
  heartbeat_s: float = 1.0
  patience_s: float = 5.0
  paced: bool = True


PRESETS = {
  "ssgd": Run("ssgd", steps=16, interval=1),
  "late": Run("late", steps=128 * 12),
  "waiting": Run("waiting", steps=128 * 6),
  "unpaced": Run("late", steps=128 * 12, paced=False),
  "short": Run("late", steps=128 * 4),
}


class Paced:
  """Lengthens steps to `step_s`, and records when each one ended."""

  def __init__(self, step_s: float):
    self._step_s, self._until_s = step_s, 0.0
    self.ends_s: list[float] = []

  def wait(self) -> None:
    """Waits for the end of a step."""
    time.sleep(max(self._until_s - time.monotonic(), 0.0))
    now_s = time.monotonic()
    self.ends_s.append(now_s)
    self._until_s = now_s + self._step_s


def seconds_a_step(ends_s: list[float], skip: int) -> float:
  """Returns the mean time of a step after the first ones."""
  return (ends_s[-1] - ends_s[skip]) / (len(ends_s) - 1 - skip)


def rounds_of(ends_s: list[float], interval: int) -> list[list[float]]:
  """Returns for each round after the first its steps' mean time, and the wait.

  The wait is that before its first step, which is left out of the mean.
  """
  found = []
  for i in range(interval, len(ends_s) - interval + 1, interval):
    within_s = (ends_s[i + interval - 1] - ends_s[i]) / (interval - 1)
    found.append([within_s, max(ends_s[i] - ends_s[i - 1] - within_s, 0.0)])
  return found


class Problem:
  """The network, its loss and a worker's batches."""

  def __init__(self, run: Run, seed: int, dataset: data.Dataset):
    self.model = models.build(
      "mlp", input_shape=(8, 8, 1), num_classes=10, hidden_sizes=run.hidden,
      seed=seed,
    )  # fmt: skip
    self.loss_fn = training.classification_loss(
      self.model.apply, normalize=dataset.normalize
    )
    self.inner = optax.sgd(0.05, momentum=0.9)
    self._stream = data.SampleStream(dataset, 2, seed=seed, owned=True)
    self._batch = run.batch

  def batch(self, worker: int, step: int) -> Any:
    """Returns the batch of a worker's step."""
    return self._stream.batch(worker, step * self._batch, self._batch)

  def rounds(self, run: Run, seed: int) -> elastic.Rounds:
    """Returns Local SGD in four bits with feedback."""
    method = methods.local_sgd(
      self.inner, run.interval, axis=None,
      compression=reducers.Compression(
        codecs.Quantize(4), reducers.ErrorFeedback()
      ),
      overlap=transforms.Delayed() if run.method == "late" else None,
    )  # fmt: skip
    return elastic.Rounds(
      method, self.model.params, workers=("worker0", "worker1"),
      samples=run.batch, quorum=1.0, timeout_s=run.timeout_s, seed=seed,
    )  # fmt: skip

  def step(self) -> Callable[..., Any]:
    """Returns a worker's local step."""

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
      def loss_fn(params: Any) -> Any:
        return self.loss_fn(params, self.model.state, batch, None)[0]

      loss, grads = jax.value_and_grad(loss_fn)(params)
      updates, opt_state = self.inner.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state, loss

    return step


def work(
  run: Run, seed: int, dataset: data.Dataset, folder: pathlib.Path,
  channel: Any, name: str,
) -> None:  # fmt: skip
  """Trains as a worker: first alone for a while, then in the run."""
  if not run.paced:
    # Both directions: the worker decides about the server's pieces, too.
    channel._size = _ray_actors._MIN_PIECE_BYTES = 2**40
  problem = Problem(run, seed, dataset)
  step, number = problem.step(), int(name[-1])
  params = problem.model.params
  opt_state = problem.inner.init(params)
  paces = [Paced(run.step_s), Paced(run.step_s)]
  for i in range(run.alone + 2):  # The first one compiles.
    params, opt_state, loss = step(params, opt_state, problem.batch(number, i))
    jax.block_until_ready(loss)
    paces[0].wait()
  loop = problem.rounds(run, seed).loop(channel, name)
  for i, state in enumerate(loop):
    batch = problem.batch(number, i)
    found = step(state.params, state.opt_state, batch)
    jax.block_until_ready(found[-1])
    paces[1].wait()
    loop.advance(*found)
  host = int(os.environ["JDIST_PROCESS"])  # Of this node of Ray.
  found = [host, paces[0].ends_s[2:], paces[1].ends_s]
  (folder / f"{name}.part").write_text(json.dumps(found))
  (folder / f"{name}.part").rename(folder / f"{name}.json")


class Heartbeats(threading.Thread):
  """Calls the workers now and then, and records when each answered."""

  def __init__(self, engine: Any, run: Run):
    super().__init__(daemon=True)
    self._engine, self._run, self._over = engine, run, threading.Event()
    self.answers_s: dict[str, list[float]] = {"worker0": [], "worker1": []}

  def run(self) -> None:
    """Calls until it is stopped."""
    while not self._over.wait(self._run.heartbeat_s):
      for name, found in self.answers_s.items():
        began_s = time.monotonic()
        # One without an answer took 30 s, and stands with that time.
        with contextlib.suppress(ConnectionError, KeyError):  # Or sent home.
          self._engine.process_of(name)
        found.append(time.monotonic() - began_s)

  def begin(self, status: Any) -> None:
    """Begins the calls, once all workers run."""
    del status
    if self.ident is None:
      self.start()

  def end(self) -> None:
    """Ends the calls."""
    self._over.set()
    self.join()


def elastic_run(run: Run, seed: int, folder: pathlib.Path) -> Row | None:
  """Trains by Local SGD; host 0 returns the row."""
  # The server and a worker are on this host, and the other worker on host 1.
  address = nodes.start(folder, cpus=2)
  if address is None:
    return None
  dataset, test = data.load("digits"), data.load("digits", "test")
  problem = Problem(run, seed, dataset)
  engine = server.RayEngine(2, address=address)
  heartbeats = Heartbeats(engine, run)
  try:
    session = problem.rounds(run, seed).session(
      engine, functools.partial(work, run, seed, dataset, folder),
      shared=False, model=(problem.model.params, {}),
      on_status=heartbeats.begin,
    )  # fmt: skip
    evaluate = jax.jit(
      lambda p, b: problem.loss_fn(p, problem.model.state, b, None)[0]
    )
    batch = {"image": test.images, "label": test.labels}
    records = server.ServerRun(session).fit(
      run.steps // run.interval,
      evaluate=lambda found: {"loss": float(evaluate(found.params, batch))},
    )
    heartbeats.end()
    summary = session.summary()
    for name in ("worker0", "worker1"):
      nodes.wait_for(folder / f"{name}.json")
    sockets = nodes.connections()
    (folder / "over").touch()
    nodes.wait_for(folder / "sockets.json")
    missed = nodes.missed_checks()
  finally:
    engine.stop()
  times = [
    json.loads((folder / f"worker{i}.json").read_text()) for i in range(2)
  ]
  return training.make_row(
    config_of(run), seed, final_loss=records[-1].metrics["loss"],
    hosts=[x for x, _, _ in times],
    alone_s=[seconds_a_step(x, 0) for _, x, _ in times],
    # The first round has nothing to wait for.
    step_s=[seconds_a_step(x, run.interval) for _, _, x in times],
    rounds_s=[rounds_of(x, run.interval) for _, _, x in times],
    rounds=summary["updates"], merges=summary["merges"],
    events=[x["kind"] for x in summary["events"]],
    changes=summary["changes"], pushed_bytes=summary["pushed_bytes"],
    pulled_bytes=summary["pulled_bytes"], wall_s=summary["wall_s"],
    heartbeats_s=heartbeats.answers_s, missed_checks=missed,
    sockets=[sockets, json.loads((folder / "sockets.json").read_text())],
  )  # fmt: skip


def ssgd_run(run: Run, seed: int, folder: pathlib.Path) -> Row | None:
  """Trains by synchronous SGD; host 0 returns the row."""
  del folder
  number = int(os.environ["JDIST_PROCESS"])
  collectives.start_processes(
    os.environ["JDIST_COORDINATOR"], 2, number, cpu_devices_per_process=1
  )
  import jdist

  workers = jdist.workers(2)
  problem = Problem(run, seed, data.load("digits"))
  optimizer = methods.ssgd(problem.inner, axis=workers.axis)
  state = training.init_state(
    workers, optimizer, problem.model.params, problem.model.state
  )
  program = workers.jit(
    training.make_step(problem.loss_fn, optimizer, axis=workers.axis)
  )
  step, paces = problem.step(), [Paced(run.step_s), Paced(run.step_s)]
  params = problem.model.params
  opt_state = problem.inner.init(params)
  for i in range(run.alone + 2):
    params, opt_state, loss = step(params, opt_state, problem.batch(number, i))
    jax.block_until_ready(loss)
    paces[0].wait()
  for i in range(run.steps + 1):
    batch = workers.place(
      jax.tree.map(lambda x: np.stack([x]), problem.batch(number, i))
    )
    state, _ = program(state, batch)
    jax.block_until_ready(state)
    paces[1].wait()
  if number:
    return None
  return training.make_row(
    config_of(run), seed, alone_s=[seconds_a_step(paces[0].ends_s[2:], 0)],
    step_s=[seconds_a_step(paces[1].ends_s, 0)],
  )  # fmt: skip


def config_of(run: Run) -> Row:
  """Returns the settings as a row has them."""
  rate = float(os.environ["JDIST_BITS_PER_S"])
  found: Row = json.loads(json.dumps(dataclasses.asdict(run)))
  if run.paced:
    del found["paced"]  # As in older rows.
  queue = os.environ.get("JDIST_QUEUE_MS")
  return (
    found | {"bits_per_s": rate} | ({"queue_ms": float(queue)} if queue else {})
  )


def main(words: list[str]) -> None:
  """Runs a preset on this host."""
  name, *seeds = words or [""]
  if name not in PRESETS:
    raise SystemExit(f"The preset must be one of {', '.join(PRESETS)}.")
  if "JDIST_COORDINATOR" not in os.environ:
    raise SystemExit("Start it by scripts/slow_network.py.")
  run, seed = PRESETS[name], int(seeds[0]) if seeds else 0
  known = training.read_rows(ROWS) if ROWS.exists() else []
  config = config_of(run)
  if any((x["config"], x["seed"]) == (config, seed) for x in known):
    return
  folder = nodes.shared_folder()
  row = (ssgd_run if run.method == "ssgd" else elastic_run)(run, seed, folder)
  if row is None:
    return
  training.append_rows(ROWS, [row])
  alone_s, step_s = (statistics.mean(row[x]) for x in ("alone_s", "step_s"))
  print(
    f"{name}: {1e3 * step_s:.1f} ms a step, {1e3 * alone_s:.1f} without "
    f"messages: {100 * alone_s / step_s:.1f} %, r {step_s / alone_s - 1:.2f}"
  )
  if "heartbeats_s" in row:
    found = {x: max(y) for x, y in row["heartbeats_s"].items()}
    print(
      f"heartbeats at most {found} s; {row['missed_checks']} checks missed; "
      f"{row['events']}"
    )
  (folder / "end").touch()


if __name__ == "__main__":
  main(sys.argv[1:])
