"""Measures what each method adds to a step; see `timing`.

python experiments/mp2/times.py mnist
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import config
import timing

if __name__ == "__main__":
  timing.main(
    pathlib.Path(__file__).resolve().parent,
    config.PRESETS,
    config.VARIANTS,
    config.Comparison,
    base="baseline",
  )
