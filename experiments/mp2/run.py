"""MP² beside what its paper compares it with, and beside a variant of ours.

    python experiments/mp2/prepare.py mnist
    python experiments/mp2/run.py mnist
    python experiments/mp2/run.py mnist --workers 4 --variants baseline ours
    python experiments/mp2/run.py mnist --times

Every row is written when its run has ended, and runs whose rows are there are
not repeated: the same command goes on where it was stopped.  `--times` measures
what each method adds to a step instead.
"""

import pathlib

import config

from jdist.training import comparison

if __name__ == "__main__":
  comparison.run_experiment(
    pathlib.Path(__file__).resolve().parent,
    config.PRESETS,
    config.VARIANTS,
    comparison.on_one_core(config.Chains),
    base="baseline",
  )
