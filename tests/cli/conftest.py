"""Fixtures of the command line: eight devices, and refused commands."""

import jax
import pytest

from jdist import cli, data, methods, models, pipeline, server

_REGISTRIES = (
  *methods.PARTS.values(), methods.registry, models.MODELS, data.DATASETS,
  server.PROTOCOLS, pipeline.TABLES,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="session")
def _eight_devices():
  assert len(jax.devices()) == 8


@pytest.fixture(autouse=True)
def _standard_promotion():
  """As a user has it: Optax's schedules and optimizers mix dtypes."""
  with jax.numpy_dtype_promotion("standard"):
    yield


@pytest.fixture(autouse=True)
def _parts_are_forgotten():
  """Parts of a user's own stay in the registries until the process ends."""
  before = [dict(x) for x in _REGISTRIES]
  yield
  for registry, entries in zip(_REGISTRIES, before, strict=True):
    registry.clear()
    registry.update(entries)


@pytest.fixture
def refusal(tmp_path, monkeypatch, capsys):
  """Runs a command that must be refused in one line, and returns the line."""

  def run(words):
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert cli.main(words.split()) == 2
    out, error = capsys.readouterr()
    assert error.startswith("jdist: error: ") and error.endswith("\n")
    assert error.count("\n") == 1 and out == ""
    assert not list(folder.iterdir())
    return error

  return run
