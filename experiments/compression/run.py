"""Everything that makes a message smaller, beside synchronous SGD.

    python experiments/compression/run.py cifar10
    python experiments/compression/run.py cifar10 --seeds 0 1 2 3 4
    python experiments/compression/run.py cifar10 --variants "ssgd" "dgc 0.5 %"
    python experiments/compression/run.py cifar10 --times

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
  )
