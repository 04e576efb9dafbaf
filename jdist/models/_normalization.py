"""Normalization layers for padded batches and half precision.

They compute in float32 and promote types explicitly: unlike Flax's layers they
run under JAX's strict type promotion.
"""

import math
from typing import get_args, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdist import checks

Norm = Literal["batch", "group", "none"]


def check_norm(norm: str) -> None:
  """Raises a ValueError unless `norm` is a kind of normalization."""
  checks.check_choice("norm", norm, get_args(Norm))


class _Normalization(nnx.Module):
  """Base of normalizations: scale and shift of each channel."""

  def __init__(self, num_features: int, *, epsilon: float = 1e-5):
    # JAX would compile a program for each array; NumPy makes them at once.
    self.scale = nnx.Param(jnp.asarray(np.ones(num_features, np.float32)))
    self.bias = nnx.Param(jnp.asarray(np.zeros(num_features, np.float32)))
    self.epsilon = epsilon

  def _normalize(
    self, wide: jax.Array, mean: jax.Array, var: jax.Array, x: jax.Array
  ) -> jax.Array:
    """Normalizes `wide`, which is x in float32, and casts to x's type."""
    y = ((wide - mean) * jax.lax.rsqrt(var + self.epsilon)).reshape(x.shape)
    scale, bias = self.scale[...], self.bias[...]
    y = y * _as_rank(scale.astype(jnp.float32), y.ndim)
    y = y + _as_rank(bias.astype(jnp.float32), y.ndim)
    return y.astype(jnp.promote_types(x.dtype, scale.dtype))


class BatchNorm(_Normalization):
  """Normalizes each channel over the batch, leaving padding out.

    y = scale * (x - mean) / sqrt(var + epsilon) + bias

  Training uses the mean and variance of the samples whose mask is 1, and moves
  the running ones towards them by `1 - momentum`; a batch of padding alone does
  not move them. Evaluation uses the running ones.

  Args:
    num_features: The number of channels, the last axis.
    momentum: The fraction of the running statistics that a step keeps.
    epsilon: The number added to the variance.

  >>> norm = BatchNorm(1)
  >>> norm.train()
  >>> x = jnp.array([[1.0], [3.0], [99.0]])
  >>> norm(x, mask=jnp.array([1, 1, 0]))[:2].round(3).tolist()
  [[-1.0], [1.0]]

  References:
    Ioffe and Szegedy, "Batch normalization", 2015, arXiv:1502.03167,
    algorithm 1. Departure: the running variance is of the biased estimate.
  """

  def __init__(
    self, num_features: int, *, momentum: float = 0.9, epsilon: float = 1e-5
  ):
    super().__init__(num_features, epsilon=epsilon)
    self.mean = nnx.BatchStat(jnp.asarray(np.zeros(num_features, np.float32)))
    self.var = nnx.BatchStat(jnp.asarray(np.ones(num_features, np.float32)))
    self.momentum = momentum
    # `nnx.Module.train` and `eval` set the attribute of this name.
    self.use_running_average = False

  def __call__(
    self, x: jax.Array, *, mask: jax.Array | None = None
  ) -> jax.Array:
    """Normalizes x [batch, ..., channels], where `mask` [batch] is not 0."""
    wide = x.astype(jnp.float32)
    if self.use_running_average:
      mean = self.mean[...].astype(jnp.float32)
      var = self.var[...].astype(jnp.float32)
    else:
      mean, var = self._batch_statistics(wide, mask)
    mean, var = _as_rank(mean, x.ndim), _as_rank(var, x.ndim)
    return self._normalize(wide, mean, var, x)

  def _batch_statistics(
    self, x: jax.Array, mask: jax.Array | None
  ) -> tuple[jax.Array, jax.Array]:
    axes = tuple(range(x.ndim - 1))
    if mask is None:
      mean, var = jnp.mean(x, axes), jnp.var(x, axes)
      any_sample = jnp.bool_(True)
    else:
      inside = mask.astype(bool).reshape(-1, *(1,) * (x.ndim - 1))
      num_samples = jnp.sum(inside, dtype=jnp.float32)
      any_sample = num_samples > 0
      # A batch of padding alone must not divide by zero: the gradient of an
      # unselected NaN is NaN, too.
      count = jnp.maximum(num_samples, 1.0) * math.prod(x.shape[1:-1])
      mean = jnp.sum(jnp.where(inside, x, 0.0), axes) / count
      # Two passes: the difference of large squares would lose the variance.
      away = jnp.where(inside, x - _as_rank(mean, x.ndim), 0.0)
      var = jnp.sum(jnp.square(away), axes) / count
    for running, value in ((self.mean, mean), (self.var, var)):
      old = running[...]
      moved = self.momentum * old.astype(jnp.float32)
      # Running statistics are not a path of gradients.
      moved += (1 - self.momentum) * jax.lax.stop_gradient(value)
      running[...] = jnp.where(any_sample, moved.astype(old.dtype), old)
    return mean, var


class GroupNorm(_Normalization):
  """Normalizes groups of channels within each sample.

  It has no state, and no statistics of a batch that skewed labels disturb.

  Args:
    num_features: The number of channels, the last axis.
    num_groups: The number of groups, a divisor of the channels.
    epsilon: The number added to the variance.

  References:
    Wu and He, "Group normalization", 2018, arXiv:1803.08494.
  """

  def __init__(
    self, num_features: int, *, num_groups: int, epsilon: float = 1e-5
  ):
    if num_groups < 1 or num_features % num_groups:
      raise ValueError(
        f"`num_groups` must divide the {num_features} channels, got "
        f"{num_groups}."
      )
    super().__init__(num_features, epsilon=epsilon)
    self.num_groups = num_groups

  def __call__(
    self, x: jax.Array, *, mask: jax.Array | None = None
  ) -> jax.Array:
    """Normalizes each sample of x [batch, ..., channels]."""
    del mask
    wide = x.astype(jnp.float32)
    # Channels of a group are consecutive, as in the paper.
    wide = wide.reshape(
      len(x), -1, self.num_groups, x.shape[-1] // self.num_groups
    )
    mean = jnp.mean(wide, (1, 3), keepdims=True)
    var = jnp.var(wide, (1, 3), keepdims=True)
    return self._normalize(wide, mean, var, x)


class LayerNorm(_Normalization):
  """Normalizes the last axis of each position.

  Args:
    num_features: The size of the last axis.
    epsilon: The number added to the variance.

  References:
    Ba, Kiros and Hinton, "Layer normalization", 2016, arXiv:1607.06450.
  """

  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalizes x [..., num_features]."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, -1, keepdims=True)
    var = jnp.var(wide, -1, keepdims=True)
    return self._normalize(wide, mean, var, x)


def make_norm(
  norm: Norm, num_features: int, num_groups: int
) -> BatchNorm | GroupNorm:
  """Returns the layer of a `norm` other than "none"."""
  if norm == "batch":
    return BatchNorm(num_features)
  return GroupNorm(num_features, num_groups=num_groups)


def _as_rank(channels: jax.Array, ndim: int) -> jax.Array:
  """Reshapes [channels] to [1, ..., 1, channels]."""
  return channels.reshape((1,) * (ndim - 1) + channels.shape)
