"""The registries: every method of this package, and its parts, by name."""

import functools
from typing import Any

import optax

from jdist import codecs, reducers, transforms
from jdist.methods import (
  _compressed_gradients,
  _diloco,
  _local_sgd,
  _method,
  _mp2,
  _overlapped,
)

# Every part by its kind and its name: finished, or a function that is called
# with those options of a run that its arguments name.
PARTS: dict[str, dict[str, Any]] = {
  "codecs": {
    "float16": codecs.Cast("float16"),
    "bfloat16": codecs.Cast("bfloat16"),
    "int8": codecs.Quantize(8),
    "int4": codecs.Quantize(4),
    # Two bits have only three levels that are symmetric around zero, but four
    # between the minimum and the maximum.
    "int2": codecs.Quantize(2, 256, "min_max"),
    "sign": codecs.Sign(),
    "ternary": codecs.Ternary(),
    "top_k": codecs.TopK,
    "random_k": codecs.RandomK,
    "dct": functools.partial(codecs.DCTTopK, ratio=0.01),
  },
  "reducers": {
    "power_sgd": functools.partial(reducers.PowerSGD, rank=2),
    "majority_vote": reducers.MajorityVote(),
  },
  "feedbacks": {
    "error": reducers.ErrorFeedback(),
    "ef21": reducers.EF21(),
    "momentum": reducers.MomentumCorrection(),
    "smoothing": reducers.Smoothing(),
  },
  # Optimizers of Optax, or sync rules.
  "rules": {
    "sgd": lambda outer_learning_rate=1.0: optax.sgd(outer_learning_rate),
    "momentum": lambda outer_learning_rate=0.7, outer_momentum=0.9: optax.sgd(
      outer_learning_rate, outer_momentum
    ),
    "nesterov": transforms.outer_sgd,
    "adam": lambda outer_learning_rate=0.01, outer_momentum=0.9: optax.adam(
      outer_learning_rate, b1=outer_momentum
    ),
  },
}


def _rate_with_momentum(run: _method.Run) -> optax.Schedule:
  # A momentum m makes progress up to 1 / (1 - m) times longer, and control
  # variates, which are progress per rate, would grow by the same factor.
  factor = 1.0 / (1.0 - run.momentum) if run.optimizer == "sgd" else 1.0
  return lambda step: factor * run.learning_rate(step)


registry: dict[str, _method.Method] = {  # Every method by its name.
  "ssgd": _method.Method(
    "synchronous SGD: the mean of the gradients in every step",
    _compressed_gradients.ssgd,
  ),
  "local_sgd": _method.Method(
    "H local steps, then the mean of the parameters", _local_sgd.local_sgd
  ),
  "post_local_sgd": _method.Method(
    "ssgd in the first half of the run, then local_sgd",
    _local_sgd.post_local_sgd,
    # The paper switches at the first decay of the rate, halfway or later.
    {"switch_step": lambda run: run.num_steps // 2},
  ),
  "diloco": _method.Method(
    "local steps; their mean is a gradient for outer Nesterov", _diloco.diloco
  ),
  "msdpu": _method.Method(
    "H grows as the rate falls, and then the mean is late",
    _overlapped.msdpu,
    # The delay begins with the first long round, which the rule decides.
    interval_policy="growth",
    late=_overlapped.MSDPU_DELAY,
  ),
  "fed_prox": _method.Method(
    "local_sgd with a pull towards the start of the round", _local_sgd.fed_prox
  ),
  "easgd": _method.Method(
    "elastic springs between the workers and a centre", _local_sgd.easgd
  ),
  "scaffold": _method.Method(
    "local_sgd with control variates, for unequal data",
    _local_sgd.scaffold,
    {"learning_rate": _rate_with_momentum},
  ),
  "slow_mo": _method.Method(
    "local_sgd with a momentum over rounds", _local_sgd.slow_mo
  ),
  "cocod": _method.Method(
    "the previous round's mean plus the worker's own progress",
    _overlapped.cocod,
  ),
  "overlap_local_sgd": _method.Method(
    "a pull towards a mean that is one round late",
    _overlapped.overlap_local_sgd,
  ),
  "streaming_diloco": _method.Method(
    "diloco in fragments at staggered steps",
    _diloco.streaming_diloco,
    # A short interval has neither four steps to stagger nor one to be late.
    {
      "fragments": lambda run: min(4, run.interval),
      "delay_steps": lambda run: min(1, run.interval - 1),
    },
    interval_policy=None,
  ),
  "qsgd": _method.Method(
    "ssgd with integers of a few bits", _compressed_gradients.qsgd
  ),
  "terngrad": _method.Method(
    "ssgd with -1, 0 or 1 times a scale", _compressed_gradients.terngrad
  ),
  "signsgd": _method.Method(
    "ssgd by majority vote on the signs of momenta",
    _compressed_gradients.signsgd,
    # Signum's momentum precedes the vote; the run's optimizer must have none.
    {"momentum": lambda run: run.momentum},
    own_momentum=True,
  ),
  "ef_signsgd": _method.Method(
    "ssgd with signs and error feedback", _compressed_gradients.ef_signsgd
  ),
  "topk_sgd": _method.Method(
    "ssgd with the largest entries and error feedback",
    _compressed_gradients.topk_sgd,
  ),
  "dgc": _method.Method(
    "the largest entries of momenta, fewer in each warm-up phase",
    _compressed_gradients.dgc,
    {
      "momentum": lambda run: run.momentum,
      # The SGD of a run has Nesterov's momentum, too.
      "nesterov": lambda run: True,
      "steps_per_phase": lambda run: run.warmup_steps or None,
    },
    own_momentum=True,
  ),
  "powersgd": _method.Method(
    "ssgd with a low-rank mean and error feedback",
    _compressed_gradients.powersgd,
  ),
  "demo": _method.Method(
    "the signs of the fastest components of momenta",
    _compressed_gradients.demo,
    own_momentum=True,
  ),
  "sparse_loco": _method.Method(
    "local steps; their largest changes in 2 bits", _diloco.sparse_loco
  ),
  "muloco": _method.Method(
    "diloco with Muon as the inner optimizer, in 2 bits",
    _diloco.muloco,
    {"weight_decay": lambda run: run.weight_decay},
  ),
  "mp2": _method.Method(
    "the mean of the front layers; a network predicts the rest", _mp2.mp2
  ),
}
