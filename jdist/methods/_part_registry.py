"""Parts of methods by name: codecs, reducers, feedbacks and rules."""

import functools
from typing import Any

import optax

from jdist import codecs, reducers, transforms

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
