"""Models by name: shapes, counts by hand, initial values."""

import functools
import inspect
import math
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jdist import data, models
from jdist.models import _lenet, _resnet, _vgg
from tests.models import _variants
from tests.models._variants import build, leaves_of, variants


def cast(tree, dtype):
  return jax.tree.map(lambda x: x.astype(dtype), tree)


def test_table_has_every_model():
  tried = {name for name, _ in _variants.VARIANTS} | set(_variants.ALSO)
  assert tried == set(models.MODELS)


_NORM = {"norm": "batch", "num_groups": 8}
_FORMED = {"form": None, "hidden_sizes": None}
_VGG = _FORMED | {
  "norm": "none", "num_groups": 8, "width": 64, "max_growth": 8
}  # fmt: skip
_DEFAULTS = {
  "MLP": {"hidden_sizes": (128,)}, "LeNet": {}, "CNN": {"hidden_sizes": ()},
  "AlexNet": _FORMED, "VGG": _VGG, "CifarResNet": _NORM,
  "ResNet": {"form": None, **_NORM, "width": 64, "shortcut_size": 1},
  "Transformer": {
    "num_layers": 4, "width": 128, "num_heads": 4, "hidden_size": None,
    "positions": "learned", "tied": False,
  },
}  # fmt: skip


def test_default_of_an_option_is_the_stated_one():
  found = {}
  for network in models.MODELS.values():
    kind = getattr(network, "func", network)
    arguments = inspect.signature(kind.__init__).parameters.values()
    found[kind.__name__] = {
      x.name: x.default for x in arguments if x.default is not x.empty
    }
  assert found == _DEFAULTS


def test_docstring_lists_the_options_of_every_model():
  names, listed = [], {}
  for line in models.build.__doc__.splitlines():
    cells = [x.strip() for x in line.split("|")]
    if len(cells) < 5 or cells[1] == "name" or "--" in cells[1]:
      continue
    name, _, options = cells[1:4]
    if name:  # "resnet18, 34, 50" stands for three names.
      first, *others = name.split(", ")
      stem = first.rstrip("0123456789")
      names = [first, *(stem + x.removeprefix(stem) for x in others)]
    for name in names:
      words = re.findall(r"[a-z_]+", re.sub(r"=(\(.*?\)|[^,]*)", "", options))
      listed[name] = listed.get(name, []) + words
  taken = {}
  for name in models.MODELS:
    with pytest.raises(ValueError, match=f"no option of {name}") as caught:
      build(name, {"other": 1})
    words = str(caught.value).rstrip(".").partition("which has ")[2]
    taken[name] = [x for x in words.split(", ") if x != "none"]
  assert {k: sorted(v) for k, v in listed.items()} == {
    k: sorted(v) for k, v in taken.items()
  }


IMAGE_MODELS = [name for name in models.MODELS if name != "transformer"]
# Deep models take long to trace, so only small ones get further image sizes.
SMALL = ["mlp", "lenet", "cnn", "alexnet", "vgg11", "resnet8", "resnet18"]
SIZES = [(name, (28, 28, 1)) for name in IMAGE_MODELS] + [
  (name, shape) for name in SMALL for shape in [(8, 8, 1), (32, 32, 3)]
]


@pytest.mark.parametrize("name, shape", SIZES)
def test_logits_have_the_stated_shape(name, shape):
  model = build(name, input_shape=shape, abstract=True)
  x = _variants.like(name, 3, shape)
  logits, state = _variants.shapes_of(model, x, train=True)
  assert logits.shape == (3, 10) and logits.dtype == jnp.float32
  assert state == model.state


@variants
def test_training_and_evaluation_return_equal_shapes(name, options):
  model = build(name, options, abstract=True)
  x = _variants.like(name)
  shapes = [
    _variants.shapes_of(model, x, train=train) for train in (True, False)
  ]
  assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", ["alexnet", "vgg11", "resnet18"])
@pytest.mark.parametrize("size", [(64, 64), (160, 160), (63, 65), (224, 224)])
def test_form_follows_the_longer_side_of_the_images(name, size):
  shape = (*size, 3)
  form = "cifar" if max(size) <= 64 else "imagenet"
  model = build(name, input_shape=shape, abstract=True)
  named = build(name, {"form": form}, input_shape=shape, abstract=True)
  other = "imagenet" if form == "cifar" else "cifar"
  changed = build(name, {"form": other}, input_shape=shape, abstract=True)
  assert model.params == named.params != changed.params
  x = _variants.like(name, 2, shape)
  logits, _ = _variants.shapes_of(model, x, train=False)
  assert logits.shape == (2, 10)


def test_resnet_of_n_blocks_has_6n_plus_2_layers():
  for name, num_layers in (("resnet8", 8), ("resnet20", 20)):
    leaves = leaves_of(build(name, abstract=True))
    assert sum("kernel" in path for path in leaves) == num_layers


def test_networks_have_the_published_number_of_layers():
  for name in models.MODELS:
    if name[:3] in ("vgg", "res") and name not in ("resnet8", "resnet20"):
      leaves = leaves_of(build(name, abstract=True))
      layers = [p for p in leaves if "kernel" in p and "shortcut" not in p]
      assert len(layers) == int(name[-2:]) - (3 - 1) * (
        # The head for CIFAR has one dense layer instead of three.
        name.startswith("vgg") and name != "vgg15"
      )


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
def test_same_seed_gives_the_same_bits_and_another_seed_others(name, options):
  first, same, other = (build(name, options, seed=seed) for seed in (3, 3, 4))
  kernels = 0
  for path, leaf in leaves_of(first).items():
    np.testing.assert_array_equal(leaf, leaves_of(same)[path])
    if "kernel" in path and leaf.any():
      kernels += 1
      assert (leaf != leaves_of(other)[path]).all()
  assert kernels > 1


@pytest.mark.parametrize(
  "name, options", [("resnet20", {}), ("transformer", {"width": 16})]
)
def test_layers_have_different_initial_values(name, options):
  leaves = leaves_of(build(name, options))
  kernels = {
    path: np.ravel(x)
    for path, x in leaves.items()
    if "kernel" in path or "table" in path
  }
  starts = {
    tuple((x / x.std())[:8].round(3).tolist()) for x in kernels.values()
  }
  assert len(starts) == len(kernels)


def scale_of(path, options, last):
  """What the variance of a kernel is times the number of its inputs."""
  scale = 1 if last or options.get("num_heads") else 2
  if "attend3_out" in path or "dense3_down" in path:
    scale /= 2 * options["num_layers"]
  if options.get("norm") == "none" and "block" in path and "conv1" in path:
    # resnet8 has 3 blocks and resnet18 8.
    scale /= 8 if "width" in options else 3
  return scale


@variants
def test_weights_start_with_the_stated_deviation(name, options):
  shape = None if name == "transformer" else (32, 32, 3)
  leaves = leaves_of(build(name, options, shape))
  kernels = [(path, x) for path, x in leaves.items() if "kernel" in path]
  for i, (path, kernel) in enumerate(kernels):
    if options.get("norm") == "none" and "block" in path and "conv2" in path:
      assert not kernel.any()
      continue
    scale = scale_of(path, options, last=i == len(kernels) - 1)
    std = math.sqrt(scale / math.prod(kernel.shape[:-1]))
    # The deviation of n draws has a relative error of 1 / sqrt(2 n).
    bound = 5 / math.sqrt(2 * kernel.size)
    assert abs(float(np.std(kernel)) / std - 1) < bound, path
    assert abs(float(np.mean(kernel))) < 5 * std / math.sqrt(kernel.size)


@pytest.mark.parametrize(
  "name, conv, scale",
  [("resnet8", "conv1", 3**-0.5), ("resnet50", "conv2", 16**-0.25)],
)
def test_fixups_scale_is_of_blocks_and_of_their_convolutions(name, conv, scale):
  options = {"norm": "none"} | ({"width": 8} if name == "resnet50" else {})
  params = build(name, options, (32, 32, 3)).params
  last = [x for x in params if "block1" in x][-1]
  kernel = params[last][conv]["kernel"]
  std = scale * math.sqrt(2 / math.prod(kernel.shape[:-1]))
  assert abs(float(np.std(kernel)) / std - 1) < 5 / math.sqrt(2 * kernel.size)


def test_shortcut_without_parameters_takes_every_second_pixel():
  block = _resnet._Block(
    2, 3, bottleneck=False, strides=2, norm="none", num_groups=1,
    shortcut_size=None, num_blocks=1, rngs=nnx.Rngs(0),
  )  # fmt: skip
  x = np.arange(1.0, 33.0, dtype=np.float32).reshape(1, 4, 4, 2)
  # The convolutions add zeros at first.
  y = np.asarray(block(jnp.asarray(x), None))
  np.testing.assert_array_equal(y[..., :2], x[:, ::2, ::2])
  assert not y[..., 2].any()


@pytest.mark.parametrize("bottleneck", [False, True])
def test_stride_of_a_block_is_that_of_its_first_window_of_three(bottleneck):
  block = _resnet._Block(
    8, 4, bottleneck=bottleneck, strides=2, norm="none", num_groups=1,
    shortcut_size=None, num_blocks=1, rngs=nnx.Rngs(0),
  )  # fmt: skip
  convs = [getattr(block, name) for name in block.names]
  assert {x.padding for x in convs} == {"SAME"}
  found = [(x.kernel_size, x.strides) for x in convs]
  one, three = (1, 1), (3, 3)
  assert found == (
    [(one, (1, 1)), (three, (2, 2)), (one, (1, 1))] if bottleneck
    else [(three, (2, 2)), (three, (1, 1))]
  )  # fmt: skip


def test_block_with_a_shortcut_of_its_own_is_padded_alike_on_all_sides():
  block = _resnet._Block(
    8, 4, bottleneck=True, strides=2, norm="none", num_groups=1,
    shortcut_size=3, num_blocks=1, rngs=nnx.Rngs(0),
  )  # fmt: skip
  names = (*block.names, "shortcut")
  assert [getattr(block, x).padding for x in names] == [0, 1, 0, 1]


def test_block_of_vgg_pools_a_last_odd_row_and_column():
  x = jnp.arange(9.0).reshape(1, 3, 3, 1)
  assert _vgg._end_block(False, x).ravel().tolist() == [4, 5, 7, 8]
  assert _vgg._end_block(True, x).tolist() == [[6]]


def test_odd_border_of_lenet_is_larger_below_and_to_the_right():
  padded = np.asarray(_lenet._pad_to_32(jnp.ones((1, 27, 29, 1))))[0, :, :, 0]
  rows, columns = np.nonzero(padded)
  assert (rows.min(), rows.max()) == (2, 28)
  assert (columns.min(), columns.max()) == (1, 29)


DEEP = [
  ("mlp", {"hidden_sizes": (3,) * 9}),
  ("resnet20", {}),
  ("resnet50", {"norm": "none"}),
  ("vgg19", {"hidden_sizes": (20, 20)}),
  ("transformer", {"num_layers": 11, "positions": "rotary"}),
]


@pytest.mark.parametrize("name, options", _variants.VARIANTS + DEEP)
def test_leaves_are_in_the_order_of_the_layers(name, options):
  model = build(name, options, abstract=True)
  leaves = list(leaves_of(model))
  kernels = [path for path in leaves if "kernel" in path]
  used = order_of_use(model, _variants.like(name))
  # The tied head of a transformer uses the tables of the front.
  assert kernels == [path for path in used if "kernel" in path]
  tables = [path for path in leaves if "table" in path]
  assert leaves[: len(tables)] == tables


def order_of_use(model, x):
  """Paths of the kernels in the order in which the program uses them."""
  pairs, treedef = jax.tree_util.tree_flatten_with_path(model.params)

  def forward(leaves, state, x):
    params = jax.tree.unflatten(treedef, leaves)
    return model.apply(params, state, x, train=False)[0]

  leaves = [leaf for _, leaf in pairs]
  jaxpr = jax.make_jaxpr(forward)(leaves, model.state, x).jaxpr
  names = {
    var: jax.tree_util.keystr(path)
    for var, (path, _) in zip(jaxpr.invars[: len(pairs)], pairs, strict=True)
  }
  return [
    names[v]
    for equation in jaxpr.eqns
    if _variants.has_products(equation)
    for v in equation.invars
    if v in names
  ]


@variants
def test_bfloat16_parameters_and_images_compute_in_bfloat16(name, options):
  model = build(name, options, abstract=True)
  half = functools.partial(jax.tree.map, lambda x: like_half(x))
  params, x = half((model.params, _variants.like(name, 4)))

  def loss(params, state, x):
    logits, state = model.apply(params, state, x, train=True)
    return logits.astype(jnp.float32).sum(), (logits, state)

  # No layer may widen its products, which half precision makes faster.
  step = jax.grad(loss, has_aux=True)
  jaxpr, (grads, (logits, state)) = jax.make_jaxpr(step, return_shape=True)(
    params, model.state, x
  )
  types = {
    variable.aval.dtype
    for equation in _variants.products(jaxpr.jaxpr)
    for variable in equation.invars
  }
  assert types == {jnp.dtype(jnp.bfloat16)}
  assert logits.dtype == jnp.bfloat16
  assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(grads))
  # Statistics stay in float32: their steps are small against their values.
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state))


def like_half(x):
  floating = jnp.issubdtype(x.dtype, jnp.floating)
  return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) if floating else x


@pytest.mark.parametrize(
  "name, options",
  [
    ("mlp", {}),
    ("lenet", {}),
    ("resnet8", {}),
    ("resnet8", {"norm": "group"}),
    ("transformer", {"num_layers": 1, "width": 16, "positions": "rotary"}),
  ],
)
def test_half_precision_is_close_to_float32(name, options):
  model = build(name, options)
  x = _variants.inputs(name, 4)

  @functools.partial(jax.jit, static_argnums=2)
  def forward(params, x, dtype):
    params = cast(params, dtype)
    x = x if name == "transformer" else x.astype(dtype)
    logits, _ = model.apply(params, model.state, x, train=True)
    return logits.astype(jnp.float32)

  exact = np.asarray(forward(model.params, x, jnp.float32))
  logits = np.asarray(forward(model.params, x, jnp.bfloat16))
  np.testing.assert_allclose(logits, exact, atol=0.05 * np.abs(exact).max())


@pytest.mark.parametrize(
  "name, options",
  [
    ("mlp", {}),
    ("lenet", {}),
    ("cnn", {}),
    ("resnet8", {"norm": "none"}),
    *(
      pytest.param(name, options, marks=pytest.mark.slow)
      for name, options in [
        ("resnet8", {}),
        ("alexnet", {}),
        ("vgg11", {"width": 8}),
        ("vgg15", {"width": 16, "norm": "batch"}),
        ("resnet18", {"width": 8}),
        ("resnet50", {"width": 8, "norm": "group"}),
        ("resnet50", {"width": 8, "norm": "none"}),
      ]
    ),
  ],
)
def test_models_overfit_a_few_digits(name, options, optimized):
  digits = data.load("digits")
  images = jnp.asarray(digits.normalize(digits.images[:20]))
  labels = jnp.asarray(digits.labels[:20])
  model = build(name, options)
  deep = name.startswith(("alex", "vgg")) or name in ("resnet18", "resnet50")
  # VGG without normalization hardly moves by SGD in so few steps.
  optimizer = optax.adam(2e-3) if deep else optax.sgd(0.02, momentum=0.9)

  def loss(params, state):
    logits, state = model.apply(params, state, images, train=True)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), state

  @jax.jit
  def step(params, state, memory):
    grads, state = jax.grad(loss, has_aux=True)(params, state)
    with jax.numpy_dtype_promotion("standard"):
      updates, memory = optimizer.update(grads, memory)
    return optax.apply_updates(params, updates), state, memory

  @jax.jit
  def evaluate(params, state):
    return model.apply(params, state, images, train=False)[0]

  # NumPy makes them, as JAX would compile a program for each shape.
  memory = jax.tree.map(
    lambda x: np.zeros(x.shape, x.dtype),
    jax.eval_shape(optimizer.init, model.params),
  )
  values = (model.params, model.state, memory)
  with optimized():
    step = step.lower(*values).compile()
  for _ in range(100 if deep else 40):
    values = step(*values)
  logits = np.asarray(evaluate(*values[:2]))
  assert (logits.argmax(axis=-1) == np.asarray(labels)).mean() > 0.95


@pytest.mark.parametrize(
  "name, options, last",
  [
    ("resnet20", {}, "conv2"),
    ("resnet18", {"width": 8}, "conv2"),
    ("resnet50", {"width": 8}, "conv3"),
  ],
)
def test_resnet_without_normalization_starts_as_its_first_layers(
  name, options, last
):
  model = build(name, options | {"norm": "none"}, (32, 32, 3))
  rng = np.random.default_rng(0)
  images = rng.standard_normal((8, 32, 32, 3), np.float32)
  apply = jax.jit(functools.partial(model.apply, train=True))
  logits = np.asarray(apply(model.params, {}, images)[0])
  assert 0.1 < logits.std() < 10
  # A block adds zeros at first, so none of its convolutions but the last one
  # and the shortcut's matters.
  params = jax.tree.map(lambda x: x, model.params)
  for block in params:
    for conv in params[block] if "block" in block else ():
      if conv not in ("shortcut", last):
        kernel = params[block][conv]["kernel"]
        params[block][conv]["kernel"] = np.asarray(kernel) * 100
  same, _ = apply(params, {}, images)
  np.testing.assert_array_equal(logits, same)


def test_only_batch_normalization_has_state():
  for name in ("vgg11", "resnet8", "resnet18"):
    for norm in ("group", "none"):
      assert build(name, {"norm": norm}, abstract=True).state == {}
    state = build(name, {"norm": "batch"}, abstract=True).state
    assert all(set(x) == {"mean", "var"} for x in norms_of(state))


def norms_of(state):
  """Innermost dicts."""
  if not any(isinstance(x, dict) for x in state.values()):
    return [state]
  return [norm for x in state.values() for norm in norms_of(x)]


@pytest.mark.parametrize("name", ["vgg11", "resnet8", "resnet18", "resnet50"])
def test_every_batch_normalization_is_given_the_mask(name, monkeypatch):
  masks = []
  call = models.BatchNorm.__call__

  def spy(self, x, *, mask=None):
    masks.append(mask)
    return call(self, x, mask=mask)

  monkeypatch.setattr(models.BatchNorm, "__call__", spy)
  model = build(name, {"norm": "batch"}, abstract=True)
  mask = jax.ShapeDtypeStruct((2,), jnp.float32)
  jax.eval_shape(
    lambda params, state, x, mask: model.apply(
      params, state, x, train=True, mask=mask
    ),
    *(model.params, model.state, _variants.like(name), mask),
  )
  assert len(masks) == len(norms_of(model.state))
  assert all(mask is not None for mask in masks)


@pytest.mark.parametrize("name", ["lenet", "cnn", "resnet8"])
def test_mirrored_image_has_other_logits(name):
  model = build(name, input_shape=(28, 28, 1))
  rng = np.random.default_rng(0)
  images = rng.standard_normal((2, 28, 28, 1), np.float32)
  apply = jax.jit(functools.partial(model.apply, train=False))
  logits = [
    apply(model.params, model.state, x)[0]
    for x in (images, images[:, ::-1], images.transpose(0, 2, 1, 3))
  ]
  assert not np.allclose(logits[0], logits[1], atol=1e-3)
  assert not np.allclose(logits[0], logits[2], atol=1e-3)


def test_model_prints_its_size():
  assert repr(build("mlp")) == "Model(9,610 parameters)"


def test_importing_models_loads_no_extra():
  code = "import sys; import jdist.models; print(*sys.modules)"
  result = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  loaded = set(result.stdout.split())
  assert not loaded & {"sklearn", "grain", "tensorflow_datasets", "jdist.data"}


@pytest.mark.parametrize("size, left", [(32, 32), (96, 24)])
def test_first_pool_is_left_out_for_small_images(size, left):
  model = models.build(
    "resnet18", input_shape=(size, size, 3), num_classes=10, width=8,
    norm="none", abstract=True,
  )  # fmt: skip
  x = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
  first = model.layers[0]
  apply = functools.partial(first.apply, train=True)
  program, (y, _) = jax.make_jaxpr(apply, return_shape=True)(
    first.params, first.state, x
  )
  assert y.shape == (1, left, left, 8)
  # As torchvision does it.
  padding = "padding=((0, 0), (1, 1), (1, 1), (0, 0))"
  assert (padding in str(program)) == (size == 96)


def test_alexnet_has_the_published_number_of_parameters():
  # It is torchvision's. The strides decide how large the first dense layer is.
  model = models.build(
    "alexnet", input_shape=(224, 224, 3), num_classes=1000, abstract=True
  )
  assert sum(x.size for x in jax.tree.leaves(model.params)) == 61_100_840
