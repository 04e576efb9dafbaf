"""Bounds of the arguments of servers, codecs, data, models and clusters.

The last value of a range is taken, or another argument is refused; the next
one is not.
"""

import re

import jax
import numpy as np
import optax
import pytest

from jdist import (
  advice,
  cluster,
  codecs,
  collectives,
  data,
  models,
  pipeline,
  prediction,
  profiling,
  server,
)
from jdist.pipeline.runtime import _grid
from jdist.server.run import _server_run
from tests import _refusals
from tests.pipeline.runtime import _small_models as small

ABOVE, TINY = 1.0 + 1e-6, 1e-6
PART, SHARE = ([TINY, 1.0], [0.0, ABOVE]), ([0.0, 1.0], [-TINY, ABOVE])
COUNT = [1], [0]
FIVE, BALANCED = server.FixedBatches(5), server.BalancedBatches(8)
IMAGES = data.load("synthetic", "test")
TREE = {"w": np.zeros(4, np.float32)}
LAYERS = {x: {"kernel": np.zeros((2, 2), np.float32)} for x in "abc"}


def _model(name, shape=(32, 32, 3), **options):
  models.build(
    name, input_shape=shape, num_classes=10, abstract=True, **options
  )


def _image(function):
  images = np.zeros((2, 8, 8, 3), np.float32)
  return function(jax.numpy.asarray(images), jax.random.key(0))


def _advised(**changes):
  given = {"num_workers": 2, "chains": {}} | changes
  return advice.advise(
    len, TREE, TREE, link=cluster.Link(1e9), optimizer=optax.sgd(0.1), **given
  )


def _steps(**changes):
  given = {"num_epochs": 1, "steps_per_epoch": 3, "per_epoch": 1} | changes
  return prediction.choose_steps(**given)


def _stream(count=2, size=None):
  stream = data.SampleStream(IMAGES, 2, seed=0)
  return stream.batch(0, 0, count, size=size)


# An argument, what it is given to, values that are taken and that are not.
ROWS = [
  (
    "timeout_s", lambda x: server.BSP(batches=FIVE, timeout_s=x),
    ([TINY], [0.0]),
  ),
  (
    "smoothing", lambda x: server.SpeedBatches(8, smoothing=x),
    ([0.0, 1 - TINY], [-TINY, 1.0]),
  ),
  (
    "maximum", lambda x: server.SpeedBatches(8, minimum=3, maximum=x),
    ([3], [2]),
  ),
  (
    "limits", lambda x: server.SpeedBatches(8, minimum=3, limits={"a": x}),
    ([3, None], [2]),
  ),
  (
    "pipelined_from",
    lambda x: server.HPS(batches=BALANCED, pipelined_from=x), ([0], [-1]),
  ),
  ("total", lambda x: _plan(x), ([TINY], [0.0])),
  ("every", lambda x: _plan(2e6, x), ([2.0], [2.0 - TINY])),
  ("bits", codecs.Quantize, ([1, 16], [0, 17])),
  ("block", lambda x: codecs.Quantize(8, block=x), COUNT),
  ("ratio", codecs.TopK, PART),
  ("k", lambda x: codecs.TopK(k=x), COUNT),
  ("chunk", lambda x: codecs.TopK(k=1, chunk=x), COUNT),
  ("ratio", codecs.RandomK, PART),
  ("chunk", lambda x: codecs.DCTTopK(k=1, chunk=x), COUNT),
  ("num_workers", lambda x: _batches(num_workers=x), ([1, 500], [0, 501])),
  ("batch_size", lambda x: _batches(batch_size=x), COUNT),
  ("seed", lambda x: _batches(seed=x), ([0, 2**40], [-1])),
  ("alpha", lambda x: _batches(alpha=x), ([TINY], [0.0])),
  (
    "num_workers", lambda x: data.evaluation_batches(IMAGES, x, 3), COUNT,
  ),
  ("batch_size", lambda x: data.evaluation_batches(IMAGES, 2, x), COUNT),
  ("count", _stream, COUNT),
  ("size", lambda x: _stream(3, x), ([3], [2])),
  ("padding", lambda x: _image(data.random_crop(x)), COUNT),
  ("probability", lambda x: _image(data.random_flip(x)), SHARE),
  (
    "test_fraction", lambda x: data.load_text("nowhere", test_fraction=x), PART,
  ),
  ("width", lambda x: _model("resnet18", width=x, norm="none"), COUNT),
  ("width", lambda x: _model("vgg11", width=x), COUNT),
  ("hidden_sizes", lambda x: _model("mlp", hidden_sizes=(2, x)), COUNT),
  *(
    (
      name,
      lambda x, name=name: _model("transformer", (8,), **{
        "num_layers": 1, "width": 2, "num_heads": 1
      } | {name: x}),
      COUNT,
    )
    for name in ("num_layers", "num_heads", "width", "hidden_size")
  ),
  ("num_workers", lambda x: _advised(num_workers=x), ([2], [1])),
  ("slowdown", lambda x: _advised(slowdown=x), ([1.0], [1 - TINY])),
  ("num_rows", lambda x: collectives.Buckets.of(TREE, num_rows=x), COUNT),
  (
    "max_bytes", lambda x: collectives.Buckets.of(TREE, max_bytes=x),
    ([4], [3]),
  ),
  (
    "max_row_bytes",
    lambda x: collectives.Buckets.of(TREE, max_row_bytes=x), ([4], [3]),
  ),
  ("num_workers", lambda x: cluster.ring_messages(x, 8.0), COUNT),
  ("nodes", lambda x: profiling.GPUS["h200"].link(x), COUNT),
  ("num_epochs", lambda x: _steps(num_epochs=x), COUNT),
  ("num_epochs", lambda x: _steps(num_epochs=x), ([], [10**6 + 1])),
  ("steps_per_epoch", lambda x: _steps(steps_per_epoch=x), COUNT),
  ("per_epoch", lambda x: _steps(per_epoch=x), ([1, 3], [0, 4])),
  (
    "num_layers", lambda x: prediction.cut(LAYERS, x, order=tuple("abc")),
    ([1, 2], [0, 3]),
  ),
  ("cuts", lambda x: pipeline.cut_layers(small.layers(), x), COUNT),
  (
    "num_microbatches",
    lambda x: pipeline.make_table("1f1b", 2, x), COUNT,
  ),
]  # fmt: skip


def _plan(total, every=None):
  return _server_run._plan(total, "seconds", every, None, {})


def _batches(**changes):
  given = {"num_workers": 2, "batch_size": 4, "seed": 0} | changes
  return data.Batches(IMAGES, **given)


@pytest.mark.parametrize(
  ("argument", "call", "values"),
  ROWS,
  ids=[f"{i} {row[0]}" for i, row in enumerate(ROWS)],
)
def test_bound_of_an_argument(argument, call, values):
  inside, outside = values
  for value in inside:
    try:
      call(value)
    except (ValueError, FileNotFoundError) as error:
      assert not re.match(f"`{argument}`", str(error)), error
  for value in outside:
    with _refusals.refused(argument, ""):
      call(value)


def test_marks_of_a_run_are_multiples_that_end_with_it():
  assert _plan(10.0, 4.0).marks == (4.0, 8.0, 10.0)
  assert _plan(9.0, 3.0).marks == (3.0, 6.0, 9.0)
  assert _plan(0.3, 0.1).marks == (0.1, 0.2, 0.3)
  whole = _server_run._plan(10.0, "updates", 2.4, None, {"a": 1})
  assert whole.marks == (2, 5, 7, 10)
  assert whole.identity == {"every": 2.4, "unit": "updates", "a": 1}
  assert _server_run._plan(2, "samples", 0.5, None, {}).marks == (1, 2)
  assert _server_run._plan(2, "samples", None, None, {}).marks == (2,)


def test_messages_of_a_grid_take_time_or_none():
  table = pipeline.make_table("gpipe", 2, 2)
  grid = _grid.make_grid(table)

  def seconds(op, stage):
    return 1.0

  assert _grid.tick_times(grid, seconds, 0.0, late=False).send_s == 0.0
  with _refusals.refused("send_s", "[0, inf]"):
    _grid.tick_times(grid, seconds, -TINY, late=False)
