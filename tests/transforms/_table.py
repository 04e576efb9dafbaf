"""One table, a line for each transformation, through the same properties."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import optax
import pytest

from jdist import methods, reducers, transforms
from jdist.transforms import intervals
from tests.transforms import _chains, _reducers, _running

MOMENTUM = optax.sgd(0.1, momentum=0.9)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


@dataclasses.dataclass(frozen=True)
class Line:
  """One transformation.

  Attributes:
    build: from `axis`, the continuous and the structural arguments.
    continuous: arguments that may be injected.
    structural: arguments that may not.
    covers: the public names that this line tests.
    whole: whether it looks at whole leaves (their largest entries, a norm),
      for which the devices of a worker that is itself sharded must talk.
    bound: whether its first state depends on the number of workers.
    rough: whether a difference in the last place may become one of a rounding
      step, a sign, or a choice of entries.
  """

  build: Callable[..., optax.GradientTransformationExtraArgs]
  continuous: dict[str, Any]
  structural: dict[str, Any]
  covers: tuple[str, ...]
  whole: bool = False
  bound: bool = False
  rough: bool = False

  def make(self, axis, **changes):
    return self.build(
      axis=axis, **(self.continuous | self.structural | changes)
    )

  def inject(self, axis, static_args=None):
    if static_args is None:
      static_args = tuple(self.structural)
    return optax.inject_hyperparams(self.build, static_args=static_args)(
      axis=axis, **self.continuous, **self.structural
    )


def line(build, continuous, structural, *covers, **flags):
  covers = covers or (build.__name__,)
  return Line(build, continuous, structural, covers, **flags)


RATES = optax.linear_schedule(0.2, 0.05, _running.NUM_STEPS)
ROUNDS_OF_3 = {"inner": MOMENTUM, "interval": 3}
LARGEST = reducers.Compression(
  _reducers.Largest(2), reducers.ErrorFeedback(0.9)
)
OWNED = reducers.Compression(_reducers.Owned(0.25), reducers.ErrorFeedback(0.9))
TABLE = {
  "average": line(_chains.average, {"rate": 0.1}, {}, "average_gradients"),
  "guarded": line(
    _chains.guarded, {"rate": 0.1}, {}, "skip_nonfinite", whole=True
  ),
  "clipped": line(
    _chains.clipped,
    {"threshold": 4.0, "deviations": 1.5, "rate": 0.1},
    {},
    "clip_local",
    "clip_deviations",
    whole=True,
  ),
  "compressed": line(
    _chains.compressed,
    {"rate": 0.1},
    {
      "compression": reducers.Compression(
        _reducers.Largest(2), reducers.ErrorFeedback()
      )
    },
    "average_gradients",
    whole=True,
  ),
  "scheduled": line(
    _chains.compressed,
    {"rate": 0.1},
    {
      "compression": reducers.Compression(
        reducers.Scheduled(
          ((5, _reducers.Plain()), (None, _reducers.Owned(0.25)))
        ),
        reducers.MomentumCorrection(0.5),
      )
    },
    "average_gradients",
    bound=True,
    whole=True,
    rough=True,
  ),
  "ssgd": line(_chains.synchronous, {"rate": 0.1}, {}, "ssgd"),
  "stale": line(_chains.stale, {"rate": 0.1}, {"steps": 2}, "delay_gradients"),
  "stale by leaf": line(
    _chains.stale, {"rate": 0.1}, {"steps": {"a": 2, "b": 1}}, "delay_gradients"
  ),
  "predicted weights": line(
    _chains.predicting, {"rate": 0.1}, {}, "predict_weights"
  ),
  "local": line(transforms.local_steps, {}, ROUNDS_OF_3),
  "outer": line(transforms.local_steps, {}, ROUNDS_OF_3 | {"rule": NESTEROV}),
  "late": line(_chains.late, {"carry": 0.5}, ROUNDS_OF_3, "local_steps"),
  "late outer": line(
    _chains.late,
    {"carry": 1.0},
    ROUNDS_OF_3 | {"rule": NESTEROV, "after_step": 4},
    "local_steps",
  ),
  "streamed": line(
    _chains.late,
    {"carry": 0.5},
    ROUNDS_OF_3 | {"stream": transforms.Stream(8), "rule": NESTEROV},
    "local_steps",
  ),
  "late by steps": line(
    _chains.late,
    {"carry": 0.5},
    ROUNDS_OF_3 | {"steps": 2, "rule": NESTEROV},
    "local_steps",
  ),
  "streamed, late by steps": line(
    _chains.chosen,
    {"carry": 0.5},
    ROUNDS_OF_3 | {"steps": 2, "stream": transforms.Stream(8), "sent_in": 2},
    "local_steps",
  ),
  "compressed rounds": line(
    _chains.late,
    {"carry": 0.5},
    ROUNDS_OF_3 | {"compression": LARGEST, "rule": NESTEROV},
    "local_steps",
    whole=True,
  ),
  "compressed and streamed": line(
    _chains.late,
    {"carry": 0.5},
    ROUNDS_OF_3 | {"compression": OWNED, "stream": transforms.Stream(8)},
    "local_steps",
    bound=True,
    whole=True,
    rough=True,
  ),
  "pulled": line(
    _chains.pulled,
    {"strength": 0.5, "learning_rate": 0.1},
    {"interval": 3},
    "pull_to_anchor",
  ),
  "local_sgd": line(
    methods.local_sgd,
    {},
    {"optimizer": MOMENTUM, "interval": 4},
    "local_sgd",
    "fixed",
  ),
  "post_local_sgd": line(
    methods.post_local_sgd,
    {},
    {
      "optimizer": MOMENTUM,
      "interval": intervals.ending_at(_running.NUM_STEPS, 4),
      "switch_step": 4,
    },
    "post_local_sgd",
    "post_local",
    "ending_at",
  ),
  "diloco": line(
    methods.diloco,
    {"outer_learning_rate": 0.7, "outer_momentum": 0.9},
    {"optimizer": MOMENTUM, "interval": 3},
  ),
  "msdpu": line(
    methods.msdpu,
    {"learning_rate": 0.1, "correction": 0.1},
    {
      "optimizer": MOMENTUM,
      "interval": intervals.msdpu(4, 0.1, max_interval=8),
      "warmup_steps": 2,
      "overlap": transforms.Delayed(carry=1.0),
    },
  ),
  "qsr": line(
    methods.local_sgd,
    {},
    {"optimizer": MOMENTUM, "interval": intervals.qsr(RATES, 0.3, 2)},
    "qsr",
    "scheduled",
  ),
  "adacomm": line(
    methods.local_sgd,
    {},
    {"optimizer": MOMENTUM, "interval": intervals.adacomm(6, 6, RATES)},
    "adacomm",
  ),
  "proximal": line(_chains.proximal, {"strength": 0.5}, {"interval": 3}),
  "fed_prox": line(
    methods.fed_prox,
    {"strength": 0.1},
    {"optimizer": MOMENTUM, "interval": 4},
  ),
  "easgd": line(
    methods.easgd,
    {"moving_rate": 0.9},
    {"optimizer": MOMENTUM, "interval": 3},
  ),
  "overlap_local_sgd": line(
    methods.overlap_local_sgd,
    {"pull": 0.6, "momentum": 0.7},
    {
      "optimizer": MOMENTUM,
      "interval": intervals.growth(RATES, start=1.0, max_interval=4),
    },
    "overlap_local_sgd",
    "growth",
  ),
  "scaffold": line(
    methods.scaffold,
    {"learning_rate": 0.1, "global_learning_rate": 0.8},
    {"optimizer": optax.sgd(0.1), "interval": 4},
  ),
  "slow_mo": line(
    methods.slow_mo,
    {
      "learning_rate": 0.1,
      "slow_learning_rate": 0.9,
      "slow_momentum": 0.5,
    },
    {"optimizer": MOMENTUM, "interval": 4, "buffers": "maintain"},
  ),
  "slow_mo average": line(
    methods.slow_mo,
    {"slow_learning_rate": 1.0, "slow_momentum": 0.5},
    {
      "optimizer": MOMENTUM,
      "interval": 4,
      "learning_rate": RATES,
      "buffers": "average",
    },
  ),
  "cocod": line(methods.cocod, {}, {"optimizer": MOMENTUM, "interval": 3}),
  "fragment_steps": line(
    transforms.fragment_steps,
    {},
    {"inner": MOMENTUM, "interval": 4, "fragments": 2},
  ),
  "streaming_diloco": line(
    methods.streaming_diloco,
    {"outer_learning_rate": 0.7, "outer_momentum": 0.9, "mix": 0.5},
    {
      "optimizer": MOMENTUM,
      "interval": 6,
      "fragments": 2,
      "delay_steps": 2,
    },
  ),
}
# On the mesh a reshape crosses the inner axis: `whole`.  As a whole, one step
# late; its halves, and workers that are themselves sharded: test_update_first.
TABLE |= {
  "update_first": line(
    transforms.update_first,
    {},
    {"optimizer": MOMENTUM, "max_bytes": 16, "in_flight": 2, "pending": 1.0},
    whole=True,
  ),
  "update_first in halves": line(
    transforms.update_first,
    {},
    {
      "optimizer": MOMENTUM,
      "max_bytes": 16,
      "in_flight": 2,
      "scatter": True,
      "pending": 1.0,
    },
    whole=True,
    bound=True,
  ),
  "mp2": line(
    _chains.predicted, {"rate": 0.1}, {"interval": 3}, "mp2", whole=True
  ),
  "predict_rest": line(
    _chains.refreshed,
    {"carry": 0.5, "rest_rate": 0.1},
    {},
    "predict_rest",
    whole=True,
  ),
}
# Those that send fewer bytes.
PLAIN = optax.sgd(0.1)
COARSE = {"whole": True, "bound": True, "rough": True}
TABLE |= {
  "ef21": line(
    _chains.compressed,
    {"rate": 0.1},
    {
      "compression": reducers.Compression(
        _reducers.Owned(0.01), reducers.EF21()
      )
    },
    "average_gradients",
    **COARSE,
  ),
  "qsgd": line(
    methods.qsgd,
    {},
    {"optimizer": MOMENTUM, "bits": 4, "block": 4, "wire": "gather"},
    **COARSE,
  ),
  "terngrad": line(
    methods.terngrad,
    {"deviations": 2.5},
    {"optimizer": PLAIN, "wire": "all_to_all"},
    **COARSE,
  ),
  "signsgd": line(
    methods.signsgd, {"momentum": 0.9}, {"optimizer": PLAIN}, **COARSE
  ),
  "ef_signsgd": line(
    methods.ef_signsgd,
    {},
    {"optimizer": MOMENTUM, "wire": "gather"},
    **COARSE,
  ),
  "topk_sgd": line(
    methods.topk_sgd,
    {},
    {"optimizer": MOMENTUM, "ratio": 0.25, "feedback": True},
    **COARSE,
  ),
  "dgc": line(
    methods.dgc,
    {"momentum": 0.9, "threshold": 4.0},
    {
      "optimizer": PLAIN,
      "ratio": 0.3,
      "nesterov": True,
      "steps_per_phase": 3,
    },
    **COARSE,
  ),
  "powersgd": line(
    methods.powersgd, {}, {"optimizer": MOMENTUM, "rank": 1}, **COARSE
  ),
  "demo": line(
    methods.demo,
    {"decay": 0.9},
    {"optimizer": PLAIN, "chunk": 2, "k": 1},
    **COARSE,
  ),
  "sparse_loco": line(
    methods.sparse_loco,
    {"outer_learning_rate": 1.0, "decay": 0.95},
    {
      "optimizer": MOMENTUM,
      "interval": 3,
      "density": 0.25,
      "bits": 2,
      "chunk": 4,
    },
    **COARSE,
  ),
  "muloco": line(
    methods.muloco,
    {
      "learning_rate": 0.05,
      "outer_learning_rate": 0.7,
      "outer_momentum": 0.9,
      "momentum": 0.95,
      "weight_decay": 0.0,
    },
    {"interval": 3, "bits": 2},
    **COARSE,
  ),
}
# What the quick set runs: each mechanism once.
QUICK = ("ssgd", "late outer", "msdpu")
# On devices every third line, and every fifth, runs in the default set.
_EACH = {"vmap": 3, "shard_map": 5, "mixed": 8}
every_line = pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[pytest.mark.smoke] if name in QUICK else [])
    for name in TABLE
  ],
)


def on(*substrates, lines=tuple(TABLE)):
  """Lines on substrates, some of them on each; all of them in the slow set."""

  def marks(name, substrate):
    if name in QUICK:
      yield pytest.mark.smoke
    elif list(TABLE).index(name) % _EACH.get(substrate, 1):
      yield pytest.mark.slow

  return pytest.mark.parametrize(
    ("name", "substrate"),
    [
      pytest.param(name, substrate, marks=list(marks(name, substrate)))
      for name in lines
      for substrate in substrates
    ],
  )


@functools.cache
def runner(name, substrate):
  workers = _running.team(substrate)
  line = TABLE[name]
  return _running.Runner(line.make(workers.axis), workers, bound=line.bound)


@functools.cache
def record(name, substrate):
  """The run of a line with its own data on every worker."""
  return runner(name, substrate).run(_running.placed(substrate))


def record_equal(name):
  """One worker alone, and eight that all have its data."""
  alone, together = (
    runner(name, substrate).run(_running.placed(substrate, equal=True))
    for substrate in ("none", "vmap")
  )
  return alone, together
