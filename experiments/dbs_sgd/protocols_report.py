"""Writes the tables of the protocols' comparison, and draws it, from its rows.

python experiments/dbs_sgd/protocols_report.py          # all pages, pictures
python experiments/dbs_sgd/protocols_report.py --check  # fails if it differs
"""

import math
import pathlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

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
_SHARINGS = {
  "shared": "shared samples", "owned": "owned samples",
  "skewed": "skewed labels",
}  # fmt: skip
# The same in all pictures; the others are grey.
_COLOURS = {
  "asgd": "black", "h_ps": "#0072b2", "decoupled_diloco": "#d55e00",
  "bsp": "#009e73", "ringleader": "#cc79a7",
}  # fmt: skip
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


def side_by_side(found: Mapping[str, Found]) -> str:
  """Returns a table of the losses of all sharings, each with its own numbers.

  Args:
    found: Runs by whose the samples are; the skewed ones order the table.
  """
  skewed = found["skewed"]
  chosen = {
    sharing: {method_of(x): x for x in own.chosen()}
    for sharing, own in found.items()
  }
  lines = []
  for method, name in chosen["skewed"].items():
    cells = [_NAMES[method]]
    for sharing, names in chosen.items():
      runs = found[sharing].runs.get(names.get(method, ""), [])
      losses = [studies.loss(row) for row in runs]
      cells += (
        [
          own_of(names[method]),
          "{:.4f} ± {:.4f}".format(*mean_and_half(losses)),
        ]
        if losses
        else ["", ""]
      )
    for base in (config.BASE, "bsp"):
      more = report.relative(skewed.runs, name, base)
      cells.append(more if name != base else "")
    lines.append(cells)
  titles = " | ".join(f"its own number | test loss, {x}" for x in found)
  return studies.table(
    f"method | {titles} | skewed: % more than ASP (paired) | than BSP", lines
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


def draw(found: Found, path: pathlib.Path, sharing: str = "shared") -> None:
  """Draws the test accuracy over virtual time."""
  chosen = found.chosen()
  colours = {
    x: _COLOURS[method_of(x)] for x in chosen if method_of(x) in _COLOURS
  }
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
    # The lowest end is in the picture, where a curve begins may not be.
    low = max(min(axes.get_ylim()[0], 95.0), min(85.0, min(ends)[0] - 2.0))
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
      f"MNIST, {_SHARINGS[sharing]}, an MLP, 8 workers, two speeds 4x unlike: "
      "mean of five seeds",
      fontsize=11,
    )


def parts(
  rows: Sequence[comparison.Row], owned: Sequence[comparison.Row]
) -> Mapping[pathlib.Path, Mapping[str, str]]:
  """Returns the parts of each page, of rows with shared and owned samples."""

  def part(make: Callable[..., str], *found: Found | None) -> str:
    return _NONE if None in found else make(*found)

  usual, plain = (
    by_sharing(rows, momentum).get("shared")
    for momentum in (OPTIONS.momentum, 0.0)
  )
  whose = by_sharing(owned, OPTIONS.momentum)
  skewed, own = whose.get("skewed"), whose.get("owned")
  both = {"shared": usual, "owned": own, "skewed": skewed}
  both = {x: runs for x, runs in both.items() if runs is not None}
  return {
    FOLDER / "PROTOCOLS.md": {
      "verdict": part(verdict, usual),
      "methods": part(table, usual),
      "setting": setting(rows) if rows else _NONE,
    },
    FOLDER / "PROTOCOLS_TABLES.md": {
      "numbers": part(numbers, usual),
      "plain": part(without_momentum, plain, usual),
    },
    FOLDER / "PROTOCOLS_OWNED.md": {
      "verdict": part(verdict, skewed),
      "verdict owned": part(verdict, own),
      "sharings": side_by_side(both) if skewed else _NONE,
      "skewed": part(table, skewed),
      "setting": setting(owned) if owned else _NONE,
    },
    FOLDER / "PROTOCOLS_OWNED_TABLES.md": {
      "owned": part(table, own),
      "numbers": part(numbers, skewed),
      "plain": part(
        without_momentum, by_sharing(owned, 0.0).get("skewed"), skewed
      ),
    },
  }


def by_sharing(
  rows: Sequence[comparison.Row], momentum: float
) -> dict[str, Found]:
  """Returns the runs of a momentum by whose the samples are."""
  own = [row for row in rows if row["config"]["momentum"] == momentum]
  groups = studies.group(
    own, lambda row: row["config"].get("sharing", "shared")
  )
  return {x: Found(groups[x]) for x in groups}


def main() -> None:
  """Writes the pages and the pictures, or checks the pages."""
  results = FOLDER / "results"
  rows, owned = (
    studies.read(results / f"{x}.jsonl") for x in ("protocols", "owned")
  )

  def show() -> None:
    for sharing, found in by_sharing([*rows, *owned], OPTIONS.momentum).items():
      name = {"shared": "protocols"}.get(sharing, sharing)
      if studies.is_shown(results / f"{name}.png"):
        draw(found, results / f"{name}.png", sharing)

  studies.publish(parts(rows, owned), show)


if __name__ == "__main__":
  main()
