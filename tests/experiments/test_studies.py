"""Tables, rates and labels that the experiments share."""

import doctest
import importlib

import optax
import pytest

from jdist import data, server
from jdist.training import comparison
from tests.experiments import _loading

studies = _loading.shared("studies")


@pytest.mark.parametrize("name", ["_problem", "_tables"])
def test_examples_of_docstrings_hold(name):
  module = importlib.import_module(f"studies.{name}")
  found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
  assert found.attempted and not found.failed


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
  found = studies.best_runs(_rows() + runs)
  assert found == {"inside": runs[1:]}


def test_rates_are_ranked_by_the_mean_over_tuning_seeds():
  seeds = {0.1: (0.7, 0.7), 0.2: (0.8, 0.7), 0.4: (0.9, 0.4)}
  rows = [
    _tuned("a", rate, accuracy)
    for rate, found in seeds.items()
    for accuracy in found
  ]
  assert studies.tuned_rates(rows)["a"].best == 0.2


def test_table_counts_the_given_seeds():
  def rows(accuracies, sent=100):
    return [
      {"seed": seed, "accuracy": accuracy, "sent_bytes": sent}
      for seed, accuracy in accuracies.items()
    ]

  runs = {
    "ssgd": rows({0: 0.5, 10: 0.5, 11: 0.5}),
    "int4": rows({0: 0.9, 10: 0.51, 11: 0.51}, sent=10),
  }
  table = studies.difference_table(runs, "ssgd", range(10, 20))
  assert table.splitlines()[2] == (
    "| int4 | +1.00 (+1.00 to +1.00) | 2 | 10.0x |"
  )


def test_page_is_filled_and_then_checked_without_a_change(
  tmp_path, monkeypatch, capsys
):
  page, drawn = tmp_path / "README.md", []
  page.write_text("<!-- rows: a -->\nold\n<!-- end: a -->\n")

  def publish(text, *words):
    monkeypatch.setattr("sys.argv", ["report.py", *words])
    studies.publish({page: {"a": text}}, lambda: drawn.append(text))

  publish("new")
  assert page.read_text().splitlines()[1] == "new" and drawn == ["new"]
  publish("new", "--check")
  before = page.read_text()
  with pytest.raises(SystemExit, match="differs from what the rows say"):
    publish("newer", "--check")
  assert page.read_text() == before and drawn == ["new"]
  assert capsys.readouterr().out == "new\nnew\nnewer\n"


@pytest.mark.parametrize("owned", [True, False])
def test_workers_of_a_fragment_pair_begin_their_own_samples(owned):
  pytest.importorskip("sklearn")
  problem = studies.Problem("digits", "mlp", 32)
  trial = comparison.Trial("comparison", "decoupled_diloco", 0.1, 0)
  samples = data.SampleStream(problem.train_set(trial), 2, seed=0, owned=owned)
  pair = problem.fragment_pair(
    trial, samples, ("a", "b"), inner=optax.sgd(0.1), outer=optax.sgd(0.7)
  )
  starts = [
    pair.server.reply(server.Reply(name, task, 0, 8))[0]["start"]
    for task, name in enumerate(("a", "b"))
  ]
  assert starts == ([0, 0] if owned else [0, 8])
