"""Bounds of arguments: the last value of a range is taken, the next is not."""

import jax
import optax
import pytest

from jdist import codecs, methods, pipeline, reducers, training, transforms
from jdist.transforms import intervals
from tests import _refusals

SGD = optax.sgd(0.1)
NONE = {"axis": None}
# The least number above 1, and numbers that are nearly 0.
ABOVE, TINY = 1.0 + 1e-6, 1e-6
CODEC = reducers.compressed(codecs.Cast("bfloat16"))
# An argument, what it is given to, values that are taken and that are not.
ROWS = [
  ("stream_steps", lambda x: transforms.Control(stream_steps=x), [1], [0]),
  ("max_bytes", lambda x: transforms.Stream(max_bytes=x), [8], [7]),
  ("steps", lambda x: transforms.Delayed(steps=x), [1], [0]),
  ("steps", lambda x: transforms.Delayed(steps=x, mix=0.5), [0], [-1]),
  ("carry", lambda x: transforms.Delayed(carry=x), [0.0, 1.0], [-TINY, ABOVE]),
  (
    "mix", lambda x: transforms.Delayed(steps=1, mix=x),
    [0.0, 1.0], [-TINY, ABOVE],
  ),
  ("after_step", lambda x: transforms.Delayed(after_step=x), [0], [-1]),
  (
    "slow_momentum", lambda x: transforms.SlowMomentum(0.1, momentum=x),
    [0.0, 1 - TINY], [-TINY, 1.0],
  ),
  ("moving_rate", transforms.Elastic, [0.0, 1.0], [-TINY, ABOVE]),
  ("pull", transforms.PulledAnchor, [0.0, 1.0], [-TINY, ABOVE]),
  (
    "momentum", lambda x: transforms.PulledAnchor(momentum=x),
    [0.0, 1.0], [-TINY, ABOVE],
  ),
  (
    "outer_momentum", lambda x: transforms.outer_sgd(0.7, x),
    [0.0, 1 - TINY], [-TINY, 1.0],
  ),
  (
    "max_bytes", lambda x: transforms.update_first(SGD, max_bytes=x, **NONE),
    [8], [7],
  ),
  (
    "in_flight", lambda x: transforms.update_first(SGD, in_flight=x, **NONE),
    [1], [0],
  ),
  (
    "pending", lambda x: transforms.update_first(SGD, pending=x, **NONE),
    [0.0, 1.0], [-TINY, ABOVE],
  ),
  ("threshold", lambda x: transforms.clip_local(x, None), [TINY], [0.0]),
  ("strength", transforms.proximal, [0.0], [-TINY]),
  (
    "b2", lambda x: transforms.predict_weights(SGD, 1, b2=x),
    [TINY, 1.0], [0.0, ABOVE],
  ),
  ("steps", lambda x: transforms.predict_weights(SGD, x), [0], [-1]),
  (
    "fragments", lambda x: transforms.fragment_steps(SGD, 4, x, **NONE),
    [1, 4], [0, 5],
  ),
  ("interval", intervals.fixed, [1], [0]),
  ("switch_step", lambda x: intervals.post_local(x, 2), [0], [-1]),
  ("total_steps", lambda x: intervals.ending_at(x, 2), [1], [0]),
  ("start", lambda x: intervals.growth(0.1, start=x), [TINY], [0.0]),
  ("decay", lambda x: intervals.msdpu(2, decay=x), [0, 1 - TINY], [-TINY, 1.0]),
  (
    "max_interval", lambda x: intervals.msdpu(4, max_interval=x), [4], [3],
  ),
  ("initial_interval", intervals.msdpu, [1], [0]),
  ("initial_interval", lambda x: intervals.adacomm(x, 5), [1], [0]),
  ("period_steps", lambda x: intervals.adacomm(2, x), [1], [0]),
  ("rank", reducers.PowerSGD, [1], [0]),
  (
    "seed", lambda x: reducers.PowerSGD(2, seed=x), [0, 2**31 - 1], [-1, 2**31],
  ),
  (
    "seed", lambda x: reducers.Compression(CODEC, seed=x),
    [0, 2**31 - 1], [-1, 2**31],
  ),
  ("max_bytes", lambda x: reducers.Chunked(CODEC, max_bytes=x), [8], [7]),
  ("multiple", lambda x: reducers.Chunked(CODEC, multiple=x), [1], [0]),
  (
    "parts", lambda x: reducers.Hierarchical(reducers.Exact(), CODEC, parts=x),
    [1], [0],
  ),
  ("decay", reducers.ErrorFeedback, [0.0, 1.0], [-TINY, ABOVE]),
  ("momentum", reducers.MomentumCorrection, [0.0, 1.0], [-TINY, ABOVE]),
  (
    "steps_per_phase", lambda x: reducers.warm_up(_top, x), [1], [0],
  ),
  (
    "final_ratio", lambda x: reducers.warm_up(_top, 1, x),
    [TINY, 1.0], [0.0, ABOVE],
  ),
  (
    "accumulate", lambda x: training.make_gradient(_loss, accumulate=x),
    [1], [0],
  ),
  ("interval", lambda x: methods.local_sgd(SGD, x, axis=None), [1], [0]),
  (
    "num_stages", lambda x: pipeline.make_table("gpipe", x, 2), [1], [0],
  ),
]  # fmt: skip


def _top(ratio):
  return reducers.compressed(codecs.TopK(ratio))


def _loss(params, model_state, batch, key):
  del batch, key
  return jax.numpy.sum(params), (model_state, {})


@pytest.mark.parametrize(
  ("argument", "call", "inside", "outside"),
  ROWS,
  ids=[f"{i} {row[0]}" for i, row in enumerate(ROWS)],
)
def test_bound_of_an_argument(argument, call, inside, outside):
  for value in inside:
    call(value)
  for value in outside:
    with _refusals.refused(argument, ""):
      call(value)
