"""Codecs whose every number can be followed by hand, for tests of reducers."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jdist import codecs


@dataclasses.dataclass(frozen=True)
class Whole(codecs.Codec):
  """The array, as it is."""

  linear: ClassVar[bool] = True

  def encode(self, x, state=(), key=None):
    return x, state

  def decode(self, payload, state, like):
    return payload.astype(like.dtype)

  def num_bits(self, like):
    return like.size * like.dtype.itemsize * 8


@dataclasses.dataclass(frozen=True)
class Rounded(codecs.Codec):
  """Integers of -levels..levels, a byte each, and a scale for each block."""

  levels: int = 127
  block: int = 8
  stochastic: bool = False

  @property
  def key(self):
    return "worker" if self.stochastic else "none"

  def granule(self):
    return self.block

  def encode(self, x, state=(), key=None):
    x = x.reshape(-1).astype(jnp.float32)
    rows = jnp.pad(x, (0, -x.size % self.block)).reshape(-1, self.block)
    scale = jnp.max(jnp.abs(rows), 1) / self.levels
    ratio = rows / jnp.where(scale == 0, 1, scale)[:, None]
    if self.stochastic:
      ratio = jnp.floor(ratio + jax.random.uniform(key, ratio.shape))
    codes = jnp.round(ratio).astype(jnp.int8).reshape(-1)[: x.size]
    return {"codes": codes, "scale": scale}, state

  def decode(self, payload, state, like):
    scale = jnp.repeat(payload["scale"], self.block)[: like.size]
    x = payload["codes"].astype(jnp.float32) * scale
    return x.reshape(like.shape).astype(like.dtype)

  def num_bits(self, like):
    return 8 * like.size + 32 * -(-like.size // self.block)


@dataclasses.dataclass(frozen=True)
class OneScale(Rounded):
  """One scale for the whole array, as a block of all."""

  def granule(self):
    return 1

  def encode(self, x, state=(), key=None):
    return dataclasses.replace(
      Rounded(self.levels, max(x.size, 1), self.stochastic)
    ).encode(x, state, key)

  def decode(self, payload, state, like):
    return Rounded(self.levels, max(like.size, 1)).decode(payload, state, like)

  def num_bits(self, like):
    return 8 * like.size + 32


@dataclasses.dataclass(frozen=True)
class Signs(codecs.Codec):
  """A sign each and nothing that could tell of a NaN."""

  def encode(self, x, state=(), key=None):
    return (x.reshape(-1) >= 0), state

  def decode(self, payload, state, like):
    x = jnp.where(payload, 1.0, -1.0)
    return x.reshape(like.shape).astype(like.dtype)

  def num_bits(self, like):
    return 8 * like.size


@dataclasses.dataclass(frozen=True)
class Largest(codecs.Codec):
  """The k entries of largest magnitude, values and 16-bit indices."""

  k: int = 2
  sparse: ClassVar[bool] = True

  def encode(self, x, state=(), key=None):
    flat = x.reshape(-1).astype(jnp.float32)
    k = min(self.k, flat.size)
    _, chosen = jax.lax.top_k(jnp.abs(flat), k)
    return (chosen.astype(jnp.uint16), flat[chosen]), state

  def decode(self, payload, state, like):
    zeros = jnp.zeros(like.shape, jnp.float32)
    return self.add_to(zeros, payload, state).astype(like.dtype)

  def add_to(self, total, payload, state):
    chosen, values = payload
    flat = total.reshape(-1).at[chosen.astype(jnp.int32)].add(values)
    return flat.reshape(total.shape)

  def num_bits(self, like):
    return 48 * min(self.k, like.size)


@dataclasses.dataclass(frozen=True)
class Drawn(codecs.Codec):
  """k entries that all workers draw alike; its sums may be summed."""

  k: int = 2
  linear: ClassVar[bool] = True
  sparse: ClassVar[bool] = True

  @property
  def key(self):
    return "shared"

  def init(self, like):
    return jnp.zeros(min(self.k, like.size), jnp.int32)

  def encode(self, x, state=(), key=None):
    flat = x.reshape(-1).astype(jnp.float32)
    shape = state.shape
    state = jax.random.choice(key, flat.size, shape, replace=False)
    return flat[state.astype(jnp.int32)], state.astype(jnp.int32)

  def decode(self, payload, state, like):
    flat = jnp.zeros(like.size, jnp.float32).at[state].set(payload)
    return flat.reshape(like.shape).astype(like.dtype)

  def num_bits(self, like):
    return 32 * min(self.k, like.size)
