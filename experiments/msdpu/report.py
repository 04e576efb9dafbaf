"""The table and the picture of the comparison, from its rows.

python experiments/msdpu/report.py cifar10
"""

import pathlib

from jdist.training import comparison

if __name__ == "__main__":
  comparison.report_experiment(
    pathlib.Path(__file__).resolve().parent, ours="msdpu"
  )
