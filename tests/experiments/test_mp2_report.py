"""What the report of MP² makes of rows."""

import pytest

from tests.experiments._loading import load


def test_accuracy_is_reached_between_two_evaluations(monkeypatch):
  report = load("mp2_report", "mp2/report.py", monkeypatch)
  curve = [{"step": s, "accuracy": a} for s, a in ((10, 0.5), (30, 0.9))]
  rows = [{"curve": curve}]
  assert report.steps_to(rows, 70.0) == pytest.approx(20.0)
  assert report.steps_to(rows, 25.0) == pytest.approx(5.0)
  assert report.steps_to(rows, 91.0) is None
  # Of the mean over seeds, which no seed needs to be above.
  lower = [{"step": s, "accuracy": a} for s, a in ((10, 0.3), (30, 0.5))]
  assert report.steps_to([*rows, {"curve": lower}], 55.0) == pytest.approx(20.0)


def test_modelled_time_matches_hand_computation(monkeypatch):
  report = load("mp2_report", "mp2/report.py", monkeypatch)

  def reached(step, both_bytes):
    return [
      {
        "steps": 100, "train_s": 70.0, "both_bytes": 100 * both_bytes,
        "curve": [{"step": step, "accuracy": 0.8}],
      }
    ]  # fmt: skip

  runs = {"baseline": reached(40, 10**6), "ours": reached(60, 10**5)}
  # Steps of 0.1 and 0.1 * 2 s, then 8 and 0.8 Mbit over each of the links.
  times = {"baseline": {"step_s": 0.1, "ratio": 1.0}, "ours": {"ratio": 2.0}}
  found = report.seconds_to(runs, times, 80.0, "both_bytes")
  assert tuple(report._LINKS) == ("10 Mbit/s", "100 Mbit/s", "1 Gbit/s")
  assert found["baseline"] == pytest.approx([36.0, 7.2, 4.32])
  assert found["ours"] == pytest.approx([16.8, 12.48, 12.048])
  # Without times of its own a step is that of Baseline's runs.
  found = report.seconds_to(runs, {}, 80.0, "both_bytes")
  assert found["ours"] == pytest.approx([46.8, 42.48, 42.048])


def test_steps_over_a_link_make_the_time_to_an_accuracy(monkeypatch):
  report = load("mp2_report", "mp2/report.py", monkeypatch)

  def reached(step):
    return [{"curve": [{"step": step, "accuracy": 0.8}]}]

  def measured(method, step_s, ratio):
    return {
      "method": method, "hosts": 8, "bits_per_s": 1e7, "step_s": step_s,
      "ratio": ratio, "quartiles": [ratio, ratio], "modelled_s": step_s,
    }  # fmt: skip

  table = report.link_table(
    {"baseline": reached(40), "ours": reached(60), "worse": reached(90)},
    [
      measured("baseline", 0.5, 1.0),
      measured("ours", 0.2, 0.5),  # By blocks; medians alone would say 0.4.
      measured("computation", 0.1, 0.2),
    ],
    80.0,
  )
  assert "8 hosts, links of 10 Mbit/s" in table
  times = [line.split("|")[-2].strip() for line in table.splitlines()[2:]]
  assert times == ["20 s", "12 s (-25 %)", ""]


def test_predictors_prepared_again_count_once(monkeypatch):
  report = load("mp2_report", "mp2/report.py", monkeypatch)
  rows = [
    {"purpose": "predictor", "kind": "published", "runs": 1, "best": 1},
    {"purpose": "predictor", "kind": "published", "runs": 4, "best": 2},
    {"purpose": "predictor", "kind": "published", "runs": 1, "best": 3},
  ]
  rows = [row | {"config": {"fit_epochs": 6}} for row in rows]
  # Longer trained is another one.
  rows.append(rows[-1] | {"config": {"fit_epochs": 30}, "best": 4})
  assert [row["best"] for row in report.once(rows)] == [2, 3, 4]
  # Nowcasters do not depend on it, and depths on another number.
  config = {"fit_epochs": 6, "study_epochs": 6}
  rows = [
    {"purpose": purpose, "best": best, "config": config | {option: 30}}
    for purpose, option, best in (
      ("nowcaster", "seeds", 1),
      ("nowcaster", "fit_epochs", 2),
      ("cut", "fit_epochs", 3),
      ("cut", "seeds", 4),
      ("cut", "study_epochs", 5),
    )
  ]
  assert [row["best"] for row in report.once(rows)] == [2, 4, 5]


def test_other_settings_stand_apart(monkeypatch):
  report = load("mp2_report", "mp2/report.py", monkeypatch)

  def row(workers, purpose, rate, seed, accuracy, **config):
    return {
      "config": {"workers": workers, **config}, "purpose": purpose,
      "method": "baseline", "learning_rate": rate, "seed": seed,
      "accuracy": accuracy, "test_loss": 0.1,
    }  # fmt: skip

  rows = [
    row(8, "tuning", 0.1, 10_000, 0.8),
    row(8, "comparison", 0.1, 0, 0.81),
    # Another rate is best with four of them, and tuning is no result.
    row(4, "tuning", 0.1, 10_000, 0.6),
    row(4, "tuning", 0.2, 10_000, 0.7),
    row(4, "comparison", 0.2, 0, 0.71),
    # Rows are older than the seed of the first weights.
    row(8, "comparison", 0.1, 1, 0.82, start_seed=None),
    row(8, "comparison", 0.1, 0, 0.83, start_seed=20_000),
  ]
  found = report.by_setting(rows)
  assert {n: runs["baseline"] for n, runs in found.items()} == {
    "8 workers": [rows[1], rows[5]],
    "4 workers": [rows[4]],
    "8 workers, first weights of seed 20000": [rows[6]],
  }
