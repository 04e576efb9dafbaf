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


SECOND = "experiments/some/TABLES.md"


def untraced(tmp_path, monkeypatch, text, printed="", name=SECOND):
  folder = tmp_path / "experiments" / "some"
  (folder / "results").mkdir(parents=True)
  row = {
    "config": {"momentum": 0.9}, "learning_rate": 0.025, "accuracy": 0.6231,
    "sent_bytes": 847_684_026.0, "curve": [0.1234],
  }  # fmt: skip
  (folder / "results" / "rows.jsonl").write_text(json.dumps(row) + "\n")
  (folder / "report.py").write_text(f"print({printed!r})\n")
  path = tmp_path / name
  path.write_text(text)
  monkeypatch.setattr(figures, "ROOT", tmp_path)
  monkeypatch.setattr(figures, "EXPERIMENTS", tmp_path / "experiments")
  monkeypatch.setattr(figures, "REPORTS", {"some": (("report.py",),)})
  (found,) = map(figures.check, figures.pages([]))
  assert found.name == name
  return found.untraced


def test_a_figure_is_a_number_with_a_point_outside_of_code():
  text = (
    "62.57 ± 0.77, 1,234.5, `0.1`, v1.2.3, [a](b/0.5), arXiv 2310.14423, "
    "[1805.09767](https://arxiv.org), Python 3.11"
  )
  assert figures.figures_of(text) == ["62.57", "0.77", "1234.5"]


def test_a_line_of_a_table_of_docs_is_that_of_one_row_or_one_printed_line(
  tmp_path, monkeypatch
):
  (tmp_path / "docs").mkdir()
  text = "| 62.31 | 847.7 |\n| 0.77 | 1.5 |\n| 62.31 | 0.77 |\n| 12.34 |"
  text += " [some](../experiments/some/TABLES.md)"
  found = untraced(
    tmp_path, monkeypatch, text, "| 0.77 ± 1.5 |", "docs/some.md"
  )
  # Of two sources at once, and of a curve.
  assert found == ("62.31", "0.77", "12.34")


@pytest.mark.parametrize(
  ("line", "traced"),
  [
    ("| shared | 8x | +17 ± 3 | 1,250 |", True),
    ("| **8x** | 17 ± 3 |", True),  # Fewer columns, and no sign.
    ("| int4, 1F1B, 8/4/2, H | 8x | 1250 |", True),  # Numbers within names.
    ("| shared | 8x | -60 ± 17 | 1,250 |", False),
    ("| shared | 8x | +18 ± 3 | 1,250 |", False),
    ("| shared | 8x | +17 ± 3 | 1,251 |", False),
    ("| shared | 9x | +17 ± 3 | 1,250 |", False),
    ("| shared | 8x | 3 ± 17 |", False),  # In another order.
    ("| shared | 8x | +17 ± 4 |", False),  # Of two lines.
    ("| 62.31 |", False),  # In a row, but not printed.
  ],
)
def test_whole_numbers_of_an_experiments_table_are_traced(
  tmp_path, monkeypatch, line, traced
):
  printed = "| shared | 8x | +17 ± 3 | 1,250 |\n| owned | 4x | +5 ± 4 | 7 |"
  assert (not untraced(tmp_path, monkeypatch, line, printed)) == traced


@pytest.mark.parametrize(
  ("text", "wanted"),
  [
    ("It has 1.5 points.", ()),
    ("It has 62.31 points.", ("62.31",)),  # In a row, but nothing says so.
    ("At a rate of 0.025, momentum 0.9.", ()),
    ("At a rate of 2.5 %.", ("2.5",)),  # A setting is as it is.
    ("<!-- paper: 88.98 --> It saves 88.98 %.", ()),
    ("It saves 88.98 %.", ("88.98",)),
    ("It is -1.5 points worse.", ("-1.5",)),
    ("It has 0.3 (-0.2 to\n+0.9) more.", ()),
    ("It has 0.3 (+0.2 to +0.9) more.", ("0.3", "+0.2", "+0.9")),
    ("It has 1.5 (-0.2 to +0.9) more.", ("1.5", "-0.2", "+0.9")),
    ("It has 1.5 ± 0.2.", ("1.5", "0.2")),
  ],
)
def test_a_figure_of_the_text_is_printed_or_a_setting_or_a_papers(
  tmp_path, monkeypatch, text, wanted
):
  printed = "1.5\n+0.3 (-0.2 to +0.9)"
  assert untraced(tmp_path, monkeypatch, text, printed) == wanted


@pytest.mark.parametrize(
  ("link", "wanted"), [("", ("1.5",)), ("[some](experiments/some/X.md)", ())]
)
def test_the_readme_has_the_figures_of_what_it_links_to(
  tmp_path, monkeypatch, link, wanted
):
  text = f"It has 1.5 points. {link}"
  assert untraced(tmp_path, monkeypatch, text, "1.5", "README.md") == wanted


def test_what_was_measured_before_is_not_checked(tmp_path, monkeypatch):
  untraced(tmp_path, monkeypatch, "Nothing.")
  (tmp_path / "experiments" / "some" / "HISTORY.md").write_text("It had 1.25.")
  assert len(figures.pages([])) == 1


def test_what_a_report_printed_before_it_failed_counts(tmp_path):
  (tmp_path / "report.py").write_text("print(1.5)\nraise SystemExit('no rows')")
  assert figures.printed(tmp_path, ("report.py",)) == "1.5\n"


def test_every_experiment_fits_a_page():
  found = {
    path.parent.name: len(path.read_text().splitlines())
    for path in figures.EXPERIMENTS.glob("*/README.md")
  }
  assert len(found) >= 9
  assert {name: lines for name, lines in found.items() if lines > 100} == {}


@pytest.mark.slow
def test_no_page_has_a_figure_without_a_row():
  for one in map(figures.check, figures.pages([])):
    assert not one.untraced, one
