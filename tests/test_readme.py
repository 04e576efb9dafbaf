"""The examples of README and of the pages in docs/ run as they are printed."""

import pathlib
import re

import pytest

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


def _save_model():
  """Writes `model.safetensors`, as the command above the example does."""
  from jdist import models, training

  build = {"name": "mlp", "input_shape": (8, 8, 1), "num_classes": 10}
  model = models.build(**build)
  training.save_model(
    "model.safetensors", model.params, model.state, {"build": build}
  )


@pytest.mark.smoke
@pytest.mark.parametrize("number", range(len(_BLOCKS)))
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
