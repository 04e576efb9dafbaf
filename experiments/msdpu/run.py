"""MSDPU beside everything it is compared with.

    python experiments/msdpu/run.py cifar10
    python experiments/msdpu/run.py mnist --seeds 0 1 2 3 4
    python experiments/msdpu/run.py cifar10 --variants "ssgd" "msdpu H0=8"

Every row is written when its run has ended, and runs whose rows are there are
not repeated: the same command goes on where it was stopped.
"""

import pathlib

import config

from jdist.training import comparison

if __name__ == "__main__":
  comparison.run_experiment(
    pathlib.Path(__file__).resolve().parent,
    config.PRESETS,
    config.VARIANTS,
    comparison.on_one_core(comparison.Chains),
  )
