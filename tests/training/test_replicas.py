"""What all workers share is equal to the bit after 200 steps of any method."""

import json

import pytest

from jdist import methods
from tests import _processes

_COMPRESSED = (
  "qsgd", "terngrad", "signsgd", "ef_signsgd", "topk_sgd",
  "dgc", "powersgd", "demo", "sparse_loco", "muloco",
)  # fmt: skip
# Which need networks that were trained before.
_TRAINED = {"mp2"}
_OTHERS = tuple(sorted({*methods.registry} - {*_COMPRESSED} - _TRAINED))


def train(names, steps):
  """Trains with each, and compares the rows of all that is shared."""
  import jax
  import numpy as np
  import optax

  from jdist import collectives, data, models, training, transforms
  from jdist.cli import _groups, _methods

  jax.config.update("jax_numpy_dtype_promotion", "standard")
  digits = data.load("digits")
  model = models.build(
    "mlp", input_shape=digits.input_shape, num_classes=10, hidden_sizes=(32,)
  )
  team = collectives.workers(4, substrate="shard_map")
  batches = data.Batches(digits, 4, 8, seed=3, worker_ids=team.local_workers)
  loss = training.classification_loss(model.apply, normalize=digits.normalize)
  different = {}
  for name in names:
    options = _groups.Common(interval=3)
    run = _methods.run_of(options, steps, 10, optax.constant_schedule(0.02))
    chain = _methods.build_method(name, options, run, team.axis)
    step = training.make_step(loss, chain, axis=team.axis)
    state = training.init_state(team, chain, model.params, model.state)
    state, _ = training.Trainer(team, step).fit(state, batches.iterate, steps)
    # On the anchor, where there is one, to compare the parameters too.
    labels = transforms.sharing(state.opt_state)
    rows = team.gather((state.params, state.opt_state))
    told = jax.tree_util.tree_leaves_with_path(rows)
    shared = [labels.params] * len(jax.tree.leaves(rows[0]))
    shared += jax.tree.leaves(labels.state)
    assert any(shared) or name == "overlap_local_sgd", name
    different[name] = [
      jax.tree_util.keystr(path)
      for (path, leaf), same in zip(told, shared, strict=True)
      # Of bits: a loss that has not arrived is NaN.
      if same and len({row.tobytes() for row in np.asarray(leaf)}) > 1
    ]
  return different


@pytest.mark.slow
@pytest.mark.parametrize("names", [_COMPRESSED, _OTHERS], ids=["few", "others"])
@pytest.mark.parametrize("processes", [1, 2])
def test_replicas_are_identical_to_the_bit(names, processes):
  pytest.importorskip("sklearn")
  found = _processes.run(
    train,
    names,
    200,
    num_processes=processes,
    devices_per_process=4 // processes,
    timeout_s=1200,
  )
  for told in found:
    assert set(told) == set(names)
    assert not any(told.values()), json.dumps(told)
