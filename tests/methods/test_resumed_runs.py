"""A run that was stopped ends as one that went through, to the bit."""

import chex
import jax.numpy as jnp
import optax
import pytest

from jdist import collectives, methods, training, transforms
from tests.transforms._rounds import random_targets

SGD = optax.sgd(0.1)
NUM_WORKERS = 4
# Random numbers, owners' residuals, a shared low rank, a phase of a schedule,
# and the middle of a round.
METHODS = {
  "qsgd": lambda axis: methods.qsgd(SGD, block=8, axis=axis),
  "ef_signsgd": lambda axis: methods.ef_signsgd(SGD, axis=axis),
  "powersgd": lambda axis: methods.powersgd(SGD, 1, axis=axis),
  "dgc": lambda axis: methods.dgc(SGD, 0.1, axis=axis, steps_per_phase=2),
  "sparse_loco": lambda axis: methods.sparse_loco(
    SGD, 3, 0.1, axis=axis, chunk=32
  ),
}


@pytest.mark.parametrize("name", METHODS)
def test_state_alone_resumes_a_run(name, tmp_path):
  team = collectives.workers(NUM_WORKERS, substrate="shard_map")
  optimizer = METHODS[name](team.axis)
  targets = random_targets(8, NUM_WORKERS, 8, 8)

  @team.jit
  def step(w, state, x):
    updates, state = optimizer.update(w - x, state, w)
    return transforms.apply_updates(w, updates, state), state

  def run(w, state, xs):
    for x in xs:
      w, state = step(w, state, *team.place((x,)))
    return w, state

  def begin():
    w = team.replicate(jnp.zeros((8, 8)))
    return w, team.jit(optimizer.init)(w)

  half = run(*begin(), targets[:5])
  told = transforms.sharing(half[1])
  with training.Checkpoints(tmp_path, team) as checkpoints:
    # Refuses a leaf that is labelled as shared and is not.
    checkpoints.save(5, half, (told.params, told.state))
  with training.Checkpoints(tmp_path, team) as checkpoints:
    again = checkpoints.restore(begin()).state
  wanted = run(*begin(), targets)
  chex.assert_trees_all_equal(run(*again, targets[5:]), wanted)
