"""Overlap: a round's mean is taken while the next round is computed.

A sender holds a worker's message while the next round is computed.  `Sender`
sends all of it when the mean is due, `_chunked_stream.ChunkedStream` some of it
in every step:

    round's end    hold        the message that is sent from now on
    every step     send        starts some of it; nothing waits for it yet
                   receive     stores the received part
    mean due       mean        of all of it; sends the missing part
"""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from jdist import checks, collectives, reducers
from jdist.states import PyTree
from jdist.transforms.local import _anchor, _round

# A `SyncState`, whose module imports this one.
SyncState = Any
# The usual numbers of steps in which a message is sent divide it.
_USUAL_STEPS = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
  """The split of a delayed message into sub-tensors.

  In a round of H steps every step sends the next `1/H` of the message, in
  sub-tensors of equal size.

  Attributes:
    max_bytes: The largest size of a sub-tensor; 4 MiB by default.
    specs: How the parameters are split over the mesh's other axes, a tree of
      PartitionSpec (`Workers.specs(params)`), for workers that are themselves
      sharded: every device then sends its own part.  It cannot be combined
      with a compression.

  >>> Stream(max_bytes=4096).cut(10_000, 5, itemsize=4)
  (2, 1000)
  """

  max_bytes: int = 4 * 2**20
  specs: PyTree = None

  def __post_init__(self) -> None:
    checks.set_structural(self, "max_bytes", minimum=8)

  def cut(self, length: int, steps: int, *, itemsize: int) -> tuple[int, int]:
    """Returns the number of sub-tensors in a step, and the elements of each."""
    in_step = -(-length // steps)
    number = -(-in_step * itemsize // self.max_bytes)
    return number, -(-in_step // number)

  def chunks(
    self, compression: reducers.Compression, steps: int | None
  ) -> reducers.Compression:
    """Returns the compression by sub-tensors; a chunked one stays as it is."""
    if isinstance(compression.reducer, reducers.Chunked):
      return compression
    if self.specs is not None or compression.specs is not None:
      raise ValueError(
        "`specs` must be None where a compressed message is streamed, whose "
        "sub-tensors are of whole workers. Leave `stream` out where a worker "
        "is itself sharded."
      )
    reducer = reducers.Chunked(
      compression.reducer,
      max_bytes=self.max_bytes,
      multiple=_USUAL_STEPS if steps is None else steps,
    )
    return dataclasses.replace(compression, reducer=reducer)

  def buckets(self, like: PyTree, exact: PyTree) -> collectives.Buckets:
    """Returns the buckets of an exact message and values such as the loss."""
    specs = None
    if self.specs is not None:
      whole = jax.tree.map(lambda _: PartitionSpec(), exact)
      specs = collectives.spec_leaves(self.specs, like), whole
    return collectives.Buckets.of((like, exact), specs=specs)


class Contribution(NamedTuple):
  """A worker's part of a round's mean.

  Attributes:
    message: a tree, at least float32, which a compression may compress.
    exact: The round's mean loss, never compressed; `()` if none is needed.
  """

  message: PyTree
  exact: PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Sender:
  """Sends a whole message when its mean is due.

  Attributes:
    compression: How the mean is taken; None takes it exactly.
    axis: The workers' axis.
  """

  compression: reducers.Compression | None
  axis: collectives.Axis

  def hold(self, new: Contribution, state: SyncState) -> Any:
    """Returns the form in which a contribution is held in the state."""
    del state
    return new

  def own(self, state: SyncState) -> Contribution:
    """Returns this worker's contribution that is held."""
    return state.flight.held

  def mean(
    self,
    state: SyncState,
    present: Contribution,
    late: jax.Array | bool,
    steps: int | None,
  ) -> tuple[Contribution, PyTree]:
    """Takes the mean of the held message, or of `present` if not `late`.

    `late` is equal on all workers, and `steps` the number of steps in which the
    message was streamed, None if it was not.  Returns the compression's state,
    too.
    """
    del steps
    # A warm-up decides on the device which of both is sent; where all rounds
    # are late the program does not wait for `present`.
    new = _anchor.either(late, state.flight.held, present)
    message, exact, memory = reducers.mean_of(
      self.compression, new.message, new.exact, state.compression, self.axis
    )
    return Contribution(message, exact), memory

  def flush(self, state: SyncState) -> tuple[PyTree, PyTree]:
    """Takes the exact mean of the message and of all residuals."""
    message = state.flight.held.message
    return reducers.flush_of(
      self.compression, message, state.compression, self.axis
    )


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
  stream: Stream | None = None

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
    checks.check_type("stream", self.stream, Stream | None, wanted)

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
