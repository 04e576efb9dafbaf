"""Plans of bits: precisions of messages, and the choice of one by worker."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks, codecs, reducers, signatures

_BITS = (32, 16, 8, 4)


@signatures.checked
@dataclasses.dataclass(frozen=True)
class BitPlans:
  r"""Precisions of messages; few, as each is a compiled program.

  A plan gives each tensor its bits.  A tensor of n entries takes
  :math:`b n + 32 \lceil n / k \rceil` bits of a message in blocks of k, of
  which each has a scale, and 32 n in 32 bits.

  Attributes:
    bits: For each plan and each tensor 32, 16, 8 or 4; the first plan is exact,
      and each later one takes fewer bytes.
    sizes: Entries of each tensor.
    block: Entries that share a scale.

  >>> plans = BitPlans()
  >>> [round(plans.share(i), 3) for i in range(len(plans.bits))]
  [1.0, 0.516, 0.266]
  """

  bits: tuple[tuple[int, ...], ...] = ((32,), (16,), (8,))
  sizes: tuple[int, ...] = (1 << 20,)
  block: signatures.PositiveInt = 64

  def __post_init__(self) -> None:
    if not self.bits or any(each != 32 for each in self.bits[0]):
      raise ValueError(
        f"`bits` must begin with a plan of 32 bits, got {self.bits!r}."
      )
    for plan in self.bits:
      if len(plan) != len(self.sizes) or set(plan) - set(_BITS):
        raise ValueError(
          f"`bits` must be of {_BITS}, one for each of {len(self.sizes)} "
          f"tensors, got {plan!r}."
        )
    sent = [self.num_bytes(plan) for plan in range(len(self.bits))]
    if any(b >= a for a, b in itertools.pairwise(sent)):
      raise ValueError(
        f"`bits` must be plans of fewer and fewer bytes, got {sent}."
      )

  def num_bytes(self, plan: signatures.NonNegativeInt) -> int:
    """Returns the bytes of a message, with one for each tensor's finiteness."""
    return sum(
      1 + self._bytes(size, bits)
      for size, bits in zip(self.sizes, self.bits[plan], strict=True)
    )

  def _bytes(self, size: int, bits: int) -> int:
    if bits == 32:
      return 4 * size
    # Codes are packed block by block, and each block has a scale in float32.
    full, rest = divmod(size, self.block)
    blocks = math.ceil(size / self.block)
    return (
      full * self.block * bits // 8 + math.ceil(rest * bits / 8) + (4 * blocks)
    )

  def share(self, plan: signatures.NonNegativeInt) -> float:
    """Returns a message's bytes over those in 32 bits."""
    return self.num_bytes(plan) / self.num_bytes(0)

  def choose(
    self,
    compute_s: Sequence[float | None],
    exchange_s: Sequence[float | None],
    *,
    pipelined: bool,
    slack: float = 0.9,
  ) -> tuple[int, ...]:
    """Returns the plan with the most bits that lengthens no round, by worker.

    In a pipeline an exchange may take `slack` of the longest computation.
    Otherwise a worker's computation and exchange may take as long as those of
    the slowest worker with the fewest bits.  A worker for which no plan is fast
    enough takes the last one, and one without measurements the first.

    Args:
      compute_s: Seconds of each worker's next task.
      exchange_s: Seconds of its pull and push in 32 bits.
      pipelined: Whether communication is hidden under computation.
      slack: Part of the longest computation, less a margin for long messages.

    >>> plans = BitPlans()
    >>> plans.choose([2.0, 2.0, 2.0], [1.5, 3.0, 9.0], pipelined=True)
    (0, 1, 2)
    >>> plans.choose([4.0, 1.0], [2.0, 3.0], pipelined=False)
    (2, 0)
    """
    shares = [self.share(plan) for plan in range(len(self.bits))]
    known: list[Any] = [
      None if work is None or exchange is None else (work, exchange)
      for work, exchange in zip(compute_s, exchange_s, strict=True)
    ]
    pairs = [pair for pair in known if pair is not None]
    if not pairs:
      return (0,) * len(known)
    if pipelined:
      # All messages of a round must be through while the slowest computes.
      until = slack * max(work for work, _ in pairs)
    else:
      # In turn the slowest worker with the fewest bits sets the round's length;
      # the others may use the time that they would wait. The factor keeps a
      # rounding error from taking bits off the slowest itself.
      until = (1 + 1e-9) * max(w + shares[-1] * each for w, each in pairs)

    def fits(pair: tuple[float, float], share: float) -> bool:
      return (0.0 if pipelined else pair[0]) + share * pair[1] <= until

    return tuple(
      0
      if pair is None
      else next(
        (i for i, share in enumerate(shares) if fits(pair, share)),
        len(shares) - 1,
      )
      for pair in known
    )


def plan_codec(
  plans: BitPlans, plan: int, *, feedback: bool = True
) -> reducers.MessageCodec:
  """Returns the codec of a plan's messages.

  Integers of 16, 8 or 4 bits with a scale for each block, rounded at random;
  32 bits as they are.

  With `feedback` the sender adds what it has not sent to the next message.
  """
  return reducers.MessageCodec(
    tuple(_codec(bits, plans.block) for bits in plans.bits[plan]),
    reducers.ErrorFeedback() if feedback else None,
  )


def _codec(bits: int, block: int) -> codecs.Codec:
  if bits == 32:
    return codecs.Dense()
  return codecs.Quantize(bits, block, rounding="stochastic")


@signatures.checked
def fit_bit_plans(
  gradient: signatures.Numbers,
  *,
  error_limit: signatures.PositiveFloat = 2e-2,
  block: signatures.PositiveInt = 64,
  seed: signatures.Seed = 0,
) -> BitPlans:
  r"""Makes the plans that a gradient allows.

  A tensor x takes b of 16, 8 or 4 bits only if

  .. math:: \|x - D(C_b(x))\| \le \epsilon \, \|x\|

  and 16 at least if it has one dimension, or belongs to the first or the last
  layer: to the first or the last of the tree's outermost keys, in whose order
  the layers of `jdist.models` run.  The plans are those of 32, 16, 8 and 4 bits
  in which each tensor has at least the bits that it needs, without repetitions.

  Args:
    gradient: a worker's gradient of one batch.
    error_limit: epsilon, > 0. Rounded at random in blocks of 64, gradients of
      small networks are wrong by 0.8 to 1.6 % in 8 bits and by 14 to 27 % in 4:
      0.02 allows the one and not the other.
    block: Entries that share a scale.
    seed: Seed of the rounding.

  >>> x = jax.random.normal(jax.random.key(0), (64, 64))
  >>> tree = {f"layer{i}": {"bias": x[0], "kernel": x} for i in range(3)}
  >>> for bits in fit_bit_plans(tree).bits:
  ...   print(bits)
  (32, 32, 32, 32, 32, 32)
  (16, 16, 16, 16, 16, 16)
  (16, 16, 16, 8, 16, 16)
  """
  checks.check_some("gradient", gradient)
  checks.check_real("gradient", gradient, "plans of bits")
  named, _ = jax.tree_util.tree_flatten_with_path(gradient)
  ends = {_outermost(named[0][0]), _outermost(named[-1][0])}
  least = []
  for number, (path, leaf) in enumerate(named):
    key = jax.random.fold_in(jax.random.key(seed), number)
    bits = 32
    for fewer in _BITS[1:]:
      # The error of a tensor that is not finite is NaN, and its bits stay.
      if not _relative_error(_codec(fewer, block), leaf, key) <= error_limit:
        break
      bits = fewer
    # Biases and norms are few bytes; the first and the last layer are known to
    # be sensitive to rounding.
    kept = jnp.ndim(leaf) < 2 or _outermost(path) in ends
    least.append(max(bits, 16) if kept else bits)
  plans = [tuple(max(bits, own) for own in least) for bits in _BITS]
  sizes = tuple(int(np.size(leaf)) for _, leaf in named)
  exact = BitPlans((plans[0],), sizes, block)
  sent = [sum(map(exact._bytes, sizes, plan)) for plan in plans]
  # The scales of small tensors may take more bytes than fewer bits save.
  smaller = [not i or sent[i] < min(sent[:i]) for i in range(len(plans))]
  return BitPlans(tuple(itertools.compress(plans, smaller)), sizes, block)


def _outermost(path: tuple[Any, ...]) -> str:
  return jax.tree_util.keystr(path[:1])


@functools.partial(jax.jit, static_argnums=0)
def _relative_error(
  codec: codecs.Codec, leaf: jax.Array, key: jax.Array
) -> jax.Array:
  # In one program: eagerly, each operation of a codec would be compiled alone.
  x = leaf.astype(jnp.float32)
  payload, state = codec.encode(x, codec.init(x), key)
  wrong = jnp.linalg.norm((codec.decode(payload, state, x) - x).ravel())
  return wrong / jnp.maximum(jnp.linalg.norm(x.ravel()), 1e-30)
