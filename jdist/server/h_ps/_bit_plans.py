"""Plans of bits: precisions of messages, and the choice of one by worker."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from jdist import signatures

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
