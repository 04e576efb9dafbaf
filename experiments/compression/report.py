"""The table and the picture of the comparison, from its rows.

python experiments/compression/report.py cifar10
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import reporting

if __name__ == "__main__":
  reporting.main(pathlib.Path(__file__).resolve().parent, ours="dgc")
