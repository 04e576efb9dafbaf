"""Writes the tables of the protocols' comparison, and draws it, from its rows.

python experiments/dbs_sgd/protocols_report.py          # both pages, picture
python experiments/dbs_sgd/protocols_report.py --check  # fails if it differs
"""

import argparse
import math
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import config
import report
import studies
from scipy import special

from jdist.training import comparison

FOLDER = pathlib.Path(__file__).resolve().parent
OPTIONS: config.Config = config.PRESETS["protocols"][1]
# The methods' names are in the order of the first table if all are equal.
_NAMES = {
  "bsp": "BSP", "asgd": "ASP", "ssp": "SSP", "n-softsync": "n-softsync",
  "fedbuff": "FedBuff", "ringmaster": "Ringmaster ASGD",
  "ringleader": "Ringleader ASGD", "dbs": "DBS-SGD",
  "h_ps": "H-PS", "decoupled_diloco": "Decoupled DiLoCo",
}  # fmt: skip
# A method's own number where its variant's name does not say it.
_OWN = {
  "ssp": "bound 3", "n-softsync": "n 4", "fedbuff": "K 10",
  "ringmaster": "R 8", "h_ps": "pipeline, fewer bits",
  "decoupled_diloco": "outer momentum 0.9, quorum 0.5",
}  # fmt: skip
_COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7")
_NONE = "Not run yet."


def method_of(variant: str) -> str:
  """Returns the method of a variant.

  >>> method_of("ssp, bound 9")
  'ssp'
  """
  return variant.partition(", ")[0]


def own_of(variant: str) -> str:
  """Returns a variant's own numbers in words."""
  return variant.partition(", ")[2] or _OWN.get(variant, "none")


def mean_and_half(values: Sequence[float]) -> tuple[float, float]:
  """Returns the mean and half of its 95 % interval, by Student's distribution.

  >>> [round(x, 2) for x in mean_and_half([1.0, 2.0, 3.0])]
  [2.0, 2.48]
  """
  t = float(special.stdtrit(len(values) - 1, 0.975))
  half = t * statistics.stdev(values) / math.sqrt(len(values))
  return statistics.fmean(values), half


class Found:
  """The tuned variants of one momentum, and the test runs of each.

  Args:
    rows: The rows of one momentum.

  Attributes:
    tuned: Each variant's learning rate.
    ranks: The mean held-out loss of each variant's last marks, at that rate.
    runs: The rows on test data, by variant.
  """

  def __init__(self, rows: Sequence[comparison.Row]):
    self.rows = rows
    self.tuned = studies.tuned_rates(rows, OPTIONS.rank)
    rates = {name: x.best for name, x in self.tuned.items()}
    runs = studies.runs_at(rows, rates)
    # A run that was cut off has not all of its seeds.
    self.runs: dict[str, list[comparison.Row]] = {
      name: own for name, own in runs.items() if len(own) == len(OPTIONS.seeds)
    }
    at_end = [name for name in self.runs if self.tuned[name].end is not None]
    if at_end:
      raise ValueError(
        "`rows` must have best rates inside of the grid, got one at an end for "
        f"{', '.join(at_end)}. Run the command again with more `--extensions`."
      )
    self.ranks = {
      name: -statistics.fmean(
        OPTIONS.rank(row)[0] for row in rows
        if row["purpose"] == "tuning" and row["method"] == name
        and row["learning_rate"] == rates[name]
      )
      for name in self.runs
    }  # fmt: skip

  def chosen(self) -> list[str]:
    """Returns each method's best variant on held-out samples, best test first.

    Test data choose nothing but the order of the table.
    """
    by_method = studies.group([{"name": x} for x in self.runs],
                              lambda row: method_of(row["name"]))  # fmt: skip
    best = [
      min((row["name"] for row in own), key=self.ranks.__getitem__)
      for own in by_method.values()
    ]
    return sorted(best, key=self.loss)

  def loss(self, variant: str) -> float:
    """Returns a variant's mean test loss."""
    return comparison.mean(self.runs[variant], studies.loss)


def cells(found: Found, name: str) -> tuple[str, ...]:
  """Returns what the tables say of a variant's test runs."""
  rows = found.runs[name]
  loss = mean_and_half([studies.loss(row) for row in rows])
  accuracy = mean_and_half([comparison.accuracy(row) for row in rows])
  rate = comparison.mean(rows, lambda row: row["samples"] / row["train_s"])
  age = comparison.mean(rows, lambda row: row["staleness"]["mean_over_updates"])
  return (
    f"{found.tuned[name].best:g}",
    "{:.4f} ± {:.4f}".format(*loss),
    "{:.2f} ± {:.2f}".format(*accuracy),
    report.relative(found.runs, name, config.BASE)
    if name != config.BASE
    else "",
    f"{rate:,.0f}",
    f"{age:.1f}",
    f"{comparison.mean(rows, 'message_bytes') / 1e6:,.0f}",
  )


_TITLES = (
  "rate | test loss (95 % interval) | test accuracy, % (95 % interval) "
  "| loss, % more than ASP (paired) | samples a second | mean staleness | MB"
)


def table(found: Found) -> str:
  """Returns the first table: every method with its chosen number."""
  return studies.table(
    f"method | its own number | {_TITLES}",
    [
      (_NAMES[method_of(name)], own_of(name), *cells(found, name))
      for name in found.chosen()
    ],
  )


def numbers(found: Found) -> str:
  """Returns a table of all numbers of methods that have one."""
  chosen, lines = found.chosen(), []
  for method, title in _NAMES.items():
    variants = [x for x in found.runs if method_of(x) == method]
    for name in variants if len(variants) > 1 else ():
      own = own_of(name) + (" (chosen)" if name in chosen else "")
      held_out = f"{found.ranks[name]:.4f}"
      lines.append((title, own, held_out, *cells(found, name)))
  return studies.table(
    f"method | its own number | held-out loss, by which it is chosen "
    f"| {_TITLES}",
    lines,
  )


def without_momentum(plain: Found, usual: Found) -> str:
  """Returns a table of the runs without momentum, paired with those with it."""
  lines = []
  for name in plain.chosen():
    both = {"without": plain.runs[name], "with": usual.runs[name]}
    more = report.relative(both, "without", "with")
    title = _NAMES[method_of(name)]
    lines.append((title, own_of(name), *cells(plain, name), more))
  return studies.table(
    f"method | its own number | {_TITLES} "
    "| loss, % more than with momentum (paired)",
    lines,
  )


def _listed(names: Sequence[str]) -> str:
  words = [_NAMES[method_of(x)] for x in names]
  if len(words) < 2:
    return "".join(words) or "none"
  return f"{', '.join(words[:-1])} and {words[-1]}"


def compared(found: Found, base: str) -> dict[str, comparison.Difference]:
  """Returns the paired differences of the loss of all others to a variant."""
  differences = {
    name: comparison.paired_difference(
      found.runs[name], found.runs[base], value=studies.loss
    )
    for name in found.chosen()
    if name != base
  }
  return {name: x for name, x in differences.items() if x is not None}


def verdict(found: Found) -> str:
  """Returns what the test runs say, in sentences."""
  first, second, *_ = found.chosen()
  mean, half = mean_and_half([studies.loss(x) for x in found.runs[first]])
  lead = compared(found, first)
  near = [name for name, x in lead.items() if x.low <= 0]
  against = compared(found, config.BASE)
  better = [name for name, x in against.items() if x.high < 0]
  worse = [name for name, x in against.items() if x.low > 0]
  level = [name for name in against if name not in (*better, *worse)]
  return (
    f"**{_NAMES[method_of(first)]} ({own_of(first)}) has the lowest test loss, "
    f"{mean:.4f} ± {half:.4f}**; paired by seeds, the next one, "
    f"{_NAMES[method_of(second)]}, has {lead[second].mean:.4f} more "
    f"({lead[second].low:.4f} to {lead[second].high:.4f}). Within the noise of "
    f"the first: {_listed(near)}.\nAgainst ASP, the loss of {_listed(better)} "
    f"is lower beyond the noise, that of {_listed(worse)} is higher, and "
    f"within the noise: {_listed(level)}."
  )


def setting(rows: Sequence[comparison.Row]) -> str:
  """Returns where and how often the rows were made."""
  commits = sorted({row["commit"] for row in rows})
  devices = sorted({row["device"] for row in rows})
  versions = sorted({row["versions"]["jax"] for row in rows})
  test = [row for row in rows if row["purpose"] == "comparison"]
  seconds = comparison.mean(test, "train_s")
  return (
    f"{len(rows) - len(test)} tuning runs, and {len(test)} on test data, each "
    f"of {seconds:.1f} virtual seconds; commit {', '.join(commits)}, jax "
    f"{', '.join(versions)}, {', '.join(devices)}."
  )


def draw(found: Found, path: pathlib.Path) -> None:
  """Draws the test accuracy over virtual time."""
  chosen = found.chosen()
  others = [x for x in chosen if x != config.BASE]
  colours = dict(zip(others, _COLOURS, strict=False))
  colours[config.BASE] = "black"
  with studies.picture(path, figsize=(8, 4.8), grid={"lw": 0.8}) as ((axes,),):
    ends = []
    for name in chosen:
      curve = [
        (x, 100 * y)
        for x, y in studies.mean_curve(found.runs[name], x="train_s")
      ]
      axes.plot(
        *zip(*curve, strict=True), color=colours.get(name, "#bbbbbb"),
        lw=2.0 if name in colours else 1.2, zorder=3 if name in colours else 2,
      )  # fmt: skip
      ends.append((curve[-1][1], name))
    # Labels at the ends of the lines, pushed apart where these are close.
    last_x = curve[-1][0]
    low = max(min(axes.get_ylim()[0], 95.0), 85.0)
    high = max(y for y, _ in ends) + 0.3
    step, above = (high - low) / 22, math.inf
    for y, name in sorted(ends, reverse=True):
      place = max(min(y, above - step), low)
      above = place
      axes.annotate(
        _NAMES[method_of(name)], (last_x, max(y, low)),
        xytext=(1.06 * last_x, place), fontsize=9, va="center",
        color=colours.get(name, "#777777"),
        arrowprops={
          "arrowstyle": "-", "lw": 0.6, "color": "#aaaaaa",
          "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 1,
        },
      )  # fmt: skip
    axes.set_ylim(low, high)
    axes.set_xlim(0, 1.3 * last_x)
    axes.set_xticks([x for x in axes.get_xticks() if x <= last_x + 0.5])
    axes.set_xlabel("virtual seconds")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(
      "MNIST, an MLP, 8 workers of two speeds, 4x unlike: mean of five seeds, "
      "tuned alike",
      fontsize=11,
    )


def parts(
  rows: Sequence[comparison.Row],
) -> Mapping[pathlib.Path, Mapping[str, str]]:
  """Returns the parts of each page."""
  by_momentum = studies.group(rows, lambda row: row["config"]["momentum"])
  found = {x: Found(own) for x, own in by_momentum.items()}
  usual, plain = found.get(OPTIONS.momentum), found.get(0.0)
  return {
    FOLDER / "PROTOCOLS.md": {
      "verdict": _NONE if usual is None else verdict(usual),
      "methods": _NONE if usual is None else table(usual),
      "setting": setting(rows) if rows else _NONE,
    },
    FOLDER / "PROTOCOLS_TABLES.md": {
      "numbers": _NONE if usual is None else numbers(usual),
      "plain": without_momentum(plain, usual) if plain and usual else _NONE,
    },
  }


def main() -> int:
  """Writes the pages and the picture; returns 1 if a checked one differs."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--check", action="store_true")
  check = parser.parse_args().check
  rows = studies.read(FOLDER / "results" / "protocols.jsonl")
  pages = parts(rows)
  print("\n\n".join(x for found in pages.values() for x in found.values()))
  differs = studies.write(pages, check=check)
  own = [x for x in rows if x["config"]["momentum"] == OPTIONS.momentum]
  if own and not check:
    draw(Found(own), FOLDER / "results" / "protocols.png")
  return int(check and differs)


if __name__ == "__main__":
  if main():
    raise SystemExit("A page differs from what the rows say.")
