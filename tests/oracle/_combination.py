"""One combination of all options, drawn by a seed, built and run.

`draw(seed)` chooses; `Combination.optimizer` builds it with the library and
`Combination.reference` with NumPy.  Values are chosen where a wrong weight
shows: no rate or share is 0 or 1, except where that is the law itself.
"""

import contextlib
import dataclasses
import functools
import itertools

import jax
import numpy as np
import optax

import jdist
from jdist import codecs, methods, reducers, transforms
from jdist.transforms import intervals
from tests.oracle import _model, _reference

RATE = optax.exponential_decay(0.04, 4, 0.8)
INNER = {
  "sgd": lambda: optax.sgd(RATE),
  "momentum": lambda: optax.sgd(RATE, momentum=0.9),
  "nesterov": lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
  "adamw": lambda: optax.adamw(RATE, 0.9, 0.95, 1e-2, weight_decay=0.05),
  "clipped": lambda: optax.chain(
    optax.clip_by_global_norm(1.0), optax.sgd(RATE)
  ),
}
# They are gathered, so that a codec sees a leaf: an all-to-all cuts rows.
CODECS = {
  "int4": codecs.Quantize(4),
  "top1": codecs.TopK(k=1),
  "sign": codecs.Sign(),
}
FEEDBACKS = {
  None: None,
  "error": reducers.ErrorFeedback(),
  "ef21": reducers.EF21(),
  "momentum": reducers.MomentumCorrection(0.5),
}
RULES = ("average", "outer", "elastic", "pulled anchor", "control variates")
RULES += ("slow momentum",)


@dataclasses.dataclass(frozen=True)
class Combination:
  """What is trained, and how; its fields say all that a run depends on."""

  seed: int
  method: str
  data: int = 0
  rule: tuple = ("average", {})
  interval: tuple = ("fixed", 1)
  late: dict | None = None
  pull: tuple | None = None
  fragments: int = 1
  inner: str = "sgd"
  codec: str | None = None
  feedback: str | None = None
  workers: int = 4
  substrate: str = "vmap"
  dtype: str = "float32"
  masks: str = "whole"
  weighted: bool = False
  accumulate: int = 1
  loop: str = "device"  # Or "host" or "trainer": who ends a round.
  stream: bool = False
  donate: bool = False
  resume: int | None = None
  steps: int = 14
  samples: int = 16

  # The library's.

  def optimizer(self, axis):
    inner = INNER[self.inner]()
    kinds = {
      "ssgd": lambda: methods.ssgd(
        inner, axis=axis, compression=self.compression()
      ),
      "signum": lambda: methods.signsgd(inner, 0.5, axis=axis),
      "delay_gradients": lambda: transforms.delay_gradients(
        methods.ssgd(inner, axis=axis), 2
      ),
      "update_first": lambda: transforms.update_first(
        inner, axis=axis, max_bytes=16
      ),
    }
    if self.method in kinds:
      return kinds[self.method]()
    return self.rounds(inner, axis)

  def rounds(self, inner, axis):
    name, settings = self.rule
    rules = {
      "average": lambda: None,
      "outer": lambda: transforms.outer_sgd(
        settings["rate"], settings["momentum"]
      ),
      "elastic": lambda: transforms.Elastic(settings["rate"]),
      "pulled anchor": lambda: transforms.PulledAnchor(
        settings["pull"], settings["momentum"]
      ),
      "control variates": lambda: transforms.ControlVariates(
        RATE, settings["rate"]
      ),
      "slow momentum": lambda: transforms.SlowMomentum(
        RATE, settings["rate"], settings["momentum"], settings["buffers"]
      ),
    }
    options = {
      "axis": axis,
      "overlap": self.overlap(),
      "compression": self.compression(),
    }
    if self.pull is not None:
      kind, strength = self.pull
      term = (
        transforms.pull_to_anchor(strength, RATE)
        if kind == "pull"
        else transforms.proximal(strength)
      )
      inner = optax.chain(term, inner)
    # Published names, where one has these very options.
    every, rule = self.policy(), rules[name]()
    if self.fragments > 1:
      return transforms.fragment_steps(
        inner, every, self.fragment_of, rule=rule, **options
      )
    if self.seed % 2:
      return transforms.local_steps(inner, every, rule=rule, **options)
    named = {
      "average": lambda: jdist.local_sgd(inner, every, **options),
      "outer": lambda: jdist.diloco(
        inner, every, settings["rate"], settings["momentum"], **options
      ),
      "elastic": lambda: methods.easgd(
        inner, every, settings["rate"], **options
      ),
      "control variates": lambda: methods.scaffold(
        inner, every, RATE, settings["rate"], **options
      ),
      "slow momentum": lambda: methods.slow_mo(
        inner, every, RATE, settings["rate"], settings["momentum"],
        buffers=settings["buffers"], **options,
      ),
    }  # fmt: skip
    if self.pull and self.pull[0] == "pull" and self.late:
      own = INNER[self.inner]()
      return jdist.msdpu(
        own,
        every if isinstance(every, intervals.IntervalPolicy)
        else intervals.fixed(every),
        RATE, correction=self.pull[1], rule=rule, **options,
      )  # fmt: skip
    if name in named:
      return named[name]()
    return transforms.local_steps(inner, every, rule=rule, **options)

  def policy(self):
    kind, number = self.interval
    if kind == "fixed":
      return number
    if kind == "post local":
      return intervals.post_local(4, number)
    assert kind == "growing", kind
    return intervals.scheduled(lambda step: 1 + step // number)

  def overlap(self):
    if self.late is None:
      return None
    late = dict(self.late)
    after = late.pop("after", 0)
    stream = transforms.Stream(max_bytes=16) if self.stream else None
    return transforms.Delayed(after_step=after, stream=stream, **late)

  def streamed_by_device(self):
    """Whether all steps of a stream send alike, so that no host must say."""
    late, (kind, length) = self.late, self.interval
    return (
      self.fragments == 1
      and late["after"] == 0
      and kind == "fixed"
      and (late.get("steps") is None or late["steps"] >= length)
    )

  def compression(self):
    if self.codec is None:
      return None
    if self.codec == "exact":  # Of no codec: exactly the plain mean.
      return reducers.Compression(reducers.Exact())
    reducer = reducers.compressed(CODECS[self.codec], wire="gather")
    return reducers.Compression(reducer, FEEDBACKS[self.feedback])

  def fragment_of(self, path):
    return list(_model.LEAVES).index(path.strip("/")) % self.fragments

  # The reference's.

  def length_of_round(self, begin):
    kind, number = self.interval
    if kind == "fixed":
      return number
    if kind == "post local":
      return number if begin >= 4 else 1
    return 1 + begin // number

  def reference(self):
    row = _model.flat(jax.tree.map(lambda x: x[None], self.first_params()))
    w, spans = np.repeat(row, self.workers, 0), _model.spans()
    codec = None if self.codec == "exact" else self.codec
    if self.method in ("ssgd", "delay_gradients", "update_first", "signum"):
      if self.method == "signum":
        codec = "vote"
      return _reference.Synchronous(
        w, self.inner, codec,
        "smoothing" if codec == "vote" else self.feedback, spans,
        2 if self.method == "delay_gradients" else 0,
        self.method == "update_first",
      )  # fmt: skip
    late = None if self.late is None else _reference.Late(**self.late)
    parts = []
    for p in range(self.fragments):
      leaves = [x for i, x in enumerate(spans) if i % self.fragments == p]
      columns = np.concatenate([np.arange(x.start, x.stop) for x in leaves])
      sizes = np.cumsum([0] + [x.stop - x.start for x in leaves])
      own = [slice(a, b) for a, b in itertools.pairwise(sizes)]
      length = self.length_of_round
      if self.fragments > 1:
        length = functools.partial(self._staggered, p)
      parts.append(
        _reference.Rounds(
          w, columns, own, self.rule, length, late, codec, self.feedback
        )
      )
    return _reference.LocalSteps(w, self.inner, self.pull, parts)

  def _staggered(self, p, begin):
    every = self.interval[1]
    return every if begin else every * (p + 1) // self.fragments

  # Data.

  def first_params(self):
    return _model.first_params([self.seed, self.data], self.numbers)

  @property
  def numbers(self):
    return jax.numpy.dtype(self.dtype)

  @property
  def statistics(self):
    """The dtype of batch statistics, and of the loss."""
    return np.float64 if self.dtype == "float64" else np.float32

  def batch(self, step):
    return _model.make_batch(
      [self.seed, self.data], step, self.workers, self.samples, self.masks
    )

  def precision(self):
    stack = contextlib.ExitStack()
    if self.dtype != "float32" or self.inner == "adamw":
      # Optax mixes dtypes here.
      stack.enter_context(jax.numpy_dtype_promotion("standard"))
    if self.dtype == "float64":
      stack.enter_context(jax.enable_x64(True))
    return stack


def draw(seed):
  """Draws a combination that the library does not refuse."""
  random = np.random.default_rng([seed, 0])

  def pick(*values, p=None):
    return values[random.choice(len(values), p=p)]

  def flag(share=0.5):
    return bool(random.random() < share)

  method = pick(
    "local steps", "ssgd", "signum", "delay_gradients", "update_first",
    p=(0.7, 0.1, 0.04, 0.04, 0.12),
  )  # fmt: skip
  found = {"seed": seed, "method": method, "inner": pick(*INNER)}
  synchronous = method != "local steps"
  found["workers"] = pick(2, 4, 4, 3)
  found["substrate"] = pick(
    "vmap", "shard_map", "several", "none", p=(0.45, 0.35, 0.15, 0.05)
  )
  if found["substrate"] == "none":
    found["workers"] = 1
  elif found["substrate"] == "several":
    found["workers"] = 4
  found["dtype"] = pick("float32", "float64", "bfloat16", p=(0.7, 0.2, 0.1))
  found["masks"] = pick("whole", "uneven")
  found["weighted"] = flag()
  found["accumulate"] = pick(1, 1, 2, 4)
  found["donate"] = flag()
  found["loop"] = pick("device", "host", "trainer")
  if flag(0.25):
    found["resume"] = int(random.integers(3, 11))
  if not synchronous:
    _draw_rounds(found, pick, flag)
  if method in ("ssgd", "local steps") and flag(0.5):
    found["codec"] = pick("int4", "top1", "sign", "exact")
    if found["codec"] != "exact":
      found["feedback"] = pick("error", "error", "ef21", None)
      if method == "ssgd" and found["codec"] == "top1" and flag(0.5):
        found["feedback"] = "momentum"
  if method == "update_first":
    found["loop"] = pick("device", "trainer")
  return _allowed(Combination(**found))


def _draw_rounds(found, pick, flag):
  rule = pick(*RULES)
  found["rule"] = rule, {
    "average": lambda: {},
    "outer": lambda: {"rate": pick(0.7, 0.5), "momentum": pick(0.9, 0.6)},
    "elastic": lambda: {"rate": pick(0.9, 0.4)},
    "pulled anchor": lambda: {"pull": pick(0.6, 0.3), "momentum": pick(0, 0.5)},
    "control variates": lambda: {"rate": pick(1.0, 0.8)},
    "slow momentum": lambda: {
      "rate": pick(1.0, 0.8), "momentum": pick(0.5, 0.7),
      "buffers": pick("maintain", "reset", "average"),
    },
  }[rule]()  # fmt: skip
  if flag(0.2) and rule != "pulled anchor":
    found["fragments"], found["interval"] = pick(2, 4), ("fixed", pick(4, 5))
  else:
    found["interval"] = pick(
      ("fixed", 1), ("fixed", 2), ("fixed", 3), ("fixed", 4), ("fixed", 5),
      ("post local", 3), ("growing", 3),
    )  # fmt: skip
  if flag(0.3) and found.get("fragments", 1) == 1:
    found["pull"] = pick("pull", "proximal"), pick(0.1, 0.4)
  if flag(0.6):
    late = {}
    kind = pick("round", "steps", "mix")
    if kind != "round" or found.get("fragments", 1) > 1:
      late["steps"] = pick(1, 2, 3)
    if kind == "mix":
      late |= {"steps": pick(0, 1, 2), "mix": pick(0.5, 0.25)}
    else:
      late["carry"] = pick(1.0, 0.5, None)
    if flag(0.3):
      late["after"] = pick(4, None)
    found["late"] = late
    found["stream"] = flag(0.5)


def _allowed(one):
  """Changes the parts of a combination that the library refuses together."""

  def but(**parts):
    return dataclasses.replace(one, **parts)

  name, settings = one.rule
  late = dict(one.late or {})
  if one.late is not None:
    if name in ("elastic", "pulled anchor"):
      late.pop("mix", None)
      late |= {"carry": 1.0, "after": 0}
      late["steps"] = late.get("steps") or None
    if name == "control variates" and late.get("steps") is not None:
      late["after"] = 0
    if late.get("steps") == 0:
      late["after"] = 0
    if one.fragments > 1:  # These have no warm-up.
      late["after"] = 0
    late.setdefault("after", 0)
    one = but(late=late)
    if late.get("steps") == 0:
      one = but(stream=False)
    if settings.get("buffers") == "average" and late.get("steps") != 0:
      one = but(rule=(name, settings | {"buffers": "maintain"}))
  if one.fragments > 1:
    if "buffers" in settings:
      one = but(rule=(name, settings | {"buffers": "maintain"}))
    if one.stream:
      one = but(loop="trainer")
  if one.stream:
    # A codec that looks at whole leaves encodes parts of a stream.
    one = but(codec=None, feedback=None)
    if one.loop == "device" and not one.streamed_by_device():
      one = but(loop="trainer")
  if one.substrate == "none":
    one = but(weighted=False)
  if one.dtype == "bfloat16":
    # Rounding to eight bits turns near ties of codecs.
    one = but(codec=None, feedback=None)
  return one
