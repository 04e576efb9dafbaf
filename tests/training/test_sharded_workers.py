"""Workers that are themselves sharded, and workers that are not.

By FSDP every leaf is split, and gathered where it is used.  Tensor parallel, a
column-parallel layer stands before a row-parallel one: no parameter is
gathered, activations are summed.
"""

import functools

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


def batches(start, num_workers=2):
  for t in range(start, 1000):
    random = np.random.default_rng(t)
    images = random.normal(size=(num_workers, 16, 8)).astype(np.float32)
    labels = images[..., :4].argmax(-1).astype(np.int32)
    yield {"image": images, "label": labels}


def run(name, team, specs, directory=None):
  """Trains, evaluates, and with a directory is stopped and resumed."""
  optimizer = METHODS[name](team.axis, specs)
  loss_fn = training.classification_loss(apply)
  step = training.make_step(loss_fn, optimizer, axis=team.axis)
  own = functools.partial(batches, num_workers=team.num_workers)
  mask = np.ones((team.num_workers, 16), np.float32)
  test = next(own(900)) | {"mask": mask}
  evaluate = training.Evaluator(team, apply, [test])

  def fit(num_steps, **options):
    state = training.init_state(team, optimizer, params(), specs=specs)
    trainer = training.Trainer(team, step)
    return trainer.fit(state, own, num_steps, evaluate=evaluate, **options)

  if directory is None:
    state, records = fit(STEPS)
  else:
    with training.Checkpoints(directory, team) as checkpoints:
      fit(11, checkpoints=checkpoints, checkpoint_every=5)
    with training.Checkpoints(directory, team) as checkpoints:
      state, records = fit(STEPS, checkpoints=checkpoints)
  anchor = transforms.anchor(state.opt_state, state.params)
  return team.gather(anchor), records[-1], state


def _team(num_workers=2):
  # The axes are explicit.
  mesh = jax.make_mesh((num_workers, 4), ("worker", "part"))
  return collectives.workers(num_workers, mesh=mesh)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("split", SPECS)
@pytest.mark.parametrize("name", METHODS)
def test_sharded_worker_matches_a_whole_one(name, split, num_workers, tmp_path):
  team, specs = _team(num_workers), SPECS[split]
  whole, wanted, _ = run(name, collectives.workers(num_workers), None)
  found, record, state = run(name, team, specs)
  resumed, after, _ = run(name, team, specs, tmp_path)
  for leaf in whole:
    np.testing.assert_allclose(found[leaf], whole[leaf], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(resumed[leaf], found[leaf])
    spec = tuple(state.params[leaf].sharding.spec)
    assert _stripped(spec) == _stripped(("worker", *specs[leaf]))
  assert wanted.sent_bytes == record.sent_bytes == after.sent_bytes
  assert (record.sent_bytes > 0) == (num_workers > 1)
  assert abs(wanted.metrics["loss"] - record.metrics["loss"]) < 1e-5


@pytest.mark.parametrize("reduce", [collectives.mean, collectives.sum])
def test_one_sharded_worker_reduces_over_itself(reduce):
  # XLA's partitioner aborts on an all-reduce over an axis of one device.
  mesh = collectives.make_mesh((1, 2), ("worker", "part"))
  team = collectives.workers(1, mesh=mesh)
  sharding = jax.NamedSharding(team.mesh, P("worker", "part"))
  values = {"integers": np.arange(4)[None], "floats": np.ones((1, 4), "f4")}
  found = team.jit(lambda tree: reduce(tree, team.axis))(
    jax.device_put(values, sharding)
  )
  wanted = reduce(jax.tree.map(lambda x: jnp.asarray(x[0]), values), None)
  for name, leaf in wanted.items():
    np.testing.assert_array_equal(found[name][0], leaf)
    assert found[name].dtype == leaf.dtype


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


def test_restored_leaves_are_split_as_those_of_the_run(tmp_path):
  team = _team()
  optimizer = methods.ssgd(SGD, axis=team.axis)
  state = training.init_state(team, optimizer, params(), specs=SPECS["fsdp"])
  with training.Checkpoints(tmp_path, team) as checkpoints:
    checkpoints.save(1, state)
  with training.Checkpoints(tmp_path, team) as checkpoints:
    found = checkpoints.restore(state).state
  for leaf, like in zip(
    *map(jax.tree.leaves, (found.params, state.params)), strict=True
  ):
    assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
    np.testing.assert_array_equal(leaf, like)
