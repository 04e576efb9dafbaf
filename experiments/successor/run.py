"""Top-k that predicts each mean to be the last one, against top-k alone.

    python experiments/successor/run.py mnist-mlp

Every method is tuned at five points, of a momentum and the share of the mean
that is predicted, over three seeds and with a grid of rates that is extended
until the best lies inside.  Each method's best point by validation loss is
compared on seeds of its own.  A run whose row is there is
not repeated.
"""

import pathlib
import statistics
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import config
import studies
from optax_chains import Chains, on_one_core

from jdist.training import comparison

RESULTS = pathlib.Path(__file__).resolve().parent / "results"


def best(rows: list[comparison.Row], method: str) -> tuple[str, float]:
  """Returns the variant of a method, and its rate, of the lowest mean loss."""
  own = [row for row in rows if row["method"].startswith(method)]
  points = studies.group(own, lambda x: (x["method"], x["learning_rate"]))

  def mean(point: tuple[str, float]) -> float:
    return statistics.mean(map(studies.loss, points[point]))

  return min(points, key=mean)


def main(name: str) -> None:
  """Runs a preset, as far as its rows are not there."""
  _, options = config.PRESETS[name]
  chains = on_one_core(Chains)(options, config.VARIANTS)
  held_out = chains.hold_out()
  path = RESULTS / f"{name}.jsonl"
  rows = options.rows(path)

  def run(purpose: str, variant: str, rate: float, seed: int) -> comparison.Row:
    trial = comparison.Trial(purpose, variant, rate, seed)
    row = rows.find(trial)
    if row is None:
      own = held_out if purpose == "tuning" else chains
      row = rows.add(trial, own.fit(variant, rate, seed))
      print(purpose, variant, rate, seed, row["test_loss"], flush=True)
    return row

  tuning = []
  for variant in config.VARIANTS:

    def measure(rate: float, variant: str = variant) -> list[comparison.Row]:
      found = [run("tuning", variant, rate, x) for x in config.TUNING_SEEDS]
      tuning.extend(found)
      return found

    studies.warn_of_end(
      variant,
      comparison.tune(
        options.rates, measure, options.extensions, comparison.by_loss
      ),
    )
  for method in config.METHODS:
    variant, rate = best(tuning, method)
    for seed in options.seeds:
      run("comparison", variant, rate, seed)


if __name__ == "__main__":
  main(sys.argv[1])
