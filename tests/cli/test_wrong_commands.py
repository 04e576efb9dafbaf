"""Wrong command lines of every command: one message each, and no traceback.

Each option of a command meets every wrong value; another option is wrong for
certain where the command would otherwise train.
"""

import contextlib
import dataclasses
import io

import pytest

from jdist import cli
from jdist.cli import _options

_TRAINING = (
  "--dataset", "synthetic", "--model", "mlp", "--steps", "1", "--workers", "2",
  "--batch-size", "16", "--momentum", "2",
)  # fmt: skip
_COMMANDS = {
  "launch": ("-n", "0"),
  "overlap": ("--launch-us", "-1"),
  "train": _TRAINING,
  "compare": (*_TRAINING, "--seeds", "0"),
  "bytes": ("--warmup-steps", "-1"),
  "simulate": ("empty",),
  "pipeline simulate": ("1f1b",),
  "pipeline plan": ("1f1b",),
  "pipeline draw": ("1f1b",),
  "pipeline check": ("1f1b",),
}
_VALUES = (
  "-1", "nan", "x", "binary",
)  # fmt: skip
# The words that refuse the command, and what reaches the network or leaves
# files about.
_LEFT_OUT = {
  "momentum", "launch_us", "warmup_steps", "num_processes",
  "coordinator_address", "preset", "address", "driver", "record",
}  # fmt: skip


@pytest.mark.parametrize("name", _COMMANDS)
def test_wrong_value_ends_with_one_message(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x81" * 50)
  (tmp_path / "empty").touch()
  (tmp_path / "folder").mkdir()
  command = name.split()
  fields = dataclasses.fields(cli._COMMANDS[command[0]][0])
  for number, field in enumerate(fields):
    if field.name in _LEFT_OUT:
      continue
    # A training's options take long to parse; `compare` has most of them, too.
    once = slice(number % len(_VALUES), None, len(_VALUES))
    for value in _VALUES[once] if name == "train" else _VALUES:
      words = [*command, *_COMMANDS[name], _options.word(field.name), value]
      error = io.StringIO()
      with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(error),
      ):
        status = cli.main(words)
      told = error.getvalue()
      messages = [x for x in told.splitlines() if x.startswith("jdist: ")]
      assert status in (0, 2) and len(messages) == bool(status), (words, told)
      assert "Traceback" not in told, words


def test_table_of_too_many_stages_is_refused(refusal):
  told = refusal("pipeline simulate --stages 100000")
  assert "`num_stages` times `num_microbatches`" in told


@pytest.mark.parametrize("option", ["--cluster", "--costs"])
def test_binary_file_is_named(option, tmp_path, refusal):
  path = tmp_path / "binary"
  path.write_bytes(b"\xff\xfe\x00\x81")
  told = refusal(f"pipeline simulate {option} {path}")
  assert f"must be a TOML file in UTF-8, got {path}" in told


# `split` of the fixture takes away quotes: `--option=` is an empty text.
@pytest.mark.parametrize(
  ("words", "option"),
  [
    ("train --codec=", "--codec"),
    ("train --feedback=", "--feedback"),
    ("train --outer=", "--outer"),
    ("train --checkpoints=", "--checkpoints"),
    ("bytes --codec=", "--codec"),
    ("pipeline simulate 1f1b --edge-codec=", "--edge-codec"),
  ],
)
def test_empty_text_is_refused(words, option, refusal):
  assert f"`{option}` must" in refusal(words)


@pytest.mark.parametrize("text", ["raise SystemExit(0)", "def ("])
def test_module_that_cannot_be_imported_is_named(
  text, tmp_path, monkeypatch, refusal
):
  name = f"wrong_module_{len(text)}"
  (tmp_path / f"{name}.py").write_text(text)
  monkeypatch.syspath_prepend(tmp_path)
  assert f"got '{name}'" in refusal(f"simulate none.toml --import {name}")


@pytest.mark.parametrize(
  ("file", "text"),
  [
    ("rows.jsonl", '{"a": 1}\n'),
    ("rows.jsonl", "[1]\n"),
    ("rows.jsonl", '{"config": 3}\n'),
    ("rows.jsonl", '{"config": {}, "method": 3}\n'),
    ("status.json", "{"),
    ("status.json", "1" * 5000),
    ("status.json", "[" * 200_000),
    ("rows.jsonl", "[" * 200_000 + "\n"),
  ],
)
def test_report_of_other_files_is_refused(file, text, tmp_path, refusal):
  folder = tmp_path / "run"
  folder.mkdir()
  (folder / file).write_text(text)
  told = refusal(f"report {folder}")
  assert f"got {folder}" in told or f"in {folder}/{file}, got" in told


def test_text_without_a_size_is_refused(refusal):
  told = refusal("train --model transformer --text /proc/self/mem")
  assert "`--text` must be a file with bytes, got '/proc/self/mem'" in told
