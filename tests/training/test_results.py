"""Rows stand alone, and a file of them survives being cut off."""

import json
import os
import pathlib
import platform
import subprocess

import jax
import numpy as np
import pytest

from jdist import training
from jdist.training import _results


def test_row_holds_all_that_repeats_it():
  row = training.make_row({"workers": 8}, 3, accuracy=0.9)
  assert row["config"] == {"workers": 8}
  assert (row["seed"], row["accuracy"]) == (3, 0.9)
  assert set(row["versions"]) >= {"python", "jdist", "jax", "numpy", "optax"}
  machine = f"{platform.machine()} CPU with {os.cpu_count()} cores"
  assert row["device"] == f"8 x {machine} in 1 process"
  assert row["commit"]
  json.dumps(row)


def test_row_of_several_processes_counts_them(monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  assert _results._device().endswith(" cores in 2 processes")


def test_copy_without_a_repository_is_told_its_commit(monkeypatch):
  monkeypatch.setenv("JDIST_COMMIT", "0123456789ab")
  _results._commit.cache_clear()
  assert training.make_row({}, seed=0)["commit"] == "0123456789ab"
  _results._commit.cache_clear()


def test_commit_has_a_plus_if_code_was_changed_but_not_for_rows(
  tmp_path, monkeypatch
):
  names = ("-c", "user.name=a", "-c", "user.email=a@b.c")
  for file in ("code.py", "rows.jsonl"):
    (tmp_path / file).write_text("1\n")
  for words in (["init", "-q"], ["add", "."], [*names, "commit", "-qm", "a"]):
    subprocess.run(["git", *words], cwd=tmp_path, check=True)
  monkeypatch.delenv("JDIST_COMMIT", raising=False)
  monkeypatch.setattr(_results, "__file__", str(tmp_path / "code.py"))
  folder = tmp_path / "experiment"
  folder.mkdir()
  for file, plus in (
    ("rows.jsonl", False), ("log.txt", False), ("experiment/run.py", True),
    ("code.py", True),
  ):  # fmt: skip
    (tmp_path / file).write_text("2\n")
    _results._commit.cache_clear()
    assert len(_results._commit()) == 12 + plus
    assert _results._commit().endswith("+") is plus
    (folder / "run.py").unlink(missing_ok=True)
  _results._commit.cache_clear()


def test_rows_are_appended_and_read_back(tmp_path):
  path = tmp_path / "deep" / "rows.jsonl"
  training.append_rows(path, [{"a": 1}, {"a": 2}])
  training.append_rows(path, [{"a": 3}])
  assert training.read_rows(path) == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_file_of_other_json_is_named(tmp_path):
  path = tmp_path / "rows.jsonl"
  path.write_text("{}\n[1]\n")
  with pytest.raises(ValueError, match=r"must be rows of objects in .*\[1\]"):
    training.read_rows(path)


def test_truncated_last_line_is_ignored(tmp_path):
  path = tmp_path / "rows.jsonl"
  training.append_rows(path, [{"a": 1}, {"a": 2}])
  path.write_text(path.read_text()[:-4])
  assert training.read_rows(path) == [{"a": 1}]
  # The next row does not continue the broken line.
  training.append_rows(path, [{"a": 3}])
  assert training.read_rows(path) == [{"a": 1}, {"a": 3}]


@pytest.mark.skipif(
  not pathlib.Path("/dev/full").exists(), reason="needs a device that is full"
)
def test_full_disk_error_names_the_file(tmp_path, monkeypatch):
  path, opened = tmp_path / "rows.jsonl", pathlib.Path.open
  monkeypatch.setattr(
    pathlib.Path,
    "open",
    lambda self, mode: opened(pathlib.Path("/dev/full"), mode),
  )
  with pytest.raises(OSError, match=f"written to {path}: No space left"):
    training.append_rows(path, [{"a": 1}])


def test_row_of_a_diverged_run_is_json(tmp_path):
  path = tmp_path / "rows.jsonl"
  row = {"loss": float("nan"), "curve": [{"x": float("inf")}, (1.0, 2)]}
  training.append_rows(path, [row])
  assert "NaN" not in path.read_text()
  assert training.read_rows(path) == [
    {"loss": None, "curve": [{"x": None}, [1.0, 2]]}
  ]


def test_numpy_numbers_become_json_numbers(tmp_path):
  path = tmp_path / "rows.jsonl"
  training.append_rows(path, [{"a": np.float32(0.5), "n": np.int64(3)}])
  assert training.read_rows(path) == [{"a": 0.5, "n": 3}]


def test_writer_of_metrics_is_closed_with_its_block():
  noted = []

  class Events:
    def close(self):
      noted.append("closed")

  writer = training.MetricsWriter.__new__(training.MetricsWriter)
  writer._writer = Events()
  with writer:
    assert noted == []
  assert noted == ["closed"]

  class Full:
    def close(self):
      noted.append("tried")
      raise OSError("The disk is full.")

  # An error within is not hidden by another one.
  writer._writer = Full()
  with pytest.raises(KeyError), writer:
    raise KeyError
  assert noted == ["closed", "tried"]
  with pytest.raises(OSError, match="is full"), writer:
    pass
