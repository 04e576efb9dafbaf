"""H-PS and others on real Ray workers of this machine, in seconds.

    python experiments/h_ps/workers.py gain      # H-PS over each baseline
    python experiments/h_ps/workers.py computes  # the same; no worker sleeps
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
import json
import pathlib
import statistics
import sys
from collections.abc import Sequence

import config
import faults
import numpy as np
import setups
import workers_report

from jdist import server

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
  engine = setups.engine_for(most, gpus=gpus)
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
          setups.write(name, each, repeat=repeat, **found)
          print(
            f"{repeat} {each.speeds} r={each.ratio:g} {protocol}: "
            f"{found['wall_s']:.2f} s, {found['updates']} updates, server busy "
            f"{100 * found['server_busy_s'] / found['wall_s']:.0f} %, over "
            f"{sum(found['over_s'].values()):.2f} s",
            flush=True,
          )
  finally:
    engine.stop()


# (b) The clock against real runs.

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
  engine = setups.engine_for(1)
  try:
    for repeat in range(3):
      setup = setups.Setup((1.0,), 1.0, "asp", rounds=60, total=32)
      found = setups.run(engine, setup).summary
      link_s = setup.ratio * setup.round_s
      spent = found["wall_s"] / found["updates"]
      compute_s = found["nodes"]["worker0"]["compute_s"] / found["updates"]
      latency_s = (spent - compute_s - link_s) / 2
      setups.write(
        "profile", setup, repeat=repeat, latency_s=latency_s, **found
      )
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
  engine = setups.engine_for(max(len(x.speeds) for x in chosen.values()))
  try:
    for repeat in range(repeats):
      for name, setup in chosen.items():
        if (name, repeat) in done:
          continue
        wanted = setups.simulated(setup, latency_s)
        found = setups.run(engine, setup).summary
        setups.write(
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
  engine = setups.engine_for(8)
  try:
    for num in (1, 2, 4, 8):
      for num_bytes in (1000, 10_000_000):
        session = server.LiveSession(
          engine,
          functools.partial(setups.empty_server, num_bytes),
          {x: functools.partial(setups.empty_work, x) for x in names[:num]},
          server.LivePlan(workers=names[:num]),
        )
        server.ServerRun(session).fit(seconds, "seconds")
        one = session.summary()
        each_ms = 1e3 * one["wall_s"] / one["updates"]
        rate = (one["pushed_bytes"] + one["pulled_bytes"]) / one["wall_s"]
        setups.write("scale", {"workers": num, "num_bytes": num_bytes}, **one)
        print(
          f"{num} workers, {num_bytes} bytes: {each_ms:.2f} ms an update, "
          f"{rate / 1e6:.0f} MB/s, server busy "
          f"{100 * one['server_busy_s'] / one['wall_s']:.0f} %",
          flush=True,
        )
  finally:
    engine.stop()


# (c) A recorded run again.


def replayed(folder: str) -> None:
  """Records runs on Ray, and replays them: the same bits, or not."""
  engine = setups.engine_for(4)
  try:
    for variant in ("bsp", "asp", "ssp", "h_ps", "decoupled_diloco"):
      setup = setups.Setup(SPEED["4x"], 1.0, variant, rounds=10)
      path = pathlib.Path(folder) / f"{variant}.messages"
      result = setups.run(engine, setup, record=str(path))
      learner = setups.server_learner(setup)
      again = server.replay(path, setup.protocol(), learner)
      _, payload = learner.save()
      equal = np.array_equal(payload, result.payload)
      setups.write(
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
    faults.kills(repeats if given else 30)
  elif what == "replay":
    replayed(given)
  elif what == "undisturbed":
    faults.undisturbed(repeats)
  elif what == "hang":
    faults.hang()
  elif what == "server":
    faults.server_death(given)
  else:
    raise SystemExit(__doc__)


if __name__ == "__main__":
  main()
