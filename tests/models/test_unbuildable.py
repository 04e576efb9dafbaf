"""Models that cannot be built, and images that do not suit one."""

import jax.numpy as jnp
import pytest

from jdist import models
from tests import _refusals
from tests.models._variants import build


@pytest.mark.parametrize(
  "name, shape, options, message",
  [
    ("alexnet2", (8, 8, 1), {}, "`name` must be 'mlp', 'lenet', 'cnn'"),
    ("mlp", (8, 8), {}, "`input_shape` must be"),
    ("mlp", (8, 8, 0), {}, "`input_shape` must be"),
    ("mlp", (8, 8, 1), {"hidden_sizes": 3}, "`hidden_sizes` must be a list"),
    ("mlp", (8, 8, 1), {"hidden_sizes": (0,)}, "`hidden_sizes` must be"),
    ("mlp", (8, 8, 1), {"norm": "batch"}, "`norm` is no option of mlp"),
    ("lenet", (8, 8, 1), {"depth": 3}, "which has none"),
    ("lenet", (33, 8, 1), {}, "at most 32x32"),
    ("cnn", (7, 8, 1), {}, "at least 8x8"),
    ("resnet8", (8, 3, 1), {}, "at least 4x4"),
    ("resnet8", (8, 8, 1), {"norm": "layer"}, "`norm` must be"),
    ("resnet8", (8, 8, 1), {"blocks_per_stage": 2}, "is no option of resnet8"),
    *(
      (
        "resnet8",
        (8, 8, 1),
        {"norm": "group", "num_groups": n},
        "`num_groups` must divide",
      )
      for n in (3, -1)
    ),
    ("alexnet", (7, 8, 1), {}, "at least 8x8"),
    ("alexnet", (62, 80, 3), {}, 'at least 63x63.*form="cifar"'),
    ("alexnet", (8, 8, 1), {"form": "large"}, "`form` must be"),
    ("alexnet", (8, 8, 1), {"hidden_sizes": (0,)}, "`hidden_sizes` must be"),
    ("vgg11", (31, 80, 3), {}, "at least 32x32"),
    ("vgg11", (8, 8, 1), {"norm": "layer"}, "`norm` must be"),
    ("vgg11", (8, 8, 1), {"width": 0}, "`width` must be"),
    ("vgg11", (8, 8, 1), {"convs_per_block": ()}, "is no option of vgg11"),
    ("vgg15", (8, 8, 1), {"form": "cifar"}, "`form` is no option of vgg15"),
    ("resnet18", (7, 8, 1), {}, "at least 8x8"),
    ("resnet18", (31, 80, 3), {}, "at least 32x32"),
    ("resnet18", (8, 8, 1), {"norm": "layer"}, "`norm` must be"),
    ("resnet18", (8, 8, 1), {"width": 0}, "`width` must be"),
    ("resnet18", (8, 8, 1), {"shortcut_size": 2}, "`shortcut_size` must be"),
    ("resnet18", (8, 8, 1), {"shortcut_size": -1}, "`shortcut_size` must be"),
    ("resnet50", (8, 8, 1), {"bottleneck": False}, "is no option of resnet50"),
    ("transformer", (8, 8, 1), {}, r"`input_shape` must be \(length,\)"),
    ("transformer", (0,), {}, r"`input_shape` must be \(length,\)"),
    ("transformer", (8,), {"width": 0}, "`width` must be"),
    ("transformer", (8,), {"num_heads": 3}, "`num_heads` must divide"),
    ("transformer", (8,), {"positions": "none"}, "`positions` must be"),
    (
      "transformer",
      (8,),
      {"positions": "rotary", "width": 12, "num_heads": 4},
      "`num_heads` must leave",
    ),
  ],
)
def test_unbuildable_models_raise(name, shape, options, message):
  with pytest.raises(ValueError, match=message):
    build(name, options, shape)


@pytest.mark.parametrize("argument", ["num_classes", "seed"])
def test_negative_numbers_raise(argument):
  arguments = {"input_shape": (8, 8, 1), "num_classes": 10, "seed": 0}
  with _refusals.refused(argument, "must"):
    models.build("mlp", **(arguments | {argument: -1}))


@pytest.mark.parametrize("shape", [(8, 8, 1), (2, 4, 8, 8, 1), (2, 8, 8, 3)])
def test_images_of_another_shape_are_refused(shape):
  model = build("resnet8")
  with _refusals.refused("images", "[batch, 8, 8, 1]"):
    model.apply(model.params, model.state, jnp.zeros(shape), train=False)


def test_raw_pixels_are_refused():
  model = build("mlp")
  pixels = jnp.zeros((2, 8, 8, 1), jnp.uint8)
  with pytest.raises(ValueError, match=r"Dataset.normalize"):
    model.apply(model.params, model.state, pixels, train=False)
