"""Weights of gradients in an update."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jdist import signatures


@signatures.checked
def inverse_staleness(staleness: signatures.NonNegativeInt) -> float:
  """Returns 1 / staleness, and 1 for a fresh gradient.

  References:
    Zhang et al., Staleness-aware Async-SGD for Distributed Deep Learning,
    IJCAI 2016 (arXiv 1511.05950): `alpha = alpha0 / tau`, alpha0 at tau = 0.

  >>> inverse_staleness(0), inverse_staleness(4)
  (1.0, 0.25)
  """
  return 1.0 / max(1, staleness)


@signatures.checked
@dataclasses.dataclass(frozen=True)
class Weighting:
  r"""The weight of a gradient of some samples and some staleness.

  .. math:: w_i = \Bigl(\frac{b_i}{\bar b}\Bigr)^p \,
            \frac{q_i}{\bar q} \, a(\tau_i)

  with b the samples of a batch, q the part of the data that a worker owns, and
  bars for means over the workers.  A protocol that makes one update of several
  gradients divides the factors before a by their sum.

  Attributes:
    samples: The power p: `"linear"` is 1, the rate in proportion to the batch;
      `"square_root"` is 1/2; `"none"` is 0.
    parts: Part q of the data that each worker owns, where all push equally
      often; None if the parts are equal.
    staleness: Function a of the staleness; 1 if None.

  >>> Weighting("linear").share(samples=48, mean_samples=32)
  1.5
  >>> Weighting(staleness=inverse_staleness).damping(4)
  0.25
  """

  samples: Literal["none", "linear", "square_root"] = "none"
  parts: Mapping[Any, float] | None = None
  staleness: Callable[[int], float] | None = None

  def __post_init__(self) -> None:
    for worker, part in (self.parts or {}).items():
      if not 0 < part < math.inf:
        raise ValueError(
          f"`parts` must be positive and finite, got {part} for {worker!r}; "
          "leave out a worker that owns nothing."
        )

  def weights(
    self,
    pushes: Sequence[Any],
    staleness: Sequence[int],
    mean_samples: float,
    *,
    mean: bool,
  ) -> list[float]:
    """Returns weights of gradients; by `mean` those of fresh ones sum to 1."""
    shares = [
      self.share(push.samples, mean_samples, push.worker) for push in pushes
    ]
    total = sum(shares) if mean else 1.0
    return [
      share / total * self.damping(stale)
      for share, stale in zip(shares, staleness, strict=True)
    ]

  def share(
    self, samples: int, mean_samples: float, worker: Any = None
  ) -> float:
    """Returns the weight of a fresh gradient of so many samples.

    Raises:
      ValueError: If `parts` does not name the worker.
    """
    # The weight acts as a factor of the learning rate: a gradient is a mean
    # over its samples, so more samples allow a larger step.
    weight = 1.0
    if self.samples != "none":
      weight = samples / mean_samples
      if self.samples == "square_root":
        weight **= 0.5
    if self.parts is not None:
      if worker not in self.parts:
        raise ValueError(
          f"`parts` must name every worker, got none for {worker!r}."
        )
      # A worker with more data would otherwise weigh less for each sample, as
      # all push equally often.
      mean = sum(self.parts.values()) / len(self.parts)
      weight *= self.parts[worker] / mean
    return weight

  def damping(self, staleness: int) -> float:
    """Returns the factor for gradients of a staleness."""
    return 1.0 if self.staleness is None else self.staleness(staleness)
