"""Writes the tables of predicted and measured steps, and their picture.

    python experiments/advise/report.py          # README.md and advise.png
    python experiments/advise/report.py --check  # fails if a number differs

Predictions are by the costs and the link that the hosts measured at a rate
before they took a step there; a second one is by the costs of another rate.
"""

import dataclasses
import pathlib
import statistics
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import public
import run
import studies

from jdist import advice, cluster, training

_FOLDER = pathlib.Path(__file__).resolve().parent
_WITHIN = 0.12
_REGRET = 0.05
# Ethernet 14, IP 20, TCP 20 and its time stamps 12.
_HEADERS = 66
# Settings that were looked at while the adviser was made.
_LOOKED_AT = (
  ("lenet", 32, None), ("cnn", 32, None), ("resnet8", 16, None),
  ("lenet", 64, None), ("cnn", 64, None), ("cnn", 16, None),
  ("lenet", 128, None), ("mlp", 64, None),
)  # fmt: skip
_ELSEWHERE = 1e8  # The rate whose costs also predict the steps at others.
_SETTING = ("model", "batch", "hosts", "share", "rate")
_CONFIG = ("model", "batch_size", "hosts", "share", "bits_per_s")
_PLACE = ("model", "batch_size", "hosts", "bits_per_s")
_PUBLIC = {"ddp": "SSGD", "localsgd": "Local SGD", "diloco": "DiLoCo"}


def said_of(predicted, row, rate=None):
  """Returns what was predicted for the setting of a measured row.

  Args:
    predicted: All rows with costs.
    row: A measured row.
    rate: That at which the costs were measured; the row's own by default. The
      link is always the row's.
  """
  own = [x for x in predicted if _setting(x)[:-1] == _setting(row)[:-1]]
  here = row["config"]["bits_per_s"]
  links = [x for x in own if x["config"]["bits_per_s"] == here]
  costs = {
    x["method"]: advice.MethodCosts(**x["costs"])
    for x in own
    if x["config"]["bits_per_s"] == (rate or here)
  }
  ordered = {name: costs[name] for name in run.CHAINS if name in costs}
  link = cluster.Link(**links[0]["link"])
  # The first rows are of equal hosts, whose difference was not measured.
  return advice.Advice(ordered, link, (links[0].get("slowdown", 1.0),))


def _setting(row):
  return tuple(row["config"].get(key, 1.0) for key in _CONFIG)


def settings(measured):
  """Returns the measured rows by model, batch, hosts and rate."""
  return dict(sorted(studies.group(measured, _setting).items()))


def compare(predicted, measured):
  """Returns a dict for each method of each setting."""
  found = []
  for (model, batch, hosts, share, rate), rows in settings(measured).items():
    looked_at = any(
      (model, batch) == seen[:2] and seen[2] in (None, rate)
      for seen in _LOOKED_AT
    )
    said = said_of(predicted, rows[0])
    # Intervals are those of the code that made the rows.
    own = [x for x in predicted if _setting(x) == _setting(rows[0])]
    told = {x["method"]: x.get("said_s") for x in own}
    elsewhere = said_of(predicted, rows[0], _ELSEWHERE)
    unsent = {x: y._replace(send_ratio=1.0) for x, y in said.costs.items()}
    unsent = dataclasses.replace(said, costs=unsent)
    for row in rows:
      low, middle, high = told[row["method"]] or said.seconds(row["method"])
      took = statistics.median(row["step_s"])
      found.append({
        "model": model, "batch": batch, "hosts": hosts, "share": share,
        "rate": rate, "method": row["method"], "looked at": looked_at,
        "low": low, "said": middle, "high": high, "took": took,
        "error": middle / took - 1,
        "unsent": unsent.seconds(row["method"])[1] / took - 1,
        "elsewhere": (
          elsewhere.seconds(row["method"])[1] / took - 1
          if elsewhere.costs and rate != _ELSEWHERE
          else None
        ),
        "commit": row["commit"][:8], "best": said.best,
        "pays": said.pays(row["method"]),
      })  # fmt: skip
  return found


def verdicts(found):
  """Returns a line of what the comparison says for the code of each commit."""
  own = [x for x in found if not x["looked at"]]
  groups = sorted(studies.group(own, lambda x: x["commit"]).items())
  return studies.table(
    "commit | error of a step: median, most, % | within "
    f"{100 * _WITHIN:.0f} % | in the 90 % interval (width) | choices within "
    f'{100 * _REGRET:.0f} % (worst) | wrong of "pays" | error by the link '
    f"alone, by costs at {_ELSEWHERE / 1e6:g} Mbit/s, %",
    [(commit, *verdict(rows)) for commit, rows in groups],
  )


def verdict(found):
  """Returns the cells of what the comparison says."""
  errors = [abs(x["error"]) for x in found]
  inside = sum(x["low"] <= x["took"] <= x["high"] for x in found)
  widths = [(x["high"] - x["low"]) / x["said"] for x in found]
  regrets = regrets_of(found)
  paying = [x for x in found if x["pays"]]
  wrong = sum(x["took"] >= _base(found, x)["took"] for x in paying)
  return (
    f"{100 * statistics.median(errors):.1f}, {100 * max(errors):.1f}",
    f"{sum(x <= _WITHIN for x in errors)} of {len(errors)}",
    f"{inside} of {len(found)} ({100 * statistics.median(widths):.0f} %)",
    f"{sum(x <= _REGRET for x in regrets)} of {len(regrets)} "
    f"({100 * max(regrets):.1f} %)",
    f"{wrong} of {len(paying)}",
    f"{_median(found, 'unsent')}, {_median(found, 'elsewhere')}",
  )


def _median(found, key):
  errors = [abs(x[key]) for x in found if x[key] is not None]
  return f"{100 * statistics.median(errors):.1f}" if errors else "-"


def regrets_of(found):
  """Returns how much longer the chosen method takes, for each setting."""
  regrets = []
  for one in studies.group(
    found, lambda x: tuple(x[key] for key in _SETTING)
  ).values():
    took = {x["method"]: x["took"] for x in one}
    regrets.append(took[one[0]["best"]] / min(took.values()) - 1)
  return regrets


def by_net(found):
  """Returns a line for each net and batch that nothing was chosen by."""
  lines = []
  for (model, batch, share), own in studies.group(
    [x for x in found if not x["looked at"]],
    lambda x: (x["model"], x["batch"], x["share"]),
  ).items():
    errors = [x["error"] for x in own]
    regrets = regrets_of(own)
    lines.append((
      model, batch, f"{share:g}",
      f"{1e3 * min(x['took'] for x in own):.1f}",
      f"{100 * statistics.median(errors):+.1f}",
      f"{sum(abs(x) <= _WITHIN for x in errors)} of {len(errors)}",
      f"{sum(x <= _REGRET for x in regrets)} of {len(regrets)}",
    ))  # fmt: skip
  return studies.table(
    "model | batch | last host's speed | shortest step, ms | error in the "
    f"median, % | steps within {100 * _WITHIN:.0f} % | choices within "
    f"{100 * _REGRET:.0f} %",
    sorted(lines, key=lambda line: float(line[3])),
  )


def _base(found, one):
  return next(
    x
    for x in found
    if x["method"] == next(iter(run.CHAINS))
    and all(x[key] == one[key] for key in _SETTING)
  )


def table(found):
  """Returns a line for each method of each setting."""
  return studies.table(
    "model | batch | hosts | last host's speed | Mbit/s | method | predicted, "
    "ms | interval, ms | measured, ms | error, % | looked at before",
    [
      (
        x["model"], x["batch"], x["hosts"], f"{x['share']:g}",
        f"{x['rate'] / 1e6:g}", x["method"],
        f"{1e3 * x['said']:.1f}",
        f"{1e3 * x['low']:.1f} to {1e3 * x['high']:.1f}",
        f"{1e3 * x['took']:.1f}", f"{100 * x['error']:+.1f}",
        "yes" if x["looked at"] else "",
      )
      for x in found
    ],
  )  # fmt: skip


def public_verdict(found):
  """Returns what the comparison with the public grid says, as a list."""
  ours, theirs = ([abs(x[key]) for x in found] for key in ("error", "formula"))
  short = sum(x["error"] < 0 for x in found)
  lines = [
    f"{len(found)} settings of a model of {found[0]['params'] / 1e6:.1f} "
    f"million parameters: the error of the predicted step is "
    f"{100 * statistics.median(ours):.1f} % in the median and "
    f"{100 * max(ours):.1f} % at most. That of the papers' formula, which "
    f"sends a parameter once and not {public.RING:.1f} times, is "
    f"{100 * statistics.median(theirs):.1f} % and {100 * max(theirs):.1f} %.",
    f"{short} of {len(found)} predictions are too short.",
  ]
  for method, rows in studies.group(found, lambda x: x["method"]).items():
    errors = [abs(x["error"]) for x in rows]
    lines.append(
      f"{_PUBLIC[method]}: {100 * statistics.median(errors):.1f} % in the "
      f"median of {len(errors)} settings, {100 * max(errors):.1f} % at most."
    )
  return "\n".join(f"- {line}" for line in lines)


def public_table(found):
  """Returns a line for each setting of the public grid."""
  return studies.table(
    "method | H | Mbit/s | predicted, ms | measured, ms | error, % | error of "
    "the papers' formula, %",
    [
      (
        _PUBLIC[x["method"]], x["interval"], f"{x['rate'] / 1e6:g}",
        f"{1e3 * x['said']:.1f}", f"{1e3 * x['took']:.1f}",
        f"{100 * x['error']:+.1f}", f"{100 * x['formula']:+.1f}",
      )
      for x in found
    ],
  )  # fmt: skip


def others(rows):
  """Returns a dict for each table of a pipeline, and for each server."""
  found = []
  for own in studies.group(rows, _place).values():
    took = {x["table"]: statistics.median(x["step_s"]) for x in own}
    for x in own:
      if x["table"] == "ssgd":  # It is measured beside pipelines.
        continue
      took_s = took[x["table"]]
      found.append({
        "place": _place(x), "table": x["table"], "said": x["said_s"],
        "took": took_s, "error": x["said_s"] / took_s - 1,
        "ssgd": took.get("ssgd"), "commit": x["commit"][:8],
      })  # fmt: skip
  return found


def _place(row):
  server = row["table"] == "server"
  return (*(row["config"][key] for key in _PLACE), server)


def others_verdict(found):
  """Returns a line of the pipelines and one of the servers of each commit."""
  lines = []
  for (commit, served), own in sorted(
    studies.group(found, lambda x: (x["commit"], x["place"][-1])).items()
  ):
    errors = [abs(x["error"]) for x in own]
    places = studies.group(own, lambda x: x["place"]).values()
    regrets = [
      min(x, key=lambda y: y["said"])["took"] / min(y["took"] for y in x) - 1
      for x in places
    ]
    agreed = [
      (x["said"] < x["ssgd"]) == (x["took"] < x["ssgd"])
      for x in own
      if x["ssgd"]
    ]
    lines.append((
      commit, "a server" if served else "pipelines", len(places),
      f"{100 * statistics.median(errors):.1f}, {100 * max(errors):.1f}",
      f"{sum(x <= _WITHIN for x in errors)} of {len(errors)}",
      "-" if served else f"{100 * max(regrets):.1f}",
      "-" if served else f"{sum(agreed)} of {len(agreed)}",
    ))  # fmt: skip
  return studies.table(
    "commit | what | settings | error of a step: median, most, % | within "
    f"{100 * _WITHIN:.0f} % | the choice of a table takes longer by at most, % "
    "| right of faster than SSGD",
    lines,
  )


def others_table(found):
  """Returns a line for each pipeline and server."""
  return studies.table(
    "model | batch of a worker | hosts | Mbit/s | table | predicted, ms | "
    "measured, ms | error, % | SSGD, ms",
    [
      (
        *x["place"][:3], f"{x['place'][3] / 1e6:g}", x["table"],
        f"{1e3 * x['said']:.1f}", f"{1e3 * x['took']:.1f}",
        f"{100 * x['error']:+.1f}",
        f"{1e3 * x['ssgd']:.1f}" if x["ssgd"] else "-",
      )
      for x in found
    ],
  )  # fmt: skip


def over(row):
  """Returns how much more the interface counts than we do, as two parts.

  The second is without the headers of Ethernet, IP and TCP.
  """
  said = max(row["said"].values())
  counted, packets = (row["counts"][x] for x in ("bytes", "packets"))
  return counted / said - 1, (counted - _HEADERS * packets) / said - 1


def wire_verdict(rows):
  """Returns what the interfaces' counts say, as a list."""
  spread = max(
    max(x["said"].values()) / min(x["said"].values()) - 1 for x in rows
  )
  more = [over(x) for x in rows]
  names = [f"{x['name']} ({x['config']['hosts']} hosts)" for x in rows]
  worst = max(range(len(rows)), key=lambda i: more[i][1])
  lines = [
    f"{len(rows)} ways of sending: `num_bits`, the traced step and the "
    f"compiled program differ by {100 * spread:.4f} % at most.",
    f"The interface counts {100 * min(more)[0]:.2f} to "
    f"{100 * max(more)[0]:.2f} % more, and without {_HEADERS} bytes of headers "
    f"a packet {100 * statistics.median(x for _, x in more):.2f} % in the "
    f"median and {100 * more[worst][1]:.2f} % at most, of {names[worst]}.",
  ]
  return "\n".join(f"- {line}" for line in lines)


def wire_table(rows):
  """Returns a line for each way of sending."""
  return studies.table(
    "what | hosts | our count, kB | interface, kB | packets | more, % | more "
    "without headers, %",
    [
      (
        x["name"], x["config"]["hosts"],
        f"{max(x['said'].values()) / 1e3:,.1f}",
        f"{x['counts']['bytes'] / 1e3:,.1f}", f"{x['counts']['packets']:,}",
        *(f"{100 * y:.2f}" for y in over(x)),
      )
      for x in rows
    ],
  )  # fmt: skip


def draw_public(found, path):
  """Draws the public grid's steps, by our prediction and by the formula."""
  from matplotlib import figure

  picture = figure.Figure(figsize=(6.5, 5), layout="constrained")
  axes = picture.subplots()
  took = [1e3 * x["took"] for x in found]
  for key, label, colour, marker in (
    ("error", "advise", "#0072b2", "o"),
    ("formula", "the papers' formula", "#d55e00", "x"),
  ):
    said = [y * (1 + x[key]) for x, y in zip(found, took, strict=True)]
    axes.scatter(took, said, s=22, label=label, color=colour, marker=marker)
  ends = [min(took), max(took)]
  axes.plot(ends, ends, color="black", lw=0.8, label="as measured")
  axes.set(
    xscale="log", yscale="log", xlabel="measured ms a step (public grid)",
    ylabel="predicted ms a step",
  )  # fmt: skip
  axes.legend(fontsize=8, frameon=False)
  picture.savefig(path, dpi=150)


def draw(found, path):
  """Draws predicted against measured steps."""
  from matplotlib import figure

  picture = figure.Figure(figsize=(6.5, 5), layout="constrained")
  axes = picture.subplots()
  colours = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#333333", "#e69f00", "#56b4e9",
    "#999933",
  )  # fmt: skip
  for name, colour in zip(run.CHAINS, colours, strict=True):
    own = [x for x in found if x["method"] == name]
    axes.scatter(
      [1e3 * x["took"] for x in own], [1e3 * x["said"] for x in own],
      s=22, label=name, color=colour,
    )  # fmt: skip
  ends = [f(1e3 * x["took"] for x in found) for f in (min, max)]
  axes.plot(ends, ends, color="black", lw=0.8, label="as measured")
  within = f"within {_WITHIN:.0%} of it"
  for factor, label in ((1 - _WITHIN, within), (1 + _WITHIN, None)):
    axes.plot(
      ends, [factor * x for x in ends], color="#777777", lw=1, ls=":",
      label=label,
    )  # fmt: skip
  axes.set(
    xscale="log", yscale="log", xlabel="measured ms a step",
    ylabel="predicted ms a step",
  )  # fmt: skip
  axes.legend(fontsize=8, frameon=False)
  picture.savefig(path, dpi=150)


def main():
  """Writes the pages and draws the pictures, by the rows."""
  predicted, measured = (
    training.read_rows(run.RESULTS / f"{name}.jsonl")
    for name in ("predicted", "measured")
  )
  found = compare(predicted, measured)
  grid = public.compare(training.read_rows(public.ROWS))
  counted = training.read_rows(run.RESULTS / "wire.jsonl")
  ways = others(training.read_rows(run.RESULTS / "others.jsonl"))
  pages = {
    _FOLDER / "README.md": {
      "verdict": verdicts(found),
      "public": public_verdict(grid), "wire": wire_verdict(counted),
      "others": others_verdict(ways),
    },
    _FOLDER / "TABLES.md": {
      "nets": by_net(found), "steps": table(found),
      "public steps": public_table(grid),
      "wire": wire_table(counted), "others": others_table(ways),
    },
  }  # fmt: skip

  def show():
    draw(found, run.RESULTS / "advise.png")
    draw_public(grid, run.RESULTS / "public.png")

  studies.publish(pages, show)


if __name__ == "__main__":
  main()
