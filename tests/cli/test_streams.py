"""Streams that a shell has closed, that are full, or that nobody reads."""

import contextlib
import os
import sys

import pytest

from jdist import cli
from jdist.cli import _run_end
from jdist.cli.launch import _local_run


@contextlib.contextmanager
def unread(monkeypatch):
  """Standard output is a pipe whose reader has ended."""
  there, here = os.pipe()
  os.close(there)
  with open(here, "w") as stream, open(os.devnull, "w") as nowhere:
    monkeypatch.setattr(sys, "stdout", stream)
    yield
    if sys.stdout is not stream:
      sys.stdout.close()
    os.dup2(nowhere.fileno(), here)


_DRAWN = "pipeline draw --stages 2"


@pytest.mark.parametrize(
  "words", ["--version", "train --help", _DRAWN, "pipeline simulate 1f1b"]
)
def test_output_without_a_reader_ends_in_silence(
  words, tmp_path, monkeypatch, capsys
):
  """As `jdist train --help | head -1` does. Rich ends a process itself."""
  monkeypatch.chdir(tmp_path)
  with unread(monkeypatch):
    assert cli.main(words.split()) == _run_end.UNREAD == 141
  assert not capsys.readouterr().err


def test_wrong_option_is_named_though_nobody_reads(monkeypatch, capsys):
  with unread(monkeypatch):
    assert cli.main(["train", "--nothing"]) == 2
  assert "`--nothing`" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--version", "--help", _DRAWN])
def test_full_disk_of_the_output_is_named(words, capsys, monkeypatch):
  with open("/dev/full", "w") as stream:
    monkeypatch.setattr(sys, "stdout", stream)
    assert cli.main(words.split()) == _run_end.AGAIN
    assert "No space left" in capsys.readouterr().err
    # Python flushes it at its end, and would have another status.
    assert sys.stdout is not stream
    os.dup2(sys.stdout.fileno(), stream.fileno())
    sys.stdout.close()


@pytest.mark.parametrize("words", [_DRAWN, "pipeline draw --stages x"])
def test_closed_streams_are_those_of_no_file(words, monkeypatch):
  for name in ("stdout", "stderr"):
    monkeypatch.setattr(sys, name, None)
  assert cli.main(words.split()) == 2 * words.endswith("x")
  with sys.stdout, sys.stderr:
    assert sys.stdout.fileno() != sys.stderr.fileno()


def test_backend_that_is_not_there_is_an_error_of_one_line(monkeypatch, capsys):
  def fail(words):
    raise RuntimeError(f"{words[0]} 'tpu': set JAX_PLATFORMS=''")

  monkeypatch.setattr(cli, "_run", fail)
  assert cli.main(["Unable to initialize backend"]) == 2
  error = capsys.readouterr().err
  assert error.startswith("jdist: error: Unable") and error.count("\n") == 1
  with pytest.raises(RuntimeError):
    cli.main(["Unable to multiply"])


def test_run_that_nobody_reads_is_not_started_again():
  assert _local_run.judge([141, 75]) == (
    141,
    "process 0 has ended with status 141",
  )
  assert _run_end.UNREAD in _local_run._FINAL
