"""Workers that are themselves sharded, beside workers that are not.

By FSDP every leaf is split, and gathered where it is used.  Tensor parallel, a
column-parallel layer stands before a row-parallel one: no parameter is
gathered, activations are summed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jdist import codecs, collectives, methods, reducers, training, transforms
from jdist.transforms import intervals

SGD = optax.sgd(0.1, momentum=0.9)
SPECS = {
  "fsdp": {"w1": P("part"), "b1": P("part"), "w2": P("part")},
  "tensor": {"w1": P(None, "part"), "b1": P("part"), "w2": P("part", None)},
}
STEPS = 20
METHODS = {
  "diloco": lambda axis, specs: methods.diloco(SGD, 4, axis=axis),
  "int4": lambda axis, specs: methods.diloco(
    SGD,
    4,
    axis=axis,
    compression=reducers.Compression(
      codecs.Quantize(4), reducers.ErrorFeedback()
    ),
  ),
  "powersgd": lambda axis, specs: methods.powersgd(SGD, 2, axis=axis),
  "streamed msdpu": lambda axis, specs: methods.msdpu(
    SGD,
    intervals.fixed(4),
    0.1,
    axis=axis,
    overlap=transforms.Delayed(
      carry=None, stream=transforms.Stream(specs=specs)
    ),
  ),
}


def params():
  random = np.random.default_rng(0)
  return {
    "w1": random.normal(size=(8, 16)).astype(np.float32) / 3,
    "b1": np.zeros(16, np.float32),
    "w2": random.normal(size=(16, 4)).astype(np.float32) / 4,
  }


def apply(params, model_state, images, *, train):
  del train
  hidden = jnp.tanh(images @ params["w1"] + params["b1"])
  return hidden @ params["w2"], model_state


def batches(start):
  for t in range(start, 1000):
    random = np.random.default_rng(t)
    images = random.normal(size=(2, 16, 8)).astype(np.float32)
    labels = images[..., :4].argmax(-1).astype(np.int32)
    yield {"image": images, "label": labels}


def run(name, team, specs, directory=None):
  """Trains, evaluates, and with a directory is stopped and resumed."""
  optimizer = METHODS[name](team.axis, specs)
  loss_fn = training.classification_loss(apply)
  step = training.make_step(loss_fn, optimizer, axis=team.axis)
  test = next(batches(900)) | {"mask": np.ones((2, 16), np.float32)}
  evaluate = training.Evaluator(team, apply, [test])

  def fit(num_steps, **options):
    state = training.init_state(team, optimizer, params(), specs=specs)
    trainer = training.Trainer(team, step)
    return trainer.fit(state, batches, num_steps, evaluate=evaluate, **options)

  if directory is None:
    state, records = fit(STEPS)
  else:
    with training.Checkpoints(directory, team) as checkpoints:
      fit(11, checkpoints=checkpoints, checkpoint_every=5)
    with training.Checkpoints(directory, team) as checkpoints:
      state, records = fit(STEPS, checkpoints=checkpoints)
  anchor = transforms.anchor(state.opt_state, state.params)
  return team.gather(anchor), records[-1], state


def _team():
  # Of explicit axes.
  return collectives.workers(2, mesh=jax.make_mesh((2, 4), ("worker", "part")))


@pytest.mark.slow
@pytest.mark.parametrize("split", SPECS)
@pytest.mark.parametrize("name", METHODS)
def test_sharded_worker_matches_a_whole_one(name, split, tmp_path):
  team, specs = _team(), SPECS[split]
  whole, wanted, _ = run(name, collectives.workers(2), None)
  found, record, state = run(name, team, specs)
  resumed, after, _ = run(name, team, specs, tmp_path)
  for leaf in whole:
    np.testing.assert_allclose(found[leaf], whole[leaf], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(resumed[leaf], found[leaf])
    spec = tuple(state.params[leaf].sharding.spec)
    assert _stripped(spec) == _stripped(("worker", *specs[leaf]))
  assert wanted.sent_bytes == record.sent_bytes == after.sent_bytes > 0
  assert abs(wanted.metrics["loss"] - record.metrics["loss"]) < 1e-5


def _stripped(spec):
  return spec[: max(i for i, x in enumerate(spec) if x) + 1]


@pytest.mark.slow
@pytest.mark.parametrize("split", SPECS)
def test_only_fsdp_gathers_parameters(split):
  team = _team()
  optimizer = METHODS["diloco"](team.axis, None)
  loss_fn = training.classification_loss(apply)
  step = training.make_step(loss_fn, optimizer, axis=team.axis)
  state = training.init_state(team, optimizer, params(), specs=SPECS[split])
  batch = team.shard(next(batches(0)))
  program = team.jit(step).lower(state, batch).compile().as_text()
  assert ("all-gather" in program) == (split == "fsdp")


def test_explicit_axes_become_automatic_but_raise_around_programs():
  mesh = jax.make_mesh((2, 4), ("worker", "part"))
  team = collectives.workers(2, mesh=mesh)
  kinds = set(team.mesh.axis_types)
  assert kinds == {jax.sharding.AxisType.Auto}
  placed = jax.device_put(
    np.arange(8.0, dtype=np.float32), jax.NamedSharding(mesh, P("part"))
  )
  rows = team.shard(placed)
  assert rows.shape == (2, 4)
  with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"`jax\.set_mesh`"):
    team.jit(lambda x: x)(rows)
  with jax.set_mesh(team.mesh):
    assert team.jit(lambda x: x + 1)(rows).tolist()[0] == [1, 2, 3, 4]
