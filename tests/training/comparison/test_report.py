"""What a report finds in rows."""

from jdist.training import comparison


def _tuned(method, rate, accuracy):
  return {
    "purpose": "tuning", "method": method, "learning_rate": rate,
    "accuracy": accuracy, "test_loss": 1.0,
  }  # fmt: skip


def _rows():
  found = {"low": (3, 2, 1), "high": (1, 2, 3), "inside": (1, 2, 1)}
  rows = [
    _tuned(method, rate, accuracy)
    for method, accuracies in found.items()
    for rate, accuracy in zip((0.1, 0.2, 0.4), accuracies, strict=True)
  ]
  return [*rows, _tuned("alone", 0.1, 0.5)]


def test_runs_at_other_rates_are_left_out():
  runs = [
    _tuned("inside", rate, 0.5) | {"purpose": "comparison", "seed": seed}
    for rate, seed in ((0.1, 0), (0.2, 0), (0.2, 1))
  ]
  found = comparison.best_runs(_rows() + runs)
  assert found == {"inside": runs[1:]}


def test_rates_are_ranked_by_the_mean_over_tuning_seeds():
  seeds = {0.1: (0.7, 0.7), 0.2: (0.8, 0.7), 0.4: (0.9, 0.4)}
  rows = [
    _tuned("a", rate, accuracy)
    for rate, found in seeds.items()
    for accuracy in found
  ]
  assert comparison.tuned_rates(rows)["a"].best == 0.2
