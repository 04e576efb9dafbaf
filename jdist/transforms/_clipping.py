"""Clipping a worker's own gradients, before they are added to anything."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks, collectives
from jdist.transforms.local import _anchor


def clip_local(
  threshold: jax.typing.ArrayLike, axis: collectives.Axis
) -> optax.GradientTransformationExtraArgs:
  r"""Clips a worker's gradient to its part of a norm.

  .. math:: g_i \leftarrow g_i \min\left(1, \frac{\theta}{\sqrt N
            \lVert g_i \rVert_2}\right)

  The sum of N independent gradients of norm :math:`\theta / \sqrt N` has about
  the norm :math:`\theta`: so this stands in for a clipping of the sum, which a
  worker that sends a part only never sees.

  Stands before what accumulates gradients: a residual then holds nothing that
  was not clipped.

  Args:
    threshold: theta > 0, in units of the gradients' sum.
    axis: the workers' axis; of it only the number of workers is used.

  Returns:
    A transformation with the dtypes of the gradients.  A gradient whose norm
    is not finite passes as it is.

  Raises:
    ValueError: when an argument is out of its range.

  References:
    Lin et al., Deep Gradient Compression (arXiv 1712.01887), section 3.2.

  >>> clip = clip_local(1.0, None)
  >>> g = {"a": jnp.array(3.0), "b": jnp.array(4.0)}
  >>> clipped, _ = clip.update(g, clip.init(g))
  >>> [round(x.item(), 6) for x in jax.tree.leaves(clipped)]
  [0.6, 0.8]
  """
  checks.check_continuous("threshold", threshold, open_low=True)
  collectives.check_axis(axis)

  def clip(updates: optax.Updates, params: Any) -> optax.Updates:
    del params
    checks.check_gradients("updates", updates)
    limit = _anchor.scalar(threshold) / collectives.size(axis) ** 0.5
    leaves = list(map(_wide, jax.tree.leaves(updates)))
    if not leaves:
      return updates
    largest = jnp.stack(list(map(_largest, leaves))).max()
    # One for all parts of a model: none of them is larger than their sum.
    power = _power(collectives.sum_of_parts(largest))
    squares = [
      jnp.sum(squared(x * power.astype(x.dtype))).astype(jnp.float32)
      for x in leaves
    ]
    square = sum(squares[1:], squares[0])
    norm = jnp.sqrt(collectives.sum_of_parts(square))
    # Not a factor of 1, nor of a NaN: what is not clipped stays to the bit.
    over = jnp.isfinite(norm) & (norm > limit * power)
    factor = limit / jnp.where(over, norm, 1.0)

    def scaled(x: jax.Array) -> jax.Array:
      wide = _wide(x)
      near = wide * power.astype(wide.dtype)
      return (near * factor.astype(wide.dtype)).astype(x.dtype)

    return jax.tree.map(lambda x: jnp.where(over, scaled(x), x), updates)

  return optax.with_extra_args_support(optax.stateless(clip))


def squared(x: jax.Array) -> jax.Array:
  """The squares of absolute values.

  >>> squared(jnp.array([-3.0])).item(), squared(jnp.array([3 + 4j])).item()
  (9.0, 25.0)
  """
  return (x.conj() * x).real if jnp.iscomplexobj(x) else jnp.square(x)


def _largest(x: jax.Array) -> jax.Array:
  """The largest magnitude, of complex numbers that of a part, float32."""
  parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
  found = [jnp.max(jnp.abs(part), initial=0) for part in parts]
  return jnp.stack(found).max().astype(jnp.float32)


def _power(largest: jax.Array) -> jax.Array:
  """The power of two by which no square overflows or is lost; mostly 1.

  >>> [_power(jnp.float32(x)).item() for x in (1.0, 3e38, 1e-30)]
  [1.0, 8.271806125530277e-25, 1.2089258196146292e+24]
  """
  low, high = np.float32(2.0**-80), np.float32(2.0**80)
  power = jnp.where(largest > np.float32(2.0**32), low, np.float32(1))
  return jnp.where(largest < np.float32(2.0**-32), high, power)


def _wide(x: jax.Array) -> jax.Array:
  return x if jnp.iscomplexobj(x) else x.astype(jnp.float32)


def clip_deviations(
  deviations: jax.typing.ArrayLike,
) -> optax.GradientTransformationExtraArgs:
  r"""Clips every entry of a leaf to so many deviations from zero.

  .. math:: g \leftarrow \max(-c \sigma, \min(g, c \sigma)), \qquad
            \sigma^2 = \tfrac1n \sum g^2

  A codec whose scale is the largest entry sends a few outliers well and all
  the others badly; without the outliers it is the other way round.

  Args:
    deviations: c > 0.

  Raises:
    ValueError: when `deviations` is out of its range; at `init`, for complex
      parameters, which have two parts to clip.

  References:
    Wen et al., TernGrad (arXiv 1705.07878), section 4: c = 2.5.  Departure:
    theirs is the deviation from the mean, which is nearly the same for most
    leaves and clips a leaf of equal entries to zero.

  >>> clip = clip_deviations(1.0)
  >>> g = jnp.array([3.0, -1.0, -1.0, -1.0])  # Squares are 3 in the mean.
  >>> clip.update(g, clip.init(g))[0].round(3).tolist()
  [1.732..., -1.0, -1.0, -1.0]
  """
  checks.check_continuous("deviations", deviations, open_low=True)

  def clipped(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    power = _power(_largest(wide))
    near = wide * power
    limit = _anchor.scalar(deviations) * jnp.sqrt(jnp.mean(jnp.square(near)))
    return (jnp.clip(near, -limit, limit) / power).astype(x.dtype)

  def init_fn(params: optax.Params) -> optax.EmptyState:
    checks.check_real("params", params, "`clip_deviations`")
    return optax.EmptyState()

  def update_fn(
    updates: optax.Updates, state: Any, params: Any = None, **extra_args: Any
  ) -> tuple[optax.Updates, Any]:
    del params, extra_args
    checks.check_gradients("updates", updates)
    return jax.tree.map(clipped, updates), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
