"""The line that a person sees, and a log file does not."""

import io

import pytest

from jdist import training


@pytest.mark.parametrize(
  ("num_bytes", "text"),
  [
    (0, "0 B"),
    (999, "999 B"),
    (1000, "1 kB"),
    (999_999, "1 MB"),
    (12_345_678, "12.3 MB"),
    (999.6, "1 kB"),
    (2.5e9, "2.5 GB"),
    (7e15, "7000 TB"),
  ],
)
def test_bytes_are_formatted_in_the_largest_unit(num_bytes, text):
  assert training.format_bytes(num_bytes) == text


class _Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.mark.parametrize("stream", [io.StringIO, _Terminal])
def test_the_bar_is_silent_unless_on_a_terminal(stream, monkeypatch):
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.setenv("COLUMNS", "120")
  out = stream()
  monkeypatch.setattr("sys.stderr", out)
  with training.Progress(10, "diloco seed 1", start_step=4) as progress:
    progress.update(5, "loss 0.5")
  text = out.getvalue()
  if stream is _Terminal:
    assert "diloco seed 1" in text and "5/10" in text and "loss 0.5" in text
  else:
    assert text == ""


def test_closed_outputs_show_nothing(monkeypatch):
  # Python has None for an output that was closed when it started.
  for name in ("stdout", "stderr"):
    monkeypatch.setattr(f"sys.{name}", None)
  with training.Progress(10, "diloco seed 1") as progress:
    progress.update(5, "loss 0.5")


def test_long_text_is_cut_but_steps_and_time_are_not(monkeypatch):
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.setenv("COLUMNS", "60")
  out = _Terminal()
  monkeypatch.setattr("sys.stderr", out)
  with training.Progress(2000, "all runs") as progress:
    progress.update(1000, "a tuning with a long name  24,895 samples/s")
  text = out.getvalue()
  assert "1000/2000" in text and "a tuning with" in text
  assert "…" in text and "samples/s" not in text


def test_lines_for_a_file_do_not_go_to_the_terminal(monkeypatch):
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.setenv("COLUMNS", "120")
  out, file = _Terminal(), io.StringIO()
  monkeypatch.setattr("sys.stderr", out)
  monkeypatch.setattr("sys.stdout", file)
  with training.Progress(10, "all runs") as progress:
    progress.update(5, "loss 0.5")
    print("a table")
    progress.update(6, "loss 0.4")
  assert file.getvalue() == "a table\n"
  assert "6/10" in out.getvalue() and "a table" not in out.getvalue()


def test_progress_says_what_is_done_between_steps(monkeypatch):
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.setenv("COLUMNS", "120")
  out = _Terminal()
  monkeypatch.setattr("sys.stderr", out)
  record = training.Record(3, 1, 2e6, 0.25, {}, 1.0, 1234.0)
  with training.Progress(10, "all runs") as progress:
    progress.show(record, "compiling", "ssgd seed 1", before=4)
  with training.Progress(10, "all runs") as progress:
    progress.show(record, "")
  text = out.getvalue()
  assert "ssgd seed 1  compiling" in text and "7/10" in text
  assert "loss 0.250  1,234 samples/s  2 MB sent" in text


def test_bar_grows_with_its_steps_and_may_have_no_end():
  bar = training.Progress(10, "a run")
  for number, total in ((8, 10), (12, 12)):
    bar.extend(number)
    assert bar._bar.tasks[0].total == total
  assert training.Progress(0, "a run")._bar.tasks[0].total is None
