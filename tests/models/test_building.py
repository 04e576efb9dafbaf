"""Models by name: shapes, counts by hand, initial values, and refusals."""

import functools
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import data, models

VARIANTS = [
  ("mlp", {}),
  ("mlp", {"hidden_sizes": (20, 30)}),
  ("lenet", {}),
  ("cnn", {}),
  ("resnet8", {}),
  ("resnet8", {"norm": "group"}),
  ("resnet8", {"norm": "none"}),
]
variants = pytest.mark.parametrize("name, options", VARIANTS)


def build(name, options=None, input_shape=(8, 8, 1), seed=0):
  return models.build(
    name, input_shape=input_shape, num_classes=10, seed=seed, **(options or {})
  )


def cast(tree, dtype):
  return jax.tree.map(lambda x: x.astype(dtype), tree)


def leaves_of(model):
  pairs, _ = jax.tree_util.tree_flatten_with_path(model.params)
  return {jax.tree_util.keystr(path): leaf for path, leaf in pairs}


def test_all_names_are_tried_here():
  assert {name for name, _ in VARIANTS} | {"resnet20"} == set(models.NAMES)


@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.parametrize("shape", [(8, 8, 1), (28, 28, 1), (32, 32, 3)])
def test_logits_have_the_stated_shape(name, shape):
  model = build(name, input_shape=shape)
  images = jax.ShapeDtypeStruct((3, *shape), jnp.float32)
  for train in (False, True):
    logits, state = jax.eval_shape(
      lambda x, train=train: model.apply(
        model.params, model.state, x, train=train
      ),
      images,
    )
    assert logits.shape == (3, 10) and logits.dtype == jnp.float32
    assert jax.tree.structure(state) == jax.tree.structure(model.state)


def conv(k, i, o):
  return k * k * i * o


COUNTS = {
  ("mlp", (28, 28, 1)): 784 * 128 + 128 + 128 * 10 + 10,
  ("lenet", (28, 28, 1)): (25 * 6 + 6)
  + (25 * 6 * 16 + 16)
  + (400 * 120 + 120)
  + (120 * 84 + 84)
  + (84 * 10 + 10),
  ("cnn", (32, 32, 3)): (conv(3, 3, 32) + 32)
  + (conv(3, 32, 64) + 64)
  + (conv(3, 64, 128) + 128)
  + (4 * 4 * 128 * 10 + 10),
  # Convolutions without biases, two numbers per normalized channel, and a
  # dense layer; n blocks have 2 n convolutions per stage.
  ("resnet8", (32, 32, 3)): conv(3, 3, 16)
  + 2 * conv(3, 16, 16)
  + (conv(3, 16, 32) + conv(3, 32, 32))
  + (conv(3, 32, 64) + conv(3, 64, 64))
  + 2 * (3 * 16 + 2 * 32 + 2 * 64)
  + (64 * 10 + 10),
  ("resnet20", (32, 32, 3)): conv(3, 3, 16)
  + 6 * conv(3, 16, 16)
  + (conv(3, 16, 32) + 5 * conv(3, 32, 32))
  + (conv(3, 32, 64) + 5 * conv(3, 64, 64))
  + 2 * (7 * 16 + 6 * 32 + 6 * 64)
  + (64 * 10 + 10),
}


@pytest.mark.parametrize("name", models.NAMES)
def test_parameters_are_as_many_as_counted_by_hand(name):
  ((_, shape),) = [key for key in COUNTS if key[0] == name]
  model = build(name, input_shape=shape)
  assert models.num_params(model) == COUNTS[name, shape]


def test_the_published_counts_are_met():
  assert COUNTS["lenet", (28, 28, 1)] == 61_706
  assert COUNTS["cnn", (32, 32, 3)] == 113_738
  assert COUNTS["resnet20", (32, 32, 3)] == 269_722


def test_a_resnet_of_n_blocks_has_6n_plus_2_layers():
  for name, num_layers in (("resnet8", 8), ("resnet20", 20)):
    leaves = leaves_of(build(name))
    assert sum("kernel" in path for path in leaves) == num_layers


@variants
def test_parameters_are_float32_in_plain_dicts(name, options):
  model = build(name, options)
  for tree in (model.params, model.state):
    for leaf in jax.tree.leaves(tree):
      assert isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32

    def check(node):
      if not isinstance(node, jax.Array):
        assert type(node) is dict and all(type(key) is str for key in node)
        for child in node.values():
          check(child)

    check(tree)


@variants
def test_the_same_seed_gives_the_same_bits_and_another_seed_others(
  name, options
):
  first, same, other = (build(name, options, seed=seed) for seed in (3, 3, 4))
  kernels = 0
  for path, leaf in leaves_of(first).items():
    np.testing.assert_array_equal(leaf, leaves_of(same)[path])
    if "kernel" in path and leaf.any():
      kernels += 1
      assert (leaf != leaves_of(other)[path]).all()
  assert kernels > 1


def test_no_two_layers_start_alike():
  leaves = leaves_of(build("resnet20"))
  kernels = {
    path: np.ravel(x) for path, x in leaves.items() if "kernel" in path
  }
  starts = {
    tuple((x / x.std())[:8].round(3).tolist()) for x in kernels.values()
  }
  assert len(starts) == len(kernels)


@pytest.mark.parametrize("name", models.NAMES)
def test_weights_start_with_the_stated_deviation(name):
  leaves = leaves_of(build(name, input_shape=(32, 32, 3)))
  kernels = [leaf for path, leaf in leaves.items() if "kernel" in path]
  for i, kernel in enumerate(kernels):
    last = i == len(kernels) - 1
    std = math.sqrt((1 if last else 2) / math.prod(kernel.shape[:-1]))
    # Of n draws the deviation is known to one part in sqrt(2 n).
    bound = 5 / math.sqrt(2 * kernel.size)
    assert abs(float(jnp.std(kernel)) / std - 1) < bound
    assert abs(float(jnp.mean(kernel))) < 5 * std / math.sqrt(kernel.size)


def test_the_leaves_are_in_the_order_of_the_layers():
  for name, options in [*VARIANTS, ("resnet20", {}), ("mlp", DEEP)]:
    model = build(name, options)
    kernels = [path for path in leaves_of(model) if "kernel" in path]
    assert kernels == order_of_use(model)


DEEP = {"hidden_sizes": (3,) * 11}


def order_of_use(model):
  """Paths of the kernels in the order in which the program uses them."""
  pairs, treedef = jax.tree_util.tree_flatten_with_path(model.params)

  def forward(leaves):
    params = jax.tree.unflatten(treedef, leaves)
    images = jnp.zeros((2, 8, 8, 1))
    return model.apply(params, model.state, images, train=False)[0]

  jaxpr = jax.make_jaxpr(forward)([leaf for _, leaf in pairs]).jaxpr
  names = {
    var: jax.tree_util.keystr(path)
    for var, (path, _) in zip(jaxpr.invars, pairs, strict=True)
  }
  used = []
  for equation in jaxpr.eqns:
    if equation.primitive.name in ("conv_general_dilated", "dot_general"):
      used += [names[v] for v in equation.invars if v in names]
  return used


@variants
def test_bfloat16_parameters_and_images_compute_in_bfloat16(name, options):
  model = build(name, options)
  params = cast(model.params, jnp.bfloat16)
  images = jax.random.normal(jax.random.key(0), (4, 8, 8, 1))

  def loss(params, images):
    logits, state = model.apply(params, model.state, images, train=True)
    return logits.astype(jnp.float32).sum(), (logits, state)

  half = images.astype(jnp.bfloat16)
  # No layer may widen the products: they are what half precision speeds up.
  jaxpr = jax.make_jaxpr(jax.grad(lambda p: loss(p, half)[0]))(params).jaxpr
  products = [
    variable.aval.dtype
    for equation in jaxpr.eqns
    if equation.primitive.name in ("conv_general_dilated", "dot_general")
    for variable in equation.invars
  ]
  assert products and set(products) == {jnp.dtype(jnp.bfloat16)}
  step = jax.grad(loss, has_aux=True)
  grads, (logits, state) = jax.eval_shape(step, params, half)
  assert logits.dtype == jnp.bfloat16
  assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(grads))
  # Statistics stay wide: their steps are small against their values.
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state))
  forward = jax.jit(lambda params, images: loss(params, images)[1][0])
  logits, exact = forward(params, half), forward(model.params, images)
  scale = float(jnp.abs(exact).max())
  np.testing.assert_allclose(
    logits.astype(jnp.float32), exact, atol=0.05 * scale
  )


@pytest.mark.parametrize(
  "name, options",
  [
    ("mlp", {}),
    ("lenet", {}),
    ("cnn", {}),
    ("resnet8", {}),
    ("resnet8", {"norm": "none"}),
  ],
)
def test_a_few_digits_are_learned_by_heart(name, options):
  digits = data.load("digits")
  images = jnp.asarray(digits.normalize(digits.images[:20]))
  labels = jnp.asarray(digits.labels[:20])
  model = build(name, options)
  optimizer = optax.sgd(0.02, momentum=0.9)

  def loss(params, state):
    logits, state = model.apply(params, state, images, train=True)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), state

  @jax.jit
  def step(params, state, memory):
    grads, state = jax.grad(loss, has_aux=True)(params, state)
    updates, memory = optimizer.update(grads, memory)
    return optax.apply_updates(params, updates), state, memory

  params, state = model.params, model.state
  memory = optimizer.init(params)
  for _ in range(40):
    params, state, memory = step(params, state, memory)
  logits, _ = model.apply(params, state, images, train=False)
  assert (logits.argmax(axis=-1) == labels).mean() > 0.95


def test_a_resnet_without_normalization_starts_as_its_first_layers():
  model = build("resnet20", {"norm": "none"}, (32, 32, 3))
  images = jax.random.normal(jax.random.key(0), (8, 32, 32, 3))
  apply = jax.jit(functools.partial(model.apply, train=True))
  logits, _ = apply(model.params, {}, images)
  assert 0.1 < float(logits.std()) < 10
  # Every block is the identity, so its first convolution changes nothing yet.
  params = jax.tree.map(lambda x: x, model.params)
  for name in params:
    if "block" in name:
      params[name]["conv1"]["kernel"] *= 100
  same, _ = apply(params, {}, images)
  np.testing.assert_array_equal(logits, same)


def test_group_normalization_leaves_no_state():
  assert build("resnet8", {"norm": "group"}).state == {}
  assert build("resnet8", {"norm": "none"}).state == {}
  assert set(build("resnet8").state) >= {"stage0_norm"}


@pytest.mark.parametrize("name", ["lenet", "cnn", "resnet8"])
def test_a_picture_is_not_taken_for_its_mirror_image(name):
  model = build(name, input_shape=(28, 28, 1))
  images = jax.random.normal(jax.random.key(0), (2, 28, 28, 1))
  apply = jax.jit(functools.partial(model.apply, train=False))
  logits = [
    apply(model.params, model.state, x)[0]
    for x in (images, images[:, ::-1], images.transpose(0, 2, 1, 3))
  ]
  assert not np.allclose(logits[0], logits[1], atol=1e-3)
  assert not np.allclose(logits[0], logits[2], atol=1e-3)


@pytest.mark.parametrize(
  "name, shape, options, message",
  [
    ("alexnet", (8, 8, 1), {}, "`name` must be one of mlp, lenet, cnn"),
    ("mlp", (8, 8), {}, "`input_shape` must be"),
    ("mlp", (8, 8, 0), {}, "`input_shape` must be"),
    ("mlp", (8, 8, 1), {"hidden_sizes": (0,)}, "`hidden_sizes` must be"),
    ("mlp", (8, 8, 1), {"norm": "batch"}, "`norm` is no option of mlp"),
    ("lenet", (8, 8, 1), {"depth": 3}, "which has none"),
    ("lenet", (33, 8, 1), {}, "at most 32x32"),
    ("cnn", (7, 8, 1), {}, "at least 8x8"),
    ("resnet8", (8, 3, 1), {}, "at least 4x4"),
    ("resnet8", (8, 8, 1), {"norm": "layer"}, "`norm` must be"),
    ("resnet8", (8, 8, 1), {"blocks_per_stage": 2}, "is no option of resnet8"),
    (
      "resnet8",
      (8, 8, 1),
      {"norm": "group", "num_groups": 3},
      "`num_groups` must divide",
    ),
  ],
)
def test_what_cannot_be_built_is_refused(name, shape, options, message):
  with pytest.raises(ValueError, match=message):
    build(name, options, shape)


@pytest.mark.parametrize("argument", ["num_classes", "seed"])
def test_an_impossible_number_is_refused(argument):
  arguments = {"input_shape": (8, 8, 1), "num_classes": 10, "seed": 0}
  with pytest.raises(ValueError, match=f"`{argument}` must"):
    models.build("mlp", **(arguments | {argument: -1}))


@pytest.mark.parametrize("shape", [(8, 8, 1), (2, 4, 8, 8, 1), (2, 8, 8, 3)])
def test_images_of_another_shape_are_refused(shape):
  model = build("resnet8")
  with pytest.raises(ValueError, match=r"`images` must be \[batch, 8, 8, 1\]"):
    model.apply(model.params, model.state, jnp.zeros(shape), train=False)


def test_raw_pixels_are_refused():
  model = build("mlp")
  pixels = jnp.zeros((2, 8, 8, 1), jnp.uint8)
  with pytest.raises(ValueError, match=r"Dataset.normalize"):
    model.apply(model.params, model.state, pixels, train=False)


def test_a_model_prints_its_size():
  assert repr(build("mlp")) == "Model(9,610 parameters)"


def test_importing_the_room_loads_none_of_the_extras():
  code = "import sys; import jdist.models; print(*sys.modules)"
  result = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  loaded = set(result.stdout.split())
  assert not loaded & {"sklearn", "grain", "tensorflow_datasets", "jdist.data"}
