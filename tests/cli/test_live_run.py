"""`jdist train --driver threads`: lost workers, saved and resumed runs."""

import json
import os
import signal

import jax
import pytest

from jdist import cli, training
from jdist.cli.servers import _server_parts

pytest.importorskip("simpy")

CLUSTER = """
[[nodes]]
name = "worker"
count = 2

[profile]
seconds_per_sample = 0.001
"""


class LostError(BaseException):
  """The process in which a run is watched is killed."""


@pytest.fixture
def train(tmp_path, monkeypatch):
  """Trains; calls `at` in an evaluation, by its number from 1."""
  path = tmp_path / "cluster.toml"
  path.write_text(CLUSTER)
  words = [
    "train", "--protocol", "bsp", "--driver", "threads", "--cluster", str(path),
    "--batch-size", "64", "--epochs", "2", "--evaluate-every-epochs", "1",
    "--output", str(tmp_path / "out"), "--checkpoints", str(tmp_path / "kept"),
  ]  # fmt: skip
  measure = training.Evaluator.measure

  def run(*more, at=None):
    evaluations = []

    def measured(self, *model):
      evaluations.append(model)
      if at is not None and len(evaluations) == at[0]:
        at[1]()
      return measure(self, *model)

    monkeypatch.setattr(training.Evaluator, "measure", measured)
    return cli.main([*words, *more])

  # The workers' threads do not inherit the settings of this thread.
  jax.config.update("jax_numpy_dtype_promotion", "standard")
  yield run
  jax.config.update("jax_numpy_dtype_promotion", "strict")


def test_permanently_lost_worker_ends_the_run_in_one_line(
  train, monkeypatch, capsys
):
  def work(*args):
    raise RuntimeError("There is no memory.")

  monkeypatch.setattr(_server_parts, "work", work)
  assert train() == 75
  error = capsys.readouterr().err
  assert error.startswith("jdist: error: worker0 was lost 4 times before")
  assert "RuntimeError: There is no memory. The same command starts" in error
  assert error.count("\n") == 1


def lose():
  raise LostError


def test_run_lost_during_an_evaluation_resumes(train, tmp_path, capsys):
  with pytest.raises(LostError):
    train(at=(2, lose))
  records = tmp_path / "kept" / "records.json"
  assert len(json.loads(records.read_text())["body"]) == 1
  capsys.readouterr()
  assert train() == 0
  # Behind the heading, whose lines depend on the width.
  first, last, _ = capsys.readouterr().out.splitlines()[-3:]
  assert first == "Resumes from update 46."
  assert last.startswith("update 46 ") and "accuracy" in last
  (row,) = training.read_rows(tmp_path / "out" / "rows.jsonl")
  assert [x["step"] for x in row["curve"]] == [23, 46]
  assert (row["driver"], row["clock"]) == ("threads", "wall")
  # The model of the first mark is not in the last checkpoint.
  records.unlink()
  with pytest.warns(RuntimeWarning, match="after update 23 was lost with the"):
    assert train() == 0
  _, row = training.read_rows(tmp_path / "out" / "rows.jsonl")
  assert [x["step"] for x in row["curve"]] == [46]


def test_sigterm_saves_the_run(train, tmp_path, capsys):
  def terminate():
    os.kill(os.getpid(), signal.SIGTERM)

  assert train("--epochs", "200", at=(1, terminate)) == 143
  error = capsys.readouterr().err.splitlines()[-1]
  update = int(error.split("after update ")[1].split(",")[0])
  assert "is saved in" in error and update >= 23
  assert (tmp_path / "kept" / f"update_{update:010d}").is_dir()


def test_checkpoint_of_another_run_names_the_option(train, capsys):
  assert train("--epochs", "1") == 0
  assert train("--epochs", "1", "--seed", "1") == 2
  error = capsys.readouterr().err
  assert "`--seed` is 0 in the checkpoint and 1 here. Resume" in error
  assert train("--epochs", "1", "--driver", "clock") == 2
  error = capsys.readouterr().err
  assert (
    "error: `--driver` is threads in the checkpoint and clock here" in error
  )


def test_clock_and_threads_train_alike(train, tmp_path):
  """A barrier makes the order of messages irrelevant."""
  for driver in ("clock", "threads"):
    kept = str(tmp_path / driver)
    assert train("--driver", driver, "--checkpoints", kept) == 0
  clock, threads = training.read_rows(tmp_path / "out" / "rows.jsonl")
  assert (clock["clock"], threads["clock"]) == ("virtual", "wall")
  for one, other in zip(clock["curve"], threads["curve"], strict=True):
    assert one["step"] == other["step"]
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


LINKS = """
[[links]]
between = ["worker*", "switch"]
bandwidth_gbit_per_s = 1.0

[[links]]
between = ["server", "switch"]
bandwidth_gbit_per_s = 0.01
"""


@pytest.mark.slow
def test_shards_train_to_the_bits_of_one_server(train, tmp_path):
  with open(tmp_path / "cluster.toml", "a") as file:
    file.write("pull_bytes = 1e5\npush_bytes = 1e5\n" + LINKS)
  runs = [(x, y) for x in ("clock", "threads") for y in ("1", "2")]
  for driver, shards in runs:
    kept = str(tmp_path / f"{driver}{shards}")
    more = ("--driver", driver, "--shards", shards, "--checkpoints", kept)
    assert train(*more) == 0
  rows = training.read_rows(tmp_path / "out" / "rows.jsonl")
  curves = [[(x["step"], x["loss"]) for x in row["curve"]] for row in rows]
  assert curves[0] == curves[1] and curves[2] == curves[3]
  # The server's link is the ceiling, and two shards have one each.
  one, two, *_ = (row["curve"][-1]["train_s"] for row in rows)
  assert two < one
