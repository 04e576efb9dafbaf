"""The guard skips updates that are not finite; its effects and its cost."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import collectives, training, transforms

_WORKERS = 4


def _gradients(step):
  rows = np.arange(_WORKERS * 3, dtype=np.float32).reshape(_WORKERS, 3) / 10
  if step == 2:
    rows[1, 0] = np.nan
  return jnp.asarray(rows)


@pytest.mark.parametrize("method", ["ssgd", "local"])
def test_nan_of_one_worker_skips_the_step_of_all(method):
  inner = optax.sgd(0.1)
  build = {
    "ssgd": lambda: jdist.ssgd(inner, axis="worker"),
    "local": lambda: jdist.local_sgd(inner, 2, axis="worker"),
  }[method]
  guarded = optax.chain(transforms.skip_nonfinite("worker"), build())
  plain = build()

  def run(optimizer, gradients_of):
    params = jnp.zeros((_WORKERS, 3))
    state = jax.vmap(optimizer.init, axis_name="worker")(params)

    def step(gradients, state, params):
      updates, state = optimizer.update(gradients, state, params)
      return transforms.apply_updates(params, updates, state), state

    step = jax.jit(jax.vmap(step, axis_name="worker"))
    for i in range(6):
      params, state = step(gradients_of(i), state, params)
    return params, state

  found, state = run(guarded, _gradients)
  expected, _ = run(
    plain, lambda i: jnp.zeros((_WORKERS, 3)) if i == 2 else _gradients(i)
  )
  np.testing.assert_array_equal(found, expected)
  assert transforms.skipped(state).tolist() == [1] * _WORKERS
  assert np.isnan(run(plain, _gradients)[0]).any()


def test_trainer_counts_and_the_guard_is_one_scalar():
  workers = collectives.workers(2, substrate="vmap")
  axis = workers.axis
  optimizer = optax.chain(
    transforms.skip_nonfinite(axis), jdist.ssgd(optax.sgd(0.1), axis=axis)
  )

  def loss(params, model_state, batch, key):
    return jnp.sum(params * batch["x"]), (model_state, {})

  trainer = training.Trainer(
    workers, training.make_step(loss, optimizer, axis=axis)
  )
  batches = [{"x": np.ones((2, 1, 5), np.float32)} for _ in range(4)]
  batches[1]["x"][0, 0, 0] = np.inf
  state = training.init_state(workers, optimizer, np.zeros(5, np.float32))
  assert trainer.traffic(state, workers.place(batches[0])).bytes_per_step == (
    5 * 4 + 4  # All-reduces of two workers: as many bytes as their operands.
  )
  state, records = trainer.fit(state, lambda start: iter(batches[start:]), 4)
  assert records[-1].skipped == 1
  assert np.isfinite(workers.view(state.params)).all()


def test_a_tree_without_leaves_has_nothing_to_skip():
  guard = transforms.skip_nonfinite(axis=None)
  updates, state = guard.update({}, guard.init({}))
  assert updates == {}
  assert state.skipped == 0
