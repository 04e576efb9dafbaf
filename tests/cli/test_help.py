"""The help shows every option once, with its default, at 80 columns."""

import importlib.metadata
import os
import pathlib
import subprocess
import sys
from typing import Literal

import pytest

from jdist import cli, data, methods, models
from jdist.cli import _commands, _groups, _help, _options

_ROOT = pathlib.Path(__file__).parent.parent.parent
_COMMANDS = {"train": _commands.Train, "compare": _commands.Compare}
_ALL = _COMMANDS | {
  "overlap": _commands.Overlap, "bytes": _commands.Bytes,
  "simulate": _commands.Simulate, "pipeline": _commands.Pipeline,
  "launch": _commands.Launch, "report": _commands.Report,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
  monkeypatch.setenv("COLUMNS", "80")


def _told(capsys, *words):
  assert cli.main(words) == 0
  out, error = capsys.readouterr()
  assert error == ""
  return out


@pytest.mark.parametrize(
  "words", [(), ("--help",), ("-h",), ("help",)], ids=" ".join
)
def test_overview_names_commands_methods_and_presets(words, capsys):
  text = _told(capsys, *words)
  for name in (*_COMMANDS, *methods.registry, *_options.PRESETS):
    assert name in text
  assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("command", _ALL)
def test_every_option_is_shown_once_and_explained(command, capsys):
  text = _told(capsys, command, "--help")
  fields = _help.fields(_ALL[command])
  # `launch` stores the command behind `--` in two more fields.
  assert set(fields) == {*_ALL[command].__dataclass_fields__} - {
    "command", "train",
  }  # fmt: skip
  for name, told in fields.items():
    option = _options.POSITIONAL.get((command, name), _options.word(name))
    shown = [x for x in text.splitlines() if x.startswith(f"  {option} ")]
    assert len(shown) == 1, name
    assert told[:20] in " ".join(text.split()), name
  assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("command", _ALL)
def test_help_says_what_an_option_needs(command, capsys):
  text = " ".join(_told(capsys, command, "--help").split())
  fields = _ALL[command].__dataclass_fields__
  for name, told in _help.fields(_ALL[command]).items():
    option = fields[name].metadata.get("option")
    need, *values = option.needs if option and option.needs else ("",)
    if need in fields and need != "action":
      word = _options.word(need)
      said = f"Not with `{word}`." if None in values else f"Needs `{word}"
      assert f"{told} {said}" in text, name


def test_help_shows_the_defaults_of_the_preset(capsys):
  assert "[30]" in _told(capsys, "train", "--help")
  text = _told(capsys, "train", "--preset", "cifar10-gpu", "--help")
  for default in ("[160]", "[resnet20]", "[1024]", "[bfloat16]", "[0.4]"):
    assert default in text


def test_help_names_every_data_set_and_every_model():
  told = _help.fields(_commands.Train)
  for name in data.DATASETS:
    assert name.split("/")[0] in told["dataset"], name
  for name in models.MODELS:
    assert name in told["model"], name


def test_every_preset_can_be_parsed_for_every_command():
  for name in _options.PRESETS:
    for command in _COMMANDS.values():
      options = _options.with_preset(command, name)
      assert options.preset == name
      assert options.workers == 8
    train = _options.with_preset(_commands.Train, name)
    compare = _options.with_preset(_commands.Compare, name)
    assert train.learning_rate == compare.learning_rate[0]


def test_options_change_what_a_preset_sets(monkeypatch):
  from jdist.cli import _train

  seen = []
  monkeypatch.setattr(_train, "train", seen.append)
  words = ["train", "--epochs", "3", "--preset=cifar10", "--batch_size", "64"]
  assert cli.main(words) == 0
  (options,) = seen
  assert (options.dataset, options.model) == ("cifar10", "cnn")
  assert (options.epochs, options.batch_size) == (3.0, 64)


@pytest.mark.smoke
def test_module_and_entry_point_are_the_same():
  done = subprocess.run(
    [sys.executable, "-m", "jdist", "--version"],
    env=os.environ | {"PYTHONPATH": str(_ROOT)},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0
  assert done.stdout.startswith("jdist ")
  project = (_ROOT / "pyproject.toml").read_text()
  assert 'jdist = "jdist.cli:main"' in project
  scripts = importlib.metadata.entry_points(group="console_scripts")
  for script in scripts.select(name="jdist"):
    assert script.load() is cli.main


@pytest.mark.parametrize(
  ("hint", "form"),
  [
    (bool, "| --no-some-field"), (int, "INT"), (float, "NUMBER"), (str, "NAME"),
    (int | None, "INT"), (None | str, "NAME"),
    (tuple[int, ...], "INT [INT ...]"),
    (Literal["a", "b"], "a|b"), (Literal["a", 2] | None, "a|2"),
    (tuple[Literal["a", "b"], ...], "a|b [a|b ...]"),
    (_groups.Directory, "DIR"), (_groups.Cluster, "CLUSTER.toml"),
  ],
)  # fmt: skip
def test_form_of_a_value(hint, form):
  assert _help._kind(hint, "some_field") == form


@pytest.mark.parametrize(
  ("value", "shown"),
  [
    (True, "on"), (False, "off"), (0.25, "0.25"), (30.0, "30"), (1e-5, "1e-05"),
    (7, "7"), ("sgd", "sgd"), ((0.1, 2.0), "0.1 2"), (("a", True), "a on"),
  ],
)  # fmt: skip
def test_default_is_shown_as_it_is_typed(value, shown):
  assert _help._shown(value) == shown


def test_long_option_has_a_line_of_its_own():
  text = "one two three four five"
  # Twenty columns of text stand behind thirty of the option.
  assert _help._entry("--short INT", text, 50).splitlines() == [
    "  --short INT".ljust(30) + "one two three four",
    " " * 30 + "five",
  ]
  at_most = "--" + "x" * 24
  assert len(_help._entry(at_most, text, 50).splitlines()) == 2
  assert _help._entry(at_most + "x", text, 50).splitlines() == [
    f"  {at_most}x",
    " " * 30 + "one two three four",
    " " * 30 + "five",
  ]


def test_lines_of_a_list_have_one_column():
  words = " ".join(["word"] * 16)
  first, second = _help._lines({"a": "text", "long": words})
  assert first == "  a     text"
  second, third = second.splitlines()
  assert second.startswith("  long  word") and len(second) <= 80
  assert third.startswith(" " * 8 + "word")


@pytest.mark.parametrize("command", _ALL)
def test_options_stand_below_the_titles_of_their_groups(command):
  kind = _ALL[command]
  lines = _help.options(command, kind()).splitlines()
  assert lines[0] == f"usage: jdist {command} [OPTIONS]" and lines[1] == ""
  titles = [f"{x}:" for x in _help.groups(kind)]
  found = [x for x in lines if x in titles]
  assert found == titles and lines.index("examples:") < lines.index(titles[0])
  for title, documents in _help.groups(kind).items():
    start = lines.index(f"{title}:") + 1
    own = lines[start : lines.index("", start)]
    heads = [x for x in own if x[:2] == "  " and x[2] != " "]
    assert len(heads) == len(documents) + sum("--import " in x for x in own)
  imports = [
    i for i, x in enumerate(lines) if x.startswith("  --import MODULE")
  ]
  assert imports == (
    [] if command == "launch" else [lines.index("options:") + 1]
  )
  last = {"launch": None, "report": None, "simulate": "protocols:",
          "pipeline": "tables:"}.get(command, "methods:")  # fmt: skip
  assert (last in lines) == (last is not None)
