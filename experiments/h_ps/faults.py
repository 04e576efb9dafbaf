"""Workers and servers that are killed and stopped, on Ray's workers.

By `workers.py kills`, `hang`, `server` and `undisturbed`.
"""

import dataclasses
import functools
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import config
import setups
import workers_report

from jdist import collectives, data, models, server, training


class Faults:
  """A run whose processes are killed and stopped while it goes on."""

  def __init__(
    self,
    engine: server.RayEngine,
    setup: setups.Setup,
    total: float,
    unit: str = "seconds",
    **fit: Any,
  ):
    self.engine, self.setup = engine, setup
    self._total, self._unit, self._fit = total, unit, fit
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

  def run(self) -> setups.Result:
    """Runs to the end."""

    def on_status(status: dict[str, Any]) -> None:
      self.status = status
      if self._began_s is None:
        self._began_s = time.monotonic()
      while self._actions and self._actions[0][0](status):
        self._actions.pop(0)[1]()

    protocol = dataclasses.replace(self.setup.protocol(), timeout_s=3.0)
    _, model, _ = setups.network(self.setup.hidden)
    return setups.run(
      self.engine, self.setup, self._total, self._unit, protocol=protocol,
      on_status=on_status, **self._fit,
      evaluate=lambda found: {"accuracy": measure(model, found.params)},
    )  # fmt: skip


def kills(times: int = 30, spares: int = 1) -> None:
  """SIGKILL of workers at random moments, 15 s apart at least."""
  setup = setups.Setup(config.SPEEDS["4x"], 1.0)
  generator = random.Random(0)
  engine = setups.engine_for(len(setup.speeds), spares)
  moments, at = [], 5.0
  for _ in range(times):
    at += 15.0 + generator.random() * 1.0
    moments.append(at)
  try:
    faults = Faults(engine, setup, at + 20.0)
    for moment in moments:
      name = generator.choice(setup.names)
      faults.at(moment, functools.partial(_killed, faults, name))
    result = faults.run()
  finally:
    engine.stop()
  setups.write(
    "kills", setup, spares=spares, faults=faults.done,
    accuracy=result.records[-1].metrics["accuracy"], **result.summary,
  )  # fmt: skip
  print(workers_report.faults())


def _killed(faults: Faults, name: str) -> None:
  faults.kill(name)
  last = faults.done[-1]
  print(f"{last['now_s']:.1f} s: killed {name}", flush=True)


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
  setup = setups.Setup(config.SPEEDS["4x"], 1.0)
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
    setups.write("undisturbed", setup, seed, samples=samples, accuracy=found)
    print(f"seed {seed}: {100 * found:.2f} %", flush=True)


def hang() -> None:
  """SIGSTOP of a worker under a barrier, and SIGCONT ten seconds later."""
  setup = setups.Setup(config.SPEEDS["2x"], 0.5, "bsp")
  engine = setups.engine_for(len(setup.speeds))
  try:
    faults = Faults(engine, setup, 25.0)
    seen: list[tuple[float, int, int]] = []
    faults.at(6.0, lambda: faults.kill("worker0", signal.SIGSTOP))
    faults.at(16.0, lambda: faults.kill("worker0", signal.SIGCONT))
    watch = threading.Thread(target=_watch, args=(faults, seen), daemon=True)
    watch.start()
    result = faults.run()
    setups.write(
      "hang", setup, faults=faults.done, seen=seen,
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
  setup = setups.Setup(config.SPEEDS["2x"], 0.5)
  engine = setups.engine_for(len(setup.speeds))
  every = 5 * setup.total
  try:
    faults = Faults(
      engine, setup, 20 * every, "samples", every=every, checkpoints=folder
    )
    # Four rounds after a checkpoint: the most but one that can be lost.
    faults.when(
      lambda status: status["now_s"] > 8.0 and status["updates"] % 5 == 4,
      lambda: faults.kill("server"),
    )
    result = faults.run()
    setups.write(
      "server", setup, faults=faults.done,
      accuracy=result.records[-1].metrics["accuracy"],
      resumed=faults.status["resumed"], **result.summary,
    )  # fmt: skip
    print(workers_report.faults())
  finally:
    engine.stop()
