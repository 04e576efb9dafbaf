"""Top-k that predicts each mean to be the last one, against top-k alone.

    python experiments/successor/run.py mnist-mlp

Every method is tuned at each momentum, over three seeds and with a grid of
rates that is extended until the best lies inside.  Each method's best momentum
by validation loss is compared on seeds of its own.  A run whose row is there is
not repeated.
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import config
import studies
from optax_chains import Chains, on_one_core

from jdist.training import comparison

RESULTS = pathlib.Path(__file__).resolve().parent / "results"


def best_momentum(
  tuned: dict[str, comparison.Tuned], rows: list[comparison.Row], method: str
) -> str:
  """Returns the variant of a method that is best by its tuning rows."""

  def rank(variant: str) -> tuple[float, float]:
    own = [
      row
      for row in rows
      if row["purpose"] == "tuning"
      and row["method"] == variant
      and row["learning_rate"] == tuned[variant].best
    ]
    return comparison.mean_rank(own, comparison.by_loss)

  return max((config.name_of(method, m) for m in config.MOMENTA), key=rank)


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

  tuned, tuning = {}, []
  for variant in config.VARIANTS:

    def measure(rate: float, variant: str = variant) -> list[comparison.Row]:
      found = [run("tuning", variant, rate, x) for x in config.TUNING_SEEDS]
      tuning.extend(found)
      return found

    tuned[variant] = comparison.tune(
      options.rates, measure, options.extensions, comparison.by_loss
    )
    studies.warn_of_end(variant, tuned[variant])
  for method in config.METHODS:
    variant = best_momentum(tuned, tuning, method)
    for seed in options.seeds:
      run("comparison", variant, tuned[variant].best, seed)


if __name__ == "__main__":
  main(sys.argv[1])
