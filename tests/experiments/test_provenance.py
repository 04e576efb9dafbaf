"""The page counts the rows whose code this history does not have."""

import subprocess
import sys

import pytest

from tests.experiments import _loading


def test_page_has_the_counts_of_the_rows(monkeypatch):
  monkeypatch.syspath_prepend(_loading.FOLDER)
  provenance = _loading.load("provenance", "provenance.py", monkeypatch)
  shallow = subprocess.run(
    ["git", "-C", str(_loading.FOLDER), "rev-parse", "--is-shallow-repository"],
    capture_output=True, text=True, check=False,
  ).stdout.strip()  # fmt: skip
  if shallow != "false":
    pytest.skip("without its history a copy does not know commits")
  monkeypatch.setattr(sys, "argv", ["provenance.py", "--check"])
  provenance.main()  # Fails if the page differs.


def test_changed_code_and_lost_commits_are_counted(monkeypatch, tmp_path):
  monkeypatch.syspath_prepend(_loading.FOLDER)
  provenance = _loading.load("provenance", "provenance.py", monkeypatch)
  results = tmp_path / "one/results"
  results.mkdir(parents=True)
  names = ("aaaaaaaaaaaa", "aaaaaaaaaaaa+", "bbbbbbbbbbbb")
  (results / "x.jsonl").write_text(
    "".join(f'{{"commit": "{name}"}}\n' for name in names)
  )
  (results / "y.jsonl").write_text('{"commit": "aaaaaaaaaaaa"}\n{"from": 1}\n')
  monkeypatch.setattr(provenance, "_FOLDER", tmp_path)
  monkeypatch.setattr(provenance, "commits", lambda: {"aaaaaaaaaaaa"})
  assert provenance.counts() == [("one/x", 3, 1, 1)]
