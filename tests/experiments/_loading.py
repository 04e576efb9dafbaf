"""Programs of the experiments as modules."""

import importlib.util
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parents[2] / "experiments"


def load(name, path, monkeypatch):
  """Imports a program of an experiment as a module of its own."""
  spec = importlib.util.spec_from_file_location(name, FOLDER / path)
  module = importlib.util.module_from_spec(spec)
  monkeypatch.setitem(sys.modules, name, module)
  spec.loader.exec_module(module)
  return module
