"""H-PS and others on real Ray workers of this machine, in seconds.

    python experiments/h_ps/workers.py gain      # H-PS over each baseline
    python experiments/h_ps/workers.py computes  # the same; nobody sleeps
    python experiments/h_ps/workers.py gpus      # the same, on four GPUs
    python experiments/h_ps/workers.py profile   # constants for the clock
    python experiments/h_ps/workers.py clock     # the clock beside real runs
    python experiments/h_ps/workers.py scale     # what Ray costs
    python experiments/h_ps/workers.py kills     # SIGKILL of workers, 30 times
    python experiments/h_ps/workers.py hang      # SIGSTOP under a barrier
    python experiments/h_ps/workers.py server D  # SIGKILL between checkpoints
    python experiments/h_ps/workers.py replay D  # recorded in D, and again
    python experiments/h_ps/workers.py undisturbed N  # kills' N samples
    python experiments/h_ps/workers_report.py    # tables and the picture

A network on digits; real gradients, real messages.  But for `computes` each
worker sleeps after a task until the time of its modelled speed has gone by, and
messages wait until the modelled links have carried them.  Every row is written
when its run has ended.
"""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import config
import jax
import numpy as np
import setups
import workers_report

from jdist import collectives, data, models, server, training

FOLDER = pathlib.Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
CACHE = str(pathlib.Path.home() / ".cache" / "jdist" / "h_ps")


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


# (a) H-PS over each baseline, in seconds.

GAIN = (
  setups.Setup(config.SPEEDS["8x"], 1.0),
  setups.Setup(config.SPEEDS["12/12/8/16"], 2.0),
)
COMPUTES = setups.Setup(
  (1.0, 1.0), 1.0, rounds=8, total=512, hidden=(768, 768), paced=False
)
# 34 million parameters; each worker has a GPU, and sleeps to its speed.
GPUS = setups.Setup(total=2048, hidden=(4096, 4096, 4096))
PROTOCOLS = ("h_ps", "bsp", "asp", "ssp")


def gain(
  name: str, chosen: Sequence[setups.Setup], repeats: int, gpus: float = 0.0
) -> None:
  """Interleaves protocols; goes on where it was stopped."""
  most = max(len(x.speeds) for x in chosen)
  engine = engine_for(most, gpus=gpus)
  done = [
    (json.dumps(x["config"]), x["repeat"]) for x in workers_report.rows_of(name)
  ]
  try:
    for repeat in range(repeats):
      for setup in chosen:
        for protocol in PROTOCOLS:
          each = dataclasses.replace(setup, variant=protocol)
          key = json.dumps(dataclasses.asdict(each))
          if (key, repeat) in done:
            continue
          found = setups.run(engine, each).summary
          write(name, each, repeat=repeat, **found)
          print(
            f"{repeat} {each.speeds} r={each.ratio:g} {protocol}: "
            f"{found['wall_s']:.2f} s, {found['updates']} updates, server busy "
            f"{100 * found['server_busy_s'] / found['wall_s']:.0f} %, over "
            f"{sum(found['over_s'].values()):.2f} s",
            flush=True,
          )
  finally:
    engine.stop()


# (b) The clock beside real runs.

SPEED = config.SPEEDS
CLOCK = {
  "2 alike, bsp": setups.Setup((1.0, 1.0), 0.5, "bsp", 24),
  "2x, asp": setups.Setup(SPEED["2x"], 0.5, "asp", 24),
  "4x, ssp": setups.Setup(SPEED["4x"], 1.0, "ssp", 10),
  "8x, bsp": setups.Setup(SPEED["8x"], 2.0, "bsp", 8),
  "8x, asp": setups.Setup(SPEED["8x"], 0.1, "asp", 24),
  "12/12/8/16, pipeline": setups.Setup(
    SPEED["12/12/8/16"], 1.0, "pipeline", 30
  ),
  "4x, h_ps": setups.Setup(SPEED["4x"], 2.0, "h_ps", 30),
  "6 workers, tasks": setups.Setup(
    (4.0, 4.0, 2.0, 2.0, 1.0, 1.0), 0.5, "tasks", 30
  ),
  # Chosen after the latency had been measured.
  "3 workers, bits (later)": setups.Setup((3.0, 2.0, 1.0), 1.5, "bits", 10),
}


def profile() -> None:
  """Measures what a message costs beside the links, with one worker alone."""
  engine = engine_for(1)
  try:
    for repeat in range(3):
      setup = setups.Setup((1.0,), 1.0, "asp", rounds=60, total=32)
      found = setups.run(engine, setup).summary
      link_s = setup.ratio * setup.round_s
      spent = found["wall_s"] / found["updates"]
      compute_s = found["nodes"]["worker0"]["compute_s"] / found["updates"]
      latency_s = (spent - compute_s - link_s) / 2
      write("profile", setup, repeat=repeat, latency_s=latency_s, **found)
      print(
        f"{1e3 * spent:.2f} ms an update, {1e3 * compute_s:.2f} computing, "
        f"{1e3 * latency_s:.2f} ms a message beside its link",
        flush=True,
      )
  finally:
    engine.stop()


def frozen_latency_s() -> float:
  return statistics.median(
    x["latency_s"] for x in workers_report.rows_of("profile")
  )


def clock(chosen: dict[str, setups.Setup], repeats: int = 3) -> None:
  """Runs each set-up on Ray, and writes the clock's time beside it."""
  latency_s = frozen_latency_s()
  done = [(x["name"], x["repeat"]) for x in workers_report.rows_of("clock")]
  engine = engine_for(max(len(x.speeds) for x in chosen.values()))
  try:
    for repeat in range(repeats):
      for name, setup in chosen.items():
        if (name, repeat) in done:
          continue
        wanted = setups.simulated(setup, latency_s)
        found = setups.run(engine, setup).summary
        write(
          "clock", setup, repeat=repeat, name=name, latency_s=latency_s,
          clock=wanted, **found,
        )  # fmt: skip
        ratio = (found["wall_s"] / found["updates"]) / (
          wanted["virtual_s"] / wanted["updates"]
        )
        print(
          f"{repeat} {name}: real over clock {ratio:.3f}, server busy "
          f"{100 * found['server_busy_s'] / found['wall_s']:.0f} %",
          flush=True,
        )
  finally:
    engine.stop()


# (d) What Ray costs.


def scale(seconds: float = 4.0) -> None:
  """Updates a second with empty gradients, and bytes a second."""
  names = tuple(f"worker{i}" for i in range(8))
  engine = engine_for(8)
  try:
    for num in (1, 2, 4, 8):
      for num_bytes in (1000, 10_000_000):
        found = server.LiveRun(
          engine,
          functools.partial(
            setups.empty_server, names[:num], num_bytes, seconds
          ),
          {x: functools.partial(setups.empty_work, x) for x in names[:num]},
        ).run()
        one = found.summary
        each_ms = 1e3 * one["wall_s"] / one["updates"]
        rate = (one["pushed_bytes"] + one["pulled_bytes"]) / one["wall_s"]
        write("scale", {"workers": num, "num_bytes": num_bytes}, **one)
        print(
          f"{num} workers, {num_bytes} bytes: {each_ms:.2f} ms an update, "
          f"{rate / 1e6:.0f} MB/s, server busy "
          f"{100 * one['server_busy_s'] / one['wall_s']:.0f} %",
          flush=True,
        )
  finally:
    engine.stop()


# (c) Faults.


class Faults:
  """A run whose processes are killed and stopped while it goes on."""

  def __init__(
    self, engine: server.RayEngine, setup: setups.Setup, **plan: Any
  ):
    self.engine, self.setup = engine, setup
    full = server.LivePlan(
      workers=setup.names, machines=setup.machines(), **plan
    )
    protocol = dataclasses.replace(setup.protocol(), timeout_s=3.0)
    self.live = server.LiveRun(
      engine,
      functools.partial(setups.make_server, setup, full, protocol),
      {x: functools.partial(setups.work, setup, x) for x in setup.names},
      can_resume=plan.get("checkpoints") is not None,
    )
    self.status: dict[str, Any] = {}
    self.done: list[dict[str, Any]] = []
    self._actions: list[
      tuple[Callable[[dict[str, Any]], bool], Callable[[], None]]
    ] = []
    self._began_s: float | None = None
    self._stopped: dict[str, int] = {}

  def at(self, seconds: float, action: Callable[[], None]) -> None:
    """Has something done so many seconds after the start."""

    def due(status: dict[str, Any]) -> bool:
      del status
      assert self._began_s is not None
      return time.monotonic() - self._began_s >= seconds

    self.when(due, action)

  def when(
    self, due: Callable[[dict[str, Any]], bool], action: Callable[[], None]
  ) -> None:
    """Has something done once, when a status is due, after those before it."""
    self._actions.append((due, action))

  def kill(self, name: str, how: int = signal.SIGKILL) -> None:
    """Sends a process a signal, and notes when."""
    # One that is stopped does not answer.
    process = (
      self._stopped.pop(name)
      if how == signal.SIGCONT
      else self.engine.process_of(name)
    )
    if how == signal.SIGSTOP:
      self._stopped[name] = process
    self.done.append(
      {
        "fault": signal.Signals(how).name, "worker": name,
        "at_s": time.monotonic(), "updates": self.status["updates"],
        "now_s": self.status["now_s"],
      }
    )  # fmt: skip
    os.kill(process, how)

  def run(self) -> server.LiveResult:
    """Runs to the plan's end."""

    def on_status(status: dict[str, Any]) -> None:
      self.status = status
      if self._began_s is None:
        self._began_s = time.monotonic()
      while self._actions and self._actions[0][0](status):
        self._actions.pop(0)[1]()

    return self.live.run(on_status=on_status)


def kills(times: int = 30, spares: int = 1) -> None:
  """SIGKILL of workers at random moments, 15 s apart at least."""
  setup = setups.Setup(SPEED["4x"], 1.0)
  generator = random.Random(0)
  engine = engine_for(len(setup.speeds), spares)
  moments, at = [], 5.0
  for _ in range(times):
    at += 15.0 + generator.random() * 1.0
    moments.append(at)
  try:
    faults = Faults(engine, setup, samples=None, seconds=at + 20.0)
    for moment in moments:
      name = generator.choice(setup.names)
      faults.at(moment, functools.partial(_killed, faults, name))
    result = faults.run()
  finally:
    engine.stop()
  write(
    "kills", setup, spares=spares, faults=faults.done, events=result.events,
    accuracy=accuracy(setup, result), **result.summary,
  )  # fmt: skip
  print(workers_report.faults())


def _killed(faults: Faults, name: str) -> None:
  faults.kill(name)
  last = faults.done[-1]
  print(f"{last['now_s']:.1f} s: killed {name}", flush=True)


def accuracy(setup: setups.Setup, result: server.LiveResult) -> float:
  """Test accuracy of what a run ended with."""
  _, model, _ = setups.network(setup.hidden)
  size = sum(x.nbytes for x in jax.tree.leaves(model.params))
  params = server.tree_of_bytes(result.payload[:size], model.params)
  return measure(model, params)


def measure(model: models.Model, params: Any) -> float:
  """Returns the accuracy of parameters on the test set."""
  test = data.load("digits", "test")
  evaluate = training.Evaluator(
    collectives.workers(1), model.apply,
    data.evaluation_batches(test, 1, len(test)), normalize=test.normalize,
  )  # fmt: skip
  return float(evaluate.measure(params, model.state)["accuracy"])


def undisturbed(samples: int, seeds: Sequence[int] = (0, 1, 2)) -> None:
  """Trains as `kills` without a kill, on the virtual clock; other orders."""
  setup = setups.Setup(SPEED["4x"], 1.0)
  train, model, loss = setups.network(setup.hidden)
  protocol = setup.protocol()
  for seed in seeds:
    machines = setup.machines()
    learner = server.GradientLearner(
      loss, setups.optimizer(), model.params,
      data.SampleStream(train, len(setup.speeds), seed=seed),
      workers=machines.names, seed=seed, sizes=setups.sizes(setup),
      plans=getattr(protocol, "plans", None),
    )  # fmt: skip
    run = server.Simulation(
      machines, protocol, setup.costs(), seed=seed, learner=learner
    )
    run.run(samples=samples)
    found = measure(model, learner.model.params)
    write("undisturbed", setup, seed, samples=samples, accuracy=found)
    print(f"seed {seed}: {100 * found:.2f} %", flush=True)


def hang() -> None:
  """SIGSTOP of a worker under a barrier, and SIGKILL of the server."""
  setup = setups.Setup(SPEED["2x"], 0.5, "bsp")
  engine = engine_for(len(setup.speeds))
  try:
    faults = Faults(engine, setup, seconds=25.0)
    seen: list[tuple[float, int, int]] = []
    faults.at(6.0, lambda: faults.kill("worker0", signal.SIGSTOP))
    faults.at(16.0, lambda: faults.kill("worker0", signal.SIGCONT))
    watch = threading.Thread(target=_watch, args=(faults, seen), daemon=True)
    watch.start()
    result = faults.run()
    write(
      "hang", setup, faults=faults.done, events=result.events, seen=seen,
      **result.summary,
    )  # fmt: skip
    stop = faults.done[0]["at_s"]
    gaps = _gaps(seen)
    print("SIGSTOP: longest wait for an update", max(gaps), "s")
    print("members", [(round(t - stop, 1), m) for t, _, m in seen[::10]])
  finally:
    engine.stop()


def _watch(faults: Faults, seen: list[Any]) -> None:
  while True:
    status = faults.status
    if status:
      seen.append((time.monotonic(), status["updates"], status["members"]))
      if status["finished"]:
        return
    time.sleep(0.05)


def _gaps(seen: list[tuple[float, int, int]]) -> list[float]:
  """Seconds between two looks at which the updates had gone up."""
  moved = [seen[0][0]]
  last = seen[0][1]
  for at, updates, _ in seen:
    if updates != last:
      moved.append(at)
      last = updates
  return [b - a for a, b in itertools.pairwise(moved)]


def server_death(folder: str) -> None:
  """SIGKILL of the server just before a checkpoint; one every five rounds."""
  setup = setups.Setup(SPEED["2x"], 0.5)
  engine = engine_for(len(setup.speeds))
  every = 5 * setup.total
  marks = tuple(float(every * (i + 1)) for i in range(20))
  try:
    faults = Faults(
      engine, setup, samples=int(marks[-1]), marks=marks, checkpoints=folder
    )
    # Four rounds after a checkpoint: the most but one that can be lost.
    faults.when(
      lambda status: status["now_s"] > 8.0 and status["updates"] % 5 == 4,
      lambda: faults.kill("server"),
    )
    result = faults.run()
    write(
      "server", setup, faults=faults.done, events=result.events,
      accuracy=accuracy(setup, result), resumed=faults.status["resumed"],
      **result.summary,
    )  # fmt: skip
    print(workers_report.faults())
  finally:
    engine.stop()


def replayed(folder: str) -> None:
  """Records runs on Ray, and replays them: the same bits, or not."""
  engine = engine_for(4)
  try:
    for variant in ("bsp", "asp", "ssp", "h_ps", "decoupled_diloco"):
      setup = setups.Setup(SPEED["4x"], 1.0, variant, rounds=10)
      path = pathlib.Path(folder) / f"{variant}.messages"
      result = setups.run(engine, setup, record=str(path))
      learner = setups.server_learner(setup)
      again = server.replay(path, setup.protocol(), learner)
      _, payload = learner.save()
      equal = np.array_equal(payload, result.payload)
      write(
        "replay", setup, equal=equal, recorded_bytes=path.stat().st_size,
        updates_again=again.state.version, **result.summary,
      )  # fmt: skip
      print(workers_report.replays(workers_report.rows_of("replay")[-1:]))
  finally:
    engine.stop()


def main() -> None:
  what = sys.argv[1] if len(sys.argv) > 1 else ""
  given = sys.argv[2] if len(sys.argv) > 2 else ""
  repeats = int(given) if given.isdigit() else 5
  if what == "gain":
    gain("gain", GAIN, repeats)
  elif what == "computes":
    gain("computes", (COMPUTES,), repeats)
  elif what == "gpus":
    gain("gpus", (GPUS,), repeats, gpus=1.0)
  elif what == "profile":
    profile()
  elif what == "clock":
    clock(CLOCK, repeats if given else 3)
  elif what == "scale":
    scale()
  elif what == "kills":
    kills(repeats if given else 30)
  elif what == "replay":
    replayed(given)
  elif what == "undisturbed":
    undisturbed(repeats)
  elif what == "hang":
    hang()
  elif what == "server":
    server_death(given)
  else:
    raise SystemExit(__doc__)


if __name__ == "__main__":
  main()
