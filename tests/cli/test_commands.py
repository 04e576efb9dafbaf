"""Whole runs of `train` and `compare`, as small as possible."""

import io
import json
import re
import signal
import subprocess
import sys
import types

import pytest

from jdist import cli, training
from jdist.cli import _compare
from jdist.training import comparison
from tests import _processes

_TINY = [
  "--steps", "6", "--workers", "4", "--batch-size", "32",
  "--evaluate-every-epochs", "0.05", "--warmup-epochs", "0",
]  # fmt: skip
_ROUNDS = [*_TINY, "--interval", "2"]


def test_compare_writes_rows_a_table_and_a_page(tmp_path, capsys):
  words = ["compare", *_ROUNDS, "--methods", "ssgd", "local_sgd"]
  words += ["--seeds", "0", "1", "--learning-rate", "0.05"]
  words += ["--output", str(tmp_path / "out")]
  assert cli.main(words) == 0
  out, error = capsys.readouterr()
  assert error == ""  # Progress is shown on a terminal only.
  assert "1442 training and 355 test images" in out
  assert "9,610 parameters; N = 4 workers" in out
  for line in out.splitlines():
    if "│ ssgd" in line:
      assert "±" in line and "1.0x" in line
  assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
    "report.html",
    "rows.jsonl",
    "status.json",
  ]
  assert "ssgd, local_sgd. digits: 1442" in out and "--workers" in out
  rows = training.read_rows(tmp_path / "out" / "rows.jsonl")
  assert [(r["method"], r["seed"]) for r in rows] == [
    ("ssgd", 0), ("local_sgd", 0), ("ssgd", 1), ("local_sgd", 1),
  ]  # fmt: skip
  for row in rows:  # Each row is complete by itself.
    assert set(row) >= {
      "config", "seed", "commit", "device", "versions", "method", "workers",
      "learning_rate", "accuracy", "test_loss", "train_loss", "steps",
      "rounds", "sent_bytes", "train_s", "samples_per_s", "curve",
    }  # fmt: skip
    assert row["config"]["dataset"] == "digits"
    assert row["config"]["interval"] == 2
    assert row["steps"] == row["curve"][-1]["step"] == 6
    assert row["accuracy"] == row["curve"][-1]["accuracy"]
    json.dumps(row, allow_nan=False)
  ring = 2 * 3 / 4
  assert rows[0]["sent_bytes"] == 6 * 4 * 9610 * ring
  assert rows[1]["sent_bytes"] == rows[1]["rounds"] * 4 * 9610 * ring


@pytest.mark.slow
def test_compare_tunes_on_held_out_samples(tmp_path, capsys):
  words = ["compare", *_ROUNDS, "--methods", "local_sgd", "--seeds", "0"]
  words += ["--learning-rate", "1e-6", "0.1", "--output", str(tmp_path)]
  words += ["--tuning-seeds", "1"]
  assert cli.main(words) == 0
  out = capsys.readouterr().out
  # The highest rate was best, so the grid was extended once in its ratio.
  assert "local_sgd: learning rate 0.1, of 1e-06, 0.1, 10000," in out
  assert "±" not in out.split("Mean ±")[0]  # One seed has no spread.
  tuning = training.read_rows(tmp_path / "tuning.jsonl")
  assert [r["learning_rate"] for r in tuning] == [1e-6, 0.1, 1e4]
  (row,) = training.read_rows(tmp_path / "rows.jsonl")
  assert row["learning_rate"] == 0.1
  # The same command finds its rows, and runs only new trials.
  assert cli.main([*words, "--seeds", "0", "1", "--grid-extensions", "0"]) == 0
  out = capsys.readouterr().out
  assert "4 rows are in" in out
  assert "Warning: local_sgd's best rate is the highest" in out
  assert len(training.read_rows(tmp_path / "tuning.jsonl")) == 3
  rows = training.read_rows(tmp_path / "rows.jsonl")
  assert [r["seed"] for r in rows] == [0, 1] and rows[0] == row


def test_same_command_resumes_a_run(tmp_path, capsys):
  out, ckpt = str(tmp_path / "out"), str(tmp_path / "ckpt")
  words = ["train", *_ROUNDS, "--method", "diloco", "--output", out]
  words += ["--checkpoints", ckpt, "--checkpoint-every-epochs", "0.05"]
  assert cli.main(words) == 0
  first = capsys.readouterr().out
  assert "step 2/6" in first and "step 6/6" in first
  assert "; 6 steps on " in " ".join(first.split()) and "epochs on" not in first
  # The same command once more has nothing to train, and finds the same.
  assert cli.main(words) == 0
  again = capsys.readouterr().out
  assert "Nothing left to train: step 6 of 6.\nstep 6/6" in again
  # The evaluation is repeated, and all other lines are equal.
  assert again.splitlines()[-2] == first.splitlines()[-2]
  rows = training.read_rows(tmp_path / "out" / "rows.jsonl")
  for field in rows[0].keys() - {"config"}:
    assert rows[0][field] == rows[1][field], field
  assert rows[1].keys() - rows[0].keys() == {"resumed_from_step"}
  # Other options make another run.
  for more, told in (
    (["--interval", "3"], "`--interval` is 2 in the checkpoint and 3 here."),
    # These methods' states have other arrays.
    (["--method", "local_sgd"], "`--method` is diloco in the checkpoint and"),
    (["--outer", "sgd"], "`--outer` is not given in the checkpoint and sgd"),
  ):
    assert cli.main([*words, *more]) == 2
    out, error = capsys.readouterr()
    # Only what the run would have been stands in front.
    assert told in error and error.count("\n") == 1 and "step " not in out
  # Without the last checkpoint, the run resumes from the one before.
  for path in (tmp_path / "ckpt").glob("step_00000006*"):
    path.rename(tmp_path / path.name)
  assert cli.main(words) == 0
  assert "step 6/6" in capsys.readouterr().out
  rows = training.read_rows(tmp_path / "out" / "rows.jsonl")
  assert rows[2]["accuracy"] == rows[0]["accuracy"]
  assert rows[2]["test_loss"] == rows[0]["test_loss"]


def test_tensorboard_is_given_the_rate_of_the_run(tmp_path, monkeypatch):
  given = {}

  def stop(directory, **options):
    given.update(options, directory=directory)
    raise KeyboardInterrupt

  monkeypatch.setattr(training, "MetricsWriter", stop)
  words = ["train", *_TINY, "--method", "ssgd", "--tensorboard", "board"]
  words += ["--learning-rate", "0.2", "--schedule", "constant"]
  monkeypatch.chdir(tmp_path)
  assert cli.main(words) == 130
  assert given["directory"] == "board"
  assert given["settings"]["method"] == "ssgd"
  assert float(given["learning_rate"](3)) == pytest.approx(0.2)


@pytest.mark.smoke
def test_train_makes_a_new_directory_by_default(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert cli.main(["train", *_TINY, "--method", "ssgd"]) == 0
  (made,) = (tmp_path / "runs").iterdir()
  assert made.name.startswith("train-digits-")
  assert {p.name for p in made.iterdir()} >= {"rows.jsonl", "status.json"}


# Runs the command line in a process that can be interrupted: background
# processes of a shell ignore SIGINT, and so do their children.
_INTERRUPTIBLE = """
import signal, sys
from jdist import cli
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(cli.main())
"""


@pytest.mark.slow
def test_stopped_process_ends_the_others(tmp_path):
  port = _processes.free_port()
  words = (
    "train", "--method", "ssgd", "--workers", "2", "--steps", "10000000",
    "--evaluate-every-epochs", "1", "--output", str(tmp_path),
    "--num-processes", "2", "--coordinator-address", f"127.0.0.1:{port}",
  )  # fmt: skip
  started = [
    subprocess.Popen(
      (sys.executable, "-c", _INTERRUPTIBLE, *words, "--process-id", str(i)),
      stdout=subprocess.PIPE,
      text=True,
    )
    for i in range(2)
  ]
  try:
    # Both are in the middle of training once the first has been evaluated.
    assert started[0].stdout.readline()
    started[1].send_signal(signal.SIGINT)
    # The timeout is long, because Python handles the signal only when its
    # collective has returned, which takes long on a busy machine.
    assert started[1].wait(timeout=300) == 130
    assert started[0].wait(timeout=300) not in (0, None)
  finally:
    for process in started:
      process.kill()
      process.stdout.close()
      process.wait()


def test_rates_are_tuned_on_a_part_of_the_training_set():
  class Whole:
    def hold_out(self):
      return "a part"

  whole = Whole()
  fit = _compare._Fit(None, whole, None, None, 1)
  assert fit._workloads == {"comparison": whole, "tuning": "a part"}


def test_table_counts_bytes_from_the_method_that_sends_most():
  """And takes the mean rate of the runs that have one."""

  def row(seed, sent_bytes, rate):
    return {
      "seed": seed, "accuracy": 0.5, "test_loss": 1.0, "rounds": 3,
      "sent_bytes": sent_bytes, "samples_per_s": rate, "learning_rate": 0.1,
    }  # fmt: skip

  found = {
    "local_sgd": [row(0, 1e6, 100.0), row(1, 3e6, None)],
    "ssgd": [row(0, 8e6, 300.0), row(1, 8e6, 500.0)],
  }
  options = types.SimpleNamespace(
    seeds=[0, 1], methods=["local_sgd", "ssgd"], dataset="d", model="m",
    workers=4,
  )  # fmt: skip
  made = pytest.importorskip("rich.console")
  console = made.Console(file=io.StringIO(), width=200)
  _compare._print_table(console, found, options)
  lines = console.file.getvalue().splitlines()
  first, second = (next(x for x in lines if f"│ {y}" in x) for y in found)
  assert " 2 " in first and "4.0x" in first and " 100 " in first
  assert " 8 " in second and "1.0x" in second and " 400 " in second


def test_diverged_run_has_no_value_in_the_table():
  row = {
    "seed": 0, "bits_per_token": None, "test_loss": None, "rounds": 3,
    "sent_bytes": 0.0, "samples_per_s": None, "learning_rate": 0.1,
  }  # fmt: skip
  options = types.SimpleNamespace(
    seeds=[0], methods=["ssgd"], dataset="d", model="m", workers=1
  )
  made = pytest.importorskip("rich.console")
  console = made.Console(file=io.StringIO(), width=200)
  _compare._print_table(console, {"ssgd": [row]}, options)
  table = console.file.getvalue()
  assert re.search(r"ssgd \(1 diverged\) +│ +nan ", table)
  # One worker sends nothing, and the only step has no rate.
  assert re.search(r"│ +0 +│ +- +│ +– +│ +0\.1 +│", table)


def test_bar_is_extended_by_trials_that_tuning_adds(monkeypatch):
  totals, before = [], []
  prepared = types.SimpleNamespace(
    peak=0.1,
    budget=types.SimpleNamespace(num_steps=5),
    run=lambda seed, label, **given: before.append(label.keywords["before"]),
  )
  monkeypatch.setattr(_compare._workload, "Prepared", lambda *given: prepared)
  monkeypatch.setattr(comparison, "summarize", lambda records: {})
  status = types.SimpleNamespace(
    bar=types.SimpleNamespace(extend=totals.append),
    note=lambda **entries: None,
    step=lambda *given, **options: None,
  )
  workload = types.SimpleNamespace(hold_out=lambda: None)
  options = types.SimpleNamespace(workers=2)
  fit = _compare._Fit(options, workload, None, status, 2)
  for seed in range(3):
    fit(comparison.Trial("comparison", "ssgd", 0.1, seed))
  assert totals == [10, 10, 15]
  assert before == [0, 5, 10]


@pytest.mark.parametrize(
  ("present", "rates", "trials"),
  [
    (0, "0.1", 3),
    (2, "0.1", 1),
    (9, "0.1", 1),
    # Three runs after two of each rate.
    (0, "0.1 0.2 --tuning-seeds 2", 7),
  ],
)
def test_bar_of_a_comparison_counts_rows_that_are_there(
  present, rates, trials, tmp_path, monkeypatch, capsys
):
  seen, studies = [], []

  def begun(study, rows, fit, **options):
    del rows, options
    seen.append(fit.trials)
    studies.append(study)
    raise KeyboardInterrupt

  monkeypatch.setattr(comparison, "compare", begun)
  monkeypatch.setattr(comparison.Rows, "__len__", lambda self: present)
  words = ["compare", *_ROUNDS, "--methods", "local_sgd", "--seeds", "3", "4"]
  words += ["5", "--learning-rate", *rates.split()]
  assert cli.main([*words, "--output", str(tmp_path)]) == 130
  assert seen == [trials]
  ((study,), (out, error)) = studies, capsys.readouterr()
  # The preset has three of them.
  several = 2 if "tuning" in rates else 3
  assert study.tuning_seeds == (10_000, 10_001, 10_002)[:several]
  assert (study.order, study.max_extensions) == ("seed", 2)
  there = f"{present} rows are in {tmp_path}; runs among them are not repeated."
  assert (there in " ".join(out.split())) == (present > 0)
  assert error.startswith(
    f"jdist: interrupted: {present} rows are saved in {tmp_path}. This "
    "resumes: jdist compare "
  )


def test_table_of_an_interrupt_has_rows_of_the_chosen_rates(
  tmp_path, monkeypatch
):
  def interrupted(study, rows, fit, *, rank, on_tuned):
    del rows, fit, rank
    best = comparison.Tuned(0.2, study.learning_rates, None)
    on_tuned("local_sgd", best)
    raise KeyboardInterrupt

  asked = []
  monkeypatch.setattr(comparison, "compare", interrupted)
  monkeypatch.setattr(
    comparison.Rows, "find", lambda self, trial: asked.append(trial)
  )
  words = ["compare", *_ROUNDS, "--methods", "local_sgd", "--seeds", "3"]
  words += ["--learning-rate", "0.1", "0.2", "--output", str(tmp_path)]
  assert cli.main(words) == 130
  assert asked == [comparison.Trial("comparison", "local_sgd", 0.2, 3)]


def test_tuning_keeps_one_program_and_a_comparison_all(monkeypatch):
  """Tuning proceeds rate by rate, and never returns to a program."""
  made, labels, notes = [], [], []

  def prepare(workload, options, method, rate):
    def run(seed, *, label, on_record):
      labels.append(label.keywords["run"])
      on_record("record")

    made.append((workload, method, rate))
    budget = types.SimpleNamespace(num_steps=5)
    return types.SimpleNamespace(peak=rate, budget=budget, run=run)

  monkeypatch.setattr(_compare._workload, "Prepared", prepare)
  monkeypatch.setattr(comparison, "summarize", lambda x: {"records": len(x)})
  status = types.SimpleNamespace(
    bar=types.SimpleNamespace(extend=lambda total: None), step=lambda: None,
    note=lambda **entries: notes.append(entries),
  )  # fmt: skip
  rows = types.SimpleNamespace(make_row=lambda trial, found: (trial, found))
  whole = types.SimpleNamespace(hold_out=lambda: "a part")
  options = types.SimpleNamespace(workers=2)
  fit, sizes = _compare._Fit(options, whole, rows, status, 9), []
  trials = [
    comparison.Trial(*x)
    for x in (
      ("tuning", "ssgd", 0.1, 0), ("tuning", "ssgd", 0.1, 1),
      ("tuning", "ssgd", 0.2, 0), ("tuning", "diloco", 0.1, 0),
      ("comparison", "ssgd", 0.2, 0), ("comparison", "diloco", 0.1, 0),
      ("comparison", "ssgd", 0.2, 1),
    )
  ]  # fmt: skip
  measured = {"workers": 2, "records": 1}
  for trial in trials:
    assert fit(trial) == measured
    sizes.append(len(fit._compiled))
  assert made == [
    ("a part", "ssgd", 0.1), ("a part", "ssgd", 0.2), ("a part", "diloco", 0.1),
    (whole, "ssgd", 0.2), (whole, "diloco", 0.1),
  ]  # fmt: skip
  assert sizes == [1, 1, 1, 1, 2, 3, 3]
  assert labels == [
    "tuning ssgd 0.1", "tuning ssgd 0.1", "tuning ssgd 0.2",
    "tuning diloco 0.1", "ssgd seed 0", "diloco seed 0", "ssgd seed 1",
  ]  # fmt: skip
  # The page shows the row so far, and none after it.
  shown = [x["row"] for x in notes if "row" in x]
  assert shown[::2] == [(trial, measured) for trial in trials]
  assert shown[1::2] == [None] * len(trials)


@pytest.mark.parametrize(
  ("tuned", "told"),
  [
    ((0.1, (0.1, 0.2), None), ["ssgd: learning rate 0.1, of 0.1, 0.2, by"]),
    (
      (0.2, (0.1, 0.2), "highest"),
      ["ssgd: learning rate 0.2, of 0.1", "Warning: ssgd's best rate is the h"],
    ),
    (
      (0.1, (0.1, 0.2), "highest", True),
      ["Warning: ssgd is left out: it diverged at every learning rate tried"],
    ),
  ],
)  # fmt: skip
def test_tuned_rate_is_told_with_its_place_in_the_grid(tuned, told):
  lines = []
  console = types.SimpleNamespace(print=lines.append)
  _compare._print_tuned(console, "ssgd", comparison.Tuned(*tuned))
  assert len(lines) == len(told)
  assert all(x.startswith(y) for x, y in zip(lines, told, strict=True))
