"""Random ones of the entries, which need no indices."""

import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks
from jdist.codecs import _blocks, _codec, _random, _sparse


class RandomKState(NamedTuple):
  """The state of `RandomK` with a shared key, and that of the values' codec.

  The seed, uint32 [2], says which entries the last payload holds.
  """

  seed: jax.Array
  values: Any


class RandomEntries(NamedTuple):
  """The payload of `RandomK`: that of the values' codec, and a seed.

  From the seed, uint32 [2], the receiver finds the entries; `()` if all workers
  share the key.
  """

  values: Any
  seed: Any


@dataclasses.dataclass(frozen=True)
class RandomK(_codec.Codec):
  r"""Sends random entries, the same number of everyone's.

  The array is cut into k nearly equal strata, of :math:`\lceil n/k \rceil` or
  :math:`\lfloor n/k \rfloor` neighbours, and of each one entry is drawn.  With
  s the length of its stratum

  .. math:: \mathrm{decode}(\mathrm{encode}(x))_i =
            s x_i \text{ if } i \text{ was drawn, else } 0

  which is x in expectation, exactly, also where k does not divide n; without
  `scaled` the entries are sent as they are.  **A feedback that keeps the rest
  needs that**: of an entry that was sent s times it would keep -(s - 1) times
  as much, and diverge; it is refused.  No entry is drawn twice.  Choosing costs
  k random numbers, whatever n is.

  With a shared key all workers draw the same entries, by the seed in their
  states, and payloads of values only may be summed: it is `linear`.  With
  workers' own keys a payload holds 64 bits of seed in place of indices.

  Source: random-k of arXiv 1809.07599, there with independent draws of k of n;
  strata have the same expectation and no more variance on smooth arrays.

  Args:
    ratio: the part of the entries that is sent, in (0, 1]; 0.01 by default.
    k: how many entries instead.
    shared: whether all workers draw the same entries.
    scaled: whether entries are multiplied by the length of their stratum,
      which makes them unbiased; False with `ErrorFeedback`, `EF21` and
      `MomentumCorrection`.
    values: the codec of the values; one without random numbers if `shared`.
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
    """Returns whether entries are the same everywhere and values add up."""
    return self.shared and self.values.linear

  @property
  def contractive(self) -> bool:
    """Returns whether entries are sent as they are."""
    return not self.scaled or self.ratio == 1

  @property
  def key(self) -> Literal["none", "worker", "shared"]:
    """`"shared"` or `"worker"`."""
    return "shared" if self.shared else "worker"

  def check(self, like: _codec.Like) -> None:
    """Raises a ValueError for an array of fewer than `k` entries."""
    _codec.check_float(like)
    _sparse.check_k_fits(self.k, like)
    self.values.check(self._values_like(like.size))

  def init(self, like: _codec.Like) -> Any:
    """A seed of zeros if `shared`, and the state of the values' codec."""
    values = self.values.init(self._values_like(like.size))
    seed = jnp.zeros(2, jnp.uint32)
    return RandomKState(seed, values) if self.shared else values

  def encode(
    self, x: jax.Array, state: Any = (), key: jax.Array | None = None
  ) -> tuple[RandomEntries, Any]:
    self.check(x)
    choosing, rounding = jax.random.split(_random.require(key, self))
    seed = jax.random.bits(choosing, (2,), jnp.uint32)
    indices, lengths = self._strata(seed, x.size)
    taken = jnp.asarray(x).reshape(-1).astype(jnp.float32)
    taken = taken.at[indices].get(mode="promise_in_bounds")
    if self.scaled:
      scaled = taken * lengths.astype(jnp.float32)
      # What is finite stays finite, if no longer unbiased.
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
      values,
      mode="promise_in_bounds",
      indices_are_sorted=True,
      unique_indices=True,
    )
    return flat.reshape(total.shape)

  def num_bits(self, like: _codec.Like) -> int:
    """Bits of the values, and 64 of the seed unless it is shared."""
    bits = self.values.num_bits(self._values_like(like.size))
    bits = -(-bits // 8) * 8
    return bits if self.shared else bits + 64

  def _values_like(self, size: int) -> jax.ShapeDtypeStruct:
    num = _sparse.num_entries(self.ratio, self.k, size)
    return jax.ShapeDtypeStruct((num,), jnp.float32)

  def _strata(self, seed: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The entries drawn and the lengths of their strata, int32 [k]."""
    num = _sparse.num_entries(self.ratio, self.k, size)
    if not num:
      return jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.int32)
    short, longer = divmod(size, num)
    stratum = jnp.arange(num, dtype=jnp.int32)
    starts = stratum * np.int32(short) + jnp.minimum(stratum, longer)
    lengths = jnp.where(stratum < longer, short + 1, short)
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return starts + jax.random.randint(key, (num,), 0, lengths), lengths
