"""The rungs of the ladder: settings, methods, their chains and their bytes.

A rung is a number of times fewer bytes than synchronous training in float32
sends.  A method has as many rounds in a run as the rung's bytes pay for.
"""

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdist
from jdist import codecs, collectives, methods, models, reducers, transforms

PyTree = Any
AXIS = "workers"
RUNGS = (10, 50, 100, 200, 400, 1000)


@dataclasses.dataclass(frozen=True)
class Setting:
  """A network, its data and its schedule."""

  num_layers: int
  num_heads: int
  width: int
  length: int
  """Characters of context."""

  batch_size: int
  """Windows of one worker in a step."""

  steps: int
  warmup_steps: int = 100
  last_rate: float = 0.1
  """The share of the highest rate at the end of its cosine."""

  weight_decay: float = 0.1
  clip: float = 1.0
  """The largest global norm of a gradient."""

  marks: int = 8
  """Evaluations in a run."""

  workers: int = 8


SETTINGS = {
  # nanoGPT's settings for CPUs and for one GPU, without dropout.
  "cpu": Setting(4, 4, 128, 64, 12, 2000),
  # The public number of the first one: a single worker.
  "mark": Setting(4, 4, 128, 64, 12, 2000, workers=1),
  "gpu": Setting(6, 6, 384, 256, 8, 5000),
  "tiny": Setting(1, 2, 16, 8, 2, 20, warmup_steps=2, marks=2),
}


@dataclasses.dataclass(frozen=True)
class Method:
  """How workers compute and what they send.

  Local SGD is DiLoCo with an outer rate of 1 and no outer momentum.
  """

  inner: Literal["adamw", "muon"] = "adamw"
  rounds: bool = True
  """False sends each gradient."""

  bits: int | None = None
  """The bits of an entry, with error feedback; None sends float32."""

  growth: float = 0.0
  """The length of a round is proportional to the rate to the power -growth."""

  decay: float = 1.0
  """The share of a residual that feedback keeps."""

  density: float | None = None
  """The share of entries that is sent; None sends all."""


METHODS = {
  "ssgd": Method(rounds=False),
  "ssgd-muon": Method("muon", rounds=False),
  "diloco": Method(),
  "muloco": Method("muon"),
  "diloco-int4": Method(bits=4),
  "muloco-int4": Method("muon", bits=4),
  "muloco-int4-growing": Method("muon", bits=4, growth=1.0),
  "diloco-int2": Method(bits=2),
  "muloco-int2": Method("muon", bits=2),
  "muloco-int2-growing": Method("muon", bits=2, growth=1.0),
  "muloco-int2-decaying": Method("muon", bits=2, decay=0.9),
  "muloco-sparse": Method("muon", bits=2, density=1 / 32, decay=0.95),
}


class Point(NamedTuple):
  """The numbers in which the runs of one program differ.

  Attributes:
    rate: the highest rate of the inner optimizer.
    outer_rate: the rate of the outer Nesterov momentum.
    outer_momentum: the outer momentum.
    seed: the seed of parameters and batches.
  """

  rate: Any
  outer_rate: Any
  outer_momentum: Any
  seed: Any


class Sent(NamedTuple):
  """The bytes of one worker in a run; it receives as many.

  Attributes:
    rounds: the number of means.
    run: bytes sent in the whole run.
    ratio: how many times fewer they are than those of synchronous float32.
    by_formula: bytes of the reducers' formula, which the traced program's are
      compared with; None where no reducer compresses.
  """

  rounds: int
  run: float
  ratio: float
  by_formula: float | None


def share(setting: Setting, step: jax.Array) -> jax.Array:
  """Returns the share of the highest rate: a warm-up, then a cosine."""
  warmup, step = setting.warmup_steps, jnp.asarray(step, jnp.float32)
  done = jnp.clip((step - warmup) / (setting.steps - warmup), 0.0, 1.0)
  falling = (1.0 + jnp.cos(jnp.pi * done)) / 2
  falling = setting.last_rate + (1.0 - setting.last_rate) * falling
  return jnp.where(step < warmup, (step + 1.0) / (warmup + 1), falling)


def build(setting: Setting, vocabulary: int, **options: Any) -> models.Model:
  """Builds the network with tied embeddings."""
  return models.build(
    "transformer", input_shape=(setting.length,), num_classes=vocabulary,
    num_layers=setting.num_layers, num_heads=setting.num_heads,
    width=setting.width, tied=True, **options,
  )  # fmt: skip


def _is_matrix(params: PyTree) -> PyTree:
  return jax.tree.map(lambda p: p.ndim >= 2, params)


def _hidden_matrices(params: PyTree) -> PyTree:
  """Returns Muon's dimensions for all matrices but embeddings."""

  def one(path: Any, p: jax.Array) -> Any:
    embeds = any("tokens" in str(k) or "positions" in str(k) for k in path)
    if p.ndim < 2 or embeds:
      return None
    return optax.contrib.MuonDimensionNumbers()

  return jax.tree_util.tree_map_with_path(one, params)


def chain(
  method: Method, setting: Setting, point: Point, axis: str = AXIS
) -> optax.GradientTransformationExtraArgs:
  """Returns a method's optimizer; the numbers of `point` may be traced."""

  def rate(step: jax.Array) -> jax.Array:
    return point.rate * share(setting, step)

  if method.inner == "adamw":
    inner = optax.adamw(
      rate, b2=0.99, weight_decay=setting.weight_decay, mask=_is_matrix
    )
  else:
    # With updates as large as Adam's, both have the same grid of rates.
    inner = optax.contrib.muon(
      rate, adam_b2=0.99, weight_decay=setting.weight_decay,
      consistent_rms=0.2, muon_weight_dimension_numbers=_hidden_matrices,
    )  # fmt: skip
  inner = optax.chain(optax.clip_by_global_norm(setting.clip), inner)
  if not method.rounds:
    return jdist.ssgd(inner, axis=axis)
  return methods.diloco(
    inner,
    # The host ends rounds; see `ends`.
    1,
    rule=transforms.outer_sgd(point.outer_rate, point.outer_momentum),
    axis=axis,
    compression=_compression(method),
  )


def _compression(method: Method) -> jdist.Compression | None:
  if method.bits is None:
    return None
  # Two bits have four levels between two ends, and three around zero.
  codec: Any = codecs.Quantize(
    method.bits, 256, "min_max" if method.bits < 4 else "max_abs"
  )
  if method.density is not None:
    codec = codecs.TopK(method.density, chunk=4096, values=codec)
  return jdist.Compression(codec, reducers.ErrorFeedback(method.decay))


def update(
  method: Method, setting: Setting, ends: bool, point: Point,
  params: PyTree, opt_state: PyTree, grads: PyTree,
) -> tuple[PyTree, PyTree]:  # fmt: skip
  """Updates one worker, in a step that ends a round or in another."""
  control = transforms.Control(round_ends=ends if method.rounds else None)
  optimizer = chain(method, setting, point)
  updates, opt_state = optimizer.update(
    grads, opt_state, params, control=control
  )
  return jdist.apply_updates(params, updates, opt_state), opt_state


@functools.cache
def sent_in_a_mean(
  method: Method, setting: Setting, vocabulary: int
) -> tuple[float, float | None]:
  """Counts the bytes that a worker sends for a mean, and those by formula.

  Raises:
    ValueError: if a step that ends no round sends anything.
  """
  params = build(setting, vocabulary, abstract=True).params
  point = Point(1e-3, 1.0, 0.0, 0)

  def step(ends: bool, params: PyTree, grads: PyTree) -> PyTree:
    opt_state = chain(method, setting, point).init(params)
    return update(method, setting, ends, point, params, opt_state, grads)

  def count(ends: bool) -> float:
    return collectives.traffic(
      functools.partial(step, ends), params, params,
      axis=AXIS, num_workers=setting.workers,
    ).bytes_per_step  # fmt: skip

  if method.rounds and count(False):
    raise ValueError("`method` sends in steps that end no round.")
  with reducers.reductions() as found:
    sent = count(True)
  if not found:
    return sent, None
  return sent, sum(x.sent for x in found) / 8


def sent(
  method: Method, setting: Setting, vocabulary: int, rung: float
) -> Sent:
  """Returns the rounds that a rung pays for, and what they send."""
  exact, _ = sent_in_a_mean(Method(rounds=False), setting, vocabulary)
  # Neither the inner optimizer nor the length of rounds changes a message.
  plain = dataclasses.replace(method, inner="adamw", growth=0.0)
  one, formula = sent_in_a_mean(plain, setting, vocabulary)
  rounds = setting.steps
  if method.rounds:
    paid = math.floor(exact * setting.steps / (rung * one))
    rounds = min(paid, setting.steps)
    if not rounds:
      raise ValueError(
        f"`rung` must leave a run one mean or more, got {rung} for "
        f"{setting.steps} steps and means {exact / one:.1f} times smaller."
      )
  return Sent(
    rounds, rounds * one,
    exact * setting.steps / (rounds * one) if one else 1.0,
    None if formula is None else rounds * formula,
  )  # fmt: skip


def ends(method: Method, setting: Setting, rounds: int) -> np.ndarray:
  """Returns whether each step ends a round, bool [steps]; the last one does.

  A round's length is in proportion to the rate to the power -growth.
  """
  rates = np.asarray(share(setting, jnp.arange(setting.steps)), np.float64)
  # The small rates of the warm-up would give the longest rounds.
  rates[: setting.warmup_steps] = 1.0
  weights = rates**method.growth
  # A step ends one round at most: the factor is found by bisection.
  low, high = 0.0, setting.steps / weights.min()
  for _ in range(100):
    middle = (low + high) / 2
    if np.minimum(middle * weights, 1.0).sum() < rounds:
      low = middle
    else:
      high = middle
  done = np.minimum(high * weights, 1.0).cumsum()
  # The margin is for the last step.
  return np.diff(np.floor(done / done[-1] * rounds + 1e-6), prepend=0.0) > 0
