r"""Seconds to an accuracy, where messages go over slow links.

    sudo python scripts/slow_network.py --hosts 4 --rate 10mbit \
      --timeout-s 14400 -- python experiments/msdpu/slow_links.py cifar10 \
      --seeds 100
    python experiments/msdpu/slow_links.py report

Real processes over `jax.distributed`, a worker each, a link of its own each.
Variants take turns within a seed, so that whatever else the machine does slows
all alike.  Evaluating and compiling are not counted.  Rates are those that
`run.py` has found by held-out images, for eight workers and as many images a
step.  A command that was stopped continues where it was.
"""

import dataclasses
import itertools
import pathlib
import statistics
import sys
from collections.abc import Iterator
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import config
import optax_chains
import studies

from jdist import training
from jdist.training import comparison

_ROWS = pathlib.Path(__file__).resolve().parent / "results/slow_links.jsonl"
# Of each preset of `run.py`.
_RATES = {
  "cifar10": {
    "ssgd": 0.025,
    "ssgd, int4": 0.05,
    "local_sgd H=8": 0.025,
    "msdpu, int4": 0.05,
    "msdpu": 0.025,
  },
  "mnist-mlp": {
    "ssgd": 0.1,
    "ssgd, int4": 0.1,
    "local_sgd H=8": 0.05,
    "msdpu, int4": 0.1,
    "msdpu": 0.1,
  },
  "cifar10-mlp": {
    "ssgd": 0.05,
    "ssgd, int4": 0.05,
    "local_sgd H=8": 0.025,
    "msdpu, int4": 0.025,
  },
}
# Below synchronous SGD's last accuracy with the same seed.
_MARGINS = (0.003, 0.01)


@dataclasses.dataclass(frozen=True)
class Config(optax_chains.Config):
  """Runs over the links of `scripts/slow_network.py`."""

  workers: int = 4
  """One on each host."""

  seeds: tuple[int, ...] = (100,)
  """One run each of every variant."""

  variants: tuple[str, ...] = tuple(_RATES["cifar10"])[:4]
  """Of those with a rate that was found before."""

  evaluations: int = 25
  """In a run, equally far apart, the last one at its end."""


def _preset(name: str) -> tuple[str, Config]:
  """Returns a preset of `run.py`, as it runs over links."""
  text, options = config.PRESETS[name]
  own = {
    field.name: getattr(options, field.name)
    for field in dataclasses.fields(options)
    if field.name not in ("workers", "seeds", "variants", "evaluations")
  }
  return text, Config(**own)


PRESETS = {name: _preset(name) for name in _RATES}


def _problem(row: dict[str, Any]) -> str:
  """Returns the preset that a row is of."""
  for name, (_, options) in PRESETS.items():
    if all(
      row["config"].get(key, getattr(options, key)) == getattr(options, key)
      for key in ("dataset", "model")
    ):
      return name
  raise ValueError(f"No preset has the row's problem: {row['config']}.")


def run(preset: str, options: Config) -> None:
  """Runs what is missing; process 0 writes the rows."""
  links = optax_chains.join_hosts(options.workers)
  if links is None:
    raise SystemExit("Start it by scripts/slow_network.py: see --help.")
  import jax

  rows = options.rows(_ROWS, links)
  chains = optax_chains.Chains(options, config.VARIANTS)
  trials = [
    comparison.Trial("comparison", name, _RATES[preset][name], seed)
    for seed in options.seeds
    for name in options.variants
  ]
  # All processes look before one of them writes.
  for trial in [x for x in trials if rows.find(x) is None]:
    found = chains.fit(trial.variant, trial.learning_rate, trial.seed)
    if jax.process_index() == 0:
      rows.add(trial, found)
      print(
        f"{links.name} {trial.variant} seed {trial.seed}: "
        f"{100 * found['accuracy']:.2f} % after {found['train_s']:.0f} s, "
        f"{found['sent_bytes'] / 1e6:.1f} MB",
        flush=True,
      )


def reached_s(row: dict[str, Any], accuracy: float) -> float | None:
  """Returns when a run was first evaluated at an accuracy, if it was."""
  for point in row["curve"]:
    if point["accuracy"] >= accuracy:
      return float(point["train_s"])
  return None


def table(rows: list[dict[str, Any]]) -> str:
  """Returns a table of the seconds of each variant and of synchronous SGD."""
  lines = []
  for preset, rate, own in _by_links(rows):
    base = {row["seed"]: row for row in own if _is_ssgd(row)}
    for name in _RATES[preset]:
      runs = [x for x in own if x["method"] == name and x["seed"] in base]
      if runs:
        lines.append(_line([preset, f"{rate / 1e6:g}", name], runs, base))
  return studies.table(
    "on | Mbit/s | variant | seeds | ms a step | seconds of the run | times "
    "sooner than ssgd | test accuracy, % | seconds to ssgd's less 0.3 points "
    "| times sooner | less 1 point | times sooner | MB sent",
    lines,
  )


def bounds(rows: list[dict[str, Any]]) -> str:
  """Returns a table of how much sooner than synchronous SGD a step can end.

  The bound is the step over one that sends nothing or hides all messages, which
  is taken from the quickest stretch between two evaluations.
  """
  lines = []
  for preset, rate, own in _by_links(rows):
    base = [1e3 * x["train_s"] / x["steps"] for x in own if _is_ssgd(x)]
    if not base:
      continue
    others = [x for x in own if not _is_ssgd(x)]
    quickest = statistics.mean(
      min(map(_quickest_ms, runs))
      for runs in studies.group(others, lambda row: row["seed"]).values()
    )
    step = statistics.mean(base)
    lines.append(
      f"{preset} | {rate / 1e6:g} | {step:.0f} | {quickest:.1f} "
      f"| {step / quickest:.1f}"
    )
  return studies.table(
    "on | Mbit/s | ms a step of ssgd | ms a step that waits for nothing | the "
    "bound",
    lines,
  )


def _is_ssgd(row: dict[str, Any]) -> bool:
  return bool(row["method"] == "ssgd")


def _quickest_ms(row: dict[str, Any]) -> float:
  pairs = itertools.pairwise(row["curve"][:-1])  # The last one may be a step.
  return min(
    1e3 * (b["train_s"] - a["train_s"]) / (b["step"] - a["step"])
    for a, b in pairs
  )


def _by_links(
  rows: list[dict[str, Any]],
) -> Iterator[tuple[str, float, list[dict[str, Any]]]]:
  """Yields presets, rates of links, and their rows."""
  for preset in _RATES:
    own = [row for row in rows if _problem(row) == preset]
    for rate in sorted({row["config"]["bits_per_s"] for row in own}):
      yield preset, rate, [x for x in own if x["config"]["bits_per_s"] == rate]


def _line(
  cells: list[str],
  runs: list[dict[str, Any]],
  base: dict[int, dict[str, Any]],
) -> list[str]:
  mean = comparison.mean
  step_ms = mean(runs, lambda x: 1e3 * x["train_s"] / x["steps"])
  sooner = mean(runs, lambda x: base[x["seed"]]["train_s"] / x["train_s"])
  cells = [
    *cells,
    f"{len(runs)}",
    f"{step_ms:.0f}",
    f"{mean(runs, 'train_s'):.0f}",
    f"{sooner:.2f}",
    f"{100 * mean(runs, 'accuracy'):.2f}",
  ]
  for margin in _MARGINS:
    times, ratios = [], []
    for x in runs:
      aim = base[x["seed"]]["accuracy"] - margin
      own, its = reached_s(x, aim), reached_s(base[x["seed"]], aim)
      if own is not None and its is not None:
        times.append(own)
        ratios.append(its / own)
    if len(times) < len(runs):
      cells += [f"reached by {len(times)} of {len(runs)}", ""]
    else:
      cells.append(f"{statistics.mean(times):.0f}")
      cells.append(f"{statistics.mean(ratios):.2f}")
  return [*cells, f"{mean(runs, 'sent_bytes') / 1e6:.0f}"]


if __name__ == "__main__":
  if sys.argv[1:] == ["report"]:
    found = training.read_rows(_ROWS)
    print(table(found), bounds(found), sep="\n\n")
  else:
    import tyro

    options = tyro.extras.overridable_config_cli(PRESETS)
    run(next(word for word in sys.argv[1:] if word in PRESETS), options)
