"""Writes the figures of the peers' pages from the rows, and their picture.

    python experiments/peers/report.py          # the pages and peers.png
    python experiments/peers/report.py --check  # fails if a number differs

Seconds to the target are the steps to it, which no link changes, times the
seconds of a step over the link.
"""

import pathlib
import statistics
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import picture
import problem
import run
import studies

from jdist import training

_PICTURE = run.FOLDER / "results" / "peers.png"
_COMPARISON = run.FOLDER.parents[1] / "docs" / "comparison.md"
# The aims: how many times fewer seconds above the own computation, from which
# communication over computation on; and how many times sooner than SSGD, from
# which bound on.
_FEWER, _FROM_RATIO = 5.0, 3.0
_SOONER, _FROM_BOUND = 5.0, 6.0
_SYNCHRONOUS = {"jdist": "SSGD", "PyTorch": "DDP"}
_STREAMED = "MSDPU streamed"
_FLOAT32_PEERS = (
  "DDP", "averaging", "torchft Local SGD", "torchft DiLoCo",
  "torchft DiLoCo late",
)  # fmt: skip


def tuned_by_hosts(rows):
  """Returns by the number of hosts what `tuned` returns."""
  own = studies.group(rows, lambda x: x["config"]["hosts"])
  return {hosts: tuned(mine) for hosts, mine in sorted(own.items())}


def tuned(rows):
  """Returns by framework and method its rate, and its steps by seed."""
  found = {}
  own = studies.group(
    rows, lambda x: (x["config"]["framework"], x["config"]["method"])
  )
  for key, mine in own.items():
    if key in run.TWINS:
      continue
    first = [x for x in mine if x["seed"] == run.SEEDS[0]]
    rate, inside = run.best_rate(first)
    chosen = [x for x in mine if x["config"]["rate"] == rate]
    if inside and len(chosen) == len(run.SEEDS):
      found[key] = {"rate": rate, "steps": [run.steps_of(x) for x in chosen]}
  return found


def mean_steps(tuning, key):
  """Returns the mean steps to the target; None if a run did not reach it."""
  one = tuning.get(key) or tuning.get(run.TWINS.get(key))
  if one is None or None in one["steps"]:
    return None
  return statistics.mean(one["steps"])


class Cell:
  """The measured steps of one network.

  Args:
    rows: The rows of `run.py measure` for it.
    tuning: What `tuned` returns, for as many hosts.
  """

  def __init__(self, rows, tuning):
    self.config, self.tuning = rows[0]["config"], tuning
    self.rows = studies.group(rows, lambda x: (x["framework"], x["method"]))

  @property
  def name(self):
    """The network in words."""
    return f"{self.hosts}, {self.link}"

  @property
  def hosts(self):
    """The number of hosts in words, and their share of a core if it is less."""
    share = self.config.get("core_share", 1)
    part = "" if share == 1 else f" of {share:g} core"
    return f"{self.config['hosts']} hosts{part}"

  @property
  def link(self):
    """The links, and the slow host if there is one, in words."""
    slow = "" if self.speed == 1 else f", one at {self.speed:g} of the speed"
    return f"{self.mbit:g} Mbit/s{slow}"

  @property
  def mbit(self):
    """The rate of each link, in Mbit/s."""
    return self.config["mbit_per_s"]

  @property
  def speed(self):
    """The last host's share of its core."""
    return self.config["speed"]

  def all_of(self, key, name):
    """Returns a measure's values of all repetitions."""
    return [y for x in self.rows[key] for y in x[name]]

  def step_s(self, key):
    """Returns the median seconds of a step."""
    return statistics.median(self.all_of(key, "step_s"))

  def above_s(self, key):
    """Returns the seconds of a step above the framework's own computation."""
    return self.step_s(key) - self.step_s((key[0], "alone"))

  def seconds(self, key):
    """Returns the seconds to the target; None if they are not known."""
    steps = mean_steps(self.tuning, key)
    if steps is None:
      return None
    if key == ("PyTorch", "PowerSGD"):
      # The first steps are synchronous ones.
      warm = min(problem.WARMUP, steps)
      ddp_s = self.step_s(("PyTorch", "DDP"))
      return warm * ddp_s + (steps - warm) * self.step_s(key)
    return steps * self.step_s(key)

  def waited_s(self, key):
    """Returns the seconds to the target above the own computation."""
    seconds = self.seconds(key)
    if seconds is None:
      return None
    alone_s = self.step_s((key[0], "alone"))
    return seconds - mean_steps(self.tuning, key) * alone_s

  def best(self, framework, methods=None):
    """Returns the method with the fewest seconds to the target."""
    known = {
      key: self.seconds(key)
      for key in self.rows
      if key[0] == framework and (methods is None or key[1] in methods)
    }
    known = {key: x for key, x in known.items() if x is not None}
    return min(known, key=known.get) if known else None


def cells(times, tunings):
  """Returns the networks in their order, by what `tuned_by_hosts` returns."""
  found = studies.group(
    times,
    lambda x: (
      x["config"]["hosts"], -x["config"]["speed"], x["config"]["mbit_per_s"]
    ),
  )  # fmt: skip
  return [
    Cell(rows, tunings.get(key[0], {})) for key, rows in sorted(found.items())
  ]


def _met(holds):
  return "met" if holds else "**missed**"


def ratio(cell, framework):
  """Returns communication over computation of the synchronous method."""
  key = (framework, _SYNCHRONOUS[framework])
  return cell.above_s(key) / cell.step_s((framework, "alone"))


def fewest_above(cell):
  """Returns the float32 peer that waits least, its seconds, and ours.

  They are those above the own computation, until the target; None if a run of
  ours is not known.
  """
  known = {
    key: cell.waited_s(key)
    for key in cell.rows
    if key[0] == "PyTorch" and key[1] in _FLOAT32_PEERS
  }
  known = {key: x for key, x in known.items() if x is not None}
  ours = cell.waited_s(("jdist", _STREAMED))
  if not known or ours is None:
    return None
  best = min(known, key=known.get)
  return best, known[best], ours


def verdict(found):
  """Returns the aims and what the rows say of them."""
  lines = []
  for cell in found:
    r = ratio(cell, "jdist")
    text = (
      f"{cell.name}: communication over computation is {r:.1f} for SSGD and "
      f"{ratio(cell, 'PyTorch'):.1f} for DDP"
    )
    both = fewest_above(cell)
    if both is not None:
      peer, theirs_s, ours_s = both
      text += (
        ". Above its own computation, until the target, streamed MSDPU in "
        f"float32 takes {ours_s:.1f} s, and the best peer in float32, "
        f"{peer[1]}, {theirs_s:.1f} s"
      )
      if r >= _FROM_RATIO:
        # A quotient of what is no more than noise says nothing.
        met = theirs_s >= _FEWER * max(ours_s, 0.0) and theirs_s > 0
        text += f" (aim {_FEWER:g} times as much: {_met(met)})"
    ours, theirs = cell.best("jdist"), cell.best("PyTorch")
    ssgd = ("jdist", "SSGD")
    if ours and theirs:
      a, b = cell.seconds(ours), cell.seconds(theirs)
      text += (
        f". To the target {ours[1]} takes {a:.1f} s, and the best peer, "
        f"{theirs[1]}, {b:.1f} s"
      )
      if theirs[1] == "PowerSGD":
        text += f" (aim at least level: {_met(a <= b)})"
      if cell.seconds(ssgd) is not None:
        bound = cell.step_s(ssgd) / cell.step_s(("jdist", "alone"))
        sooner = cell.seconds(ssgd) / a
        text += f"; {sooner:.1f} times sooner than SSGD, whose bound is "
        text += f"{bound:.1f}"
        if bound >= _FROM_BOUND:
          text += f" (aim {_SOONER:g} times: {_met(sooner >= _SOONER)})"
    lines.append(f"- {text}.")
  return "\n".join(lines)


def warm_up(found):
  """Returns what fewer synchronous steps would save PyTorch's PowerSGD."""
  key, parts = ("PyTorch", "PowerSGD"), []
  for cell in found:
    if cell.seconds(key) is not None:
      saved = problem.WARMUP - 2
      per_step_s = cell.step_s(("PyTorch", "DDP")) - cell.step_s(key)
      parts.append(
        f"{cell.seconds(key) - saved * per_step_s:.1f} s at {cell.name}"
      )
  return (
    f"- PyTorch's PowerSGD has {problem.WARMUP} synchronous steps, a tenth of "
    "the run, as its documentation proposes. With 2, the fewest that its hook "
    f"takes, and as many steps in all it would need {'; '.join(parts)}."
  )


def times_table(found):
  """Returns a line for each method of each network."""
  lines = []
  for cell in found:
    for key in cell.rows:
      steps = cell.all_of(key, "step_s")
      counted = cell.rows[key][0]["counted_bytes"]
      seconds = cell.seconds(key)
      sent = statistics.median(cell.all_of(key, "interface_bytes"))
      lines.append((
        cell.name, *key, f"{1e3 * cell.step_s(key):.1f}",
        f"{1e3 * min(steps):.1f} to {1e3 * max(steps):.1f}",
        f"{1e3 * cell.above_s(key):.1f}", f"{sent / 1e3:.1f}",
        "-" if counted is None else f"{counted / 1e3:.1f}",
        "-" if seconds is None else f"{seconds:.1f}",
      ))  # fmt: skip
  return studies.table(
    "network | framework | method | ms a step | least to most | above its own "
    "computation | kB a step at the interface | by `num_bits` | s to the "
    "target",
    lines,
  )


def short_table(found):
  """Returns the seconds to the target of each method, by network."""
  lines = []
  for key in methods(found):
    cells_of = []
    for cell in found:
      seconds = cell.seconds(key) if key in cell.rows else None
      cells_of.append("-" if seconds is None else f"{seconds:.1f}")
    lines.append((*key, *cells_of))
  titles = " | ".join(x.name for x in found)
  return studies.table(f"framework | method | {titles}", lines)


def methods(found):
  """Returns the frameworks and methods of the cells."""
  keys = dict.fromkeys(key for cell in found for key in cell.rows)
  return [key for key in keys if key[1] != "alone"]


def comparison(found):
  """Returns the best method of each library, by network."""
  families = (
    ("PyTorch", lambda x: x[0] == "PyTorch" and "torchft" not in x[1]),
    ("torchft", lambda x: "torchft" in x[1]),
    ("jdist in float32", lambda x: x[0] == "jdist" and "int4" not in x[1]),
    ("jdist", lambda x: x[0] == "jdist"),
  )
  lines = []
  for cell in found:
    known = {key: cell.seconds(key) for key in cell.rows}
    known = {key: x for key, x in known.items() if x is not None}
    line = [cell.name]
    for _, belongs in families:
      own = list(filter(belongs, known))
      best = min(own, key=known.get) if own else None
      line.append("-" if best is None else f"{best[1]}: {known[best]:.1f} s")
    if known:
      lines.append(line)
  return studies.table(" | ".join(["network", *dict(families)]), lines)


def steps_table(tunings):
  """Returns a line for each tuned method."""
  return studies.table(
    "hosts | framework | method | rate | steps to the target, by seed | mean",
    [
      (
        hosts, *key, f"{x['rate']:g}",
        ", ".join("not reached" if y is None else str(y) for y in x["steps"]),
        f"{mean_steps(tuning, key):.1f}" if None not in x["steps"] else "-",
      )
      for hosts, tuning in tunings.items()
      for key, x in tuning.items()
    ],
  )  # fmt: skip


def same_updates(rows):
  """Returns how far the accuracies of twins differ, as a list."""
  curves = {
    (x["config"]["framework"], x["config"]["method"], x["config"]["hosts"],
     x["seed"], x["config"]["rate"]): x["curve"]
    for x in rows
  }  # fmt: skip
  lines = []
  for one, other in run.TWINS.items():
    for (*key, hosts, seed, rate), curve in curves.items():
      twin = curves.get((*other, hosts, seed, rate))
      if tuple(key) != one or twin is None:
        continue
      both = list(zip(curve, twin, strict=False))
      most = max(abs(a[1] - b[1]) for a, b in both)
      lines.append(
        f"- {one[1]} of {one[0]} and {other[1]} of {other[0]}, one run of "
        f"{hosts} hosts at the same seed and rate: the target after "
        f"{curve[-1][0]} and "
        f"{twin[-1][0]} steps; the test accuracies of {len(both)} evaluations "
        f"differ by {100 * most:.1f} points at most."
      )
  return "\n".join(lines or ["- No such pair of runs was made."])


def flower(rows, found):
  """Returns what a round of Flower's FedAvg takes."""
  lines = [] if rows else ["- No round of Flower was timed."]
  for row in rows:
    mbit = row["config"]["bits_per_s"] / 1e6
    text = (
      f"- FedAvg by Flower {row['flower']} at {mbit:g} Mbit/s: a round of "
      f"{problem.INTERVAL} steps takes "
      f"{statistics.median(row['round_s']):.1f} s in the median of "
      f"{len(row['round_s'])}"
    )
    key = ("jdist", "Local SGD")
    for cell in found:
      if (cell.config["hosts"], cell.speed, cell.mbit) == (2, 1, mbit):
        ours_s = problem.INTERVAL * cell.step_s(key)
        text += f", one of jdist's Local SGD {ours_s:.2f} s"
    load = f"The machine's load was {row['load']:.1f}, Flower's own included."
    lines.append(f"{text}. {load}")
  return "\n".join(lines)


def exchange(before, found):
  """Returns steps of 4-bit methods with gloo's gather, and by a sum."""
  lines = []
  for cell in cells(before, {}):
    now = next((x for x in found if x.name == cell.name), None)
    for key in cell.rows if now else ():
      old_s, new_s = cell.step_s(key), now.step_s(key)
      lines.append((
        cell.name, key[1], f"{1e3 * old_s:.1f}", f"{1e3 * new_s:.1f}",
        f"{new_s / old_s:.2f}",
      ))  # fmt: skip
  return studies.table(
    "network | method | ms a step by a gather | by a sum | ratio", lines
  )


def setting(steps, times):
  """Returns what the rows were made with."""
  rows = [*steps, *times]
  config, jax = steps[0]["config"], steps[0]["versions"]
  commits = ", ".join(dict.fromkeys(x["commit"] for x in rows))
  peers = next(x["peers"] for x in rows if "torch" in x["peers"])
  loads = [x["load"] for x in times]
  return (
    f"- {config['batch']} images of a worker's step; the target is "
    f"{100 * config['target']:g} % of {config['test']} test images, within "
    f"{config['limit']} steps. PowerSGD's rank is {problem.RANK}, the workers' "
    f"Nesterov momentum {problem.MOMENTUM:g}, DiLoCo's outer rate "
    f"{problem.OUTER_RATE:g} and momentum {problem.OUTER_MOMENTUM:g}. jax "
    f"{jax['jax']}, Python {jax['python']}; torch {peers['torch']}, torchft "
    f"{peers['torchft']}, Python {peers['python']}. The machine's load when "
    f"measured: {min(loads):.1f} to {max(loads):.1f}, that of these processes "
    f"included. Commits {commits}."
  )


def main():
  """Writes the pages and draws the picture, by the rows."""
  steps, times, fed_avg, before = (
    training.read_rows(x) if x.exists() else []
    for x in (
      run.STEPS, run.TIMES, run.STEPS.with_name("flower.jsonl"),
      run.STEPS.with_name("gather.jsonl"),
    )
  )  # fmt: skip
  tunings = tuned_by_hosts(steps)
  found = cells(times, tunings)
  two = [x for x in found if x.config["hosts"] == 2]
  pages = {
    run.FOLDER / "README.md": {
      "verdict": f"{verdict(found)}\n{warm_up(found)}",
      "seconds": short_table(two), "flower": flower(fed_avg, found),
      "setting": setting(steps, times),
    },
    run.FOLDER / "TABLES.md": {
      "times": times_table(found), "steps": steps_table(tunings),
      "same": same_updates(steps), "exchange": exchange(before, found),
    },
    _COMPARISON: {
      "peers": comparison(found), "flower": flower(fed_avg, found)
    },
  }  # fmt: skip
  studies.publish(
    pages, lambda: found and picture.draw(found, methods(found), _PICTURE)
  )


if __name__ == "__main__":
  main()
