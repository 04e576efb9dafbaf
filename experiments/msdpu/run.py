"""MSDPU and all methods that it is compared with.

    python experiments/msdpu/run.py cifar10
    python experiments/msdpu/run.py mnist --seeds 0 1 2 3 4
    python experiments/msdpu/run.py cifar10 --variants "ssgd" "msdpu H0=8"

Every row is written when its run has ended, and runs whose rows are there are
not repeated: the same command continues where it was stopped.
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
    optax_chains.on_one_core(optax_chains.Chains),
  )
