"""The benchmark of codecs runs, and its rows are whole."""

import json
import runpy
import sys

import pytest

from jdist import codecs

SCRIPT = "scripts/bench_codecs.py"


def test_a_row_tells_ratios_to_a_copy(monkeypatch, tmp_path, capsys):
  output = tmp_path / "rows.jsonl"
  arguments = ["--codecs", "int4", "--size", "1000", "--repeats", "3", "--sort"]
  monkeypatch.setattr(
    sys, "argv", [SCRIPT, *arguments, "--output", str(output)]
  )
  runpy.run_path(SCRIPT, run_name="__main__")
  row = json.loads(output.read_text())
  assert row == json.loads(capsys.readouterr().out)
  assert row["tensor_bytes"] == 4000 and row["config"]["repeats"] == 3
  assert row["sort"]["median"] > 0
  told = row["codecs"]["int4"]
  # 4 bits, and a scale for each of 4 blocks.
  assert told["compression"] == pytest.approx(32_000 / (4000 + 4 * 32))
  for kind in ("encode", "decode"):
    low, high = told[kind]["quartiles"]
    assert 0 < low <= told[kind]["median"] <= high


def test_every_name_is_a_codec():
  table = runpy.run_path(SCRIPT)["CODECS"]
  assert all(isinstance(codec, codecs.Codec) for codec in table.values())
