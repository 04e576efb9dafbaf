"""Runs that diverge: exit status, row, checkpoints, and the guard."""

import json
import math
import sys
import types
import warnings

import pytest

from jdist import cli, training
from jdist.cli import _run_end
from jdist.cli.report import _status
from jdist.training import comparison

pytest.importorskip("grain")
_RUN = "train --method ssgd --workers 2 --batch-size 64 --warmup-epochs 0"


def _row(folder):
  return json.loads((folder / "rows.jsonl").read_text().splitlines()[-1])


def test_diverged_run_exits_3_and_saves_only_finite_states(tmp_path, capsys):
  words = (
    f"{_RUN} --steps 8 --learning-rate 1e30 --schedule constant --output "
    f"{tmp_path / 'out'} --checkpoints {tmp_path / 'c'} "
    "--checkpoint-every-epochs 0.05"
  )
  with pytest.warns(RuntimeWarning, match="was not saved: the checkpoint of"):
    assert cli.main(words.split()) == 3
  lines, told = capsys.readouterr()
  warned = [x for x in lines.splitlines() if x.startswith("Warning: the loss")]
  assert warned == [
    "Warning: the loss is not finite, or above 1,000, after step 2. Ctrl-C "
    "ends the run."
  ]
  assert f"States that are finite stay in {tmp_path / 'c'}." in told
  assert "jdist: diverged: the loss is not finite" in told
  assert "`--learning-rate`, 1e+30 here" in told
  assert _row(tmp_path / "out")["diverged"] is True
  assert _row(tmp_path / "out")["test_loss"] is None


@pytest.mark.parametrize(
  ("metrics", "losses", "diverged"),
  [
    ({"loss": 5e14, "accuracy": 0.1}, [1.0], True),
    ({"loss": 999.0, "accuracy": 0.1}, [math.nan], False),
    # Another loss than a cross-entropy may be of any size.
    ({"loss": 5e14}, [1.0], False),
    ({"accuracy": 0.1}, [5e14], False),
    ({"loss": math.nan}, [1.0], True),
    ({}, [1.0, math.inf], True),
    ({}, [], False),
  ],
)
def test_loss_of_a_classifier_may_not_be_beyond_reason(
  metrics, losses, diverged
):
  assert training.is_diverged(metrics, losses) is diverged


def test_comparison_without_a_finite_run_names_its_methods(
  tmp_path, monkeypatch, capsys
):
  tuned = comparison.Tuned(0.1, (0.1,), None, diverged=True)
  found = comparison.Compared({}, {"ssgd": tuned})
  monkeypatch.setattr(comparison, "compare", lambda *given, **options: found)
  words = f"compare --methods ssgd --workers 2 --output {tmp_path / 'out'}"
  assert cli.main(words.split()) == 3
  assert "ssgd ended with a loss that is not finite" in capsys.readouterr().err


def test_run_that_was_never_finite_keeps_no_states(tmp_path, capsys):
  words = (
    f"{_RUN} --steps 4 --learning-rate 1e30 --schedule constant --output "
    f"{tmp_path / 'out'} --checkpoints {tmp_path / 'c'}"
  )

  # Python shows warnings like this; pytest would keep them.
  def show(*warning):
    print(warnings.formatwarning(*warning[:4]), end="", file=sys.stderr)

  with warnings.catch_warnings():
    warnings.simplefilter("default", RuntimeWarning)
    warnings.showwarning = show
    assert cli.main(words.split()) == 3
  warned, told = capsys.readouterr().err.splitlines()
  assert warned == (
    "jdist: warning: The state after step 4 is not finite and was not saved: "
    "there is no checkpoint."
  )
  assert told.startswith("jdist: diverged:") and "stay in" not in told
  assert not list((tmp_path / "c").iterdir())


def test_step_without_a_finite_loss_is_told_once_and_at_once(tmp_path, capsys):
  config = {"output": str(tmp_path), "method": "a", "learning_rate": 1.0}
  config |= {"workers": 1, "seed": 0}
  status = _status.Status(config, lambda path: "x", "run", "heading", 9)
  good = training.Record(1, 1, 1.0, 1.0, {}, 1.0, 1.0)
  for step, diverged in ((1, False), (2, True), (3, True), (4, False)):
    capsys.readouterr()
    status.step(good._replace(step=step, diverged=diverged), "")
    told = capsys.readouterr().out
    assert ("not finite, or above 1,000, after step 2." in told) == (step == 2)
    status._write(page=False)
    doing = json.loads((tmp_path / "status.json").read_text())["doing"]
    assert ("the loss is not finite" in doing) == diverged
  # A comparison tries rates that may diverge.
  status._warned = False
  status.step(good._replace(diverged=True), "", run="tuning ssgd 1")
  assert not capsys.readouterr().out


def test_steps_of_runs_before_move_the_bar(tmp_path):
  config = {"output": str(tmp_path), "workers": 1, "seed": 0}
  status = _status.Status(config, lambda path: "x", "run", "heading", 90)
  moved: list[tuple[int, str]] = []
  status.bar.update = lambda *told: moved.append(told)
  status.step(training.Record(3, 1, 1.0, 0.5, {}, 1.0, 1.0), "", "ssgd 2", 40)
  ((step, told),) = moved
  assert step == 43 and told.startswith("ssgd 2  loss 0.500")


def test_tuning_never_chooses_a_diverged_rate(tmp_path, capsys):
  words = (
    "compare --methods ssgd --workers 2 --batch-size 64 --steps 6 --seeds 0 "
    f"--warmup-epochs 0 --grid-extensions 0 --output {tmp_path}"
  )
  grid = "--learning-rate 0.001 1e30"
  assert cli.main(f"{words} {grid}".split()) == 0
  assert _row(tmp_path)["learning_rate"] == 0.001
  # No rate is chosen if every rate diverges.
  grid = "--learning-rate 1e29 1e30"
  assert cli.main(f"{words}/2 {grid}".split()) == 3
  told = capsys.readouterr()
  assert "it diverged at every learning rate tried" in told.out
  assert "ssgd ended with a loss that is not finite" in told.err


def test_unknown_loss_is_no_divergence(tmp_path, capsys):
  words = (
    "train --method msdpu --workers 2 --batch-size 64 --warmup-epochs 0 "
    f"--steps 2 --output {tmp_path / 'out'} --checkpoints {tmp_path / 'c'} "
    "--checkpoint-every-epochs 0.04 --evaluate-every-epochs 0.04"
  )
  assert cli.main(words.split()) == 0
  assert (tmp_path / "c" / "step_00000001").is_dir()
  # The step that compiles has no rate of images either.
  lines = capsys.readouterr().out.splitlines()
  one, two = (x for x in lines if x.startswith("step "))
  assert one.startswith("step 1/2") and one.endswith(" – images/s")
  assert two.startswith("step 2/2") and "–" not in two


@pytest.mark.parametrize("driver", [None, "clock"])
def test_a_server_is_not_told_to_skip_gradients(driver):
  record = training.Record(2, 1, 1.0, 1.0, {}, 1.0, 1.0, "wall", True)
  options = types.SimpleNamespace(
    checkpoints="there", driver=driver, learning_rate=0.1
  )
  with pytest.raises(_run_end.DivergedError) as told:
    _run_end.check(options, [record], saved=False)
  assert ("--skip-nonfinite" in str(told.value)) == (driver is None)


def test_first_record_that_diverged_is_named():
  good = training.Record(1, 1, 1.0, 1.0, {}, 1.0, 1.0)
  bad = good._replace(diverged=True)
  records = [good, bad._replace(step=2), bad._replace(step=4)]
  options = types.SimpleNamespace(
    checkpoints=None, driver=None, learning_rate=0.1
  )
  with pytest.raises(_run_end.DivergedError, match="since step 2 of 4 "):
    _run_end.check(options, records, saved=False)
