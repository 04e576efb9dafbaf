"""The storm's absences on the virtual clock, over many seeds.

    python experiments/storm/absences.py             # 20 seeds, a minute each
    python experiments/storm/absences.py undisturbed

Many seeds tell what absences do to the loss from what chance does.  A row that
is there is not made again.
"""

import dataclasses
import random
import sys
from typing import Any

import numpy as np
import run

from jdist import cluster, data, server, training

ROWS = run.FOLDER / "results" / "absences.jsonl"
_STORM = run.Storm(engine="clock", seeds=tuple(range(20)))
PRESETS = {
  "storm": _STORM,
  "undisturbed": dataclasses.replace(_STORM, faults_per_hour=0.0),
}

# Seconds from the end of a fault to the worker's return, about as storms show
# them: a killed worker starts again, and TCP sends again after a cut.
_BACK_S = {"SIGKILL": 10.0, "SIGSTOP": 0.0, "cut": 3.5}


def outages(storm: run.Storm, seed: int) -> dict[str, list[cluster.Outage]]:
  """Returns the faults that `Faults` draws, as times without each worker.

  Stops and cuts of which the server would not take notice are left out.
  """
  draw, found = random.Random(seed), {name: [] for name in run.names(storm)}
  if not storm.faults_per_hour:
    return found
  rate, at_s = storm.faults_per_hour / 3600, storm.calm_s
  at_s += draw.expovariate(rate)
  while at_s < 2 * storm.merges * storm.interval * storm.step_s:
    gap_s = draw.expovariate(rate)
    order = draw.sample(run.names(storm), storm.workers)
    kind = draw.choice(storm.kinds)
    length_s = draw.uniform(*storm.stop_s)
    well = [x for x in order if not found[x] or found[x][-1].end_s < at_s]
    length_s = 0.0 if kind == "SIGKILL" else length_s
    if well and (kind == "SIGKILL" or length_s > storm.timeout_s):
      end_s = at_s + length_s + _BACK_S[kind]
      found[well[0]].append(cluster.Outage(at_s, end_s))
    at_s += gap_s
  return found


def simulate(storm: run.Storm, seed: int) -> dict[str, Any]:
  """Runs on the clock to the last merge, and returns the row."""
  model, dataset = run.network(seed), data.load("digits")
  rounds, loss_fn = run.rounds_of(storm, seed), run.loss_of(model, dataset)
  # The clock does not wait for the pauses.
  samples = run.PacedSamples(
    dataclasses.replace(storm, step_s=0.0), seed, dataset
  )
  workers = {
    name: rounds.runner(name, loss_fn, samples) for name in run.names(storm)
  }
  pair = server.Pair(rounds.syncer(shared=False), workers)
  away = outages(storm, seed)
  simulation = server.Simulation(
    cluster.Cluster(
      tuple(cluster.Node(x, outages=tuple(own)) for x, own in away.items())
    ),
    rounds.protocol, cluster.Profile(storm.step_s / 16), learner=pair,
    detection_s=storm.timeout_s,
  )  # fmt: skip
  simulation.run(updates=storm.merges)
  test = data.load("digits", "test")
  batch = {"image": test.images, "label": test.labels}
  loss, _ = loss_fn(pair.model.params, model.state, batch, None)
  merged = [x[1] for x in simulation.summary()["merges"]]
  return training.make_row(
    run.config_of(storm), seed, final_loss=float(loss),
    wall_s=simulation.now_s,
    outages=sum(
      x.start_s < simulation.now_s for own in away.values() for x in own
    ),
    share_of_all=float(np.mean(merged)) / storm.workers,
  )  # fmt: skip


def main(words: list[str]) -> None:
  """Runs a preset, by default the storm, as far as its rows are not there."""
  storm = PRESETS[words[0] if words else "storm"]
  run.make(storm, storm.seeds, ROWS, simulate)


if __name__ == "__main__":
  main(sys.argv[1:])
