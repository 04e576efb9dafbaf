"""The report of one GPU counts the cases that agree and writes its page."""

import json
import sys

import pytest

from tests.experiments._loading import load

CIRCUMSTANCES = {
  "commit": "0123", "device": "1 x GPU", "versions": {"jax": "0.11"},
}  # fmt: skip


def case(name, relative):
  return {"group": "codecs", "case": name, "dtype": "float32",
          "relative": relative}  # fmt: skip


def test_cases_that_differ_are_named_the_largest_first(monkeypatch):
  report = load("gpu_report", "gpu/report.py", monkeypatch)
  cases = [case("a", 1e-7), case("b", 2e-3), case("c", 4e-2)]
  cases.append({"group": "codecs", "case": "d", "dtype": "float32",
                "error": "broken"})  # fmt: skip
  text = report.agreement([{"group": "codecs", "cases": cases}])
  assert "| codecs | float32 | 4 | 1 | 1 | c 4.0e-02, b 2.0e-03 |" in text


def test_table_is_written_between_its_markers(monkeypatch, tmp_path):
  report = load("gpu_report", "gpu/report.py", monkeypatch)
  (tmp_path / "results").mkdir()
  row = CIRCUMSTANCES | {
    "config": {"sent": "int4"}, "relative": 0.0, "simple_ms": 2.0,
    "streamed_ms": 1.5, "ratio": 0.75,
  }  # fmt: skip
  path = tmp_path / "results" / "streamed.jsonl"
  path.write_text(json.dumps(row) + "\n")
  page = tmp_path / "README.md"
  marked = [
    f"<!-- {name} -->\nold\n<!-- end of {name} -->\n"
    for name in ("circumstances", "streamed")
  ]
  page.write_text("Before.\n" + "".join(marked))
  monkeypatch.setattr(sys, "argv", ["report.py", "--write"])
  report.main(tmp_path)
  text = page.read_text()
  assert "old" not in text and text.startswith("Before.")
  assert "| int4 | 0.0e+00 | 2.00 | 1.50 | 0.75 |" in text
  assert "commit 0123" in text
  page.write_text("Nothing.\n")
  with pytest.raises(SystemExit, match="No page has the marker"):
    report.main(tmp_path)
