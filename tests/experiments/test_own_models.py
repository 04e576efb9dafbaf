"""Models of other frameworks and meshes, as users write them."""

import importlib.util

import jax
import pytest

from tests.experiments import _loading

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
FOLDER = _loading.FOLDER / "own_models"


def run(name, monkeypatch, num_steps):
  monkeypatch.syspath_prepend(FOLDER)
  for module in ("digits", "functions"):
    monkeypatch.setitem(
      __import__("sys").modules,
      module,
      _loading.load(module, f"own_models/{module}.py", monkeypatch),
    )
  with jax.numpy_dtype_promotion("standard"):  # As a user has it.
    module = _loading.load(f"own_{name}", f"own_models/{name}.py", monkeypatch)
    return module.main(num_steps)


@pytest.mark.smoke
@pytest.mark.parametrize(
  ("name", "num_steps"),
  [
    ("functions", 60),
    ("linen_network", 20),
    ("nnx_network", 40),
    ("equinox_network", 30),
  ],
)
def test_network_learns_digits(name, num_steps, monkeypatch, capsys):
  if name == "equinox_network" and not importlib.util.find_spec("equinox"):
    pytest.skip("Equinox is not installed: pip install equinox")
  assert run(name, monkeypatch, num_steps) > 0.7
  assert "kB sent by each worker" in capsys.readouterr().out


@pytest.mark.smoke
def test_only_adapters_are_sent(monkeypatch):
  accuracy, sent = run("lora", monkeypatch, 20)
  adapters = 4 * (64 * 4 + 4 * 128 + 128 * 10)
  # 4 rounds of a ring of 4 workers.
  assert sent == 4 * 2 * 3 / 4 * adapters
  assert accuracy > 0.7


@pytest.mark.smoke
def test_sharded_worker_takes_the_same_steps(monkeypatch):
  accuracy, apart = run("fsdp_mesh", monkeypatch, 20)
  assert apart < 1e-5
  assert accuracy > 0.5
