"""Writes the front page's tables and picture from the rows.

    python experiments/first_comparison/report.py          # pages, picture
    python experiments/first_comparison/report.py --check  # fails on others

All numbers between markers, here and on the front page, are written here.
"""

import math
import pathlib
import statistics
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import choice
import numpy as np
import protocol
import studies

from jdist import training
from jdist.training import comparison

Row = choice.Row
Key = tuple[str, int]
FOLDER = pathlib.Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
FRONT = FOLDER.parents[1] / "README.md"
_DRAWS = 2000
BASE, OURS = protocol.BASE, protocol.OURS


class Found:
  """The rows, and what follows from them.

  Attributes:
    soonest: the setting of each method that reaches the target first.
    fewest: the setting of each method that sends the fewest bytes.
    runs: the rows of the report's seeds, by method and first round.
  """

  def __init__(self, results: pathlib.Path = RESULTS, *, clean: bool = True):
    """Reads rows; raises a ValueError if they must be `clean` and are not."""
    names = ("costs", "tuning", "comparison")
    self.costs, self.tuning, rows = (
      studies.read(results / f"{name}.jsonl", clean=clean) for name in names
    )
    self.rows = [*self.costs, *self.tuning, *rows]
    self.soonest, self.fewest = (
      choice.choose(self.tuning, self.costs, by)
      for by in (choice.by_seconds, choice.by_bytes)
    )
    self.runs: dict[Key, list[Row]] = {}
    for chosen in (self.soonest, self.fewest):
      for method, one in chosen.items():
        own = [
          row for row in choice.of(rows, method, one.first)
          if row["learning_rate"] == one.rate
        ]  # fmt: skip
        if own:
          self.runs[method, one.first] = own
    self.base = self.runs[BASE, 1]
    accuracies = map(comparison.accuracy, self.base)
    self.target = statistics.mean(accuracies) - protocol.MARGIN

  def difference(self, key: Key) -> comparison.Difference:
    """Returns the points of accuracy more than the base, paired by seeds."""
    found = comparison.paired_difference(self.runs[key], self.base)
    if found is None:
      raise ValueError(f"`rows` must have two seeds of {key} or more.")
    return found

  def fewer(self, key: Key) -> float:
    """Returns how many times fewer bytes than the base a setting sends."""
    sent = [
      comparison.mean(x, "sent_bytes") for x in (self.base, self.runs[key])
    ]
    return sent[0] / sent[1]

  def as_good(self, key: Key) -> bool:
    """Returns whether the interval lies above minus the margin."""
    return key[0] == BASE or self.difference(key).low > -protocol.MARGIN

  def reached_s(self, key: Key) -> float:
    """Returns the modelled seconds to the target."""
    return choice.reached(self.runs[key], self.costs, self.target)

  def run_s(self, key: Key) -> float:
    """Returns the modelled seconds of the whole run."""
    return float(choice.seconds(self.runs[key][0], self.costs)[-1])

  def sooner(
    self, key: Key, other: Key = (BASE, 1)
  ) -> tuple[float, float, float]:
    """Returns how many times sooner than another one it reaches the target.

    With the 2.5 and the 97.5 % quantile of samples of the seeds; each sample
    has its own target.
    """
    draws = np.random.default_rng(0).integers(
      len(self.base), size=(_DRAWS, len(self.base))
    )

    def means(rows: list[Row]) -> np.ndarray:
      return np.array([choice.accuracies(row) for row in rows])[draws].mean(1)

    aims = means(self.base)[:, -1] - protocol.MARGIN
    own, others = (
      choice.crossings(
        choice.seconds(self.runs[x][0], self.costs), means(self.runs[x]), aims
      )
      for x in (key, other)
    )
    # A sample that never reaches its target counts as the end of time.
    low, high = np.quantile(others / own, (0.025, 0.975)).tolist()
    return self.reached_s(other) / self.reached_s(key), low, high


def _seconds(value: float) -> str:
  return "not reached" if math.isinf(value) else f"{value:.3f}"


def _rounds(method: str, first: int) -> str:
  if method == BASE:
    return "1"
  return f"{first} to {2 * first}" if method == OURS else f"{first}"


def _name(key: Key) -> str:
  return key[0] if key[0] == BASE else f"{key[0]}, H={_rounds(*key)}"


def comparison_table(found: Found) -> str:
  """Returns the table of the report's seeds, by the seconds to the target."""
  lines = []
  for key in sorted(found.runs, key=found.reached_s):
    method, first = key
    rows = found.runs[key]
    mean, spread = studies.mean_accuracy(rows)
    gap, held, sooner = "-", "-", "1.0x"
    if method != BASE:
      gap = found.difference(key).interval()
      held = "yes" if found.as_good(key) else "no"
      ratio, low, high = found.sooner(key)
      sooner = f"{ratio:.1f}x ({low:.1f} to {high:.1f})" if ratio else "-"
    reasons = [
      name
      for name, chosen in (("time", found.soonest), ("bytes", found.fewest))
      if chosen[method].first == first and method != BASE
    ]
    lines.append([
      f"**{method}**" if method == OURS else method, _rounds(method, first),
      rows[0]["delay"], " and ".join(reasons),
      f"{rows[0]['learning_rate']:g}", len(rows), f"{mean:.2f} ± {spread:.2f}",
      gap, held, rows[0]["rounds"], f"{rows[0]['sent_bytes'] / 1e6:.2f}",
      f"{found.fewer(key):.1f}x", _seconds(found.reached_s(key)), sooner,
      f"{found.run_s(key):.2f}",
    ])  # fmt: skip
  return studies.table(
    "variant | steps of a round | steps late | chosen by | rate | seeds "
    f"| test accuracy, % | points more than {BASE} (95 % interval) | as good "
    "| rounds | MB sent | fewer bytes | seconds to the target "
    "| sooner (95 % interval) | seconds of the run",
    lines,
  )


def tuning_table(found: Found) -> str:
  """Returns the table of the tuning, a line for each kind of rounds."""
  aim = found.soonest[BASE].quality - protocol.MARGIN
  lines = []
  for method in protocol.METHODS:
    for first in protocol.firsts(method):
      own = choice.of(found.tuning, method, first)
      rates = studies.group(own, lambda row: row["learning_rate"])
      best = choice.best_rate(own)
      quality = {rate: choice.quality(x)[0] for rate, x in rates.items()}
      name = _rounds(method, first)
      chosen = found.soonest[method].first, found.fewest[method].first
      lines.append([
        method, f"**{name}**" if first in chosen else name,
        own[0]["delay"],
        ", ".join(
          f"**{rate:g}: {quality[rate]:.2f}**" if rate == best
          else f"{rate:g}: {quality[rate]:.2f}"
          for rate in sorted(rates)
        ).replace("-inf", "diverged"),
        "yes" if quality[best] >= aim else "no",
        _seconds(choice.reached(rates[best], found.costs, aim)),
      ])  # fmt: skip
  return studies.table(
    "variant | steps of a round | steps late | validation accuracy, %, by rate "
    "| as good | seconds to the target",
    lines,
  )


def cost_table(found: Found) -> str:
  """Returns the cost model's numbers."""
  lines = []
  for key, rows in found.runs.items():
    method, first = key
    said = choice.said(found.costs, method, first, rows[0]["delay"])
    own = said.costs[method]
    sent_s = protocol.LINK.send_s(own.round_bytes, own.round_messages)
    extra_s = statistics.median(own.extra_s)
    lines.append([
      method, _rounds(method, first), f"{1e3 * said.step_s:.2f}",
      f"{1e3 * extra_s:.2f}", f"{own.round_bytes / 1e3:.1f}",
      own.round_messages, f"{1e3 * sent_s:.1f}", rows[0]["delay"],
      f"{1e3 * first * said.exposed_s(method):.1f}",
    ])  # fmt: skip
  return studies.table(
    "variant | steps of a round | c, ms | x, ms | kB of a mean "
    "| messages of a mean | s, ms | d | ms of a mean that are not hidden",
    lines,
  )


def verdict(found: Found) -> str:
  """Returns what the rows say, as a list."""
  good = [key for key in found.runs if found.as_good(key)]
  bad = [_name(key) for key in found.runs if key not in good]
  soonest, fewest = min(good, key=found.reached_s), max(good, key=found.fewer)
  shortest = min(good, key=found.run_s)
  by_time, by_bytes = (
    (OURS, chosen[OURS].first) for chosen in (found.soonest, found.fewest)
  )
  lines = []
  for key in dict.fromkeys((by_time, by_bytes)):
    ratio, low, high = found.sooner(key)
    held = (
      "as good by the margin" if key in good
      else "**not shown to be as good by the margin**"
    )  # fmt: skip
    lines.append(
      f"**{_name(key)}: {found.fewer(key):.0f} times fewer bytes than {BASE}, "
      f"{found.difference(key).interval()} points of accuracy** "
      f"({len(found.runs[key])} seeds that nothing was chosen by, 95 % "
      f"interval), {held}; the target {ratio:.1f} times sooner than {BASE} "
      f"({low:.1f} to {high:.1f}), the whole run "
      f"{found.run_s((BASE, 1)) / found.run_s(key):.0f} times shorter."
    )
  others = [key for key in good if key[0] not in (OURS, BASE)]
  first = "**MSDPU is the first of the methods that are as good**"
  if others:
    rival = min(others, key=found.reached_s)
    mine = min((by_time, by_bytes), key=found.reached_s)
    ratio, low, high = found.sooner(mine, rival)
    if soonest[0] != OURS:
      first = "**MSDPU is not the first of the methods that are as good**"
    first += (
      f": {_name(mine)} takes {1 / ratio:.2f} of the time of {_name(rival)} "
      f"({1 / high:.2f} to {1 / low:.2f}), "
    ) + (
      "which is no difference beyond the noise of the seeds"
      if low < 1 < high
      else "beyond the noise of the seeds"
    )
  lines.append(
    f"{first}. Of those that are as good the fewest bytes has "
    f"{_name(fewest)} ({found.fewer(fewest):.0f} times fewer), and the "
    f"shortest run {_name(shortest)}."
  )
  if bad:
    lines.append(f"Not shown to be as good: {'; '.join(bad)}.")
  return "\n".join(f"- {line}" for line in lines)


def setting(found: Found) -> str:
  """Returns the setting of the rows, from the code that ran them."""
  commits = ", ".join(sorted({row["commit"] for row in found.rows}))
  devices = ", ".join(sorted({row["device"] for row in found.rows}))
  link = protocol.LINK
  return "\n".join((
    f"- {protocol.WORKERS} workers of {protocol.BATCH_SIZE} images, "
    f"{protocol.STEPS} steps, {protocol.WARMUP_STEPS} of warm-up, a cosine to "
    "a hundredth of the highest rate, Nesterov momentum "
    f"{protocol.MOMENTUM:g}, float32.",
    f"- Tuning: seeds {protocol.TUNING_SEEDS[0]} to "
    f"{protocol.TUNING_SEEDS[-1]}, each with another tenth of the training set "
    f"held out; rates from {protocol.RATES[0]:g} to {protocol.RATES[-1]:g}, "
    "extended by factors of two until the best is inside; rounds of "
    f"{', '.join(map(str, protocol.FIRST))} steps at first for every method.",
    f"- Report: seeds {protocol.SEEDS[0]} to {protocol.SEEDS[-1]}, the whole "
    f"training set, test images. The target is {found.target:.2f} %.",
    f"- Link: {link.bandwidth_bits_per_s / 1e6:g} Mbit/s and "
    f"{1e3 * link.latency_s:g} ms a message, for each worker.",
    f"- {len(found.rows)} rows, of the commits {commits}, on {devices}.",
  ))  # fmt: skip


def caption(found: Found) -> str:
  """Returns the caption of the picture on the front page."""
  key = OURS, found.fewest[OURS].first
  soonest = min(filter(found.as_good, found.runs), key=found.reached_s)
  held = "as good" if found.as_good(key) else "not shown to be as good"
  return (
    f"*Handwritten digits, {protocol.WORKERS} workers, {len(found.runs[key])} "
    f"seeds: MSDPU in 4 bits sends {found.fewer(key):.0f} times fewer bytes "
    f"than synchronous SGD at {found.difference(key).interval()} points of "
    f"accuracy ({held} by a margin of {protocol.MARGIN:g}). The first at that "
    f"accuracy less the margin, on the modelled link, is "
    f"{soonest[0].replace('msdpu', 'MSDPU')}. Protocol and limits:\n"
    "[experiments/first_comparison](experiments/first_comparison/README.md).*"
  )


def bench(path: pathlib.Path) -> str:
  """Returns what the rows of `scripts/bench_step.py` say."""
  row = training.read_rows(path)[-1]
  said = [
    f"{x['median']:.3f}, quartiles {x['quartiles'][0]:.3f} to "
    f"{x['quartiles'][1]:.3f}"
    for x in (row["step_ratio"], row["noise_ratio"])
  ]
  more = row["peak_bytes"]["jdist"] / row["peak_bytes"]["hand"] - 1
  return (
    f"The ratio of paired step times has the median {said[0]}; the "
    f"hand-written step against itself has {said[1]}. Peak memory differs by "
    f"{100 * more:.1f} %."
  )


_COLORS = {
  "ssgd": "#333333", "local_sgd": "#0072b2", "diloco": "#009e73",
  OURS: "#d55e00",
}  # fmt: skip


def draw(found: Found, path: pathlib.Path) -> None:
  """Draws accuracy over bytes, rounds and modelled seconds."""
  link = protocol.LINK
  with studies.picture(
    path, 1, 3, legend=(len(found.runs) + 1) // 2, figsize=(13, 4.8),
    sharey=True, grid={"alpha": 0.25, "lw": 0.6},
  ) as (grid,):  # fmt: skip
    for key, rows in found.runs.items():
      method = key[0]
      curves = np.array([choice.accuracies(row) for row in rows])
      mean, spread = curves.mean(0), curves.std(0, ddof=1)
      rounds = np.array(rows[0]["marks"]["rounds"])
      mega = rows[0]["sent_bytes"] / 1e6 * rounds / rounds[-1]
      color = _COLORS[method if method == OURS else method.partition(",")[0]]
      dashed = method.endswith("int4") and method != OURS
      longest = key[1] != found.soonest[method].first
      for axes, x in zip(
        grid, (mega, rounds, choice.seconds(rows[0], found.costs)), strict=True
      ):
        axes.plot(
          x, mean, color=color, ls="--" if dashed else "-",
          lw=2.0 if method == OURS else 1.3, alpha=0.55 if longest else 1.0,
          label=_name(key), marker="s" if longest else "o", markevery=[-1],
          ms=5,
        )  # fmt: skip
        if method == BASE:
          axes.fill_between(
            x, mean - spread, mean + spread, color=color, alpha=0.13, lw=0
          )
    labels = (
      "MB sent by each worker",
      "rounds of communication",
      f"modelled seconds at {link.bandwidth_bits_per_s / 1e6:g} Mbit/s and "
      f"{1e3 * link.latency_s:g} ms,\nlate messages under the steps that hide "
      "them",
    )
    for axes, label in zip(grid, labels, strict=True):
      axes.axhline(
        found.target, color="#666666", lw=1, ls=":",
        label="ssgd's accuracy less the margin",
      )  # fmt: skip
      axes.set_xscale("log")
      axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
      axes.set_xlabel(label)
    grid[0].set_ylabel("test accuracy, %")
    grid[0].set_ylim(93, 98.4)
    grid[2].set_xlim(left=0.02)


def pages(found: Found) -> dict[pathlib.Path, dict[str, str]]:
  """Returns the texts of all pages by their places."""
  return {
    FOLDER / "README.md": {
      "verdict": verdict(found),
      "comparison": comparison_table(found),
      "costs": cost_table(found),
      "setting": setting(found),
      "bench": bench(RESULTS / "bench_step.jsonl"),
    },
    FOLDER / "TABLES.md": {"tuning": tuning_table(found)},
    FRONT: {"caption": caption(found)},
  }


def main() -> None:
  """Writes the pages and the picture, or checks the pages."""
  found = Found()
  studies.publish(pages(found), lambda: draw(found, RESULTS / "compare.png"))


if __name__ == "__main__":
  main()
