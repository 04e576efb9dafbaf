"""The registry: every method of this package by name."""

import optax

from jdist import transforms
from jdist.methods import (
  _compressed_gradients,
  _diloco,
  _local_sgd,
  _method,
  _mp2,
  _overlapped,
  _synchronous,
)


def _one_bit_warmup(run: _method.Run) -> int:
  # The paper's 15 to 20 % of the run, and all of the rate's warm-up.
  return max(1, run.warmup_steps, run.num_steps // 6)


def _rate_with_momentum(run: _method.Run) -> optax.Schedule:
  # Behind a momentum progress is longer, and control variates would be too.
  factor = 1.0 / (1.0 - run.momentum) if run.optimizer == "sgd" else 1.0
  return lambda step: factor * run.learning_rate(step)


registry: dict[str, _method.Method] = {
  "ssgd": _method.Method(
    "synchronous SGD: the gradients' mean in every step", _synchronous.ssgd
  ),
  "local_sgd": _method.Method(
    "H steps each for itself, then the parameters' mean", _local_sgd.local_sgd
  ),
  "post_local_sgd": _method.Method(
    "ssgd for the first half of the run, then local_sgd",
    _local_sgd.post_local_sgd,
    {"switch_step": lambda run: run.num_steps // 2},
  ),
  "diloco": _method.Method(
    "local steps; their mean is a gradient for outer Nesterov", _diloco.diloco
  ),
  "msdpu": _method.Method(
    "H grows as the rate falls, and then the mean comes late",
    _overlapped.msdpu,
    interval_policy="growth",
    late=transforms.Delayed(1, carry=None, after_step=None),
  ),
  "fed_prox": _method.Method(
    "local_sgd with a pull back to the round's beginning", _local_sgd.fed_prox
  ),
  "easgd": _method.Method(
    "springs between the workers and a centre", _local_sgd.easgd
  ),
  "scaffold": _method.Method(
    "local_sgd with control variates, for unequal data",
    _local_sgd.scaffold,
    {"learning_rate": _rate_with_momentum},
  ),
  "slow_mo": _method.Method(
    "local_sgd with a momentum of the rounds", _local_sgd.slow_mo
  ),
  "cocod": _method.Method(
    "the last round's mean, one's own progress on top", _overlapped.cocod
  ),
  "overlap_local_sgd": _method.Method(
    "a pull to a mean that is one round late", _overlapped.overlap_local_sgd
  ),
  "od_sgd": _method.Method(
    "gradients one step late, a local step in between",
    _overlapped.od_sgd,
    {"local_learning_rate": lambda run: run.learning_rate},
  ),
  "streaming_diloco": _method.Method(
    "diloco in fragments at staggered steps",
    _diloco.streaming_diloco,
    {
      "fragments": lambda run: min(4, run.interval),
      "delay_steps": lambda run: min(1, run.interval - 1),
    },
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
    {"momentum": lambda run: run.momentum},
    own_momentum=True,
  ),
  "ef_signsgd": _method.Method(
    "ssgd with signs, and feedback of the rest",
    _compressed_gradients.ef_signsgd,
  ),
  "one_bit_adam": _method.Method(
    "Adam, then signs of its momentum",
    _compressed_gradients.one_bit_adam,
    {
      "warmup_steps": _one_bit_warmup,
      "weight_decay": lambda run: run.weight_decay,
    },
  ),
  "topk_sgd": _method.Method(
    "ssgd with the largest entries, and feedback",
    _compressed_gradients.topk_sgd,
  ),
  "dgc": _method.Method(
    "the largest entries of momenta, fewer and fewer",
    _compressed_gradients.dgc,
    {
      "momentum": lambda run: run.momentum,
      "nesterov": lambda run: True,
      "steps_per_phase": lambda run: run.warmup_steps or None,
    },
    own_momentum=True,
  ),
  "powersgd": _method.Method(
    "ssgd with a mean of low rank, and feedback", _compressed_gradients.powersgd
  ),
  "demo": _method.Method(
    "signs of the fastest components of momenta",
    _compressed_gradients.demo,
    own_momentum=True,
  ),
  "sparse_loco": _method.Method(
    "local steps; the largest entries in 2 bits", _diloco.sparse_loco
  ),
  "muloco": _method.Method(
    "diloco with Muon inside, in 2 bits",
    _diloco.muloco,
    {"weight_decay": lambda run: run.weight_decay},
  ),
  "mp2": _method.Method(
    "the front layers' mean; a network predicts the others", _mp2.mp2
  ),
}
