"""The examples of README and of the pages in docs/ run as they are printed."""

import pathlib
import re
import shlex

import pytest

from jdist import cli
from tests import _thinned

_ROOT = pathlib.Path(__file__).parent.parent
_PAGES = {
  path.relative_to(_ROOT).as_posix(): path.read_text()
  for path in [
    _ROOT / "README.md",
    _ROOT / "CONTRIBUTING.md",
    *sorted((_ROOT / "docs").glob("*.md")),
  ]
}
_README = _PAGES["README.md"]
_BLOCKS = [
  (page, block)
  for page, text in _PAGES.items()
  for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
]

_CELLS = {
  page.relative_to(_ROOT).as_posix(): re.findall(
    r"^```{code-cell} \w+\n(?:---\n.*?^---\n)?(.*?)^```",
    page.read_text(),
    flags=re.DOTALL | re.MULTILINE,
  )
  for page in sorted((_ROOT / "docs").rglob("*.md"))
  if "{code-cell}" in page.read_text()
}
# Words of commands that a reader replaces, or installs a part for.
_OTHERS = ("NAME", "my_model:", "powers", "signed", "--import")


def _commands():
  """Returns the page and the words of each command, without doubles."""
  found = {}
  pages = [*_ROOT.glob("*.md"), *(_ROOT / "docs").rglob("*.md")]
  for page in [*pages, *(_ROOT / "experiments").glob("*/*.md")]:
    text = page.read_text().replace("\\\n", " ")
    lines = re.findall(r"^jdist .*$", text, re.MULTILINE)
    for line in lines + re.findall(r"`(jdist [^`]*)`", text):
      if line.split()[1] not in cli._COMMANDS:
        continue  # It is prose.
      words = shlex.split(line, comments=True)
      if len(words) > 2 and not any(x in line for x in _OTHERS):
        found.setdefault(shlex.join(words[1:]), page.relative_to(_ROOT))
  return [(page, words) for words, page in found.items()]


_COMMANDS = _commands()


def _save_model():
  """Writes `model.safetensors`, as the command above the example does."""
  from jdist import models, training

  build = {"name": "mlp", "input_shape": (8, 8, 1), "num_classes": 10}
  model = models.build(**build)
  training.save_model(
    "model.safetensors", model.params, model.state, {"build": build}
  )


# The first one has a test of its own.  All others run by default, although
# three compile for seconds: what a page prints is run on every change.
_NUMBERS = range(1, len(_BLOCKS))


@pytest.mark.parametrize(
  "number", _thinned.some(_NUMBERS, _NUMBERS, smoke=_NUMBERS[-1:])
)
def test_example_runs(number, capsys, tmp_path, monkeypatch):
  page, block = _BLOCKS[number]
  monkeypatch.chdir(tmp_path)
  _save_model()
  # Optax's Adam mixes dtypes in a way that the strict mode of the tests
  # refuses; a reader's program has the ordinary mode.
  import jax

  with jax.numpy_dtype_promotion("standard"):
    scope = {"__name__": "readme"}
    exec(compile(block, f"{page}, block {number}", "exec"), scope)
    for name, test in list(scope.items()):
      if name.startswith("test_"):
        test()


# The site runs them, too, and shows what they print.
@pytest.mark.parametrize("page", _CELLS)
def test_notebook_runs(page, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  import jax

  with jax.numpy_dtype_promotion("standard"):
    scope = {"__name__": "notebook"}
    for number, cell in enumerate(_CELLS[page]):
      # The kernel of the site's notebooks has IPython, to show pictures.
      cell = cell.replace("IPython.display import", "pathlib import Path as")
      exec(compile(cell, f"{page}, cell {number}", "exec"), scope)


# All values are read in the slow set: a command's parser takes a while.
@pytest.mark.parametrize(
  "read", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_every_command_can_be_read(read, tmp_path, monkeypatch):
  # A page defines each part that its commands name by a module.
  monkeypatch.chdir(tmp_path)
  for name, part in (("my_codec", "Powers"), ("my_module", "Fresh")):
    (block,) = (x for _, x in _BLOCKS if f"class {part}(" in x)
    code = block[: re.search(r"^\w.* = ", block, re.MULTILINE).start()]
    pathlib.Path(f"{name}.py").write_text(code)
  wrong = {}
  for page, line in _COMMANDS:
    name, *words = cli._expand(shlex.split(line))
    try:
      if read:
        cli._parse(name, words)
      elif name != "launch":
        cli._check_known(name, cli._COMMANDS[name][0], words)
    except ValueError as error:
      wrong[f"{page}: {line}"] = str(error)
  assert not wrong, wrong
  assert len(_COMMANDS) > 30


@pytest.mark.smoke
def test_first_example_prints_the_result_in_its_comment(capsys):
  _, code = _BLOCKS[0]
  wanted, within = re.search(
    r"print\(.*\)  # \[(.*)\], within ([\d.]+)", code
  ).groups()
  import jax

  with jax.numpy_dtype_promotion("standard"):
    exec(compile(code, "README block 0", "exec"), {"__name__": "readme"})
  printed = capsys.readouterr().out.strip().strip("[]").split()
  for found, value in zip(printed, wanted.split(), strict=True):
    assert abs(float(found) - float(value)) <= float(within)


def test_pipeline_example_prints_the_drawn_table(capsys):
  code, drawn = re.search(
    r"```python\n((?:(?!```).)*?)```\n\n```\n(device 0 .*?)```",
    _PAGES["docs/pipelines.md"],
    flags=re.DOTALL,
  ).groups()
  exec(compile(code, "pipelines", "exec"), {"__name__": "readme"})
  assert drawn.strip() in capsys.readouterr().out


def test_first_example_has_about_fifteen_lines():
  _, code = _BLOCKS[0]
  assert len([line for line in code.splitlines() if line.strip()]) <= 16


@pytest.mark.parametrize("page", _PAGES)
def test_links_lead_to_files(page):
  links = re.findall(r"\]\((?!http)([^)#]+)\)", _PAGES[page])
  folder = (_ROOT / page).parent
  assert [link for link in links if not (folder / link).exists()] == []


def test_figures_of_methods_stand_on_the_linked_pages():
  text = _PAGES["docs/methods.md"]
  start = text.index("| method | paper | in jdist |")
  table = text[start:].split("\n\n")[0].splitlines()[2:]
  linked = 0
  for row in table:
    *_, seen, _ = row.split(" |")
    for link in re.findall(r"\]\((\.\./experiments/[^)]+)\)", seen):
      page = (_ROOT / "docs" / link).read_text()
      numbers = re.findall(r"\d+\.\d+(?: ± \d+\.\d+|x)?", seen)
      assert numbers, row
      assert [x for x in numbers if x not in page] == [], row
      linked += 1
  assert linked >= 18


def test_changelog_begins_with_the_unreleased_version():
  text = (_ROOT / "CHANGELOG.md").read_text()
  assert re.search(r"^## (Unreleased|\d+\.\d+)", text, flags=re.MULTILINE)
