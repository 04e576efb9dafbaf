"""MP² beside what its paper compares it with, and beside a variant of ours.

    python experiments/mp2/prepare.py mnist
    python experiments/mp2/run.py mnist
    python experiments/mp2/run.py mnist --workers 4 --variants baseline ours
    python experiments/mp2/run.py mnist --times

Every row is written when its run has ended, and runs whose rows are there are
not repeated: the same command continues where it ended.  `--times` measures
what each method adds to a step instead.
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import config
import optax_chains

if __name__ == "__main__":
  optax_chains.run_experiment(
    pathlib.Path(__file__).resolve().parent,
    config.PRESETS,
    config.VARIANTS,
    optax_chains.on_one_core(config.Chains),
    base="baseline",
  )
