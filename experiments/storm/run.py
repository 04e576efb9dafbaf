"""Workers that are killed and stopped at random while a method trains on.

    python experiments/storm/run.py short          # 4 workers, minutes
    python experiments/storm/run.py full           # 8 workers, 5 seeds, hours
    python experiments/storm/run.py full 0 3       # of these seeds alone
    python experiments/storm/run.py one-spare      # one waiting process, not 4
    python experiments/storm/run.py undisturbed    # without faults
    python experiments/storm/run.py paced          # with the pauses of a storm

A row that is there is not made again.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import links
import numpy as np
import optax

from jdist import (
  codecs,
  data,
  elastic,
  methods,
  models,
  reducers,
  server,
  training,
)

FOLDER = pathlib.Path(__file__).resolve().parent
ROWS = FOLDER / "results" / "rows.jsonl"
# Rows of workers that merge by themselves.
PEERS = ROWS.with_name("peers.jsonl")


@dataclasses.dataclass(frozen=True)
class Storm:
  """A run, and the faults in it.

  Attributes:
    workers: their number.
    merges: length of the run; a merge takes about `interval * step_s`.
    faults_per_hour: of all workers together, as a Poisson process.
    calm_s: seconds without faults at the start.
    kinds: the faults, each as likely as the others.
    stop_s: shortest and longest time of a stop and of a cut.
    interval: local steps of a round, H.
    rate: the first inner learning rate, which falls to a hundredth by a cosine.
    decay: weight decay.
    step_s: seconds to which a step is lengthened by sleeping: on few cores
      workers would otherwise measure each other.
    timeout_s: seconds after which a worker without a push counts as lost.
    spares: processes that wait to take the place of a killed one.
    rto_s: longest interval at which TCP sends again; None is the system's, 120.
    quorum: part of the members whose pushes a merge waits for.
    peers: whether workers merge each other's messages.
    engine: `"ray"`; `"threads"` of one process, for a run without faults; or
      `"clock"` (`absences.py`), on which faults are times without a machine.
    seeds: of the runs.
  """

  workers: int = 8
  merges: int = 840
  faults_per_hour: float = 125.0
  calm_s: float = 60.0
  kinds: tuple[str, ...] = ("SIGKILL", "SIGSTOP", "cut")
  stop_s: tuple[float, float] = (5.0, 60.0)
  interval: int = 10
  rate: float = 0.01
  decay: float = 0.01
  step_s: float = 0.2
  timeout_s: float = 6.0
  spares: int = 4
  rto_s: float | None = 5.0
  quorum: float = 0.5
  peers: bool = False
  engine: str = "ray"
  seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


def undisturbed(storm: Storm) -> Storm:
  """Returns the run to compare with: without faults, and without sleeping.

  All members are in each merge, so that it is the same run at any speed.
  """
  return dataclasses.replace(
    storm, faults_per_hour=0.0, step_s=0.0, quorum=1.0, timeout_s=600.0,
    spares=0, engine="threads",
  )  # fmt: skip


_FULL = Storm()
# More faults an hour, so that minutes have some.
_SHORT = Storm(
  workers=4, merges=80, faults_per_hour=240.0, calm_s=10.0,
  stop_s=(5.0, 30.0), seeds=(0,),
)  # fmt: skip
# Whether pauses and processes change what is computed.
_PACED = dataclasses.replace(_FULL, merges=60, faults_per_hour=0.0, seeds=(0,))
PRESETS = {
  "full": _FULL,
  "undisturbed": undisturbed(_FULL),
  "paced": _PACED,
  "paced-undisturbed": undisturbed(_PACED),
  "peers": dataclasses.replace(_FULL, peers=True, seeds=(0, 1, 2)),
  # Where several kills come within seconds, the later ones start cold.
  "one-spare": dataclasses.replace(_FULL, spares=1),
  "short": _SHORT,
  "short-undisturbed": undisturbed(_SHORT),
}


def config_of(storm: Storm) -> dict[str, Any]:
  """Returns the settings as a row has them, with lists in place of tuples."""
  found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(storm)))
  if not found.get("peers", True):  # As in rows before there was a choice.
    del found["peers"]
  return found


def method_of(storm: Any) -> optax.GradientTransformation:
  """Returns DiLoCo in four bits with feedback.

  Weight decay and a falling rate give the loss a floor: that of an overfitted
  network would change by percents with any change of the samples.
  """
  rate = optax.cosine_decay_schedule(
    storm.rate, storm.merges * storm.interval, 0.01
  )
  inner = optax.chain(
    optax.add_decayed_weights(storm.decay), optax.sgd(rate, momentum=0.9)
  )
  return methods.diloco(
    inner, storm.interval, axis=None,
    compression=reducers.Compression(
      codecs.Quantize(4), reducers.ErrorFeedback()
    ),
  )  # fmt: skip


def rounds_of(storm: Storm, seed: int) -> elastic.Rounds:
  """Returns the method as workers and the server run it."""
  return elastic.Rounds(
    method_of(storm), network(seed).params, workers=names(storm), samples=16,
    quorum=storm.quorum, timeout_s=storm.timeout_s, peers=storm.peers,
    seed=seed,
  )  # fmt: skip


def names(storm: Storm) -> tuple[str, ...]:
  """Returns the workers' names."""
  return tuple(f"worker{i}" for i in range(storm.workers))


def network(seed: int) -> models.Model:
  """Returns the network."""
  return models.build(
    "mlp", input_shape=(8, 8, 1), num_classes=10, hidden_sizes=(64,), seed=seed
  )


def loss_of(model: models.Model, dataset: data.Dataset) -> Any:
  """Returns the loss of the network on a data set."""
  return training.classification_loss(model.apply, normalize=dataset.normalize)


class PacedSamples:
  """Each worker's own samples, a batch in `step_s`."""

  shared = False

  def __init__(self, storm: Storm, seed: int, dataset: data.Dataset):
    self._stream = data.SampleStream(
      dataset, storm.workers, seed=seed, owned=True
    )
    self._step_s, self._until_s = storm.step_s, 0.0

  def batch(self, worker: int, start: int, count: int, **size: Any) -> Any:
    """Returns a batch, not sooner than `step_s` after the last one."""
    time.sleep(max(self._until_s - time.monotonic(), 0.0))
    self._until_s = time.monotonic() + self._step_s
    return self._stream.batch(worker, start, count, **size)


def work(
  storm: Storm,
  seed: int,
  dataset: data.Dataset,
  channel: server.Channel,
  name: str,
) -> None:
  """Trains as a worker, in a process of its own.

  It is sent the data: to import what reads them takes seconds of a core.
  """
  samples = PacedSamples(storm, seed, dataset)
  loss_fn = loss_of(network(seed), dataset)
  rounds_of(storm, seed).work(channel, name, loss_fn, samples)


# What ends a fault.
_ENDS = {"SIGSTOP": "SIGCONT", "cut": "heal"}


class Faults:
  """Kills, stops and cuts off workers at the moments of a Poisson process."""

  def __init__(self, engine: Any, storm: Storm, seed: int):
    self.engine, self.storm = engine, storm
    self.random = random.Random(seed)
    self.log: list[dict[str, Any]] = []
    self.cuts = links.Cuts()
    # Each worker's process, asked for while it answers.
    self.processes: dict[str, int] = {}
    # What ends a fault, and when, by worker.
    self.faulty: dict[str, tuple[float, str]] = {}
    self.next_s = storm.calm_s + self._gap_s()

  def _gap_s(self) -> float:
    rate = self.storm.faults_per_hour
    return self.random.expovariate(rate / 3600) if rate else np.inf

  def __call__(self, status: dict[str, Any]) -> None:
    """Begins and ends the faults that are due, at the server's time."""
    now_s = status["now_s"]
    if not self.storm.faults_per_hour:
      return
    self.cuts.follow()
    for name, (until_s, kind) in list(self.faulty.items()):
      if now_s >= until_s:
        del self.faulty[name]
        self._do(now_s, name, kind)
    for name in status["here"]:
      if name not in self.processes:
        with contextlib.suppress(ConnectionError, KeyError):
          self.processes[name] = self.engine.process_of(name)
    while now_s >= self.next_s:
      self.next_s += self._gap_s()
      # Drawn in any case, so that a seed is one sequence of faults.
      order = self.random.sample(names(self.storm), self.storm.workers)
      kind = self.random.choice(self.storm.kinds)
      length_s = self.random.uniform(*self.storm.stop_s)
      # The first that is well: who is being started cannot be killed.
      name = next((x for x in order if self._is_well(x, status)), None)
      if name is None:
        continue
      self._do(now_s, name, kind)
      if kind in _ENDS:
        self.faulty[name] = now_s + length_s, _ENDS[kind]

  def _is_well(self, name: str, status: dict[str, Any]) -> bool:
    known = name in self.processes and name in status["here"]
    return known and name not in self.faulty

  def _do(self, now_s: float, name: str, kind: str) -> None:
    self.log.append({"kind": kind, "worker": name, "at_s": now_s})
    print(f"{now_s:7.1f} s  {kind} {name}", flush=True)
    try:
      if kind == "heal":
        self.cuts.heal(name)
      elif kind == "cut":
        self.cuts.cut(name, self.processes[name])
      else:
        os.kill(self.processes[name], signal.Signals[kind])
    except (KeyError, ProcessLookupError):  # It has ended meanwhile.
      self.log[-1]["gone"] = True
    if kind == "SIGKILL":
      self.processes.pop(name, None)

  def lost(self, event: dict[str, Any]) -> None:
    """Forgets the process of a worker that the engine has lost."""
    print(event, flush=True)
    if event["kind"] == "lost":
      self.processes.pop(event["worker"], None)

  def finish(self) -> None:
    """Ends all faults."""
    for name, (_, kind) in self.faulty.items():
      if kind == "heal":
        self.cuts.heal(name)
      elif name in self.processes:
        with contextlib.suppress(ProcessLookupError):
          os.kill(self.processes[name], signal.SIGCONT)
    self.faulty.clear()


def train(storm: Storm, seed: int) -> dict[str, Any]:
  """Runs to the last merge, and returns the row."""
  engine: Any = server.ThreadEngine()
  if storm.engine == "ray":
    engine = server.RayEngine(
      storm.workers, cpus_per_worker=0.1, spares=storm.spares
    )
  faults = Faults(engine, storm, seed)
  model, test = network(seed), data.load("digits", "test")
  dataset = data.load("digits")
  loss_fn = loss_of(model, dataset)
  evaluator = jax.jit(lambda p, b: loss_fn(p, model.state, b, None)[0])
  batch = {"image": test.images, "label": test.labels}
  session = rounds_of(storm, seed).session(
    engine, functools.partial(work, storm, seed, dataset), shared=False,
    on_status=faults, on_event=faults.lost, model=(model.params, {}),
  )  # fmt: skip
  load = [os.getloadavg()[0]]
  try:
    records = server.ServerRun(session).fit(
      storm.merges, every=max(storm.merges // 40, 1),
      evaluate=lambda found: {"loss": float(evaluator(found.params, batch))},
    )  # fmt: skip
    load.append(os.getloadavg()[0])
    summary = session.summary()
  finally:
    faults.finish()
    engine.stop()
  del summary["nodes"]
  for event in summary["events"]:
    # Ray adds numbers of processes, and paths of the machine.
    event["reason"] = re.split(" class_name:| traceback:", event["reason"])[0]
  return training.make_row(
    config_of(storm), seed, faults=faults.log, load=load,
    curve=[[x.train_s, x.metrics["loss"]] for x in records],
    final_loss=records[-1].metrics["loss"], **summary,
    **measures(faults.log, summary),
  )  # fmt: skip


def measures(
  faults: list[dict[str, Any]], summary: dict[str, Any]
) -> dict[str, Any]:
  """Returns how long survivors and victims took, in seconds.

  `next_merge_s` counts from a fault to the next merge.  `back_s` has for each
  kind the time from a kill, or from the end of a stop or a cut that the server
  has noticed, to the victim's return; None if it did not return in the run.
  `short` counts the stops and cuts that nobody has noticed.
  """
  merges = [x[0] for x in summary["merges"]]
  next_merge_s: list[float] = []
  for fault in faults:
    if fault["kind"] not in _ENDS.values():
      at_s = fault["at_s"]
      next_merge_s += [x - at_s for x in merges if x > at_s][:1]
  found = list(returns(faults, summary["changes"]))
  kinds = ("SIGKILL", *_ENDS.values())
  return {
    "next_merge_s": next_merge_s,
    "back_s": {kind: [y for x, y, _ in found if x == kind] for kind in kinds},
    "short": sum(kind == "short" for kind, _, _ in found),
    "merge_gap_s": np.diff(merges).tolist(),
  }


def returns(
  faults: list[dict[str, Any]], changes: list[Any]
) -> Iterator[tuple[str, float | None, bool]]:
  """Yields the return of each victim: kind, seconds, interrupted or not.

  The kind is `short` if nobody has noticed the fault, and the seconds are None
  if the victim did not return in the run.  The last part says whether another
  fault of the same worker came before its return.
  """
  for number, fault in enumerate(faults):
    at_s, name, kind = fault["at_s"], fault["worker"], fault["kind"]
    if kind in _ENDS:
      continue
    own = [x for x in changes if x[3] == name]
    before = [x[2] for x in own if x[0] <= at_s]
    if kind != "SIGKILL" and before[-1:] != ["left"]:
      yield "short", None, False
      continue
    back = [x[0] for x in own if x[2] == "returned" and x[0] > at_s]
    until_s = back[0] if back else np.inf
    again = [x["at_s"] for x in faults[number + 1 :] if x["worker"] == name]
    interrupted = min(again, default=until_s) < until_s
    yield kind, back[0] - at_s if back else None, interrupted


def main(words: list[str]) -> None:
  """Runs a preset, as far as its rows are not there."""
  name, *seeds = words or [""]
  if name not in PRESETS:
    raise SystemExit(f"The preset must be one of {', '.join(PRESETS)}.")
  storm = PRESETS[name]
  os.environ.setdefault("RAY_worker_niceness", "0")  # By default it is 15.
  if links.possible():
    links.enter()
    if storm.rto_s is not None:
      links.limit_rto(storm.rto_s)
  elif "cut" in storm.kinds and storm.faults_per_hour:
    raise SystemExit(
      "Cuts of links need `ip`, and root or a kernel on which `unshare --user` "
      "works for all users."
    )
  path = PEERS if storm.peers else ROWS
  make(storm, map(int, seeds or storm.seeds), path, train)


def make(storm: Any, seeds: Any, path: pathlib.Path, run: Any) -> None:
  """Adds the rows of `run(storm, seed)` to a file in which they are missing."""
  known = training.read_rows(path) if path.exists() else []
  config = config_of(storm)
  for seed in seeds:
    if any((x["config"], x["seed"]) == (config, seed) for x in known):
      continue
    row = run(storm, seed)
    training.append_rows(path, [row])
    print(f"loss {row['final_loss']:.4f} after {row['wall_s']:.0f} s")


if __name__ == "__main__":
  main(sys.argv[1:])
