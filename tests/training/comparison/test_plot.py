"""A picture is drawn from rows alone."""

import numpy as np
import pytest

from jdist import cluster
from jdist.training import comparison
from jdist.training.comparison import _plot


def _rows(methods=("ssgd", "diloco"), seeds=2):
  rows = []
  for number, method in enumerate(methods):
    for seed in range(seeds):
      curve = [
        {
          "step": step,
          "rounds": step // (1 + 7 * number),
          "sent_bytes": 38e3 * (step // (1 + 7 * number)),
          "train_s": step * 1e-3,
          "accuracy": 0.95 - 0.5 / step - 0.01 * number + 0.001 * seed,
        }
        for step in range(40, 400, 40)
      ]
      rows.append(
        {
          "config": {"dataset": "digits", "model": "mlp", "batch_size": 128},
          "method": method,
          "seed": seed,
          "workers": 8,
          "steps": 360,
          "accuracy": curve[-1]["accuracy"],
          "curve": curve,
        }
      )
  return rows


_LINK = cluster.Link(100e6, 1e-3)


def test_picture_is_written_and_its_figure_closed(tmp_path):
  from matplotlib import pyplot

  path = tmp_path / "compare.png"
  comparison.plot_comparison(_rows(), path, _LINK)
  content = path.read_bytes()
  assert content[:4] == b"\x89PNG" and len(content) > 20_000
  assert pyplot.get_fignums() == []
  image = pyplot.imread(path)
  # Something is drawn: many colours, and not only on white.
  assert len(np.unique(image.reshape(-1, image.shape[-1]), axis=0)) > 100


def test_single_seed_single_worker_and_diverged_runs_are_drawn(tmp_path):
  rows = _rows(methods=("ssgd",), seeds=1)
  for row in rows:
    row["workers"] = 1
    for point in row["curve"]:
      point["sent_bytes"], point["accuracy"] = 0.0, 0.1
    row["accuracy"] = 0.1
  comparison.plot_comparison(rows, tmp_path / "one.png", _LINK)
  assert (tmp_path / "one.png").exists()


@pytest.mark.parametrize(
  ("value", "text"),
  [(0.5, "0.5"), (1.0, "1"), (10.0, "10"), (2000.0, "2,000"), (0.05, "0.05")],
)
def test_ticks_are_plain_numbers(value, text):
  assert _plot._plain(value) == text
