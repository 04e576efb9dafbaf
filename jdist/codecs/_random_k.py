"""Random-k: randomly chosen entries, which need no indices."""

import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks
from jdist.codecs import _blocks, _codec, _random, _sparse


class RandomKState(NamedTuple):
  """The state of `RandomK` with a shared key.

  Attributes:
    seed: The seed of the last payload's entries, uint32 [2].
    values: The state of the values' codec.
  """

  seed: jax.Array
  values: Any


class RandomEntries(NamedTuple):
  """The payload of `RandomK`.

  Attributes:
    values: The payload of the values' codec.
    seed: The seed from which the receiver finds the entries, uint32 [2]; `()`
      if all workers share the key.
  """

  values: Any
  seed: Any


@dataclasses.dataclass(frozen=True)
class RandomK(_codec.Codec):
  r"""Sends randomly chosen entries.

  The array is cut into k nearly equal strata of :math:`\lceil n/k \rceil` or
  :math:`\lfloor n/k \rfloor` neighbours, and one entry of each is drawn.  With
  s the length of its stratum

  .. math:: \mathrm{decode}(\mathrm{encode}(x))_i =
            s x_i \text{ if } i \text{ was drawn, else } 0

  whose expectation is exactly x, also if k does not divide n.  With
  `scaled=False` entries are sent unchanged, **as feedback needs it**: feedback
  would keep -(s - 1) times a scaled entry and diverge, so that the combination
  is refused.  No entry is drawn twice.  A choice costs k random numbers for
  every n.

  With a shared key all workers draw the same entries by the seed in their
  states, and payloads of values may be summed: the codec is `linear`.  With
  workers' own keys a payload holds 64 bits of seed in place of indices.

  Source: random-k of arXiv 1809.07599, which draws k of n independently; strata
  have the same expectation and no more variance on smooth arrays.

  Args:
    ratio: The fraction of the entries that is sent, in (0, 1]; 0.01 by default.
    k: The number of entries, in place of `ratio`.
    shared: Whether all workers draw the same entries.
    scaled: Whether entries are multiplied by the length of their stratum, which
      makes them unbiased; use False with `ErrorFeedback`, `EF21` and
      `MomentumCorrection`.
    values: The codec of the values; one without random numbers if `shared`.
  """

  ratio: float | None = None
  k: int | None = None
  shared: bool = True
  scaled: bool = True
  values: _sparse.Values = _sparse.FLOAT32

  sparse: ClassVar[bool] = True

  def __post_init__(self) -> None:
    _sparse.check_ratio_or_k(self)
    checks.check_choice("shared", self.shared, (True, False))
    checks.check_choice("scaled", self.scaled, (True, False))
    _sparse.check_values(self.values)
    if self.shared and self.values.key != "none":
      raise ValueError(
        "`values` must draw no random numbers when `shared`, or all workers "
        f"would round alike, got {self.values!r}. Use `rounding='nearest'`, or "
        "`shared=False`."
      )

  @property
  def linear(self) -> bool:  # type: ignore[override]
    """Returns whether workers share entries and values may be summed."""
    return self.shared and self.values.linear

  @property
  def contractive(self) -> bool:
    """Returns whether entries are sent unchanged."""
    return not self.scaled or self.ratio == 1

  @property
  def key(self) -> Literal["none", "worker", "shared"]:
    """Returns `"shared"` or `"worker"`."""
    return "shared" if self.shared else "worker"

  def check(self, like: _codec.Like) -> None:
    """Raises a ValueError for an array of fewer than `k` entries."""
    _codec.check_float(like)
    _sparse.check_k_fits(self.k, like)
    self.values.check(self._values_like(like.size))

  def init(self, like: _codec.Like) -> Any:
    """Returns a zero seed if `shared`, and the state of the values' codec."""
    values = self.values.init(self._values_like(like.size))
    seed = jnp.zeros(2, jnp.uint32)
    return RandomKState(seed, values) if self.shared else values

  def encode(
    self, x: jax.Array, state: Any = (), key: jax.Array | None = None
  ) -> tuple[RandomEntries, Any]:
    self.check(x)
    # The receiver repeats the choice from the seed alone, without the key.
    choosing, rounding = jax.random.split(_random.require(key, self))
    seed = jax.random.bits(choosing, (2,), jnp.uint32)
    indices, lengths = self._strata(seed, x.size)
    taken = jnp.asarray(x).reshape(-1).astype(jnp.float32)
    taken = taken.at[indices].get(mode="promise_in_bounds")
    if self.scaled:
      scaled = taken * lengths.astype(jnp.float32)
      # Clipped entries are biased; infinities would make the mean useless.
      scaled = jnp.clip(scaled, -_blocks.LARGEST, _blocks.LARGEST)
      taken = jnp.where(_blocks.finite(taken), scaled, taken)
    inner = state.values if isinstance(state, RandomKState) else state
    values, inner = self.values.encode(taken, inner, rounding)
    if self.shared:
      return RandomEntries(values, ()), RandomKState(seed, inner)
    return RandomEntries(values, seed), inner

  def decode(
    self, payload: RandomEntries, state: Any, like: _codec.Like
  ) -> jax.Array:
    zeros = jnp.zeros(like.shape, jnp.float32)
    return _blocks.narrow(self.add_to(zeros, payload, state), like.dtype)

  def add_to(
    self, total: jax.Array, payload: RandomEntries, state: Any
  ) -> jax.Array:
    seed = state.seed if self.shared else payload.seed
    inner = state.values if self.shared else state
    like = self._values_like(total.size)
    values = self.values.decode(payload.values, inner, like)
    indices, _ = self._strata(seed, total.size)
    entries = total.reshape(-1).at[indices]
    flat = entries.add(
      values, mode="promise_in_bounds", indices_are_sorted=True,
      unique_indices=True,
    )  # fmt: skip
    return flat.reshape(total.shape)

  def num_bits(self, like: _codec.Like) -> int:
    """Returns the bits of the values, and 64 for a seed that is not shared."""
    bits = self.values.num_bits(self._values_like(like.size))
    bits = -(-bits // 8) * 8
    return bits if self.shared else bits + 64

  def _values_like(self, size: int) -> jax.ShapeDtypeStruct:
    num = _sparse.num_entries(self.ratio, self.k, size)
    return jax.ShapeDtypeStruct((num,), jnp.float32)

  def _strata(self, seed: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns drawn entries and the lengths of their strata, int32 [k]."""
    num = _sparse.num_entries(self.ratio, self.k, size)
    if not num:
      return jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.int32)
    # The first strata are one entry longer if k does not divide n.
    short, longer = divmod(size, num)
    stratum = jnp.arange(num, dtype=jnp.int32)
    starts = stratum * np.int32(short) + jnp.minimum(stratum, longer)
    lengths = jnp.int32(short) + (stratum < longer).astype(jnp.int32)
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    drawn = jax.random.randint(key, (num,), 0, lengths, jnp.int32)
    return starts + drawn, lengths
