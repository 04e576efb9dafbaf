r"""Trains one net by jdist, PyTorch and torchft, over links of one machine.

    python experiments/peers/run.py prepare
    python experiments/peers/run.py tune             # steps to the target
    sudo python experiments/peers/run.py measure     # seconds a step
    python experiments/peers/report.py

`prepare` writes images, initial weights and the order of the data for both.
`tune` and `measure` need a Python with torch, torchft and numpy: `--python`,
or the environment variable PEERS_PYTHON. A row that is there is not made again.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))

import problem
import slow_network

from jdist import data, models, training

FOLDER = pathlib.Path(__file__).resolve().parent
STEPS, TIMES = (FOLDER / "results" / f"{x}.jsonl" for x in ("steps", "times"))
PROBLEM = pathlib.Path(tempfile.gettempdir(), "jdist-peers.npz")
SEEDS = problem.SEEDS
TARGET, LIMIT = 0.94, 240
# The first rates that are tried; the grid grows by factors of 2.
RATES = (0.0125, 0.025, 0.00625)
FRAMEWORKS = {
  "jdist": (
    "ours.py",
    ("SSGD", "SSGD int4", "PowerSGD", "Local SGD", "Local SGD int4",
     "MSDPU streamed", "MSDPU streamed int4", "DiLoCo int4",
     "DiLoCo int4 H=16"),
  ),
  "PyTorch": (
    "theirs.py",
    ("DDP", "DDP fp16", "PowerSGD", "averaging", "torchft Local SGD",
     "torchft DiLoCo", "torchft DiLoCo quantized", "torchft DiLoCo late"),
  ),
}  # fmt: skip


# Methods whose updates are those of another one, and which are not tuned: one
# run at its rate shows it.
TWINS = {
  ("jdist", "SSGD"): ("PyTorch", "DDP"),
  ("jdist", "Local SGD"): ("PyTorch", "averaging"),
  ("PyTorch", "torchft Local SGD"): ("PyTorch", "averaging"),
  ("PyTorch", "torchft DiLoCo quantized"): ("PyTorch", "torchft DiLoCo"),
}

# These methods send everything in each step.
_WHOLE = ("SSGD", "DDP", "DDP fp16")


def prepare(options):
  """Writes the file that both frameworks read."""
  import numpy as np

  train, test = data.load("mnist"), data.load("mnist", "test")
  # A border of two pixels, so that the net has 1.1 million parameters.
  border = ((0, 0), (2, 2), (2, 2), (0, 0))
  found = {
    "images": np.pad(train.images, border), "labels": train.labels,
    "test_images": np.pad(test.images, border)[: options.test],
    "test_labels": test.labels[: options.test],
    "mean": train.mean[0], "std": train.std[0],
  }  # fmt: skip
  for seed in SEEDS:
    model = models.build(
      "cnn", input_shape=(32, 32, 1), num_classes=10, hidden_sizes=(512,),
      seed=seed,
    )  # fmt: skip
    for layer, kinds in model.params.items():
      for kind, value in kinds.items():
        found[f"weights{seed}/{layer}/{kind}"] = np.asarray(value)
    order = np.random.default_rng(seed).permutation(len(train))
    found[f"order{seed}"] = order.astype(np.int32)
  np.savez(options.problem, **found)


class Group:
  """The processes of one framework, one on each host.

  Args:
    options: The command's options.
    framework: A name of `FRAMEWORKS`.
    names: The hosts' names; None for this machine without a network.
  """

  def __init__(self, options, framework, names=None):
    program = str(FOLDER / FRAMEWORKS[framework][0])
    ours = framework == "jdist"
    python = sys.executable if ours else options.python
    address = "127.0.0.1" if names is None else "10.77.0.1"
    port = _free_port() if names is None else 9913 + ours
    self.processes = []
    for host in range(options.hosts):
      # One core for each host, as far as there are enough.
      core = str(host % (os.cpu_count() or 1))
      command = [
        "taskset", "-c", core, python, program, "--problem",
        str(options.problem), "--address", f"{address}:{port}", "--host",
        str(host), "--hosts", str(options.hosts),
      ]  # fmt: skip
      if names is not None:
        command = slow_network.inside(names[host], command)
      self.processes.append(
        subprocess.Popen(
          command,
          # Otherwise torchft tells of each message. Both frameworks are faster
          # with huge pages, which `jdist launch` sets.
          env=os.environ
          | {"RUST_LOG": "error", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
          text=True,
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          start_new_session=True,
        )
      )
    self.read()

  def read(self):
    """Returns an answer of each process."""
    found = [p.stdout.readline() for p in self.processes]
    if not all(found):
      raise SystemExit(f"A process has ended: {self.processes[0].args}")
    return [json.loads(x) for x in found]

  def ask(self, **request):
    """Sends a request to all processes, and returns their answers."""
    for process in self.processes:
      process.stdin.write(json.dumps(request) + "\n")
      process.stdin.flush()
    return self.read()

  def close(self):
    """Ends the processes, and closes their pipes."""
    for process in self.processes:
      with process:
        process.kill()


def _free_port():
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    return found.getsockname()[1]


@contextlib.contextmanager
def groups(options, names=None):
  """Starts the processes of the wanted frameworks; ends them afterwards."""
  with contextlib.ExitStack() as stack:
    found = {}
    for framework in options.frameworks:
      found[framework] = Group(options, framework, names)
      stack.callback(found[framework].close)
    yield found


def wanted(options, framework):
  """Returns the methods of a framework that are asked for."""
  methods = FRAMEWORKS[framework][1]
  return [x for x in methods if not options.methods or x in options.methods]


def steps_of(row):
  """Returns the steps to the target; None if it was not reached."""
  step, accuracy = row["curve"][-1]
  return step if accuracy >= row["config"]["target"] else None


def best_rate(rows):
  """Returns the rate of the fewest steps, and whether it is inside the grid.

  If two are equal, the more accurate one at the end is returned.
  """
  ordered = sorted(rows, key=lambda row: row["config"]["rate"])
  best = min(ordered, key=_rank)["config"]["rate"]
  ends = (ordered[0]["config"]["rate"], ordered[-1]["config"]["rate"])
  return best, best not in ends


def _rank(row):
  last = row["curve"][-1][1]
  return steps_of(row) or float("inf"), -(last if last == last else -1.0)


def tune(options):
  """Tunes all methods without a network."""
  with groups(options) as found:
    tune_all(options, found)


def tune_all(options, found):
  """Finds each method's rate, and its steps to the target by seed."""
  everything = [
    Tuning(options, framework, method, group)
    for framework, group in found.items()
    for method in wanted(options, framework)
  ]
  for run in everything:
    if run.key not in TWINS:
      run.tune()
  for run in everything:
    if run.key in TWINS:
      run.confirm(Tuning(options, *TWINS[run.key], None))


class Tuning:
  """The runs of one method to the target."""

  def __init__(self, options, framework, method, group):
    self.group, self.key = group, (framework, method)
    self.config = {
      "framework": framework, "method": method, "hosts": options.hosts,
      "batch": problem.BATCH, "target": TARGET, "limit": LIMIT,
      "test": options.test,
    }  # fmt: skip

  def tune(self):
    """Runs at rates until the best is inside the grid, then all seeds."""
    first = SEEDS[0]
    for rate in RATES:
      self.row(first, rate)
    for _ in range(6):
      best, inside = best_rate(self.rows(first))
      if inside:
        break
      lowest = best == min(x["config"]["rate"] for x in self.rows(first))
      self.row(first, best / 2 if lowest else best * 2)
    for seed in SEEDS[1:]:
      self.row(seed, best)

  def confirm(self, twin):
    """Runs once at a twin's rate, if that is known."""
    rows = twin.rows(SEEDS[1])
    if rows:
      self.row(SEEDS[1], rows[0]["config"]["rate"])

  def rows(self, seed):
    """Returns the rows of a seed."""
    known = training.read_rows(STEPS) if STEPS.exists() else []
    return [
      row
      for row in known
      if row["seed"] == seed
      and {k: v for k, v in row["config"].items() if k != "rate"} == self.config
    ]

  def row(self, seed, rate):
    """Runs once, if there is no row yet."""
    if any(x["config"]["rate"] == rate for x in self.rows(seed)):
      return
    # A rate that is slower than another one need not be run to its end.
    known = [steps_of(x) for x in self.rows(seed)]
    limit = min((x for x in known if x), default=LIMIT)
    every = max(problem.INTERVAL, problem.interval(self.config["method"]))
    curves = [
      x["curve"]
      for x in self.group.ask(
        do="train", method=self.config["method"], seed=seed, rate=rate,
        limit=limit, target=TARGET, every=every,
      )
    ]  # fmt: skip
    row = training.make_row(
      self.config | {"rate": rate}, seed, curve=curves[0],
      **versions_of(self.group),
    )  # fmt: skip
    training.append_rows(STEPS, [row])
    print(
      self.config["framework"], self.config["method"], f"seed {seed}",
      f"rate {rate:g}:", steps_of(row), curves[0][-1], flush=True,
    )  # fmt: skip


def versions_of(group):
  """Returns what the processes say of their versions."""
  return {"peers": group.ask(do="versions")[0]}


def measure(options):
  """Measures all methods in turns, at each rate."""
  prefix = f"jd{os.getpid() % 100000}"
  with contextlib.ExitStack() as stack:
    names = stack.enter_context(
      slow_network.network(options.hosts, "1gbit", 0.0, prefix)
    )
    found = stack.enter_context(groups(options, names))
    turns = [
      Turn(group, framework, method, names)
      for framework, group in found.items()
      for method in ["alone", *wanted(options, framework)]
    ]
    for turn in turns:  # Compiles, and passes what a method does at first.
      turn.take(turn.longest)
      print("ready:", turn.framework, turn.method, flush=True)
    share = core_share(options.hosts)
    for setting in options.settings:
      rate, _, speed = setting.partition("@")
      slow_network.change_rate(names, rate)
      config = {
        "hosts": options.hosts, "batch": problem.BATCH,
        "speed": float(speed or 1), "repetitions": options.repetitions,
        "mbit_per_s": float(rate.removesuffix("mbit")),
      }  # fmt: skip
      if share < 1:
        config["core_share"] = share
      with contextlib.ExitStack() as quotas:
        for host in range(options.hosts):
          # The last host is the slow one.
          last = host == options.hosts - 1
          quota = share * (config["speed"] if last else 1)
          if quota < 1:
            own = [group.processes[host].pid for group in found.values()]
            quotas.enter_context(slow_network.cpu_quota(own, quota))
        rows = measure_setting(turns, config)
      training.append_rows(TIMES, rows)
      for row in rows:
        print(
          setting, row["framework"], row["method"],
          *(f"{1e3 * x:.1f}" for x in row["step_s"]),
          f"{row['interface_bytes'][0] / 1e3:.0f} kB", flush=True,
        )  # fmt: skip
    if options.tune:  # With what is compiled already: no link changes it.
      slow_network.change_rate(names, "1000mbit")
      tune_all(options, found)


def core_share(hosts):
  """Returns each host's share of a core: they never use another one's."""
  return min(1.0, (os.cpu_count() or 1) / hosts)


def measure_setting(turns, config):
  """Returns the rows of all methods, which take turns."""
  load, taken = os.getloadavg()[0], [[] for _ in turns]
  for _ in range(config["repetitions"]):
    for turn, found in zip(turns, taken, strict=True):
      found.append(turn.take(turn.steps(config["mbit_per_s"])))
  return [
    turn.row(config, found, load)
    for turn, found in zip(turns, taken, strict=True)
  ]


class Turn:
  """A method's part of a measurement."""

  def __init__(self, group, framework, method, names):
    self.group, self.framework, self.method = group, framework, method
    self.names = names
    # Two rounds, and for PowerSGD more than its synchronous steps.
    self.longest = 2 * problem.INTERVAL

  def steps(self, mbit_per_s):
    """Returns the steps of a repetition: whole rounds, about two seconds."""
    if problem.interval(self.method) > 1 or self.method == "alone":
      return self.longest
    return 2 if mbit_per_s < 50 and self.method in _WHOLE else 8

  def take(self, steps):
    """Runs steps; returns seconds and interface bytes of one step."""
    before = slow_network.sent_bytes(self.names[0])
    answers = self.group.ask(do="time", method=self.method, steps=steps)
    sent = slow_network.sent_bytes(self.names[0]) - before
    return max(x["seconds"] for x in answers) / steps, sent / steps

  def row(self, config, taken, load):
    """Returns the row of all repetitions."""
    step_s, sent = zip(*taken, strict=True)
    counted = self.group.ask(do="count", method=self.method)[0]["counted"]
    return training.make_row(
      config, 0, framework=self.framework, method=self.method,
      step_s=list(step_s), interface_bytes=list(sent), counted_bytes=counted,
      load=load, **versions_of(self.group),
    )  # fmt: skip


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("what", choices=("prepare", "tune", "measure"))
  parser.add_argument("--problem", type=pathlib.Path, default=PROBLEM)
  parser.add_argument("--test", type=int, default=1000,
                      help="test images of an evaluation")  # fmt: skip
  parser.add_argument("--hosts", type=int, default=2)
  parser.add_argument("--python", default=os.environ.get("PEERS_PYTHON"),
                      help="one with torch, torchft and numpy")  # fmt: skip
  parser.add_argument("--frameworks", nargs="+", default=tuple(FRAMEWORKS),
                      choices=tuple(FRAMEWORKS))  # fmt: skip
  parser.add_argument("--methods", nargs="+", default=())
  parser.add_argument("--settings", nargs="+", default=("100mbit",),
                      help="link rates; 100mbit@0.25 slows a host")  # fmt: skip
  parser.add_argument("--repetitions", type=int, default=3)
  parser.add_argument("--tune", action="store_true",
                      help="tunes afterwards by the same")  # fmt: skip
  options = parser.parse_args()
  if options.what != "prepare" and not options.python:
    parser.error("--python must be a Python with torch, torchft and numpy")
  # Stopped by a signal, it still ends what it has started.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  {"prepare": prepare, "tune": tune, "measure": measure}[options.what](options)


if __name__ == "__main__":
  main()
