"""Workers that share a core train as those that do not."""

import chex
import jax
import pytest

from jdist import methods
from tests.experiments import _loading

optax_chains = _loading.shared("optax_chains")

VARIANTS = {"ssgd": lambda run: methods.ssgd(run.inner, axis=run.axis)}


def test_gradients_in_turn_match_vectorized_gradients():
  pytest.importorskip("sklearn")
  options = optax_chains.Config(
    dataset="digits", model="mlp", workers=2, epochs=0.3, warmup_epochs=0.1
  )

  def trained(kind):
    with jax.numpy_dtype_promotion("standard"):  # Of Optax's schedules.
      run = kind(options, VARIANTS).prepare("ssgd", 0.1, 0)
      state, _ = run.programs.trainer.fit(
        run.state, run.batches.iterate, run.num_steps
      )
    return jax.device_get(state.params)

  one = optax_chains.on_one_core(optax_chains.Chains)
  assert one is not optax_chains.Chains
  chex.assert_trees_all_close(
    trained(one), trained(optax_chains.Chains), rtol=1e-5, atol=1e-6
  )
