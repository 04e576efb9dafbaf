"""`jdist train --stages`: trained and resumed runs, and refusals."""

import dataclasses
import json
import shutil
import subprocess
import sys
import time
import types

import jax
import pytest

from jdist import cli, models, pipeline
from jdist.cli import _commands, _methods
from jdist.cli.pipelines import _pipeline_run, _tables

pytest.importorskip("grain")
_RUN = (
  "train --method ssgd --workers 2 --batch-size 128 --steps 6 --warmup-epochs 0"
)


def _train(words, folder, capsys):
  words = f"{_RUN} --output {folder} {words}".split()
  assert cli.main(words) == 0
  capsys.readouterr()
  return json.loads((folder / "rows.jsonl").read_text().splitlines()[-1])


def test_stages_train_as_the_whole_model(tmp_path, capsys):
  cut = _train("--stages 2 --microbatches 4", tmp_path / "cut", capsys)
  whole = _train("--accumulate 4", tmp_path / "whole", capsys)
  assert cut["test_loss"] == pytest.approx(whole["test_loss"], rel=1e-5)
  assert cut["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-5)
  assert cut["accuracy"] == whole["accuracy"]
  assert cut["config"]["stages"] == 2


@pytest.mark.slow
def test_late_table_resumes_from_its_checkpoint(tmp_path, capsys):
  words = (
    "--augment --stages 2 --table ours --window 2 --microbatches 2 --cuts 1 "
    "--steps 4"
  )
  saved = f"--checkpoints {tmp_path / 'a'} --checkpoint-every-epochs 0.1"
  _train(f"{words} {saved}", tmp_path / "a", capsys)
  whole = _train(words, tmp_path / "b", capsys)
  again = _train(f"{words} {saved}", tmp_path / "a", capsys)
  for name in ("test_loss", "accuracy", "sent_bytes"):
    assert again[name] == whole[name]


@pytest.mark.parametrize(
  ("more", "steps"), [("", None), ("--delay-fix prediction", 1)]
)
def test_prediction_looks_as_far_as_gradients_are_late(
  more, steps, tmp_path, monkeypatch
):
  class Built(Exception):  # noqa: N818  It ends the run before it compiles.
    pass

  def build_method(*given, predicted_steps):
    raise Built(predicted_steps)

  monkeypatch.setattr(_methods, "build_method", build_method)
  words = "--stages 2 --table ours --window 2 --microbatches 2 --cuts 1"
  with pytest.raises(Built) as error:
    cli.main(f"{_RUN} --output {tmp_path} {words} {more}".split())
  assert error.value.args == (steps,)


_HALF = "--late-from 0.5 --delay-fix prediction"


@pytest.mark.slow
@pytest.mark.parametrize(
  ("more", "step"),
  [("", 1), (_HALF, 1), (_HALF, 20), (_HALF, 21)],
  ids=["late", "in time yet", "at the change", "late since"],
)
def test_killed_run_resumes_with_the_same_bits(more, step, tmp_path, capsys):
  words = (
    "--stages 2 --table ours --window 2 --microbatches 2 --cuts 1 --steps 40 "
    f"--evaluate-every-epochs 1 {more}"
  )
  killed = f"{_RUN} --output {tmp_path / 'a'} {words}"
  saved = tmp_path / "saved"
  command = [sys.executable, "-m", "jdist", *killed.split()]
  kept = f"--checkpoints {saved} --checkpoint-every-epochs 0.05"
  process = subprocess.Popen(
    [*command, *kept.split()], stderr=subprocess.DEVNULL
  )

  def newest():
    return max(
      (int(x.stem.split("_")[1]) for x in saved.glob("step_*.json")), default=0
    )

  while newest() < step and process.poll() is None:
    time.sleep(0.02)
  assert process.poll() is None, "the run was over before it could be killed"
  process.kill()
  process.wait()
  if step == 20:  # Later checkpoints are removed.
    for path in saved.glob("step_*"):
      if int(path.stem.split("_")[1]) > step:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
  again = _train(f"{words} {kept}", tmp_path / "a", capsys)
  whole = _train(words, tmp_path / "b", capsys)
  for name in ("test_loss", "accuracy", "rounds", "sent_bytes"):
    assert again[name] == whole[name]
  points = [[x["step"] for x in row["curve"]] for row in (again, whole)]
  assert points[0] == points[1]


@pytest.mark.slow
def test_late_from_runs_1f1b_before_its_window(tmp_path, capsys):
  words = "--stages 2 --microbatches 2 --cuts 1 --momentum 0.9"
  late = f"{words} --table ours --window 2"
  plain = _train(words, tmp_path / "a", capsys)
  half = _train(f"{late} --late-from 0.5", tmp_path / "b", capsys)
  fixed = _train(f"{late} {_HALF}", tmp_path / "c", capsys)
  whole = _train(late, tmp_path / "d", capsys)
  assert [x["step"] for x in half["curve"]] == [3, 6]
  assert len({x["test_loss"] for x in (plain, half, fixed, whole)}) == 4
  # Messages between the stages of one worker do not count.
  assert half["sent_bytes"] == whole["sent_bytes"] == plain["sent_bytes"]


def test_both_tables_of_a_late_run_have_a_step_at_least(monkeypatch):
  made = object.__new__(_pipeline_run.PreparedStages)
  phase = types.SimpleNamespace(
    pipe=types.SimpleNamespace(
      continue_from=lambda state, *_: state,
      grid=types.SimpleNamespace(behind=0),
    ),
    optimizer=None,
  )
  made.workload = types.SimpleNamespace(workers=None)
  made.budget, made.first = types.SimpleNamespace(num_steps=6), phase
  made.late, ends = phase, []

  def fit(self, phase, state, seed, num_steps, fit):
    ends.append(num_steps)
    return 0, []

  for name, value in {
    "_fit": fit, "_state": lambda *_: 0, "_is_late": lambda *_: False
  }.items():  # fmt: skip
    monkeypatch.setattr(_pipeline_run.PreparedStages, name, value)
  for share in (0.01, 0.5, 0.99):
    made.options = _commands.Train(late_from=share)
    made.run(0)
  assert ends == [1, 6, 3, 6, 5, 6]


@pytest.mark.parametrize("late", [False, True])
def test_second_table_continues_from_the_first(late, monkeypatch):
  made = object.__new__(_pipeline_run.PreparedStages)
  first, second = (
    types.SimpleNamespace(
      name=name, optimizer=f"{name} rule",
      pipe=types.SimpleNamespace(
        continue_from=lambda *given, name=name: (name, *given),
        grid=types.SimpleNamespace(behind=0),
      ),
    )
    for name in ("first", "second")
  )  # fmt: skip
  made.workload = types.SimpleNamespace(workers="team")
  made.budget = types.SimpleNamespace(num_steps=6)
  made.first, made.late, calls = first, second, []
  made.options = _commands.Train(late_from=0.5)

  def fit(self, phase, state, seed, num_steps, fit):
    calls.append((phase.name, state, seed, num_steps, fit))
    return f"end of {phase.name}", [f"record of {phase.name}"]

  for name, value in {
    "_fit": fit, "_is_late": lambda *_: late,
    "_state": lambda self, phase, seed: f"{phase.name} {seed}",
  }.items():  # fmt: skip
    monkeypatch.setattr(_pipeline_run.PreparedStages, name, value)
  assert made.run(4, free={"x"}, more=1) == ["record of second"]
  given = {"free": (), "more": 1}
  if late:
    assert calls == [("second", "second 4", 4, 6, given)]
  else:
    carried = ("second", "end of first", "team", "second rule")
    before = {"continues": ["record of first"]}
    assert calls == [
      ("first", "first 4", 4, 3, given),
      ("second", carried, 4, 6, given | before),
    ]
  # With one table all may be changed that a longer run may have.
  calls.clear()
  made.first = None
  made.run(4, free={"x"})
  assert calls == [("second", "second 4", 4, 6, {"free": {"x"}})]


def test_stages_have_about_equally_many_operations():
  # The first layer has nearly all operations.
  model = models.build(
    "mlp", input_shape=(8, 8, 1), num_classes=10, hidden_sizes=(512, 8, 8),
    abstract=True,
  )  # fmt: skip
  batch = {"image": jax.ShapeDtypeStruct((4, 8, 8, 1), "float32")}
  for stages, cuts in ((2, (1,)), (4, 4), (5, 5)):
    found = _pipeline_run._balanced(model.layers, stages, batch, "image")
    assert found == cuts


@pytest.mark.parametrize(
  ("words", "told"),
  [
    ("--table gpipe", "`--table` must be left out without `--stages`"),
    ("--window 2", "`--window` must be left out without `--stages`"),
    ("--stages 0", "`--stages` must be at least 1"),
    (
      "--stages 4 --microbatches 4",
      "`cuts` must be an int from 1 to 2",
    ),
    ("--stages 2 --table none", "a table must be one of naive, gpipe"),
    ("--stages 2 --window 2", "`window` is no option of 1f1b"),
    ("--stages 2 --accumulate 2", "`--accumulate` must be left out with"),
    ("--stages 2 --microbatches 5", "`--batch-size` must divide evenly"),
    ("--stages 2 --cuts 1 2", "`--cuts` must be 1 layer for the 2 stages"),
    ("--stages 2 --workers 32", "`--stages` times `--workers` must be at most"),
    ("--stages 2 --method mp2 --predictor x", "`--stages` must be left out"),
    ("--stages 2 --late-from 0.5", "`--late-from` must be left out with"),
    (
      f"--stages 2 --table ours {_HALF} --steps 1",
      "`--late-from` must have a step before it and one after it",
    ),
    (
      "--stages 2 --table ours --late-from 1",
      "`--late-from` must be in (0, 1), got 1",
    ),
    (
      "--stages 2 --delay-fix prediction",
      "`--delay-fix` must be left out with `--table` 1f1b",
    ),
    ("--stages 2 --table paci", "`table` must be synchronous, or have delayed"),
  ],
)
def test_bad_stages_are_refused_in_one_line(words, told, refusal):
  workers = "" if "--workers" in words else "--workers 1"
  assert told in refusal(f"train --steps 1 {workers} {words}")


@pytest.mark.parametrize("before", ["", "launch -n 4 -- "])
@pytest.mark.parametrize("again", ["--table gpipe", "--table=gpipe"])
def test_pipeline_train_is_given_one_table(before, again, refusal):
  told = refusal(f"{before}pipeline train 1f1b --steps 1 {again}")
  assert "`--table` must be left out where" in told and "'1f1b'" in told


def test_pipeline_train_is_train_with_stages(tmp_path, capsys):
  words = "--model cnn --workers 1 --steps 1 --method ssgd --batch-size 32"
  words = f"pipeline train gpipe {words} --output {tmp_path}"
  assert cli.main(words.split()) == 0
  capsys.readouterr()
  row = json.loads((tmp_path / "rows.jsonl").read_text())
  assert (row["config"]["stages"], row["config"]["table"]) == (4, "gpipe")


def test_table_has_two_micro_batches_for_each_stage_by_default():
  options = _commands.Train(stages=3, table="gpipe")
  assert _tables.of_options(options).num_microbatches == 6
  given = dataclasses.replace(options, microbatches=4)
  assert _tables.of_options(given).num_microbatches == 4
  # PipeDream updates after every micro-batch.
  assert _tables.make("pipedream", 2, 8).num_microbatches == 1


@pytest.mark.parametrize("name", ["microbatches", "window", "chunks"])
def test_numbers_of_a_table_from_a_file_are_its_own(name, tmp_path):
  path = tmp_path / "mine.txt"
  path.write_text(pipeline.format_table(pipeline.make_table("1f1b", 3, 5)))
  options = _commands.Train(stages=3, table=str(path))
  assert _tables.of_options(options).num_microbatches == 5
  with pytest.raises(ValueError, match=f"`--{name}` must be left out with a"):
    _tables.of_options(dataclasses.replace(options, **{name: 2}))
