"""One table, a line for each transformation, through the same properties.

Gradients are elementwise, `w - x`, with other targets x on every worker in
every step, so that a test reads the collectives of the transformation and no
others.  One leaf is float32 and one bfloat16.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jdist import collectives, transforms
from jdist.transforms import intervals
from tests.transforms import _reducers

NUM_STEPS = 30
NUM_WORKERS = 8
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


def average(rate, *, axis):
  return optax.chain(
    transforms.average_gradients(axis), optax.sgd(rate, momentum=0.9)
  )


def synchronous(rate, *, axis):
  return transforms.ssgd(optax.sgd(rate, momentum=0.9), axis=axis)


def stale(rate, steps, *, axis):
  return transforms.delay_gradients(synchronous(rate, axis=axis), steps)


def pulled(strength, learning_rate, interval, *, axis):
  pull = transforms.pull_to_anchor(strength, learning_rate)
  inner = optax.chain(pull, optax.sgd(learning_rate))
  return transforms.local_steps(inner, interval, axis=axis)


def proximal(strength, interval, *, axis):
  inner = optax.chain(transforms.proximal(strength), optax.sgd(0.1))
  return transforms.local_steps(inner, interval, axis=axis)


def led(local_rate, *, axis):
  return transforms.lead_step(MOMENTUM, optax.sgd(local_rate), axis=axis)


def clipped(threshold, deviations, rate, *, axis):
  return optax.chain(
    transforms.clip_deviations(deviations),
    # Each leaf for itself: the leaves are of several dtypes.
    transforms.clip_local(threshold, axis, per_leaf=True),
    transforms.average_gradients(axis),
    optax.sgd(rate),
  )


def reduced(rate, reducer, feedback, *, axis):
  average = transforms.average_gradients(axis, reducer, feedback)
  return optax.chain(average, optax.sgd(rate, momentum=0.9))


def frozen(rate, *, axis):
  adam = transforms.scale_by_frozen_adam(
    5, axis, _reducers.Owned(0.01), transforms.EF21(), eps=0.1
  )
  return optax.chain(adam, optax.sgd(rate))


class Cut:
  """Leaf "a" is the front, the rest is made from it."""

  def split(self, tree):
    return {"a": tree["a"]}, {"b": tree["b"]}

  def join(self, front, rest):
    return front | rest


def predict(theta, front):
  return {"b": {"c": theta * jnp.sin(front["a"].reshape(2, 2))}}


def predicted(rate, interval, *, axis):
  inner = optax.sgd(rate, momentum=0.9)
  return transforms.mp2(
    inner, Cut(), predict, np.float32(0.5), interval, axis=axis
  )


def refreshed(carry, rest_rate, *, axis):
  """A front whose mean is late, and a rest that learns too."""
  front = transforms.local_steps(
    MOMENTUM, 3, axis=axis, delay_rounds=1, carry=carry, outer=NESTEROV
  )
  # The residual is float32 whatever the dtype of an injected rate.
  rate = jnp.asarray(rest_rate).astype(jnp.float32)
  rest = transforms.local_steps(optax.sgd(rate), 3, axis=axis)
  return transforms.predict_rest(
    front, Cut(), predict, np.float32(0.5), axis=axis, rest=rest
  )


def line(build, continuous, structural, *covers, **flags):
  covers = covers or (build.__name__,)
  return Line(build, continuous, structural, covers, **flags)


RATES = optax.linear_schedule(0.2, 0.05, NUM_STEPS)
ROUNDS_OF_3 = {
  "inner": MOMENTUM,
  "interval": 3,
  "outer": None,
  "delay_rounds": 0,
  "delay_after_step": 0,
}
TABLE = {
  "average": line(average, {"rate": 0.1}, {}, "average_gradients"),
  "clipped": line(
    clipped,
    {"threshold": 4.0, "deviations": 1.5, "rate": 0.1},
    {},
    "clip_local",
    "clip_deviations",
    whole=True,
  ),
  "reduced": line(
    reduced,
    {"rate": 0.1},
    {
      "reducer": _reducers.Largest(2),
      "feedback": transforms.ErrorFeedback(),
    },
    "average_gradients",
    whole=True,
  ),
  "scheduled": line(
    reduced,
    {"rate": 0.1},
    {
      "reducer": transforms.Scheduled(
        ((5, _reducers.Plain()), (None, _reducers.Owned(0.25)))
      ),
      "feedback": transforms.MomentumCorrection(0.5),
    },
    "average_gradients",
    bound=True,
    whole=True,
    rough=True,
  ),
  "ssgd": line(synchronous, {"rate": 0.1}, {}, "ssgd"),
  "stale": line(stale, {"rate": 0.1}, {"steps": 2}, "delay_gradients"),
  "local": line(transforms.local_steps, {"carry": 1.0}, ROUNDS_OF_3),
  "outer": line(
    transforms.local_steps, {"carry": 1.0}, ROUNDS_OF_3 | {"outer": NESTEROV}
  ),
  "late": line(
    transforms.local_steps, {"carry": 0.5}, ROUNDS_OF_3 | {"delay_rounds": 1}
  ),
  "late outer": line(
    transforms.local_steps,
    {"carry": 1.0},
    ROUNDS_OF_3 | {"outer": NESTEROV, "delay_rounds": 1, "delay_after_step": 4},
  ),
  "streamed": line(
    transforms.local_steps,
    {"carry": 0.5},
    ROUNDS_OF_3
    | {"delay_rounds": 1, "stream": transforms.Stream(8), "outer": NESTEROV},
  ),
  "reduced rounds": line(
    transforms.local_steps,
    {"carry": 0.5},
    ROUNDS_OF_3
    | {
      "reducer": _reducers.Largest(2),
      "feedback": transforms.ErrorFeedback(0.9),
      "outer": NESTEROV,
      "delay_rounds": 1,
    },
    whole=True,
  ),
  "reduced and streamed": line(
    transforms.local_steps,
    {"carry": 0.5},
    ROUNDS_OF_3
    | {
      "reducer": _reducers.Owned(0.25),
      "feedback": transforms.ErrorFeedback(0.9),
      "delay_rounds": 1,
      "stream": transforms.Stream(8),
    },
    bound=True,
    whole=True,
    rough=True,
  ),
  "pulled": line(
    pulled,
    {"strength": 0.5, "learning_rate": 0.1},
    {"interval": 3},
    "pull_to_anchor",
  ),
  "local_sgd": line(
    transforms.local_sgd,
    {},
    {"optimizer": MOMENTUM, "interval": 4},
    "local_sgd",
    "fixed",
  ),
  "post_local_sgd": line(
    transforms.post_local_sgd,
    {},
    {
      "optimizer": MOMENTUM,
      "interval": intervals.ending_at(NUM_STEPS, 4),
      "switch_step": 4,
    },
    "post_local_sgd",
    "post_local",
    "ending_at",
  ),
  "diloco": line(
    transforms.diloco,
    {"outer_learning_rate": 0.7, "outer_momentum": 0.9},
    {"optimizer": MOMENTUM, "interval": 3},
  ),
  "msdpu": line(
    transforms.msdpu,
    {"learning_rate": 0.1, "correction": 0.1, "carry": 1.0},
    {
      "optimizer": MOMENTUM,
      "interval": 4,
      "warmup_steps": 2,
      "max_interval": 8,
    },
  ),
  "qsr": line(
    transforms.local_sgd,
    {},
    {"optimizer": MOMENTUM, "interval": intervals.qsr(RATES, 0.3, 2)},
    "qsr",
    "scheduled",
  ),
  "adacomm": line(
    transforms.local_sgd,
    {},
    {"optimizer": MOMENTUM, "interval": intervals.adacomm(6, 6, RATES)},
    "adacomm",
  ),
  "proximal": line(proximal, {"strength": 0.5}, {"interval": 3}),
  "fed_prox": line(
    transforms.fed_prox,
    {"strength": 0.1},
    {"optimizer": MOMENTUM, "interval": 4},
  ),
  "easgd": line(
    transforms.easgd,
    {"moving_rate": 0.9},
    {"optimizer": MOMENTUM, "interval": 3},
  ),
  "overlap_local_sgd": line(
    transforms.overlap_local_sgd,
    {"pull": 0.6, "momentum": 0.7},
    {"optimizer": MOMENTUM, "interval": intervals.adacomm(6, 6, RATES)},
  ),
  "scaffold": line(
    transforms.scaffold,
    {"learning_rate": 0.1, "global_learning_rate": 0.8},
    {"optimizer": optax.sgd(0.1), "interval": 4},
  ),
  "slow_mo": line(
    transforms.slow_mo,
    {
      "learning_rate": 0.1,
      "slow_learning_rate": 0.9,
      "slow_momentum": 0.5,
    },
    {"optimizer": MOMENTUM, "interval": 4, "buffers": "maintain"},
  ),
  "slow_mo average": line(
    transforms.slow_mo,
    {"slow_learning_rate": 1.0, "slow_momentum": 0.5},
    {
      "optimizer": MOMENTUM,
      "interval": 4,
      "learning_rate": RATES,
      "buffers": "average",
    },
  ),
  "cocod": line(transforms.cocod, {}, {"optimizer": MOMENTUM, "interval": 3}),
  "lead_step": line(led, {"local_rate": 0.1}, {}, "lead_step"),
  "od_sgd": line(
    transforms.od_sgd,
    {"local_learning_rate": 0.1},
    {"optimizer": MOMENTUM, "warmup_steps": 3},
  ),
  "fragment_steps": line(
    transforms.fragment_steps,
    {"mix": 0.0},
    {
      "inner": MOMENTUM,
      "interval": 4,
      "fragments": 2,
      "delay_steps": 0,
      "outer": None,
    },
  ),
  "streaming_diloco": line(
    transforms.streaming_diloco,
    {"outer_learning_rate": 0.7, "outer_momentum": 0.9, "mix": 0.5},
    {
      "optimizer": MOMENTUM,
      "interval": 6,
      "fragments": 2,
      "delay_steps": 2,
    },
  ),
}
# On the mesh a reshape crosses the inner axis: `whole`.
TABLE |= {
  "mp2": line(predicted, {"rate": 0.1}, {"interval": 3}, "mp2", whole=True),
  "predict_rest": line(
    refreshed, {"carry": 0.5, "rest_rate": 0.1}, {}, "predict_rest", whole=True
  ),
}
# Those that send fewer bytes.
PLAIN = optax.sgd(0.1)
COARSE = {"whole": True, "bound": True, "rough": True}
TABLE |= {
  "frozen": line(frozen, {"rate": 0.1}, {}, "scale_by_frozen_adam", **COARSE),
  "qsgd": line(
    transforms.qsgd,
    {},
    {"optimizer": MOMENTUM, "bits": 4, "block": 4, "wire": "gather"},
    **COARSE,
  ),
  "terngrad": line(
    transforms.terngrad,
    {"deviations": 2.5},
    {"optimizer": PLAIN, "wire": "exchange"},
    **COARSE,
  ),
  "signsgd": line(
    transforms.signsgd, {"momentum": 0.9}, {"optimizer": PLAIN}, **COARSE
  ),
  "ef_signsgd": line(
    transforms.ef_signsgd,
    {},
    {"optimizer": MOMENTUM, "wire": "gather"},
    **COARSE,
  ),
  "one_bit_adam": line(
    transforms.one_bit_adam,
    {
      "learning_rate": 0.1,
      "b1": 0.9,
      "b2": 0.999,
      "eps": 1e-8,
      "weight_decay": 0.01,
    },
    {"warmup_steps": 5},
    **COARSE,
  ),
  "topk_sgd": line(
    transforms.topk_sgd,
    {},
    {"optimizer": MOMENTUM, "ratio": 0.25, "feedback": True},
    **COARSE,
  ),
  "dgc": line(
    transforms.dgc,
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
    transforms.powersgd, {}, {"optimizer": MOMENTUM, "rank": 1}, **COARSE
  ),
  "demo": line(
    transforms.demo,
    {"decay": 0.9},
    {"optimizer": PLAIN, "chunk": 2, "k": 1},
    **COARSE,
  ),
  "sparse_loco": line(
    transforms.sparse_loco,
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
    transforms.muloco,
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
every_line = pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[pytest.mark.smoke] if name in QUICK else [])
    for name in TABLE
  ],
)
PARAMS = {
  "a": np.linspace(-1.0, 1.0, 4, dtype=np.float32),
  "b": {"c": np.ones((2, 2), jnp.bfloat16)},
}


def targets(num_workers):
  """Targets [steps, workers, ...] and losses [steps, workers]."""
  random = np.random.default_rng(0)

  def one(like):
    shape = (NUM_STEPS, num_workers, *like.shape)
    return random.normal(size=shape).astype(like.dtype)

  fall = np.exp(-np.arange(NUM_STEPS) / 8)[:, None]
  noise = random.uniform(0.7, 1.3, (NUM_STEPS, num_workers))
  losses = (4 * fall * noise).astype(np.float32)
  return jax.tree.map(one, PARAMS), losses


def make_step(optimizer, traces=None):
  """What one worker does; appends to `traces` whenever it is traced."""

  def step(params, state, target, loss):
    if traces is not None:
      traces.append(1)
    gradients = jax.tree.map(lambda p, x: p - x.astype(p.dtype), params, target)
    updates, state = optimizer.update(gradients, state, params, loss=loss)
    return transforms.apply_updates(params, updates, state), state

  return step


@functools.cache
def team(substrate):
  """Eight workers everywhere, except on the (2, 2) mesh."""
  if substrate == "mixed":  # Two workers on each of four devices.
    mesh = collectives.make_mesh((4,), ("worker",))
    return collectives.workers(NUM_WORKERS, mesh=mesh)
  if substrate == "mesh":  # Two workers of two devices each.
    mesh = collectives.make_mesh((2, 2), ("worker", "fsdp"))
    return collectives.workers(2, mesh=mesh)
  if substrate == "none":
    return collectives.workers(1, substrate="none")
  if substrate == "two":
    return collectives.workers(2, substrate="vmap")
  return collectives.workers(NUM_WORKERS, substrate=substrate)


@dataclasses.dataclass
class Run:
  """A run, with all workers' arrays [workers, ...] after every step."""

  params: list[Any]
  states: list[Any]
  donated: bool


def copied(tree):
  # A NumPy view of a buffer that is donated next would change under us.
  return jax.tree.map(lambda x: np.array(x, copy=True), tree)


class Runner:
  """One compiled step, for any data."""

  def __init__(self, optimizer, workers, dtype=None, bound=False):
    self.optimizer, self.workers, self.dtype = optimizer, workers, dtype
    self.bound = bound
    self.traces = []
    step = make_step(optimizer, self.traces)
    self.step = workers.jit(step, donate_argnums=(0, 1))

  def begin(self):
    """Parameters and state of all workers, placed without a program."""
    params = jax.tree.map(lambda x: jnp.asarray(x, self.dtype), PARAMS)
    if self.bound:
      state = init_among(self.optimizer, self.workers, params)
    else:
      state = self.optimizer.init(params)
    return self.place((params, state))

  def place(self, tree):
    mesh = self.workers.mesh
    inner = () if mesh is None else mesh.axis_names[1:]

    def one(x):
      # What looks like a parameter, or a row of them, is sharded like one.
      spec = PartitionSpec()
      for shape in [p.shape for p in jax.tree.leaves(PARAMS)]:
        rest = x.ndim - len(shape)
        if rest in (0, 1) and x.shape[rest:] == shape:
          spec = PartitionSpec(*[None] * rest, *inner)
      rows = np.broadcast_to(x, (self.workers.num_workers, *x.shape))
      return jax.device_put(rows.copy(), self.workers.sharding(spec))

    return jax.tree.map(one, tree)

  def run(self, xs, losses, step=None):
    step = step or self.step
    params, state = self.begin()
    record = Run([], [], True)
    for t in range(NUM_STEPS):
      # A flag that is only written is no argument of the program.
      old = [x for x in jax.tree.leaves((params, state)) if x.ndim > 1]
      data = self.workers.place(at(t, (xs, losses)))
      params, state = step(params, state, *data)
      record.params.append(copied(params))
      record.states.append(copied(state))
      record.donated &= all(x.is_deleted() for x in old)
    return record

  def compile(self):
    """The step as a program that can be read, and run."""
    data = self.workers.place(at(0, targets(self.workers.num_workers)))
    return self.step.lower(*self.begin(), *data).compile()


def init_among(optimizer, workers, params):
  """One worker's first state, where the number of workers is known."""
  init = jax.jit(workers.spmd(optimizer.init))
  return jax.tree.map(lambda x: x[0], init(workers.replicate(params)))


def at(t, data):
  return jax.tree.map(lambda x: x[t], data)


@functools.cache
def runner(name, substrate):
  workers = team(substrate)
  line = TABLE[name]
  return Runner(line.make(workers.axis), workers, bound=line.bound)


@functools.cache
def record(name, substrate):
  """The run of a line with its own data on every worker."""
  one = runner(name, substrate)
  return one.run(*targets(one.workers.num_workers))


def record_equal(name):
  """One worker alone, and eight that all have its data."""
  xs, losses = targets(1)
  together = runner(name, "vmap").run(
    *jax.tree.map(lambda x: np.repeat(x, NUM_WORKERS, 1), (xs, losses))
  )
  return runner(name, "none").run(xs, losses), together
