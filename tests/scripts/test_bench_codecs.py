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


def test_means_are_measured_by_several_calls_in_flight(monkeypatch, capsys):
  arguments = ["--codecs", "sign", "--size", "1024", "--repeats", "3",
               "--workers", "2", "--in-flight", "2"]  # fmt: skip
  table = runpy.run_path(SCRIPT)
  means = {"exact": None, "int4": table["_MEANS"]["int4"]}
  monkeypatch.setitem(table["main"].__globals__, "_MEANS", means)
  monkeypatch.setattr(sys, "argv", [SCRIPT, *arguments])
  table["main"]()
  row = json.loads(capsys.readouterr().out)
  assert row["config"]["in_flight"] == 2
  assert row["means"].keys() == means.keys()
  assert all(x["median"] > 0 for x in row["means"].values())


def test_every_name_is_a_codec():
  table = runpy.run_path(SCRIPT)["CODECS"]
  assert all(isinstance(codec, codecs.Codec) for codec in table.values())
