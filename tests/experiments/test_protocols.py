"""The comparison of protocols by one protocol: machines, ranks, tables."""

import math

import pytest

from jdist import server, training
from tests.experiments import _loading
from tests.experiments.test_comparisons import copied, run


@pytest.fixture
def config(monkeypatch):
  _loading.enter("dbs_sgd", monkeypatch)
  return _loading.load("config", "dbs_sgd/config.py", monkeypatch)


@pytest.fixture
def report(config, monkeypatch):
  pytest.importorskip("matplotlib")
  name = "dbs_sgd/protocols_report.py"
  return _loading.load("protocols_report", name, monkeypatch)


def test_two_kinds_of_machines_are_four_times_unlike(config):
  options = config.PRESETS["protocols"][1]
  assert config.speeds(options, 4.0) == [4.0] * 4 + [1.0] * 4


def test_speeds_of_older_rows_are_pairs_in_equal_ratios(config):
  assert config.speeds(config.Config(), 8.0) == pytest.approx(
    [8, 8, 4, 4, 2, 2, 1, 1]
  )
  assert config.speeds(config.Config(workers=4), 4.0) == [4, 4, 1, 1]


def test_a_round_takes_the_slowest_task_and_an_exchange(config):
  pytest.importorskip("simpy")
  options = config.Config(kinds=2, exchange=1.0, jitter=0.0)
  run = server.Simulation(
    config.machines(options, 4.0, 1e6),
    server.BSP(batches=server.FixedBatches(32)),
    config.costs(options, 1e6),
  )
  run.run(updates=10)
  # 32 samples take 32 ms at speed 1; an exchange takes what they take at the
  # mean speed of 2.5.
  assert run.now_s == pytest.approx(10 * (0.032 + 0.0128), rel=1e-3)


def test_older_presets_have_no_new_variants(config):
  assert len(config.FIRST) == 8
  for preset in ("mnist", "cifar10", "cifar10-gpu"):
    assert config.PRESETS[preset][1].variants == config.FIRST


def test_each_method_has_one_variant_or_three(config):
  methods = [
    x.partition(", ")[0] for x in config.PRESETS["protocols"][1].variants
  ]
  counts = {x: methods.count(x) for x in methods}
  assert counts == {
    "bsp": 1, "asgd": 1, "dbs": 1, "ringleader": 1, "ssp": 3, "n-softsync": 3,
    "fedbuff": 3, "ringmaster": 3, "h_ps": 3, "decoupled_diloco": 3,
  }  # fmt: skip


def _curve(*losses):
  return [
    {"loss": x, "accuracy": 0.9, "train_s": float(i)}
    for i, x in enumerate(losses)
  ]


def test_rates_are_ranked_by_the_mean_of_the_last_marks(config):
  options = config.Config(last_marks=3)
  row = {"curve": _curve(9.0, 0.5, 0.1, 0.3), "accuracy": 0.9}
  assert options.rank(row) == pytest.approx((-0.3, 0.9))
  row["curve"][2]["loss"] = None
  assert options.rank(row) == (-math.inf, -math.inf)


def _rows(config, name, tuning, test):
  """Rows of three rates, of which the middle one is best."""
  common = {
    "method": name, "config": {"momentum": 0.9}, "commit": "abc",
    "device": "a CPU", "versions": {"jax": "1"}, "samples": 1000,
    "train_s": 10.0, "message_bytes": 2e6,
    "staleness": {"mean_over_updates": 3.0}, "accuracy": 0.9,
  }  # fmt: skip
  rows = [
    common
    | {
      "purpose": "tuning", "seed": seed, "learning_rate": rate,
      "test_loss": loss, "curve": _curve(loss, loss, loss),
    }
    for rate, loss in ((0.1, tuning + 0.1), (0.2, tuning), (0.4, tuning + 1))
    for seed in (10_000, 10_001, 10_002)
  ]  # fmt: skip
  return rows + [
    common
    | {
      "purpose": "comparison", "seed": seed, "learning_rate": 0.2,
      "test_loss": test + 0.001 * i, "curve": _curve(test, test, test),
    }
    for i, seed in enumerate(config.PRESETS["protocols"][1].seeds)
  ]  # fmt: skip


def test_a_number_is_chosen_by_held_out_loss_alone(config, report):
  rows = [
    *_rows(config, "ssp", 0.5, 0.3),
    *_rows(config, "ssp, bound 9", 0.4, 0.35),
    *_rows(config, "asgd", 0.5, 0.2),
  ]
  found = report.Found(rows)
  assert found.chosen() == ["asgd", "ssp, bound 9"]
  first, second = report.table(found).splitlines()[2:]
  assert first.startswith("| ASP | none | 0.2 | 0.2020 ± 0.0020 |")
  # Paired, the loss is 0.15 more than 0.202 in every seed.
  assert second.split("|")[6].strip() == "+74 ± 0"
  assert "ASP (none) has the lowest test loss" in report.verdict(found)
  assert "Within the noise of the first: none." in report.verdict(found)


def test_runs_without_momentum_are_paired_with_those_with_it(config, report):
  usual = report.Found(_rows(config, "asgd", 0.5, 0.2))
  plain = report.Found(_rows(config, "asgd", 0.5, 0.25))
  (line,) = report.without_momentum(plain, usual).splitlines()[2:]
  # 0.252 is 0.05, a quarter, more than 0.202.
  assert line.startswith("| ASP | none | 0.2 | 0.2520 ± 0.0020 |")
  assert line.endswith("| +25 ± 0 |")


def test_a_best_rate_at_an_end_enters_no_table(config, report):
  rows = [
    x for x in _rows(config, "asgd", 0.5, 0.2) if x["learning_rate"] < 0.4
  ]
  with pytest.raises(ValueError, match="at an end for asgd"):
    report.Found(rows)


def test_losses_stand_side_by_side_where_samples_are_shared_and_skewed(
  config, report
):
  shared = [
    *_rows(config, "asgd", 0.5, 0.2), *_rows(config, "bsp", 0.5, 0.25),
    *_rows(config, "ringleader", 0.5, 0.3), *_rows(config, "dbs", 0.5, 0.1),
  ]  # fmt: skip
  skewed = [
    *_rows(config, "asgd", 0.5, 0.4), *_rows(config, "bsp", 0.5, 0.5),
    *_rows(config, "dbs", 0.5, 0.6), *_rows(config, "dbs, by part", 0.4, 0.3),
  ]  # fmt: skip
  for row in skewed:
    row["config"] = row["config"] | {"sharing": "skewed"}
  found = report.by_sharing(shared + skewed, 0.9)
  assert list(found) == ["shared", "skewed"]
  assert not report.by_sharing(skewed, 0.0)
  text = report.side_by_side(found)
  # The best first where labels are skewed; 0.302 is a quarter less than 0.402
  # and 40 % less than 0.502.
  dbs, asp, bsp = text.splitlines()[2:]
  assert dbs.endswith("| none | 0.1020 ± 0.0020 | by part | 0.3020 ± 0.0020 "
                      "| -25 ± 0 | -40 ± 0 |")  # fmt: skip
  assert asp == (
    "| ASP | none | 0.2020 ± 0.0020 | none | 0.4020 ± 0.0020 |  | -20 ± 0 |"
  )
  assert bsp.endswith("| 0.5020 ± 0.0020 | +25 ± 0 |  |")
  pages = report.parts(shared, skewed)
  owned = next(x for path, x in pages.items() if path.stem == "PROTOCOLS_OWNED")
  # Nothing was run where samples are owned and their labels alike.
  assert owned["verdict owned"] == "Not run yet."
  assert owned["sharings"] == text
  assert "DBS-SGD (by part) has the lowest" in owned["verdict"]


@pytest.mark.slow
def test_every_new_protocol_trains_over_links(tmp_path):
  folder = copied("dbs_sgd", tmp_path)
  pytest.importorskip("sklearn")
  pytest.importorskip("simpy")
  names = ("fedbuff, K 4", "h_ps", "decoupled_diloco, outer momentum 0.5",
           "ringleader")  # fmt: skip
  run(folder, "run.py", "smoke", "--exchange", "0.5", "--variants", *names)
  rows = training.read_rows(folder / "results" / "smoke.jsonl")
  assert [row["method"] for row in rows] == list(names)
  for row in rows:
    assert row["accuracy"] > 0.3 and row["samples"] > 100
  # A message for 8 samples, and one for 64.
  fedbuff, _, diloco, _ = (x["message_bytes"] / x["samples"] for x in rows)
  assert diloco < fedbuff / 3
  # The gradients of a pipeline are one update old from the second round on.
  assert 0.8 < rows[1]["staleness"]["mean_over_updates"] < 1


def test_a_programs_protocols_are_those_of_the_registry(config):
  options = config.PRESETS["protocols"][1]
  found = {type(config.VARIANTS[x](options)).__name__ for x in options.variants}
  assert found == {
    "BSP", "Protocol", "SSP", "NSoftsync", "Ringmaster", "Ringleader", "HPS",
    "DecoupledDiLoCo",
  }  # fmt: skip
