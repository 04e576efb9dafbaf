"""Overlap: a round's mean is taken while the next round is computed."""

import dataclasses

import jax

from jdist import checks
from jdist.transforms.local import _round, _sender


@dataclasses.dataclass(frozen=True, eq=False)
class Delayed:
  r"""Overlaps a round's mean with the computation of the next round.

  The mean of a round's pseudo-gradients moves the anchor one round late; the
  worker keeps a part :math:`\rho` of its progress since it sent:

  .. math:: a \leftarrow a + \mathrm{outer}(\tfrac1N \sum_i
            \Delta_i^{(r-1)}), \qquad w_i \leftarrow a - \rho \Delta_i^{(r)}

  With `steps=d` the mean is applied after d steps of the next round (at its end
  if the round is shorter), and the worker keeps all that it has done since the
  round's start at :math:`s_i = a - \rho \Delta_i^{(r)}`:

  .. math:: a \leftarrow a + \mathrm{outer}(\tfrac1N \sum_i
            \Delta_i^{(r)}), \qquad w_i \leftarrow a - (s_i - w_i)

  With `mix` it stays where it is when it sends, and moves to
  :math:`w_i \leftarrow \alpha w_i + (1 - \alpha) a` when the mean is applied.

  Without `stream` a message is sent when its mean is due, in a conditional
  where nothing overlaps: the readable reference.  A stream gives the same
  result up to rounding without a codec, with a cast, and with one
  `reducers.Chunked` for both.  Any other codec encodes the sub-tensors of a
  stream in place of leaves, and gives another result.

  Attributes:
    steps: d >= 1, as many as the link needs, or None for a whole round; 0 only
      with `mix`.
    carry: rho in [0, 1]; None is 1/N, because a worker knows its own share of
      the mean that is being taken, and keeps that.  Not with `mix`.
    mix: alpha in [0, 1], with `steps` only.
    after_step: Rounds that begin before this local step are not delayed: a
      synchronous warm-up.  With None the delay begins with the first round of
      two steps, or of 3d with `steps` above one: a mean that is applied halfway
      or later may allow a tenth of the usual rate.
    stream: How to split a message into sub-tensors, of which every step sends
      the next ones; None sends it at once.

  References:
    Shen et al., CoCoD-SGD (arXiv 1906.12043): the late mean with the worker's
    progress on top.  Douillard et al., Streaming DiLoCo (arXiv 2501.18512):
    steps late, and the mixing.
  """

  steps: int | None = None
  carry: jax.typing.ArrayLike | None = 1.0
  mix: jax.typing.ArrayLike | None = None
  after_step: int | None = 0
  stream: _sender.Stream | None = None

  def __post_init__(self) -> None:
    low = 1 if self.mix is None else 0
    if self.steps is not None:
      checks.set_structural(self, "steps", minimum=low)
    elif self.mix is not None:
      raise ValueError(
        "`mix` says where a worker goes when a mean arrives within a round and "
        f"needs `steps`, got steps=None and mix={self.mix}."
      )
    for name in ("carry", "mix"):
      if (value := getattr(self, name)) is not None:
        checks.check_continuous(name, value, high=1.0)
    if self.after_step is not None:
      checks.set_structural(self, "after_step", minimum=0)
    if self.mix is not None and not _is_one(self.carry):
      raise ValueError(
        "`carry` must be left out with `mix`, by which a worker stays where it "
        f"is until the mean arrives, got {checks.show(self.carry)}."
      )
    # A mean that is not late has no warm-up, and nothing to stream.
    if self.steps == 0 and self.after_step != 0:
      raise ValueError(
        "`after_step` must be 0 where `steps` is 0 and nothing is delayed, got "
        f"{self.after_step}. Leave it out, or take `steps=1`."
      )
    if self.steps == 0 and self.stream is not None:
      raise ValueError(
        "`stream` splits a late message, and `steps` must be at least 1 with "
        "it, got 0."
      )
    wanted = (
      "a `transforms.Stream`, for instance `stream=Stream()`, or None to send "
      "at once"
    )
    checks.check_type("stream", self.stream, _sender.Stream | None, wanted)

  def check_rule(self, rule: _round.SyncRule) -> None:
    """Raises a ValueError where a rule's mean cannot be late in this way."""
    name, late = type(rule).__name__, self.steps != 0
    if rule.apart and self.mix is not None:
      raise ValueError(
        f"`mix` must be None for `{name}`, whose workers are pulled to the "
        f"anchor by a rate of its own, got {checks.show(self.mix)}."
      )
    if rule.apart and not _is_one(self.carry):
      raise ValueError(
        f"`carry` must be left out for `{name}`, whose workers keep a distance "
        "from the anchor and all their progress, got "
        f"{checks.show(self.carry)}."
      )
    if late and rule.exact_parts:
      raise ValueError(
        f"`overlap` must be None for `{name}`, which averages something with "
        "every bit that would be a round old: `buffers='average'`. Take "
        "`buffers='maintain'`."
      )
    # Without a warm-up all rounds are alike, and every rule can be late.
    if self.after_step == 0:
      return
    if rule.apart:
      raise ValueError(
        f"`after_step` must be 0 for `{name}`, whose workers keep a distance "
        f"from the anchor in every round, got {self.after_step}."
      )
    # A round that is not delayed would apply the new state to its own mean.
    departs = type(rule).depart is not _round.SyncRule.depart
    if self.steps is not None and departs:
      raise ValueError(
        f"`after_step` must be 0 for `{name}` with `steps`, got "
        f"{self.after_step}: its own state changes when a message is sent."
      )


def _is_one(carry: jax.typing.ArrayLike | None) -> bool:
  """Returns whether all progress is known to be kept."""
  # The value of a traced carry is unknown, and is treated as a part.
  known = carry is not None and not checks.is_traced(carry)
  return known and float(carry) == 1.0  # type: ignore[arg-type]
