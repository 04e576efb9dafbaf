"""Figures of pages are traced to rows, and those of nothing are found."""

import importlib.util
import json
import pathlib
import sys

import pytest

_PATH = pathlib.Path(__file__).parents[2] / "scripts" / "check_figures.py"
_SPEC = importlib.util.spec_from_file_location("check_figures", _PATH)
figures = importlib.util.module_from_spec(_SPEC)
sys.modules["check_figures"] = figures
_SPEC.loader.exec_module(figures)


def page(tmp_path, monkeypatch, text, printed=""):
  folder = tmp_path / "some"
  (folder / "results").mkdir(parents=True)
  row = {"accuracy": 0.6231, "sent_bytes": 847_684_026.0, "curve": [0.1234]}
  (folder / "results" / "rows.jsonl").write_text(json.dumps(row) + "\n")
  (folder / "report.py").write_text(f"print({printed!r})\n")
  (folder / "README.md").write_text(text)
  monkeypatch.setitem(figures.REPORTS, "some", (("report.py",),))
  (found,) = figures.check(folder)
  return found


def test_a_figure_is_a_number_with_a_point_outside_of_code():
  text = "62.57 ± 0.77, 1,234.5, `0.1`, v1.2.3, [a](b/0.5), arXiv 2310.14423"
  assert figures.figures_of(text) == ["62.57", "0.77", "1234.5"]


def test_a_line_of_a_table_is_that_of_one_row_or_of_one_printed_line(
  tmp_path, monkeypatch
):
  text = "| 62.31 | 847.7 |\n| 0.77 | 1.5 |\n| 62.31 | 0.77 |\n| 12.34 |"
  found = page(tmp_path, monkeypatch, text, "| 0.77 ± 1.5 |")
  assert found.figures == 7
  # Of two sources at once, and of a curve.
  assert found.untraced == ("62.31", "0.77", "12.34")


@pytest.mark.parametrize(
  ("text", "untraced"),
  [
    ("It has 1.5 points.", ()),
    ("It has 62.31 points.", ("62.31",)),  # In a row, but nothing says so.
    ("<!-- paper: 88.98 --> It saves 88.98 %.", ()),
    ("It saves 88.98 %.", ("88.98",)),
  ],
)
def test_a_figure_of_the_text_is_printed_or_a_papers(
  tmp_path, monkeypatch, text, untraced
):
  assert page(tmp_path, monkeypatch, text, "1.5").untraced == untraced


@pytest.mark.slow
def test_no_page_has_more_untraced_figures_than_before():
  for name in sorted(p.parent.name for p in figures.ROOT.glob("*/README.md")):
    for one in figures.check(figures.ROOT / name):
      assert len(one.untraced) <= figures.UNTRACED.get(one.name, 10**6), one
