"""The report of MSDPU's runs over slow links reads rows as it should."""

from jdist import training
from tests.experiments import _loading


def _row(method, seconds, accuracies):
  return {
    "method": method, "seed": 1, "steps": 100,
    "config": {"bits_per_s": 1e7, "dataset": "cifar10", "model": "lenet"},
    "train_s": seconds, "accuracy": accuracies[-1], "sent_bytes": 2e6,
    "curve": [
      {"accuracy": accuracy, "train_s": seconds * (i + 1) / len(accuracies)}
      for i, accuracy in enumerate(accuracies)
    ],
  }  # fmt: skip


def test_seconds_to_an_accuracy_are_those_of_the_same_seed(monkeypatch):
  _loading.enter("msdpu", monkeypatch)
  report = _loading.load("links", "msdpu/slow_links.py", monkeypatch)
  # 0.6 less 0.3 points is reached at the end, less 1 point before.
  rows = [
    _row("ssgd", 40.0, (0.5, 0.592, 0.594, 0.6)),
    _row("msdpu, int4", 10.0, (0.5, 0.595)),
  ]
  _, _, base, ours = report.table(rows).splitlines()
  cells = "ssgd | 1 | 400 | 40 | 1.00 | 60.00 | 40 | 1.00 | 20 | 1.00 | 2"
  assert base == f"| cifar10 | 10 | {cells} |"
  cells = "msdpu, int4 | 1 | 100 | 10 | 4.00 | 59.50 | reached by 0 of 1 |"
  assert ours == f"| cifar10 | 10 | {cells}  | 10 | 2.00 | 2 |"


def test_bound_is_a_step_over_one_that_waits_for_nothing(monkeypatch):
  _loading.enter("msdpu", monkeypatch)
  report = _loading.load("links", "msdpu/slow_links.py", monkeypatch)
  ours = _row("msdpu, int4", 10.0, (0.1, 0.2, 0.3, 0.4))
  steps = (10, 30, 90, 100)  # 20 steps in 2.5 s, then 60.
  ours["curve"] = [
    point | {"step": step}
    for point, step in zip(ours["curve"], steps, strict=True)
  ]
  base = _row("ssgd", 25.0, (0.1, 0.2))
  assert report.bounds([base, ours]).splitlines()[-1] == (
    "| cifar10 | 10 | 250 | 41.7 | 6.0 |"
  )


def test_rates_are_those_that_were_found_before(monkeypatch):
  _loading.enter("msdpu", monkeypatch)
  links = _loading.load("links", "msdpu/slow_links.py", monkeypatch)
  for preset, rates in links._RATES.items():
    path = _loading.FOLDER / "msdpu" / "results" / f"{preset}.jsonl"
    found = {
      (row["method"], row["learning_rate"])
      for row in training.read_rows(path)
      if row["purpose"] == "comparison" and row["method"] in rates
    }
    assert found == set(rates.items())


def test_rows_of_two_networks_are_separate(monkeypatch):
  _loading.enter("msdpu", monkeypatch)
  links = _loading.load("links", "msdpu/slow_links.py", monkeypatch)
  other = _row("ssgd", 10.0, (0.5, 0.9))
  other["config"] = {"bits_per_s": 1e7, "dataset": "mnist", "model": "mlp"}
  _, _, *lines = links.table([_row("ssgd", 40.0, (0.6,)), other]).splitlines()
  found = [line.split(" | ")[:3] for line in lines]
  assert found == [["| cifar10", "10", "ssgd"], ["| mnist-mlp", "10", "ssgd"]]
