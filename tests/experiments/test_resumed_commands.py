"""The commands of the experiments' pages resume from the existing rows."""

import re
import shlex
import shutil
import types

import pytest

from jdist import cluster, training
from jdist.training import comparison
from tests.experiments import _loading

tyro = pytest.importorskip("tyro")

# The program that trains, and what stands before a preset in its rows' file.
_TRAINING = {
  "compression": ("config.py", "run.py", ""),
  "dbs_sgd": ("config.py", "run.py", ""),
  "failures": ("config.py", "train.py", ""),
  "h_ps": ("config.py", "train.py", ""),
  "mp2": ("config.py", "run.py", ""),
  "msdpu": ("config.py", "run.py", ""),
  "pipeline": ("accuracy.py", "accuracy.py", "accuracy_"),
}


def commands(name, program, presets):
  """The options of a program's calls on its experiment's pages, by preset."""
  found = {preset: [options] for preset, (_, options) in presets.items()}
  for page in (_loading.FOLDER / name).glob("*.md"):
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(
      rf"python experiments/{name}/{program} ([^`\n]*)", text
    ):
      preset, *args = shlex.split(line.split("#")[0])
      options = tyro.extras.overridable_config_cli(
        presets, args=[preset, *(x for x in args if x != "--times")]
      )
      found[preset].append(options)
  return found


def setting_of(module, row):
  """The setting that a row was compared in; None where there are none."""
  if not hasattr(module, "Setting"):
    return None
  names = module.Setting.__dataclass_fields__
  config = row["config"]
  return module.Setting(**{x: config[x] for x in names if x in config})


def trial_of(row):
  """The trial that a row is of."""
  return comparison.Trial(
    row["purpose"], row["method"], row["learning_rate"], row["seed"]
  )


@pytest.mark.parametrize("name", _TRAINING)
def test_each_row_is_found_by_a_command_of_its_page(
  name, monkeypatch, tmp_path
):
  config, program, before = _TRAINING[name]
  _loading.enter(name, monkeypatch)
  module = _loading.load(f"{name}_options", f"{name}/{config}", monkeypatch)
  paths = []
  for preset, called in commands(name, program, module.PRESETS).items():
    path = _loading.FOLDER / name / "results" / f"{before}{preset}.jsonl"
    if not path.exists():
      continue
    paths.append(path)
    # Without options, and with those of the pages.
    counts = [0] * len(called)
    for row in training.read_rows(path):
      setting = setting_of(module, row)
      found = [
        options.rows(tmp_path / "none", setting).is_of(row, trial_of(row))
        for options in called
      ]
      counts = [x + y for x, y in zip(counts, found, strict=True)]
      assert any(found), f"{path} has a row of no command: {row}"
    assert counts[0], f"The preset {preset} of {name} would start anew."
  assert paths


def refuse(*args):
  raise AssertionError(f"computed again: {args}")


@pytest.mark.parametrize("name", ["h_ps", "failures"])
def test_clocks_compute_no_row_again(name, monkeypatch):
  pytest.importorskip("matplotlib")
  _loading.enter(name, monkeypatch)
  module = _loading.load(f"{name}_run", f"{name}/run.py", monkeypatch)
  run = types.SimpleNamespace(machines=cluster.workers([1.0]))
  monkeypatch.setattr(module, "row", refuse)
  monkeypatch.setattr(module, "simulate", lambda *args, **kwargs: run)
  monkeypatch.setattr(cluster, "plot_trace", lambda *args, **kwargs: None)
  module.main(_loading.FOLDER / name)


@pytest.mark.parametrize(
  ("preset", "rows"),
  [*((x, x) for x in ("hosts", "thin", "many")), ("hosts", "hosts-flushed")],
)
def test_cells_of_pipelines_are_not_planned_again(preset, rows, monkeypatch):
  _loading.enter("pipeline", monkeypatch)
  module = _loading.load("pipeline_run", "pipeline/run.py", monkeypatch)
  monkeypatch.setattr(module, "cell", refuse)
  options = module.config.PRESETS[preset][1]
  module.main(module.FOLDER / f"{rows}.jsonl", options, refuse)


def test_every_file_of_rows_is_read():
  paths = list(_loading.FOLDER.glob("*/results/*.jsonl"))
  assert len(paths) > 40
  for path in paths:
    assert training.read_rows(path), path


def test_first_comparison_is_not_run_again(monkeypatch, tmp_path):
  _loading.enter("first_comparison", monkeypatch)
  module = _loading.load("run", "first_comparison/run.py", monkeypatch)
  for name in ("costs", "tuning", "comparison"):
    shutil.copy(module.RESULTS / f"{name}.jsonl", tmp_path)
  monkeypatch.setattr(module.program, "Digits", lambda: None)
  monkeypatch.setattr(module.Runs, "_program", refuse)
  runs = module.Runs(tmp_path, clean=False)
  for method in module.protocol.METHODS:
    for first in module.protocol.firsts(method):
      runs.tune(method, first)
    for by in (module.choice.by_seconds, module.choice.by_bytes):
      runs.compare(method, by, module.protocol.SEEDS)
