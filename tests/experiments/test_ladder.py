"""The rungs of the ladder send what they say, and rows name clean code."""

import dataclasses

import jax
import numpy as np
import pytest

from jdist import training
from tests.experiments import _loading

_TEXT = 65


@pytest.fixture
def ladder(monkeypatch):
  _loading.enter("records", monkeypatch)
  # Optax's Muon raises floats to powers of integers.
  with jax.numpy_dtype_promotion("standard"):
    yield _loading.load("ladder", "records/ladder.py", monkeypatch)


@pytest.fixture
def run(ladder, monkeypatch):
  return _loading.load("run", "records/run.py", monkeypatch)


def test_rung_sends_as_few_bytes_as_its_name_says(ladder):
  method = ladder.METHODS["muloco-int2"]
  setting = dataclasses.replace(ladder.SETTINGS["cpu"], num_layers=1)
  for rung in ladder.RUNGS:
    sent = ladder.sent(method, setting, _TEXT, rung)
    assert sent.ratio >= rung
    if rung > 10:  # There, each step has a mean.
      # One round more would be more bytes than the rung allows.
      assert sent.ratio * sent.rounds / (sent.rounds + 1) < rung
  # The formula counts codes and scales; the program rows of whole blocks, too.
  assert sent.by_formula == pytest.approx(sent.run, rel=0.02)
  # A float32 all-reduce sends 7 bytes of a parameter, two bits and two scales
  # of 256 entries a fourteenth of that.
  assert sent.ratio * sent.rounds / setting.steps == pytest.approx(
    14.2, rel=0.02
  )


@pytest.mark.parametrize("growth", [0.0, 1.0])
def test_rounds_end_with_the_run_and_grow_as_the_rate_falls(ladder, growth):
  setting, method = ladder.SETTINGS["cpu"], ladder.Method(growth=growth)
  for rounds in (15, 70, 1540):
    ends = ladder.ends(method, setting, rounds)
    assert ends.sum() == rounds
    assert ends[-1]
    lengths = np.diff(np.flatnonzero(ends), prepend=-1)
    if not growth:
      assert lengths.max() - lengths.min() <= 1
  assert growth == 0 or lengths[-1] > lengths[0]


def test_rows_of_changed_or_unknown_code_are_refused(
  run, tmp_path, monkeypatch
):
  report = _loading.load("report", "records/report.py", monkeypatch)
  for commit in ("unknown", "0123456789ab+", ""):
    path = tmp_path / f"{len(commit)}.jsonl"
    training.append_rows(path, [{"commit": "0123456789ab"}, {"commit": commit}])
    with pytest.raises(ValueError, match="`commit` must name a clean checkout"):
      report.studies.read(path)


def test_page_says_what_the_rows_say(run, monkeypatch):
  report = _loading.load("report", "records/report.py", monkeypatch)
  folder = _loading.FOLDER / "records"
  parts = report.parts_of(
    report.studies.read(folder / "results" / "ladder.jsonl")
  )
  page = (folder / "README.md").read_text()
  assert report.studies.filled(page, parts) == page
  # A changed digit is found.
  changed = page.replace("| 802.9 |", "| 802.8 |")
  assert report.studies.filled(changed, parts) == page != changed


def test_best_point_has_the_lowest_mean_and_no_run_that_diverged(run):
  row = {"outer_rate": 1.0, "outer_momentum": 0.0}
  rows = [
    row | {"learning_rate": rate, "seed": seed, "val_loss": loss}
    for rate, losses in ((1, (1.0, 3.0)), (2, (1.9, 1.9)), (4, (1.0, None)))
    for seed, loss in enumerate(losses)
  ]
  assert run.best_point(rows) == (2, 1.0, 0.0, None)


@pytest.mark.slow
def test_command_tunes_compares_and_skips_what_is_there(
  run, tmp_path, monkeypatch, capsys
):
  text = tmp_path / "text"
  text.write_bytes(
    bytes(np.random.default_rng(0).integers(65, 70, 2000, np.uint8))
  )
  rows = tmp_path / "rows.jsonl"
  command = [
    "run.py", "diloco@4", "muloco-int4-growing@10",
    "--setting", "tiny", "--text", str(text), "--rows", str(rows),
    "--outers", "1:0", "1:0.5", "--commit", "0123456789ab",
  ]  # fmt: skip
  monkeypatch.setattr(
    "sys.argv", [*command, "--rates", "0.001", "0.002", "0.004"]
  )
  run.main()
  found = training.read_rows(rows)
  assert {row["purpose"] for row in found} == {"tuning", "comparison"}
  assert all(
    row["ratio"] >= row["rung"] and row["val_loss"] < 2 for row in found
  )
  compared = [row for row in found if row["purpose"] == "comparison"]
  assert [row["seed"] for row in compared] == 2 * [*range(10)]
  assert len({row["val_loss"] for row in compared}) == 20
  run.main()
  assert len(training.read_rows(rows)) == len(found)
