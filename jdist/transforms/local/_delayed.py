"""Overlap: a round's mean that arrives while the next round is computed."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist import checks, states
from jdist.transforms.local import _clock, _streaming

PyTree = Any


@states.declare(
  shared=("in_flight", "arrived_loss", "due_after", "device_before")
)
class Flight(NamedTuple):
  """A message under way, part of the state of local steps.

  Attributes:
    held: this worker's message of the last round, as its sender holds it.
    in_flight: whether `held` holds one, bool scalar.
    arrived_loss: the mean loss that arrived in this round, float32 scalar, NaN
      if none has; `()` where a mean arrives at a round's end.
    due_after: the steps of a round after which the mean of the last one is due,
      0 for all of them, int32 scalar, constant.
    device_before: rounds that begin before this step the device ends, int32
      scalar, constant.
  """

  held: PyTree
  in_flight: jax.Array
  arrived_loss: Any
  due_after: jax.Array
  device_before: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Delayed:
  r"""Overlaps a round's mean with the computation of the next round.

  The mean of a round's pseudo-gradients moves the anchor one round late; the
  worker keeps a part :math:`\rho` of what it has done since it sent:

  .. math:: a \leftarrow a + \mathrm{outer}(\tfrac1N \sum_i
            \Delta_i^{(r-1)}), \qquad w_i \leftarrow a - \rho \Delta_i^{(r)}

  With `steps=d` the mean arrives after d steps of the next round (at its end,
  if that comes first), and the worker keeps all that it has done since it set
  out from :math:`s_i = a - \rho \Delta_i^{(r)}`:

  .. math:: a \leftarrow a + \mathrm{outer}(\tfrac1N \sum_i
            \Delta_i^{(r)}), \qquad w_i \leftarrow a - (s_i - w_i)

  With `mix` it stays where it is when it sends, and goes to
  :math:`w_i \leftarrow \alpha w_i + (1 - \alpha) a` when the mean arrives.

  Without `stream` a message goes at once when its mean is due, in a conditional
  where nothing overlaps: the readable reference, of the same bits.

  Attributes:
    steps: d >= 1, as many as the link needs, or None for a whole round; 0 only
      with `mix`.
    carry: rho in [0, 1]; None is 1/N: of the mean that is under way a worker
      knows its own share, and keeps that.
    mix: alpha in [0, 1], with `steps` only.
    after_step: rounds that begin before this local step are not delayed: a
      synchronous warm-up.
    stream: how to split a message into sub-tensors, of which every step sends
      the next ones; None sends it at once.

  Raises:
    ValueError: when an argument is out of its range.

  References:
    Shen et al., CoCoD-SGD (arXiv 1906.12043): the late mean with the worker's
    progress on top.  Douillard et al., Streaming DiLoCo (arXiv 2501.18512):
    steps late, and the mixing.
  """

  steps: int | None = None
  carry: jax.typing.ArrayLike | None = 1.0
  mix: jax.typing.ArrayLike | None = None
  after_step: int = 0
  stream: _streaming.Stream | None = None

  def __post_init__(self) -> None:
    low = 1 if self.mix is None else 0
    if self.steps is not None:
      checks.check_structural("steps", self.steps, minimum=low)
    elif self.mix is not None:
      raise ValueError(
        "`mix` says where a worker goes when a mean arrives within a round and "
        f"needs `steps`, got steps=None and mix={self.mix}."
      )
    for name in ("carry", "mix"):
      if (value := getattr(self, name)) is not None:
        checks.check_continuous(name, value, high=1.0)
    checks.check_structural("after_step", self.after_step, minimum=0)
    if self.stream is not None and not isinstance(
      self.stream, _streaming.Stream
    ):
      raise ValueError(
        "`stream` must be a `transforms.Stream`, for instance "
        f"`stream=Stream()`, or None to send at once, got {self.stream!r}."
      )


def look_ahead(clock: _clock.RoundClock, flight: Flight) -> jax.Array:
  """Returns the places of the next two updates; see `rounds_ahead`.

  Args:
    clock: the round's clock between two steps.
    flight: what is under way.
  """
  rows = clock.ahead()
  interval, offset = rows[..., 0], rows[..., 1]
  begins = jnp.stack([clock.step, clock.step + 1], -1) - offset
  late = begins >= flight.device_before[..., None]
  # The second of the two updates may be in a new round, and the message under
  # way then is that of the present one.
  sends = (offset[..., 1] == 0) & late[..., 0]
  flying = jnp.stack([flight.in_flight, flight.in_flight | sends], -1)
  due = flight.due_after[..., None]
  window = jnp.minimum(interval, due)
  window = jnp.where(flying | (offset >= window), window, 0)
  window = jnp.where(due > 0, window, interval)
  return jnp.stack([jnp.where(late, window, -1), offset, interval], -1)
