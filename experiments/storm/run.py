"""Workers that are killed and stopped at random while a method trains on.

    python experiments/storm/run.py short     # 4 workers, minutes
    python experiments/storm/run.py full      # 8 workers, 5 seeds, hours
    python experiments/storm/run.py report    # the table and the picture

Each seed leaves two rows, of a run in the storm and of one without faults.
"""

import dataclasses
import functools
import os
import pathlib
import random
import signal
import sys
import time
from typing import Any

import jax
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


@dataclasses.dataclass(frozen=True)
class Storm:
  """A run, and the faults in it.

  Attributes:
    workers: their number.
    merges: length of the run; a merge takes about `interval * step_s`.
    faults_per_hour: of all workers together, as a Poisson process.
    stopped: share of the faults that are a SIGSTOP, the others are a SIGKILL.
    stop_s: shortest and longest time of a stop.
    interval: local steps of a round, H.
    rate: the inner learning rate.
    step_s: seconds to which a step is lengthened by sleeping: on few cores
      workers would otherwise measure each other.
    timeout_s: seconds after which a worker without a push counts as lost.
    spares: processes that wait to take the place of a killed one.
    seeds: a storm and an undisturbed run for each.
  """

  workers: int = 8
  merges: int = 900
  faults_per_hour: float = 125.0
  stopped: float = 0.5
  stop_s: tuple[float, float] = (5.0, 60.0)
  interval: int = 20
  rate: float = 0.001
  step_s: float = 0.1
  timeout_s: float = 6.0
  spares: int = 1
  seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


PRESETS = {
  "full": Storm(),
  # More faults an hour, so that minutes have some.
  "short": Storm(
    workers=4, merges=60, faults_per_hour=240.0, stop_s=(5.0, 12.0),
    interval=10, rate=0.003, seeds=(0,),
  ),
}  # fmt: skip


def rounds_of(storm: Storm, seed: int) -> elastic.Rounds:
  """Returns the method: DiLoCo in four bits with feedback."""
  method = methods.diloco(
    optax.sgd(storm.rate, momentum=0.9), storm.interval, axis=None,
    compression=reducers.Compression(
      codecs.Quantize(4), reducers.ErrorFeedback()
    ),
  )  # fmt: skip
  return elastic.Rounds(
    method, network(seed).params, workers=names(storm), samples=16,
    timeout_s=storm.timeout_s, seed=seed,
  )  # fmt: skip


def names(storm: Storm) -> tuple[str, ...]:
  """Returns the workers' names."""
  return tuple(f"worker{i}" for i in range(storm.workers))


def network(seed: int) -> models.Model:
  """Returns the network."""
  return models.build(
    "mlp", input_shape=(8, 8, 1), num_classes=10, hidden_sizes=(64,), seed=seed
  )


def loss_of(model: models.Model) -> Any:
  """Returns the loss of the network on the digits."""
  normalize = data.load("digits").normalize
  return training.classification_loss(model.apply, normalize=normalize)


class PacedSamples:
  """Each worker's own samples, a batch in `step_s`."""

  shared = False

  def __init__(self, storm: Storm, seed: int):
    self._stream = data.SampleStream(
      data.load("digits"), storm.workers, seed=seed, owned=True
    )
    self._step_s, self._until_s = storm.step_s, 0.0

  def batch(self, worker: int, start: int, count: int, **size: Any) -> Any:
    """Returns a batch, not sooner than `step_s` after the last one."""
    time.sleep(max(self._until_s - time.monotonic(), 0.0))
    self._until_s = time.monotonic() + self._step_s
    return self._stream.batch(worker, start, count, **size)


def work(storm: Storm, seed: int, channel: server.Channel, name: str) -> None:
  """Trains as a worker, in a process of its own."""
  samples, loss_fn = PacedSamples(storm, seed), loss_of(network(seed))
  rounds_of(storm, seed).work(channel, name, loss_fn, samples)


class Faults:
  """Kills and stops workers at the moments of a Poisson process."""

  def __init__(self, engine: server.RayEngine, storm: Storm, seed: int):
    self.engine, self.storm = engine, storm
    self.random = random.Random(seed)
    self.log: list[dict[str, Any]] = []
    self.stopped: dict[str, tuple[float, int]] = {}
    self.next_s = self._gap_s()

  def _gap_s(self) -> float:
    rate = self.storm.faults_per_hour
    return self.random.expovariate(rate / 3600) if rate else np.inf

  def __call__(self, status: dict[str, Any]) -> None:
    """Sends the signals that are due, at the server's time."""
    now_s = status["now_s"]
    for name, (until_s, process) in list(self.stopped.items()):
      if now_s >= until_s:
        del self.stopped[name]
        self._send(now_s, name, process, signal.SIGCONT)
    while now_s >= self.next_s:
      self.next_s += self._gap_s()
      # Drawn in any case, so that a seed is one sequence of faults.
      victim = self.random.choice(names(self.storm))
      stops = self.random.random() < self.storm.stopped
      length_s = self.random.uniform(*self.storm.stop_s)
      if victim in self.stopped or victim not in status["here"]:
        continue
      try:
        process = self.engine.process_of(victim)
      except (ConnectionError, KeyError):
        continue  # It is being started.
      how = signal.SIGSTOP if stops else signal.SIGKILL
      if stops:
        self.stopped[victim] = now_s + length_s, process
      self._send(now_s, victim, process, how)

  def _send(self, now_s: float, name: str, process: int, how: Any) -> None:
    kind = signal.Signals(how).name
    self.log.append({"kind": kind, "worker": name, "at_s": now_s})
    print(f"{now_s:7.1f} s  {kind} {name}", flush=True)
    try:
      os.kill(process, how)
    except ProcessLookupError:
      self.log[-1]["kind"] += ", gone"

  def finish(self) -> None:
    """Continues the workers that are stopped."""
    for _, process in self.stopped.values():
      os.kill(process, signal.SIGCONT)
    self.stopped.clear()


def train(storm: Storm, seed: int) -> dict[str, Any]:
  """Runs to the last merge, and returns the row."""
  engine = server.RayEngine(
    storm.workers, cpus_per_worker=0.1, spares=storm.spares
  )
  faults = Faults(engine, storm, seed)
  model, test = network(seed), data.load("digits", "test")
  loss_fn = loss_of(model)
  evaluator = jax.jit(lambda p, b: loss_fn(p, model.state, b, None)[0])
  batch = {"image": test.images, "label": test.labels}
  session = rounds_of(storm, seed).session(
    engine, functools.partial(work, storm, seed), shared=False,
    on_status=faults, model=(model.params, {}),
  )  # fmt: skip
  try:
    records = server.ServerRun(session).fit(
      storm.merges, every=max(storm.merges // 20, 1),
      evaluate=lambda found: {"loss": float(evaluator(found.params, batch))},
    )  # fmt: skip
    summary = session.summary()
  finally:
    faults.finish()
    engine.stop()
  del summary["nodes"]
  return training.make_row(
    dataclasses.asdict(storm), seed, faults=faults.log,
    curve=[[x.train_s, x.metrics["loss"]] for x in records],
    final_loss=records[-1].metrics["loss"], **summary,
    **measures(faults.log, summary),
  )  # fmt: skip


def measures(
  faults: list[dict[str, Any]], summary: dict[str, Any]
) -> dict[str, Any]:
  """Returns how long survivors and victims took, in seconds.

  `next_merge_s` counts from a fault to the next merge, `back_s` from a kill, or
  from the end of a stop that the server has noticed, to the victim's return.
  """
  merges = [x[0] for x in summary["merges"]]
  changes = summary["changes"]
  next_merge_s, back_s = [], []
  for fault in faults:
    at_s, name = fault["at_s"], fault["worker"]
    if fault["kind"] in ("SIGKILL", "SIGSTOP"):
      next_merge_s += [x - at_s for x in merges if x > at_s][:1]
    if fault["kind"] not in ("SIGKILL", "SIGCONT"):
      continue
    own = [x for x in changes if x[3] == name]
    returns = [x[0] - at_s for x in own if x[2] == "returned" and x[0] > at_s]
    # A short stop is not noticed, and has no return.
    before = [x[2] for x in own if x[0] <= at_s]
    if fault["kind"] == "SIGKILL" or before[-1:] == ["left"]:
      back_s += returns[:1]
  return {
    "next_merge_s": next_merge_s,
    "back_s": back_s,
    "merge_gap_s": np.diff(merges).tolist(),
  }


def report(rows: list[dict[str, Any]]) -> str:
  """Returns the table of all storms beside their undisturbed runs."""
  lines = [
    "| workers | seed | kills, stops | merges | living in a merge, % | next "
    "merge, s: median, most | back, s: median, most | time over undisturbed | "
    "final loss over undisturbed, % |",
    "|---|---|---|---|---|---|---|---|---|",
  ]

  def two(found: list[float]) -> str:
    if not found:
      return ""
    return f"{np.median(found):.1f}, {max(found):.1f}"

  for row in rows:
    setting = row["config"] | {"faults_per_hour": 0.0}
    same = [
      x for x in rows if (x["config"], x["seed"]) == (setting, row["seed"])
    ]
    if not row["config"]["faults_per_hour"] or not same:
      continue
    kinds = [x["kind"] for x in row["faults"]]
    loss = 100 * (row["final_loss"] / same[-1]["final_loss"] - 1)
    lines.append(
      f"| {row['config']['workers']} | {row['seed']} | "
      f"{kinds.count('SIGKILL')}, {kinds.count('SIGSTOP')} | "
      f"{row['updates']} | {100 * row['merged_share']:.1f} | "
      f"{two(row['next_merge_s'])} | {two(row['back_s'])} | "
      f"{row['wall_s'] / same[-1]['wall_s']:.2f} | {loss:+.2f} |"
    )
  return "\n".join(lines)


def draw(row: dict[str, Any], path: pathlib.Path) -> None:
  """Draws who is a member, the faults, the merges and the loss."""
  plt = training.pyplot()
  figure, (top, middle, below) = plt.subplots(
    3, 1, sharex=True, figsize=(10, 7), height_ratios=(3, 1, 2)
  )
  workers = names(Storm(workers=row["config"]["workers"]))
  for y, name in enumerate(workers):
    own = [x for x in row["changes"] if x[3] == name]
    for change, after in zip(own, [*own[1:], None], strict=True):
      if change[2] != "left":
        end_s = row["wall_s"] if after is None else after[0]
        top.plot([change[0], end_s], [y, y], color="#0072b2", linewidth=4)
  for kind, marker in (("SIGKILL", "x"), ("SIGSTOP", "|"), ("SIGCONT", ".")):
    found = [x for x in row["faults"] if x["kind"] == kind]
    top.scatter(
      [x["at_s"] for x in found], [workers.index(x["worker"]) for x in found],
      marker=marker, color="#d55e00", label=kind, zorder=3,
    )  # fmt: skip
  top.set_yticks(range(len(workers)), workers)
  top.legend(loc="upper right", ncols=3)
  times, merged, living = zip(*row["merges"], strict=True)
  middle.step(times, living, color="#999999", label="living")
  middle.scatter(times, merged, s=4, color="#009e73", label="in the merge")
  middle.set_ylim(0, len(workers) + 0.5)
  middle.legend(loc="lower right", ncols=2)
  below.plot(*zip(*row["curve"], strict=True), color="#333333")
  below.set(xlabel="seconds", ylabel="test loss", yscale="log")
  figure.tight_layout()
  figure.savefig(path, dpi=110)


def main(words: list[str]) -> None:
  """Runs a preset, or writes the table and the picture."""
  if words == ["report"]:
    rows = training.read_rows(ROWS)
    (FOLDER / "TABLES.md").write_text(
      "# Tables of the storm\n\nWritten by `run.py report` from "
      f"[rows](results/rows.jsonl).\n\n{report(rows)}\n"
    )
    draw([x for x in rows if x["faults"]][-1], FOLDER / "results" / "storm.png")
    return
  if len(words) != 1 or words[0] not in PRESETS:
    raise SystemExit(f"run.py must be given {', '.join(PRESETS)} or report.")
  storm = PRESETS[words[0]]
  ROWS.parent.mkdir(exist_ok=True)
  for seed in storm.seeds:
    for setting in (dataclasses.replace(storm, faults_per_hour=0.0), storm):
      row = train(setting, seed)
      training.append_rows(ROWS, [row])
      print(f"loss {row['final_loss']:.4f} after {row['wall_s']:.0f} s")


if __name__ == "__main__":
  main(sys.argv[1:])
