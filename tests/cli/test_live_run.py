"""`jdist train --driver ray`, its actors threads here: what is lost."""

import jax
import pytest

from jdist import cli, server, training
from jdist.cli.servers import _ray_run

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
  """Trains, and is killed in the middle of an evaluation, if asked for."""
  path = tmp_path / "cluster.toml"
  path.write_text(CLUSTER)
  words = [
    "train", "--protocol", "bsp", "--driver", "ray", "--cluster", str(path),
    "--batch-size", "64", "--epochs", "2", "--evaluate-every-epochs", "1",
    "--output", str(tmp_path / "out"), "--checkpoints", str(tmp_path / "kept"),
  ]  # fmt: skip
  monkeypatch.setattr(
    server, "RayEngine", lambda *args, **options: server.ThreadEngine()
  )

  def run(killed_at=None):
    evaluations = []

    def is_diverged(*args):
      evaluations.append(args)
      if len(evaluations) == killed_at:
        raise LostError
      return training.is_diverged(*args)

    class Watching:
      """`training`, as the watcher sees it."""

      def __getattr__(self, name):
        return is_diverged if name == "is_diverged" else getattr(training, name)

    monkeypatch.setattr(_ray_run, "training", Watching())
    return cli.main(words)

  # In threads, too, as a user has it.
  jax.config.update("jax_numpy_dtype_promotion", "standard")
  yield run
  jax.config.update("jax_numpy_dtype_promotion", "strict")


def test_a_worker_that_is_lost_for_good_is_a_line(train, monkeypatch, capsys):
  def work(*args):
    raise RuntimeError("There is no memory.")

  monkeypatch.setattr(_ray_run, "work", work)
  assert train() == 75
  told = capsys.readouterr().err
  assert told.startswith("jdist: error: worker0 was lost 3 times before")
  assert "RuntimeError: There is no memory. The same command begins" in told
  assert told.count("\n") == 1


def test_a_run_lost_before_its_evaluation_goes_on(train, tmp_path, capsys):
  with pytest.raises(LostError):
    train(killed_at=2)
  records = tmp_path / "kept" / "records.json"
  assert len(training.read_rows(records)) == 1
  capsys.readouterr()
  assert train() == 0
  first, last, _ = capsys.readouterr().out.splitlines()
  assert first == "Goes on from update 46."
  assert last.startswith("update 46 ") and "accuracy" in last
  (row,) = training.read_rows(tmp_path / "out" / "rows.jsonl")
  assert [x["step"] for x in row["curve"]] == [23, 46]
  # Of a mark that nobody has evaluated the parameters are gone.
  records.unlink()
  assert train() == 0
  told = capsys.readouterr().out
  assert "not evaluated: the run was lost meanwhile" in told
  _, row = training.read_rows(tmp_path / "out" / "rows.jsonl")
  assert [x["step"] for x in row["curve"]] == [46]
