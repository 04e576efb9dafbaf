"""Parameters that several stages of one program share stay equal."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

import jdist
from jdist import codecs, pipeline, reducers, transforms
from jdist.pipeline.runtime import _stage_arrays, _ticks
from tests.pipeline.runtime import _small_models as small
from tests.pipeline.runtime import _training

_MICRO = _training.MICRO
_SGD = optax.sgd(0.1, momentum=0.9)


def _layers(table):
  return small.tied_layers(before=table.num_stages > 3)


def _pipe(table):
  return _training.one_program(_layers(table), table, (8, 8))


def _copies(pipe, state, worker=0):
  """Returns the tied matrix of both stages that have it."""
  arrays = jax.tree.map(lambda x: np.asarray(x[worker]), state.params)
  parts = pipe._ticks.params.split(arrays)
  first, last = (x["table"] for x in parts if "table" in x)
  return first, last


@pytest.mark.parametrize(
  ("table", "fix"),
  [
    # Both copies lie on the second device, one in each of its chunks.
    (pipeline.make_table("interleaved", 2, 2, num_chunks=2), None),
    pytest.param(
      pipeline.make_table("1f1b", 3, 4), None, marks=pytest.mark.slow
    ),
    pytest.param(
      pipeline.make_table("interleaved", 1, 2, num_chunks=3),
      None,
      marks=pytest.mark.slow,
    ),
    pytest.param(pipeline.ours(3, 6, window=2), None, marks=pytest.mark.slow),
    (pipeline.ours(3, 6, window=2), transforms.predict_weights),
  ],
  ids=["two devices", "1f1b", "one device", "ours", "ours, predicted"],
)
def test_copies_receive_the_sum_of_their_gradients(table, fix):
  pipe = _pipe(table)
  assert not pipe._ticks.params.stacked
  count = table.num_microbatches
  batches = small.batches(6, 1, _MICRO * count)
  inner = _SGD if fix is None else fix(_SGD, pipe.grid.delay)
  state, losses = _training.train(
    pipe,
    lambda axis: optax.chain(transforms.average_gradients(axis), inner),
    batches,
  )
  first, last = _copies(pipe, state)
  np.testing.assert_array_equal(first, last)
  behind = pipe.grid.behind
  late = transforms.delay_gradients(inner, pipe.grid.delay)
  layers = _layers(table)
  _, wanted = _training.unsplit(
    layers,
    lambda axis: late,
    batches[: len(batches) - behind],
    count,
    loss=small.chain_loss(layers),
  )
  np.testing.assert_allclose(losses[behind:], wanted, rtol=1e-5)


def test_norm_counts_the_first_of_three_copies():
  # Two of them lie on one device.
  layers = small.tied_layers()
  layers = [*layers, dataclasses.replace(layers[-1], name="again")]
  params = _stage_arrays.StageArrays([x.params for x in layers], 2, pack=True)
  tied = _ticks.TiedLeaves(layers, params, "stage")
  arrays = params.join([x.params for x in layers])
  found = params.split(jax.vmap(tied.once, axis_name="stage")(arrays))
  once, dense, *again = found
  assert small.error((once, dense), [x.params for x in layers[:2]]) == 0.0
  assert len(again) == 2 and not any(x["table"].any() for x in again)


def test_each_of_two_tied_leaves_has_its_own_sum():
  one, two = np.full(2, 1.0, np.float32), np.full(2, 10.0, np.float32)
  given = {"one": {"w": one}, "two": {"w": two}}
  layers = [
    dataclasses.replace(small.tied_layers()[0], name=name, params=given)
    for name in "ab"
  ]
  params = _stage_arrays.StageArrays([given] * 2, 2, pack=True)
  tied = _ticks.TiedLeaves(layers, params, "stage")
  arrays = params.join([given] * 2)
  summed = jax.vmap(tied.sum, axis_name="stage")(arrays)
  for found in params.split(summed):
    np.testing.assert_array_equal(found["one"]["w"], 2 * one)
    np.testing.assert_array_equal(found["two"]["w"], 2 * two)


def test_differently_rounded_copies_receive_the_first_ones_update():
  # The stage of the second copy begins with another layer, so that the codec's
  # blocks have other borders.
  pipe = _pipe(pipeline.make_table("1f1b", 2, 2))
  batches = small.batches(3, 2, _MICRO * 2)
  compression = reducers.Compression(
    reducers.compressed(codecs.Quantize(4, 16)),
    reducers.ErrorFeedback(),
  )

  def chain(axis):
    return jdist.ssgd(_SGD, axis=axis, compression=compression)

  state, _ = _training.train(pipe, chain, batches, workers=2)
  first, last = _copies(pipe, state)
  np.testing.assert_array_equal(first, last)
