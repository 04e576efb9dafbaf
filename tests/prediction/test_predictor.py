"""The predictor: by hand in NumPy, its size, and what it is bound to."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import collectives, methods, models, prediction
from tests import _refusals
from tests.prediction import _tiny


def relu(x):
  """A rectifier that cuts off some of what enters, but not all."""
  assert (x < 0).any() and (x > 0).any()
  return np.maximum(0.0, x)


def reference(p, vector, grid, rear):
  """The published network of rank 1, layer after layer, in NumPy."""
  x = vector.reshape(grid, grid, -1)
  for i in (1, 2, 3):
    b, n = p[f"block{i}"], len(x)
    wide = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    x = sum(
      wide[r : r + n, c : c + n] @ b["conv"]["kernel"][r, c]
      for r in range(3)
      for c in range(3)
    )
    x = relu(x + b["conv"]["bias"])
    s = relu(x.mean((0, 1)) @ b["squeeze"]["kernel"] + b["squeeze"]["bias"])
    s = s @ b["excite"]["kernel"] + b["excite"]["bias"]
    x = x / (1 + np.exp(-s))
    if n > 1:
      x = x.reshape(n // 2, 2, n // 2, 2, 8).max((1, 3))
  f = x.reshape(8)
  if "hidden" in p:
    a = relu(f @ p["hidden"]["kernel"] + p["hidden"]["bias"])
  if "hidden_dense" in p:
    f = relu(f @ p["hidden_dense"]["kernel"] + p["hidden_dense"]["bias"])
  decoders = {name: q["kernel"] for name, q in p["layers"].items()}
  return np.concatenate(
    [
      f @ decoders[name] if dense else np.outer(a, decoders[name])
      for name, dense in rear
    ],
    axis=None,
  )


@functools.cache
def cut_of(name, num_layers, **options):
  model = models.build(
    name, input_shape=(8, 8, 1), num_classes=10, abstract=True, **options
  )
  return prediction.cut(model, num_layers, name=name)


def front_of(cut, seed=0):
  draw = np.random.default_rng(seed).standard_normal(cut.num_front)
  return (draw * 0.1).astype(np.float32)


def init(predictor, seed=0):
  return jax.jit(predictor.init)(jax.random.key(seed))


def predict(predictor, params, vector):
  """The rear in one vector."""

  @jax.jit
  def flat(params, vector):
    rear = predictor.apply_vector(params, vector)
    return _tiny.flatten_rear(predictor.cut, rear)

  return np.asarray(flat(params, vector))


SMALL = {
  # [8, 8, C] and one dense layer; [1, 1, C] and three.
  "on a grid": (cut_of("resnet8", 3, norm="none"), 8, "flatten"),
  "in one pixel": (cut_of("lenet", 1), 1, "hidden"),
}


@pytest.mark.parametrize("kind", SMALL)
def test_prediction_matches_formulas(kind):
  cut, grid, dense_from = SMALL[kind]
  predictor = prediction.predictor(cut, grid=grid, dense_from=dense_from)
  # Of both signs, and drawn so that no rectifier is without effect.
  draw = np.random.default_rng(11)
  params = jax.tree.map(
    lambda x: 0.3 * draw.standard_normal(x.shape).astype(np.float32),
    init(predictor),
  )
  vector = np.zeros(grid**2 * predictor.num_channels, np.float32)
  vector[: cut.num_front] = front_of(cut)
  rear = predict(predictor, params, vector[: cut.num_front])
  layers = [(layer.name, layer.is_dense) for layer in cut.rear]
  by_hand = reference(jax.tree.map(np.asarray, params), vector, grid, layers)
  # What 64 does not divide is padded.
  whole, start = [], 0
  for layer in cut.rear:
    whole.append(by_hand[start : start + layer.size])
    start += layer.size if layer.is_dense else -(-layer.size // 64) * 64
  np.testing.assert_allclose(rear, np.concatenate(whole), rtol=2e-5, atol=1e-6)


def by_formula(channels, convs, dense, features, hidden_dense):
  """Counted from the sheet; `convs` and `dense` are sizes of layers."""
  total = 9 * channels * 8 + 8 + 2 * (9 * 8 * 8 + 8)
  total += 3 * (8 * 2 + 2 + 2 * 8 + 8)
  total += (8 * 64 + 64) * (bool(convs) + hidden_dense)
  total += sum(convs) // 64 + sum(n * features for n in dense)
  return total


def conv(i, o, k=3):
  return k * k * i * o + o


VGG = [conv(128, 256), *[conv(256, 256)] * 7]
VGG_DENSE = [257 * 100, 101 * 100, 101 * 10]
RESNET = [
  conv(64, 128),
  *[conv(128, 128)] * 3,
  conv(64, 128),
  conv(128, 256),
  *[conv(256, 256)] * 3,
  conv(128, 256),
]
LENET_DENSE = [401 * 120, 121 * 84, 85 * 10]
COUNTS = {
  "vgg15": (4065, by_formula(4065, VGG, VGG_DENSE, 64, True)),
  "resnet18": (2901, by_formula(2901, RESNET, [2570], 8, False)),
  "lenet": (2572, by_formula(2572, [], LENET_DENSE, 64, True)),
}
# Of the sheet: C of [1, 8, 8, C], and [1, 1, 1, 2572].
CHANNELS = {
  "lenet": (1, 2572),
  "alexnet": (8, 9646),
  "vgg15": (8, 4065),
  "resnet18": (8, 2901),
  "resnet34": (8, 5498),
  "resnet50": (8, 5361),
}


@pytest.mark.parametrize("name", prediction.PUBLISHED)
def test_published_inputs_and_decoders_match(name):
  predictor = prediction.predictor(prediction.published_cut(name))
  assert (predictor.grid, predictor.num_channels) == CHANNELS[name]
  resnet = name.startswith("resnet")
  assert predictor.dense_from == ("flatten" if resnet else "hidden")
  shapes = jax.eval_shape(predictor.init, jax.random.key(0))
  sizes = [math.prod(x.shape) for x in jax.tree.leaves(shapes)]
  assert predictor.num_params == sum(sizes)
  if name in COUNTS:
    assert (predictor.num_channels, predictor.num_params) == COUNTS[name]


def test_predictor_of_vgg_15_has_published_size():
  assert COUNTS["vgg15"][1] == 2_720_126


@pytest.mark.parametrize("rank", (1, 2))
def test_predicted_convolution_has_its_rank(rank):
  cut = cut_of("resnet8", 3, norm="none")
  predictor = prediction.predictor(cut, rank)
  layer = cut.rear[0]
  rear = predict(predictor, init(predictor, 1), front_of(cut))
  width = -(-layer.size // 64)
  # Of the 64 rows the last is cut off.
  product = rear[: 63 * width].reshape(63, width)
  values = np.linalg.svd(product, compute_uv=False)
  assert values[rank - 1] > 1e-3 * values[0]
  assert values[rank] < 1e-5 * values[0]


def test_loss_of_completed_network_reaches_every_parameter():
  cut = cut_of("lenet", 2)
  predictor = prediction.predictor(cut)
  model = models.build("lenet", input_shape=(8, 8, 1), num_classes=10)
  images = jnp.asarray(np.random.default_rng(0).random((4, 8, 8, 1)))

  @jax.jit
  @jax.grad
  def grads(params):
    front, _ = cut.split(model.params)
    whole = cut.join(front, predictor.apply(params, front))
    logits, _ = model.apply(whole, {}, images.astype(jnp.float32), train=True)
    return jnp.mean(logits**2)

  found = grads(init(predictor))
  for path, leaf in jax.tree_util.tree_leaves_with_path(found):
    assert np.any(leaf != 0), jax.tree_util.keystr(path)


def test_weights_begin_within_two_deviations_and_biases_at_their_value():
  predictor = prediction.predictor(cut_of("lenet", 2))
  params = init(predictor, 3)
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    assert leaf.dtype == jnp.float32
    if path[-1].key == "bias":
      np.testing.assert_array_equal(leaf, np.float32(0.1))
    else:
      assert np.max(np.abs(leaf)) <= 0.2
  kernel = params["block1"]["conv"]["kernel"]
  # Of a normal cut off at two deviations: 0.88 of its deviation.
  assert abs(np.std(kernel) - 0.088) < 0.001


@pytest.mark.parametrize("substrate", ("vmap", "shard_map"))
def test_all_workers_predict_the_same_on_every_substrate(substrate):
  cut, *_ = SMALL["on a grid"]
  predictor = prediction.predictor(cut)
  team = collectives.workers(4, substrate=substrate)
  params = init(predictor)
  alone = predict(predictor, params, front_of(cut))

  def step(params, vectors):
    mean = collectives.mean(vectors, team.axis)
    return _tiny.flatten_rear(cut, predictor.apply_vector(params, mean))

  rows = np.asarray(
    team.gather(team.jit(step)(*team.replicate((params, front_of(cut)))))
  )
  assert (rows == rows[:1]).all()
  np.testing.assert_allclose(rows[0], alone, rtol=1e-5, atol=1e-6)


def test_other_fronts_and_parameters_are_refused():
  predictor = prediction.predictor(cut_of("lenet", 2), np.int64(2))
  assert type(predictor.rank) is int
  params = init(predictor)
  other = prediction.predictor(cut_of("lenet", 2), grid=8)
  with _refusals.refused(
    "params",
    "conv.kernel is float[3, 3, 2572, 8] and not float[3, 3, 41, 8]",
  ):
    other.apply_vector(params, jnp.zeros(2572))
  few = {k: v for k, v in params.items() if k != "hidden_dense"}
  with pytest.raises(ValueError, match=r"leaf hidden_dense\.bias is missing"):
    predictor.apply_vector(few, jnp.zeros(2572))
  with pytest.raises(
    ValueError, match=r"leaf more is float\[1\] and not missing"
  ):
    predictor.apply_vector(params | {"more": jnp.zeros(1)}, jnp.zeros(2572))
  with _refusals.refused("front", "the front of"):
    predictor.apply(params, {"conv1": {"kernel": jnp.zeros((5, 5, 1, 6))}})


def test_predictor_of_another_cut_is_refused_when_the_state_is_made():
  model = models.build("lenet", input_shape=(8, 8, 1), num_classes=10)
  cuts = [prediction.cut(model, number) for number in (1, 2)]
  own, other = (prediction.predictor(cut) for cut in cuts)
  params = [jax.eval_shape(x.init, jax.random.key(0)) for x in (own, other)]
  params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params)
  for predict, theta, rule in (
    (other.apply, params[1], "`front` must be the front of|`tree` must be"),
    (own.apply, params[1], r"`params` must be of Predictor.*is float"),
    (
      lambda _, f: other.cut.split(model.params)[1],
      (),
      "its leaf conv2.(kernel|bias) is missing",
    ),
  ):
    optimizer = methods.mp2(optax.sgd(0.1), cuts[0], predict, theta, axis=None)
    with pytest.raises(
      ValueError, match=f"`predict`.*`predictor_params`.*({rule})"
    ):
      optimizer.init(model.params)
