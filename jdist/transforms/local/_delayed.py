"""Overlap: a round's mean that arrives while the next round is computed."""

import dataclasses

import jax

from jdist import checks, reducers
from jdist.transforms.local import (
  _late_rounds,
  _local_steps,
  _mid_round,
  _streaming,
  _sync_rule,
)

# The numbers of steps in which a message is sent divide it: 1, 2, 4, 8, 16.
_USUAL_STEPS = 16


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
      knows its own share, and keeps that.  Not with `mix`.
    mix: alpha in [0, 1], with `steps` only.
    after_step: rounds that begin before this local step are not delayed: a
      synchronous warm-up.  None: those before the first round that is longer
      than `steps`, or than one step, are not, where a mean would arrive at the
      next round's end only, and a delay costs most.
    stream: how to split a message into sub-tensors, of which every step sends
      the next ones; None sends it at once.

  Raises:
    ValueError: when an argument is out of its range, or two do not go together.

  References:
    Shen et al., CoCoD-SGD (arXiv 1906.12043): the late mean with the worker's
    progress on top.  Douillard et al., Streaming DiLoCo (arXiv 2501.18512):
    steps late, and the mixing.
  """

  steps: int | None = None
  carry: jax.typing.ArrayLike | None = 1.0
  mix: jax.typing.ArrayLike | None = None
  after_step: int | None = 0
  stream: _streaming.Stream | None = None

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
    if self.steps == 0 and self.after_step != 0:
      raise ValueError(
        "`after_step` must be 0 where `steps` is 0 and nothing is delayed, got "
        f"{self.after_step}. Leave it out, or take `steps=1`."
      )
    wanted = (
      "a `transforms.Stream`, for instance `stream=Stream()`, or None to send "
      "at once"
    )
    checks.check_type("stream", self.stream, _streaming.Stream | None, wanted)

  def engine(self, now: _local_steps.Synchronizer) -> _local_steps.Synchronizer:
    """Makes a round engine's means late; refuses a rule that forbids it."""
    _check(now.rule, self)
    if self.steps == 0:
      return dataclasses.replace(now, mix=self.mix)
    stream, compression = self.stream, now.compression
    if stream is not None and compression is not None:
      steps = now.policy.constant
      if steps is not None and self.steps is not None:
        steps = min(steps, self.steps)
      compression = _in_chunks(compression, stream, steps)
    elif stream is not None and stream.specs is not None:
      stream = dataclasses.replace(stream, specs=now.rule.like(stream.specs))
    options = dict(
      vars(now) | {"compression": compression, "mix": self.mix},
      carry=self.carry,
      after_step=self.after_step,
      stream=stream,
    )
    if self.steps is None:
      return _late_rounds.LateSynchronizer(**options)
    return _mid_round.MidRoundSynchronizer(**options, steps=self.steps)


def _check(rule: _sync_rule.SyncRule, overlap: Delayed) -> None:
  """Raises a ValueError where a rule's mean cannot be late in this way."""
  name = type(rule).__name__
  if rule.beside and overlap.mix is not None:
    raise ValueError(
      f"`mix` must be None for `{name}`, whose workers are pulled to the "
      f"anchor by a rate of its own, got {checks.show(overlap.mix)}."
    )
  if rule.beside and not _is_one(overlap.carry):
    raise ValueError(
      f"`carry` must be left out for `{name}`, whose workers stay beside the "
      f"anchor and keep all their progress, got {checks.show(overlap.carry)}."
    )
  if overlap.steps == 0:
    if overlap.stream is not None:
      raise ValueError(
        "`stream` splits what is late, and `steps` must be at least 1 with it, "
        "got 0."
      )
    return
  if rule.exact_parts:
    raise ValueError(
      f"`overlap` must be None for `{name}`, which averages something with "
      "every bit that would be a round old: `buffers='average'`. Take "
      "`buffers='maintain'`."
    )
  if overlap.after_step != 0 and rule.beside:
    raise ValueError(
      f"`after_step` must be 0 for `{name}`, whose workers stay beside the "
      f"anchor in every round, got {overlap.after_step}."
    )
  departs = type(rule).depart is not _sync_rule.SyncRule.depart
  if overlap.after_step != 0 and overlap.steps is not None and departs:
    raise ValueError(
      f"`after_step` must be 0 for `{name}` with `steps`, got "
      f"{overlap.after_step}: its own state changes when a message leaves."
    )


def _is_one(carry: jax.typing.ArrayLike | None) -> bool:
  """Returns whether all progress is kept; of a traced one that is unknown."""
  known = carry is not None and not checks.is_traced(carry)
  return known and float(carry) == 1.0  # type: ignore[arg-type]


def _in_chunks(
  compression: reducers.Compression,
  stream: _streaming.Stream,
  steps: int | None,
) -> reducers.Compression:
  """Returns the compression of sub-tensors, as `stream` splits them.

  Of a message that is sent in so many `steps`, if that is fixed.  A reducer
  that is in chunks already stays.
  """
  if isinstance(compression.reducer, reducers.Chunked):
    return compression
  if stream.specs is not None or compression.specs is not None:
    raise ValueError(
      "`specs` must be None where a compressed message is streamed, whose "
      "sub-tensors are of whole workers. Leave `stream` out where a worker is "
      "itself sharded."
    )
  reducer = reducers.Chunked(
    compression.reducer,
    max_bytes=stream.max_bytes,
    order=stream.order,
    multiple=_USUAL_STEPS if steps is None else steps,
  )
  return dataclasses.replace(compression, reducer=reducer)
