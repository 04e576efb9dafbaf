"""Parameters of models are counted without allocating them."""

import itertools

import jax
import numpy as np
import pytest

from jdist import models
from tests.models import _variants


def conv(k, i, o):
  return k * k * i * o


def dense(*sizes):
  return sum(i * o + o for i, o in itertools.pairwise(sizes))


def convs(*sizes, norm=0):
  """3x3 convolutions, each with biases or two numbers per channel."""
  pairs = itertools.pairwise(sizes)
  return sum(conv(3, i, o) + (2 if norm else 1) * o for i, o in pairs)


VGG = {
  "vgg11": (3, 64, 128, *(256,) * 2, *(512,) * 4),
  "vgg13": (3, *(64,) * 2, *(128,) * 2, *(256,) * 2, *(512,) * 4),
  "vgg15": (3, *(64,) * 2, *(128,) * 2, *(256,) * 8),
  "vgg16": (3, *(64,) * 2, *(128,) * 2, *(256,) * 3, *(512,) * 6),
  "vgg19": (3, *(64,) * 2, *(128,) * 2, *(256,) * 4, *(512,) * 8),
}


def basic_resnet(blocks):
  """Two 3x3 convolutions a block; a 1x1 one where the features change."""
  total, features = 0, 64
  for stage, num_blocks in enumerate(blocks):
    wide = 64 * 2**stage
    total += convs(features, *(wide,) * (2 * num_blocks), norm=1)
    if wide != features:
      total += conv(1, features, wide) + 2 * wide
    features = wide
  return total


def bottleneck_resnet(blocks):
  total, features = 0, 64
  for stage, num_blocks in enumerate(blocks):
    narrow, wide = 64 * 2**stage, 256 * 2**stage
    for block in range(num_blocks):
      total += conv(1, features, narrow) + conv(3, narrow, narrow)
      total += conv(1, narrow, wide) + 2 * (narrow + narrow + wide)
      if block == 0:
        total += conv(1, features, wide) + 2 * wide
      features = wide
  return total


SMALL_STEM = conv(3, 3, 64) + 2 * 64
LARGE_STEM = conv(7, 3, 64) + 2 * 64
CIFAR = (32, 32, 3)
IMAGENET = (224, 224, 3)

# Hand counts by name, input shape and number of classes.
COUNTS = {
  ("mlp", (28, 28, 1), 10): dense(784, 128, 10),
  ("lenet", (28, 28, 1), 10): (25 * 6 + 6)
  + (25 * 6 * 16 + 16)
  + dense(400, 120, 84, 10),
  ("cnn", CIFAR, 10): convs(3, 32, 64, 128) + dense(4 * 4 * 128, 10),
  ("alexnet", CIFAR, 10): convs(3, 96)
  + (conv(5, 96, 256) + 256)
  + convs(256, 384, 384, 256)
  + dense(4 * 4 * 256, 512, 512, 10),
  ("alexnet", IMAGENET, 1000): (conv(11, 3, 64) + 64)
  + (conv(5, 64, 192) + 192)
  + convs(192, 384, 256, 256)
  + dense(6 * 6 * 256, 4096, 4096, 1000),
  ("vgg15", CIFAR, 10): convs(*VGG["vgg15"]) + dense(256, 100, 100, 10),
  **{
    (name, CIFAR, 10): convs(*VGG[name]) + dense(512, 10)
    for name in ("vgg11", "vgg13", "vgg16", "vgg19")
  },
  **{
    (name, IMAGENET, 1000): convs(*VGG[name])
    + dense(7 * 7 * 512, 4096, 4096, 1000)
    for name in ("vgg11", "vgg13", "vgg16", "vgg19")
  },
  # They have convolutions without biases, two numbers per normalized channel
  # and a dense layer; n blocks have 2 n convolutions per stage.
  ("resnet8", CIFAR, 10): convs(3, *(16,) * 3, 32, 32, 64, 64, norm=1)
  + dense(64, 10),
  ("resnet20", CIFAR, 10): convs(3, *(16,) * 7, *(32,) * 6, *(64,) * 6, norm=1)
  + dense(64, 10),
  **{
    (name, CIFAR, 10): SMALL_STEM + body + dense(features, 10)
    for name, body, features in (
      ("resnet18", basic_resnet((2, 2, 2, 2)), 512),
      ("resnet34", basic_resnet((3, 4, 6, 3)), 512),
      ("resnet50", bottleneck_resnet((3, 4, 6, 3)), 2048),
    )
  },
  **{
    (name, IMAGENET, 1000): LARGE_STEM + body + dense(features, 1000)
    for name, body, features in (
      ("resnet18", basic_resnet((2, 2, 2, 2)), 512),
      ("resnet34", basic_resnet((3, 4, 6, 3)), 512),
      ("resnet50", bottleneck_resnet((3, 4, 6, 3)), 2048),
    )
  },
  # It has embeddings; q, k, v, out, two dense layers and two norms per layer;
  # a norm, and a head without biases.
  ("transformer", (64,), 50): (64 + 50) * 128
  + 4 * (dense(128, 3 * 128) + dense(128, 128) + dense(128, 512, 128))
  + (2 * 4 + 1) * 2 * 128
  + 128 * 50,
}

# The numbers are from the papers, torchvision (ImageNet), the sheet of MP²
# (vgg15) and a widely used collection of CIFAR models (resnet18 to 50 with ten
# classes).
PUBLISHED = {
  ("lenet", (28, 28, 1), 10): 61_706,
  ("alexnet", IMAGENET, 1000): 61_100_840,
  ("vgg11", IMAGENET, 1000): 132_863_336,
  ("vgg13", IMAGENET, 1000): 133_047_848,
  ("vgg15", CIFAR, 10): 4_722_698,
  ("vgg16", IMAGENET, 1000): 138_357_544,
  ("vgg19", IMAGENET, 1000): 143_667_240,
  ("resnet20", CIFAR, 10): 269_722,
  ("resnet18", CIFAR, 10): 11_173_962,
  ("resnet34", CIFAR, 10): 21_282_122,
  ("resnet50", CIFAR, 10): 23_520_842,
  ("resnet18", IMAGENET, 1000): 11_689_512,
  ("resnet34", IMAGENET, 1000): 21_797_672,
  ("resnet50", IMAGENET, 1000): 25_557_032,
}


def count(name, shape, num_classes, **options):
  return models.num_params(
    models.build(
      name,
      input_shape=shape,
      num_classes=num_classes,
      abstract=True,
      **options,
    )
  )


def test_every_model_is_counted():
  assert {name for name, _, _ in COUNTS} == set(models.MODELS)


@pytest.mark.parametrize("key", COUNTS, ids=str)
def test_parameter_counts_match_hand_counts(key):
  assert count(*key) == COUNTS[key]


@pytest.mark.parametrize("key", PUBLISHED, ids=str)
def test_parameter_counts_match_published_ones(key):
  assert COUNTS[key] == PUBLISHED[key]


def test_transformer_of_the_size_of_gpt_2_has_its_parameters():
  options = {"num_layers": 12, "width": 768, "num_heads": 12, "tied": True}
  assert count("transformer", (1024,), 50_257, **options) == 124_439_808


def front(name, num_convs, **options):
  """Parameters of the first convolutions, shortcuts included."""
  model = models.build(
    name, input_shape=CIFAR, num_classes=10, abstract=True, **options
  )
  sizes = [leaf.size for leaf in jax.tree.leaves(model.params)]
  # Each layer has a bias and a kernel.
  return sum(sizes[: 2 * num_convs])


def test_mp2_pushes_the_front_of_these_networks():
  narrow = {"norm": "none", "width": 32, "shortcut_size": 3}
  assert front("alexnet", 2) == 617_344
  assert front("vgg15", 4) == 260_160
  assert front("resnet18", 10, **narrow) == 185_664
  assert count("resnet18", CIFAR, 10, **narrow) == 3_139_274
  assert front("resnet34", 16, **narrow) == 351_872


@_variants.variants
def test_abstract_model_has_the_shapes_of_a_real_one(name, options):
  real = _variants.build(name, options)
  abstract = _variants.build(name, options, abstract=True)
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (real.params, real.state)
  )
  assert (abstract.params, abstract.state) == shapes
  logits, _ = _variants.shapes_of(abstract, _variants.like(name), train=True)
  same, _ = _variants.shapes_of(real, _variants.like(name), train=True)
  assert logits == same


def test_abstract_model_allocates_nothing(monkeypatch):
  def draw(seed):
    raise AssertionError("numbers were drawn")

  monkeypatch.setattr(np.random, "default_rng", draw)
  before = sum(x.nbytes for x in jax.live_arrays())
  model = _variants.build("resnet50", input_shape=IMAGENET, abstract=True)
  leaves = jax.tree.leaves((model.params, model.state))
  assert {type(x) for x in leaves} == {jax.ShapeDtypeStruct}
  # Normalizations, which have few numbers, are allocated nevertheless.
  after = sum(x.nbytes for x in jax.live_arrays())
  assert after - before < models.num_params(model) * 4 / 100


def test_abstract_model_lowers_to_a_program():
  model = _variants.build("resnet8", abstract=True)
  x = _variants.like("resnet8")
  apply = jax.jit(lambda *args: model.apply(*args, train=True))
  lowered = apply.lower(model.params, model.state, x)
  assert "stablehlo.convolution" in lowered.as_text()


def test_cnn_has_the_given_hidden_layers():
  model = models.build(
    "cnn",
    input_shape=CIFAR,
    num_classes=10,
    abstract=True,
    hidden_sizes=(512,),
  )
  wanted = convs(3, 32, 64, 128) + dense(4 * 4 * 128, 512, 10)
  found = sum(x.size for x in jax.tree.leaves(model.params))
  assert found == wanted == 1_147_466
