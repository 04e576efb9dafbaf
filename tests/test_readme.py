"""What the README shows is run as it stands there."""

import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).parent.parent
_README = (_ROOT / "README.md").read_text()
_BLOCKS = re.findall(r"```python\n(.*?)```", _README, flags=re.DOTALL)


def _save_the_model_that_one_reads():
  """Writes `model.safetensors`, as the command above the example does."""
  from jdist import models, training

  told = {"name": "mlp", "input_shape": (8, 8, 1), "num_classes": 10}
  model = models.build(**told)
  training.save_model(
    "model.safetensors", model.params, model.state, {"build": told}
  )


@pytest.mark.smoke
@pytest.mark.parametrize("number", range(len(_BLOCKS)))
def test_the_readme_example_runs(number, capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  _save_the_model_that_one_reads()
  # Optax's Adam mixes dtypes in a way that the strict mode of the tests
  # refuses; a reader's program has the ordinary mode.
  import jax

  with jax.numpy_dtype_promotion("standard"):
    scope = {"__name__": "readme"}
    exec(compile(_BLOCKS[number], f"README block {number}", "exec"), scope)
    for name, test in list(scope.items()):
      if name.startswith("test_"):
        test()


def test_the_first_example_prints_what_its_comment_says(capsys):
  code = _BLOCKS[0]
  wanted, within = re.search(
    r"print\(.*\)  # \[(.*)\], within ([\d.]+)", code
  ).groups()
  import jax

  with jax.numpy_dtype_promotion("standard"):
    exec(compile(code, "README block 0", "exec"), {"__name__": "readme"})
  printed = capsys.readouterr().out.strip().strip("[]").split()
  for found, value in zip(printed, wanted.split(), strict=True):
    assert abs(float(found) - float(value)) <= float(within)


def test_the_pipeline_that_is_drawn_is_printed(capsys):
  code, drawn = re.search(
    r"```python\n((?:(?!```).)*?)```\n\n```\n(device 0 .*?)```",
    _README,
    flags=re.DOTALL,
  ).groups()
  exec(compile(code, "README", "exec"), {"__name__": "readme"})
  assert drawn.strip() in capsys.readouterr().out


def test_the_main_example_has_about_fifteen_lines():
  lines = [line for line in _BLOCKS[0].splitlines() if line.strip()]
  assert len(lines) <= 16


def test_every_file_that_the_readme_names_is_there():
  links = re.findall(r"\]\((?!http)([^)#]+)\)", _README)
  assert links
  missing = [link for link in links if not (_ROOT / link).exists()]
  assert not missing


def test_a_methods_number_is_that_of_the_experiment_that_it_names():
  start = _README.index("| method | paper | in jdist |")
  table = _README[start:].split("\n\n")[0].splitlines()[2:]
  named = 0
  for row in table:
    *_, seen, _ = row.split(" |")
    for link in re.findall(r"\]\((experiments/[^)]+)\)", seen):
      page = (_ROOT / link).read_text()
      numbers = re.findall(r"\d+\.\d+(?: ± \d+\.\d+|x)?", seen)
      assert numbers, row
      assert [x for x in numbers if x not in page] == [], row
      named += 1
  assert named >= 20


def test_the_changelog_begins_with_what_is_not_released():
  text = (_ROOT / "CHANGELOG.md").read_text()
  assert re.search(r"^## (Unreleased|\d+\.\d+)", text, flags=re.MULTILINE)
