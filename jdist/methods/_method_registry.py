"""The registries: every method of this package, and its parts, by name."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optax

from jdist import codecs, collectives, reducers, transforms
from jdist.methods import (
  _compressed_gradients,
  _diloco,
  _local_sgd,
  _mp2,
  _overlapped,
)


class Run(NamedTuple):
  """The facts of a training run on which methods depend.

  Attributes:
    num_steps: The number of local steps in the whole run.
    warmup_steps: The number of steps in which the learning rate rises.
    learning_rate: A schedule over local steps.
    steps_per_epoch: The number of steps in one pass over the training set,
      rounded up.
    interval: The number of local steps in the first round.
    optimizer: The kind of each worker's optimizer, "sgd" or "adamw".
    momentum: The momentum of SGD.
    weight_decay: The decoupled weight decay.
  """

  num_steps: int
  warmup_steps: int
  learning_rate: optax.Schedule
  steps_per_epoch: int = 1
  interval: int = 1
  optimizer: str = "sgd"
  momentum: float = 0.0
  weight_decay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Method:
  """An entry of the registry: how a method is built from the facts of a run.

  Attributes:
    summary: One line of help.
    factory: A function of `jdist.methods`, or another one with arguments of
      the same names, for instance
      `functools.partial(transforms.local_steps, rule=...)`.
    from_run: Arguments of the factory that follow from a run.  An argument
      called `learning_rate` is the run's schedule and needs no entry.
    interval_policy: The default interval policy, a name of
      `jdist.transforms.intervals`; None if the interval must be a number.
    late: The overlap of a method whose means are late by definition.
    own_momentum: Whether the method applies the momentum itself, so that its
      optimizer must be plain SGD.

  >>> def mean_sgd(optimizer, *, axis, compression=None):
  ...   mean = transforms.average_gradients(axis, compression)
  ...   return optax.chain(mean, optimizer)
  >>> method = Method("a mean in every step", mean_sgd)
  >>> sorted(method.arguments), sorted(method.required)
  (['axis', 'compression', 'optimizer'], ['axis', 'optimizer'])
  """

  summary: str
  factory: Callable[..., optax.GradientTransformationExtraArgs]
  from_run: Mapping[str, Callable[[Run], Any]] = dataclasses.field(
    default_factory=dict
  )
  interval_policy: str | None = "fixed"
  late: transforms.Delayed | None = None
  own_momentum: bool = False

  @functools.cached_property
  def arguments(self) -> frozenset[str]:
    """The names of the factory's arguments."""
    return frozenset(inspect.signature(self.factory).parameters)

  @functools.cached_property
  def required(self) -> frozenset[str]:
    """The names of the factory's arguments that have no default."""
    parameters = inspect.signature(self.factory).parameters.values()
    return frozenset(
      one.name for one in parameters if one.default is inspect.Parameter.empty
    )

  @property
  def in_rounds(self) -> bool:
    """Returns whether the method needs the run's interval."""
    # MP² has a default, as published, and is not a method of rounds.
    return "interval" in self.required

  def build(
    self,
    optimizer: optax.GradientTransformation,
    run: Run,
    *,
    axis: collectives.Axis,
    **options: Any,
  ) -> optax.GradientTransformationExtraArgs:
    """Builds the method's chain; `run` gives arguments that `options` lack.

    A method that makes each worker's optimizer itself ignores the given one.
    """
    # A factory takes some of these: `muloco`, for instance, has no optimizer.
    found: dict[str, Any] = {
      "optimizer": optimizer,
      # `local_steps`, on which users build methods, has this name for it.
      "inner": optimizer,
      "learning_rate": run.learning_rate,
    }
    if self.in_rounds:
      found["interval"] = run.interval
    found = {k: v for k, v in found.items() if k in self.arguments}
    found |= {name: of(run) for name, of in self.from_run.items()}
    # An explicit setting of the user takes precedence over the run.
    return self.factory(**(found | options), axis=axis)


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


def _rate_with_momentum(run: Run) -> optax.Schedule:
  # A momentum m makes progress up to 1 / (1 - m) times longer, and control
  # variates, which are progress per rate, would grow by the same factor.
  factor = 1.0 / (1.0 - run.momentum) if run.optimizer == "sgd" else 1.0
  return lambda step: factor * run.learning_rate(step)


registry: dict[str, Method] = {  # Every method by its name.
  "ssgd": Method(
    "synchronous SGD: the mean of the gradients in every step",
    _compressed_gradients.ssgd,
  ),
  "local_sgd": Method(
    "H local steps, then the mean of the parameters", _local_sgd.local_sgd
  ),
  "post_local_sgd": Method(
    "ssgd in the first half of the run, then local_sgd",
    _local_sgd.post_local_sgd,
    # The paper switches at the first decay of the rate, halfway or later.
    {"switch_step": lambda run: run.num_steps // 2},
  ),
  "diloco": Method(
    "local steps; their mean is a gradient for outer Nesterov", _diloco.diloco
  ),
  "msdpu": Method(
    "H grows as the rate falls, and then the mean is late",
    _overlapped.msdpu,
    # The delay begins with the first long round, which the rule decides.
    interval_policy="growth",
    late=_overlapped.MSDPU_DELAY,
  ),
  "fed_prox": Method(
    "local_sgd with a pull towards the start of the round", _local_sgd.fed_prox
  ),
  "easgd": Method(
    "elastic springs between the workers and a centre", _local_sgd.easgd
  ),
  "scaffold": Method(
    "local_sgd with control variates, for unequal data",
    _local_sgd.scaffold,
    {"learning_rate": _rate_with_momentum},
  ),
  "slow_mo": Method(
    "local_sgd with a momentum over rounds", _local_sgd.slow_mo
  ),
  "cocod": Method(
    "the previous round's mean plus the worker's own progress",
    _overlapped.cocod,
  ),
  "overlap_local_sgd": Method(
    "a pull towards a mean that is one round late",
    _overlapped.overlap_local_sgd,
  ),
  "streaming_diloco": Method(
    "diloco in fragments at staggered steps",
    _diloco.streaming_diloco,
    # A short interval has neither four steps to stagger nor one to be late.
    {
      "fragments": lambda run: min(4, run.interval),
      "delay_steps": lambda run: min(1, run.interval - 1),
    },
    interval_policy=None,
  ),
  "qsgd": Method(
    "ssgd with integers of a few bits", _compressed_gradients.qsgd
  ),
  "terngrad": Method(
    "ssgd with -1, 0 or 1 times a scale", _compressed_gradients.terngrad
  ),
  "signsgd": Method(
    "ssgd by majority vote on the signs of momenta",
    _compressed_gradients.signsgd,
    # Signum's momentum precedes the vote; the run's optimizer must have none.
    {"momentum": lambda run: run.momentum},
    own_momentum=True,
  ),
  "ef_signsgd": Method(
    "ssgd with signs and error feedback", _compressed_gradients.ef_signsgd
  ),
  "topk_sgd": Method(
    "ssgd with the largest entries and error feedback",
    _compressed_gradients.topk_sgd,
  ),
  "dgc": Method(
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
  "powersgd": Method(
    "ssgd with a low-rank mean and error feedback",
    _compressed_gradients.powersgd,
  ),
  "demo": Method(
    "the signs of the fastest components of momenta",
    _compressed_gradients.demo,
    own_momentum=True,
  ),
  "sparse_loco": Method(
    "local steps; their largest changes in 2 bits", _diloco.sparse_loco
  ),
  "muloco": Method(
    "diloco with Muon as the inner optimizer, in 2 bits",
    _diloco.muloco,
    {"weight_decay": lambda run: run.weight_decay},
  ),
  "mp2": Method(
    "the mean of the front layers; a network predicts the rest", _mp2.mp2
  ),
}
