"""The schedule of H-PS's comparisons counts the updates of each protocol."""

import dataclasses

import jax.numpy as jnp
import pytest

from jdist.training import comparison
from tests.experiments import _loading


@pytest.mark.parametrize(
  ("variant", "per_round"), [("bsp", 1), ("h_ps, foresight", 1), ("asp", 4)]
)
def test_cosine_is_as_long_as_the_run(variant, per_round, monkeypatch):
  """Rounds are of 64 samples; asp makes an update of each worker's task."""
  pytest.importorskip("simpy")
  _loading.enter("h_ps", monkeypatch)
  module = _loading.load("h_ps_train", "h_ps/train.py", monkeypatch)
  _, smoke = module.config.PRESETS["smoke"]
  options = dataclasses.replace(smoke, schedule="cosine", epochs=10.0)
  fit = module.Fit(options)
  trial = comparison.Trial("tuning", variant, 0.1, 10_000)
  size = len(fit.problem.train_set(trial))
  (setting,) = options.list_settings()
  schedule = fit.schedule(setting, trial)
  length = round(size * 10.0 / 64 * per_round)
  # From a tenth of the rate up to all of it, and down to a hundredth.
  ends = [schedule(k) for k in (0, length // 10, length)]
  assert jnp.allclose(jnp.array(ends), jnp.array([0.1, 1.0, 0.01]), atol=1e-5)
  assert schedule(length - 5) > ends[-1]
  plain = module.Fit(dataclasses.replace(options, schedule="constant"))
  assert plain.schedule(setting, trial)(10**6) == 1.0
