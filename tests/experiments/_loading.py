"""Programs of the experiments as modules."""

import importlib
import importlib.util
import os
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parents[2] / "experiments"


def load(name, path, monkeypatch):
  """Imports a program of an experiment as a module of its own."""
  spec = importlib.util.spec_from_file_location(name, FOLDER / path)
  module = importlib.util.module_from_spec(spec)
  monkeypatch.setitem(sys.modules, name, module)
  # Some programs add a flag for their own process.
  monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
  spec.loader.exec_module(module)
  return module


def enter(name, monkeypatch):
  """Lets an experiment's programs import one another, until a test ends."""
  monkeypatch.syspath_prepend(FOLDER / name)
  for path in FOLDER.glob("*/*.py"):
    # All experiments have a `config`: what is there once the test has ended is
    # that of before.
    monkeypatch.setitem(sys.modules, path.stem, None)
    del sys.modules[path.stem]


def alone(name, path):
  """Imports a program that imports no other one, for a whole file of tests."""
  spec = importlib.util.spec_from_file_location(name, FOLDER / path)
  # Its dataclasses look for their module.
  module = sys.modules[name] = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def shared(name):
  """Imports a package that several experiments share."""
  if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))
  return importlib.import_module(name)
