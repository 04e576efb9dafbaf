"""Any NNX module as a pure function, under every transformation of JAX."""

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jdist import models, states
from tests import _refusals

P = jax.sharding.PartitionSpec


class Net(nnx.Module):
  """Has a list of layers, batch statistics, and dropout."""

  def __init__(self, rngs, rate=0.5):
    self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(12)])
    self.norm = models.BatchNorm(4)
    self.dropout = nnx.Dropout(rate, rngs=rngs)

  def __call__(self, x, mask=None):
    for layer in self.layers:
      x = x + jnp.tanh(layer(x))
    return self.dropout(self.norm(x, mask=mask))


class Unmasked(nnx.Module):
  def __init__(self, rngs):
    self.layer = nnx.Linear(4, 3, rngs=rngs)
    self.norm = models.BatchNorm(3)

  def __call__(self, x):
    return self.norm(self.layer(x))


class ConvNet(nnx.Module):
  """The layers of a ResNet, but few, as each takes its time to compile."""

  def __init__(self, rngs):
    self.conv = nnx.Conv(1, 4, (3, 3), strides=(2, 2), rngs=rngs)
    self.norm = models.BatchNorm(4)
    self.dense = nnx.Linear(4, 3, rngs=rngs)

  def __call__(self, x, mask=None):
    x = jax.nn.relu(self.norm(self.conv(x), mask=mask))
    return self.dense(x.mean(axis=(1, 2)))


def conv_net():
  return models.functional(ConvNet(nnx.Rngs(0)))


def inputs(*shape):
  # NumPy draws them, as JAX would compile a program for each shape.
  rng = np.random.default_rng(1)
  return jnp.asarray(rng.standard_normal(shape, np.float32))


def resnet():
  return models.build("resnet8", input_shape=(8, 8, 1), num_classes=10)


def test_function_equals_the_module():
  net = Net(nnx.Rngs(0))
  model = models.functional(net)
  x = inputs(6, 4)
  net.eval()
  logits, state = model.apply(model.params, model.state, x, train=False)
  np.testing.assert_array_equal(logits, net(x))
  net.train()
  logits, state = model.apply(model.params, model.state, x, train=True)
  np.testing.assert_array_equal(logits, net(x))
  np.testing.assert_array_equal(state["norm"]["mean"], net.norm.mean[...])


def test_list_indices_become_text_keys():
  model = models.functional(Net(nnx.Rngs(0)))
  assert set(model.params["layers"]) == {str(i) for i in range(12)}
  # JAX rebuilds dicts with sorted keys: "10" comes before "2".
  params = jax.tree.map(lambda x: x, model.params)
  assert list(params["layers"])[2] == "10"
  x = inputs(6, 4)
  first, _ = model.apply(model.params, model.state, x, train=False)
  again, _ = model.apply(params, model.state, x, train=False)
  np.testing.assert_array_equal(first, again)


def test_calls_do_not_change_the_module():
  net = Net(nnx.Rngs(0))
  model = models.functional(net)
  before = jax.tree.map(np.asarray, (model.params, model.state["norm"]))
  x = inputs(6, 4)
  first, _ = model.apply(model.params, model.state, x, train=True)
  again, _ = model.apply(model.params, model.state, x, train=True)
  np.testing.assert_array_equal(first, again)
  after = (model.params, model.state["norm"])
  chex.assert_trees_all_equal(before, after)
  np.testing.assert_array_equal(net.norm.mean[...], np.zeros(4))


def test_dropout_key_advances_with_the_state():
  model = models.functional(Net(nnx.Rngs(0)))
  x = inputs(6, 4)
  first, state = model.apply(model.params, model.state, x, train=True)
  second, _ = model.apply(model.params, state, x, train=True)
  assert ((first == 0) != (second == 0)).any()
  still, _ = model.apply(model.params, state, x, train=False)
  assert (still != 0).all()


class LinenDropout(linen.Module):
  flag: str

  @linen.compact
  def __call__(self, x, **flags):
    known = {"train": False, "deterministic": True} | flags
    still = known[self.flag] ^ (self.flag == "train")
    return linen.Dropout(0.5, deterministic=still)(x)


class WithTrain(LinenDropout):
  def __call__(self, x, train):
    return super().__call__(x, train=train)


class WithDeterministic(LinenDropout):
  def __call__(self, x, deterministic):
    return super().__call__(x, deterministic=deterministic)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
  "module", [WithTrain("train"), WithDeterministic("deterministic")]
)
def test_keys_that_a_linen_module_is_bound_to_are_state(module, raw):
  key = jax.random.PRNGKey(3) if raw else jax.random.key(3)
  model = models.functional(module.bind({}, rngs={"dropout": key}))
  assert states.is_key(model.state["rngs"]["dropout"])  # Folded by workers.
  x = jnp.ones((8, 8))
  first, state = model.apply(model.params, model.state, x, train=True)
  key = jax.random.split(jax.random.key(3))
  wanted = module.apply({}, x, module.flag == "train", rngs={"dropout": key[0]})
  np.testing.assert_array_equal(first, wanted)
  chex.assert_trees_all_equal(
    jax.random.key_data(state["rngs"]["dropout"]), jax.random.key_data(key[1])
  )
  second, _ = model.apply(model.params, state, x, train=True)
  assert ((first == 0) != (second == 0)).any()
  still, same = model.apply(model.params, state, x, train=False)
  np.testing.assert_array_equal(still, x)
  chex.assert_trees_all_equal(same, state)
  # Keys are no statistics, which padding could enter.
  masked, _ = model.apply(
    model.params, model.state, x, train=True, mask=jnp.zeros(8)
  )
  np.testing.assert_array_equal(masked, first)


def told(on, off):
  """Returns a call that shows the flags that it is given, by its defaults."""

  def call(
    self, x, train=on, training=on, is_training=on, deterministic=off,
    inference=off, use_running_average=off,
  ):  # fmt: skip
    flags = [train, training, is_training]
    flags += [not deterministic, not inference, not use_running_average]
    return x * jnp.array(flags, x.dtype)

  return call


@pytest.mark.parametrize("kind", [nnx.Module, linen.Module, eqx.Module])
@pytest.mark.parametrize("train", [True, False])
def test_modules_are_told_whether_they_are_trained(kind, train):
  module = type("Told", (kind,), {"__call__": told(not train, train)})()
  if kind is linen.Module:
    module = module.bind({})
  model = models.functional(module)
  found, _ = model.apply({}, {}, jnp.ones((2, 6)), train=np.bool(train))
  np.testing.assert_array_equal(found, np.full((2, 6), train, np.float32))


@pytest.mark.parametrize("kind", [nnx.Module, eqx.Module])
def test_mode_decides_where_a_flag_is_none(kind):
  module = type("Told", (kind,), {"__call__": told(True, None)})()
  found, _ = models.functional(module).apply(
    {}, {}, jnp.ones((2, 6)), train=False
  )
  np.testing.assert_array_equal(found, [[0, 0, 0, 1, 1, 1]] * 2)


class Fields(linen.Module):
  train: bool = False
  is_training: bool = False
  deterministic: bool = True
  use_running_average: bool | None = None  # It is given to the call.

  def __call__(self, x, deterministic=None, use_running_average=None):
    flags = [self.train, self.is_training, not self.deterministic]
    flags += [deterministic is None, not use_running_average]
    return x * jnp.array(flags, x.dtype)


@pytest.mark.parametrize("train", [True, False])
def test_fields_of_a_linen_module_follow_training(train):
  model = models.functional(Fields().bind({}))
  found, _ = model.apply({}, {}, jnp.ones(5), train=train)
  np.testing.assert_array_equal(found, [train, train, train, True, train])


def test_evaluation_does_not_change_the_state():
  model = conv_net()
  apply = jax.jit(functools.partial(model.apply, train=False))
  _, state = apply(model.params, model.state, inputs(4, 8, 8, 1))
  chex.assert_trees_all_equal(state, model.state)


def test_evaluation_uses_the_statistics_of_the_state():
  model = models.functional(Net(nnx.Rngs(0)))
  x = inputs(6, 4)
  zero, _ = model.apply(model.params, model.state, x, train=False)
  moved = {**model.state, "norm": {"mean": jnp.ones(4), "var": jnp.ones(4)}}
  one, _ = model.apply(model.params, moved, x, train=False)
  np.testing.assert_allclose(one, zero - 1, atol=1e-4)


def test_rows_are_independent_in_evaluation():
  model = conv_net()
  x = inputs(4, 8, 8, 1)
  apply = jax.jit(functools.partial(model.apply, train=False))
  whole, _ = apply(model.params, model.state, x)
  alone, _ = apply(model.params, model.state, x[:1])
  np.testing.assert_allclose(whole[:1], alone, rtol=1e-4, atol=1e-5)


def per_worker(num_workers):
  """One gradient and state per worker, with parameters of its own."""
  model = conv_net()

  def step(params, state, images):
    def loss(params):
      logits, new = model.apply(params, state, images, train=True)
      return jnp.square(logits).mean(), new

    return jax.grad(loss, has_aux=True)(params)

  def stack(tree):
    factors = 1 + np.arange(num_workers, dtype=np.float32) / 10
    return jax.tree.map(
      lambda x: np.asarray(x) * factors.reshape(-1, *(1,) * x.ndim), tree
    )

  arguments = (
    stack(model.params),
    stack(model.state),
    np.asarray(inputs(num_workers, 4, 8, 8, 1)),
  )
  return step, arguments


def assert_close(one, other):
  def check(a, b):
    # Gradients before a batch norm nearly cancel, so errors are compared with
    # the largest entry of a leaf.
    a, b = np.asarray(a), np.asarray(b)
    np.testing.assert_allclose(
      a, b, rtol=1e-4, atol=1e-5 * (1 + np.abs(b).max())
    )

  jax.tree.map(check, one, other)


def one_by_one(step, arguments):
  step = jax.jit(step)
  results = [
    step(*jax.tree.map(lambda x, i=i: x[i], arguments))
    for i in range(len(arguments[-1]))
  ]
  return jax.tree.map(lambda *leaves: np.stack(leaves), *results)


def test_vmap_over_workers_equals_one_worker_after_the_other():
  step, arguments = per_worker(3)
  together = jax.jit(jax.vmap(step))(*arguments)
  assert_close(together, one_by_one(step, arguments))


def test_shard_map_over_workers_equals_one_worker_after_the_other():
  num_workers = min(2, jax.device_count())
  step, arguments = per_worker(num_workers)
  mesh = jax.make_mesh(
    (num_workers,),
    ("worker",),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=jax.devices()[:num_workers],
  )

  def one(params, state, images):
    view = lambda tree: jax.tree.map(lambda x: x[0], tree)  # noqa: E731
    result = step(view(params), view(state), view(images))
    return jax.tree.map(lambda x: x[None], result)

  specs = (P("worker"),) * 3
  mapped = jax.shard_map(
    one, mesh=mesh, in_specs=specs, out_specs=(P("worker"),) * 2
  )
  together = jax.jit(mapped)(*arguments)
  assert_close(together, one_by_one(step, arguments))


def test_one_program_serves_all_calls():
  model = conv_net()
  traces = []

  @jax.jit
  def run(params, state, images):
    traces.append(1)
    return model.apply(params, state, images, train=True)

  state = model.state
  for _ in range(3):
    _, state = run(model.params, state, inputs(2, 8, 8, 1))
  assert len(traces) == 1


def padded(images):
  """The images with loud padding after them, and the mask."""
  padding = 1e3 * np.asarray(inputs(3, *images.shape[1:]))
  mask = np.array([1.0] * len(images) + [0.0] * 3, np.float32)
  return np.concatenate([images, padding]), mask


def test_mask_reaches_every_layer_of_a_resnet():
  model = resnet()
  images = inputs(5, 8, 8, 1)
  apply = jax.jit(functools.partial(model.apply, train=True))
  logits, state = apply(model.params, model.state, images)
  longer, mask = padded(images)
  masked, masked_state = apply(model.params, model.state, longer, mask=mask)
  assert_close((masked[:5], masked_state), (logits, state))


def test_gradients_with_a_mask_equal_those_of_the_unpadded_batch():
  model = conv_net()

  def loss(params, images, mask=None):
    logits, _ = model.apply(params, model.state, images, train=True, mask=mask)
    return jnp.square(logits[:5]).sum()

  images = inputs(5, 8, 8, 1)
  grad = jax.jit(jax.grad(loss))
  expected = grad(model.params, images)
  assert_close(grad(model.params, *padded(images)), expected)


def test_batch_of_padding_alone_keeps_state_and_finite_gradients():
  model = conv_net()
  mask = jnp.zeros(3)

  def loss(params):
    logits, state = model.apply(
      params, model.state, inputs(3, 8, 8, 1), train=True, mask=mask
    )
    selected = jnp.where(mask[:, None] > 0, jnp.square(logits), 0.0)
    return selected.sum(), state

  grads, state = jax.jit(jax.grad(loss, has_aux=True))(model.params)
  chex.assert_trees_all_equal(state, model.state)
  assert all((x == 0).all() for x in jax.tree.leaves(grads))


def test_mask_for_a_module_without_one_raises_in_training():
  model = models.functional(Unmasked(nnx.Rngs(0)))
  mask = jnp.ones(6)
  model.apply(model.params, model.state, inputs(6, 4), train=False, mask=mask)
  with _refusals.refused("mask", "not be given"):
    model.apply(model.params, model.state, inputs(6, 4), train=True, mask=mask)


def test_module_without_state_ignores_a_mask():
  model = models.functional(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
  arguments = (model.params, {}, inputs(6, 4))
  masked, state = model.apply(*arguments, train=True, mask=jnp.zeros(6))
  plain, _ = model.apply(*arguments, train=True)
  np.testing.assert_array_equal(masked, plain)
  assert state == {}


@pytest.mark.parametrize("kind", [nnx.Module, linen.Module, eqx.Module])
def test_module_that_needs_more_than_inputs_is_refused(kind):
  call = {"__call__": lambda self, x, state: (x, state)}
  module = type("Stateful", (kind,), call)()
  if kind is linen.Module:
    module = module.bind({})
  with _refusals.refused("module", "got Stateful of x, state and state=None"):
    models.functional(module)


def test_linen_module_without_its_variables_is_refused():
  with _refusals.refused("module", "bound to its variables"):
    models.functional(Fields())
