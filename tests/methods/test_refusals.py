"""Refusals of methods: an argument and its rule."""

import chex
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import methods, transforms
from jdist.transforms import intervals
from tests import _refusals
from tests.methods._rounds import SGD

X = jnp.zeros(3)


def easgd(*args, **options):
  return methods.easgd(SGD, 3, *args, axis=None, **options)


def slow_mo(**options):
  return methods.slow_mo(SGD, 3, 0.1, axis=None, **options)


def scaffold(rate=0.1, **options):
  return methods.scaffold(SGD, 3, rate, axis=None, **options)


def sparse_loco(optimizer=SGD, *args, **options):
  return methods.sparse_loco(optimizer, 2, *args, axis=None, **options)


def streaming(interval=3, fragments=2, *args, **options):
  return methods.streaming_diloco(
    SGD, interval, fragments, *args, axis=None, **options
  )


def diloco_by_rule(options):
  return methods.diloco(SGD, 4, axis=None, rule=optax.adam(0.1), **options)


def streaming_by_rule(options):
  return streaming(rule=optax.adam(0.1), **options)


def fragments(interval=3, number=2):
  return transforms.fragment_steps(SGD, interval, number, axis=None)


def late(**options):
  return transforms.Delayed(**options)


@_refusals.table(
  # Rounds.
  ("optimizer", lambda: methods.easgd(0.1, 3, axis=None), "an Optax transform"),
  ("moving_rate", lambda: easgd(1.5), "in [0, 1], got 1.5"),
  ("params", lambda: easgd().update(X, easgd().init(X)), "given to `update`"),
  ("after_step", lambda: easgd(overlap=late(after_step=3)), "0 for `Elastic`"),
  ("learning_rate", lambda: scaffold(0.0), "in (0, inf], got 0.0"),
  (
    "after_step",
    lambda: scaffold(overlap=late(steps=1, after_step=3)),
    "0 for",
  ),
  ("buffers", lambda: slow_mo(buffers="keep"), "'reset' or 'average'"),
  ("slow_momentum", lambda: slow_mo(slow_momentum=1.0), "in [0, 1), got 1.0"),
  (
    "momentum",
    lambda: methods.muloco(0.1, 2, momentum=1.0, axis=None),
    "in [0, 1), got 1.0",
  ),
  ("overlap", lambda: slow_mo(buffers="average", overlap=late()), "None for"),
  ("strength", lambda: methods.fed_prox(SGD, 3, -1.0, axis=None), "[0, inf]"),
  # DiLoCo's.
  ("optimizer", lambda: sparse_loco(0.1), "an Optax transformation"),
  ("density", lambda: sparse_loco(SGD, 2.0), "in (0, 1], got 2.0"),
  ("decay", lambda: sparse_loco(decay=1.1), "in [0, 1], got 1.1"),
  ("learning_rate", lambda: methods.muloco(-0.1, 2, axis=None), "in (0, inf]"),
  (
    "interval",
    lambda: streaming(intervals.fixed(4)),
    "Give the number of step",
  ),
  ("outer_learning_rate", lambda: streaming(4, 2, -0.7), "in (0, inf]"),
  *(
    (name, lambda make=make, x=x: make(x), "left out where `rule` is given")
    for make in (diloco_by_rule, streaming_by_rule)
    for name, x in (
      ("outer_learning_rate", {"outer_learning_rate": "abc"}),
      (
        "outer_learning_rate",
        {"outer_learning_rate": optax.constant_schedule(1.0)},
      ),
      ("outer_momentum", {"outer_momentum": -3.0}),
    )
  ),
  (
    "delay_steps",
    lambda: streaming(delay_steps=3),
    "below `interval`, 3, got 3",
  ),
  ("delay_steps", lambda: streaming(delay_steps=None), "an int >= 0, got None"),
  ("fragments", lambda: streaming(3, 4), "an int from 1 to 3, got 4"),
  ("fragments", lambda: fragments().init(X), "an int from 1 to 1, got 2"),
  ("params", lambda: fragments(4, 1).update(X, ()), "`streaming_diloco`"),
  # Overlapped.
  (
    "overlap",
    lambda: methods.msdpu(
      SGD, intervals.fixed(3), 0.1, axis=None, warmup_steps=2, overlap=True
    ),
    "got True",
  ),
  ("stream", lambda: methods.cocod(SGD, 3, axis=None, stream=True), "got True"),
  (
    "pull",
    lambda: methods.overlap_local_sgd(SGD, 3, -0.1, axis=None),
    "in [0, 1], got -0.1",
  ),
  # Compressed gradients.
  ("optimizer", lambda: methods.topk_sgd(0.1, axis=None), "an Optax transform"),
  (
    "ratio",
    lambda: methods.topk_sgd(SGD, 0.0, axis=None),
    "in (0, 1], got 0.0",
  ),
  ("bits", lambda: methods.qsgd(SGD, 40, axis=None), "an int from 1 to 16"),
  ("momentum", lambda: methods.dgc(SGD, momentum=2.0, axis=None), "in [0, 1]"),
  ("momentum", lambda: methods.signsgd(SGD, -0.5, axis=None), "in [0, 1), got"),
  (
    "momentum",
    lambda: methods.signsgd(SGD, 1.0, axis=None),
    "in [0, 1), got 1.0",
  ),
  (
    "ratio",
    lambda: methods.dgc(SGD, 2.0, axis=None, steps_per_phase=3),
    "in (0, 1], got 2.0",
  ),
)
def test_invalid_arguments_raise(argument, call, rule):
  _refusals.check(argument, call, rule)


@pytest.mark.parametrize(
  "make",
  [
    lambda rate: methods.muloco(rate, interval=2, axis=None),
    lambda rate: methods.diloco(
      optax.sgd(0.1), 2, axis=None, outer_learning_rate=rate
    ),
  ],
)
def test_a_rate_may_be_an_integer_of_numpy(make):
  params = {"w": jnp.ones((2, 2))}

  def updates(rate):
    optimizer = make(rate)
    return optimizer.update(params, optimizer.init(params), params)[0]

  chex.assert_trees_all_equal(updates(np.int64(2)), updates(2.0))
