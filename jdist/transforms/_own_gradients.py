"""Changes of a worker's own gradients: clipping, a proximal term, skips."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks, collectives, states
from jdist.transforms.local import _anchor


def clip_local(
  threshold: jax.typing.ArrayLike, axis: collectives.Axis
) -> optax.GradientTransformationExtraArgs:
  r"""Clips a worker's gradient to its share of a norm.

  .. math:: g_i \leftarrow g_i \min\left(1, \frac{\theta}{\sqrt N
            \lVert g_i \rVert_2}\right)

  The sum of N independent gradients of norm :math:`\theta / \sqrt N` has about
  the norm :math:`\theta`.  This replaces the clipping of the sum, which is
  unknown to workers that send only a part of their gradients.  It must precede
  a residual, which then holds only clipped gradients.

  Args:
    threshold: theta > 0, in units of the gradients' sum.
    axis: The axis of the workers, for their number.

  Returns:
    A transformation with the dtypes of the gradients.  A gradient whose norm
    is not finite passes unchanged.

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
    # One power for all parts of a model, as their squares are summed; no part
    # is larger than the sum of the magnitudes.
    power = _power(collectives.sum_of_parts(largest))
    squares = [
      jnp.sum(squared(x * power.astype(x.dtype))).astype(jnp.float32)
      for x in leaves
    ]
    square = sum(squares[1:], squares[0])
    norm = jnp.sqrt(collectives.sum_of_parts(square))
    # Gradients are not multiplied unless they are clipped: even a factor of 1
    # in another dtype would change their bits.
    over = jnp.isfinite(norm) & (norm > limit * power)
    factor = limit / jnp.where(over, norm, 1.0)

    def scaled(x: jax.Array) -> jax.Array:
      wide = _wide(x)
      near = wide * power.astype(wide.dtype)
      return (near * factor.astype(wide.dtype)).astype(x.dtype)

    return jax.tree.map(lambda x: jnp.where(over, scaled(x), x), updates)

  return optax.with_extra_args_support(optax.stateless(clip))


def squared(x: jax.Array) -> jax.Array:
  """Returns the squares of absolute values.

  >>> squared(jnp.array([-3.0])).item(), squared(jnp.array([3 + 4j])).item()
  (9.0, 25.0)
  """
  return (x.conj() * x).real if jnp.iscomplexobj(x) else jnp.square(x)


def _largest(x: jax.Array) -> jax.Array:
  """Returns the largest magnitude of real and imaginary parts, float32."""
  parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
  found = [jnp.max(jnp.abs(part), initial=0) for part in parts]
  return jnp.stack(found).max().astype(jnp.float32)


def _power(largest: jax.Array) -> jax.Array:
  """Returns a power of two, mostly 1, that keeps squares in float32's range.

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
  r"""Clips each entry to a multiple of its leaf's standard deviation.

  .. math:: g \leftarrow \max(-c \sigma, \min(g, c \sigma)), \qquad
            \sigma^2 = \tfrac1n \sum g^2

  A codec whose scale is the largest entry resolves a few outliers well and all
  other entries badly; clipping reverses this.

  Args:
    deviations: c > 0.

  Raises:
    ValueError: If `deviations` is out of its range; at `init`, for complex
      parameters, which have two parts to clip.

  References:
    Wen et al., TernGrad (arXiv 1705.07878), section 4: c = 2.5.  Departure:
    the paper takes the deviation from the mean, which is nearly the same for
    most leaves and clips a leaf of equal entries to zero.

  >>> clip = clip_deviations(1.0)
  >>> g = jnp.array([3.0, -1.0, -1.0, -1.0])  # The mean square is 3.
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

  # Not `optax.stateless`, whose `init` would not see complex parameters.
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


@states.declare(shared=("skipped",))
class SkipNonfiniteState(NamedTuple):
  """State of `skip_nonfinite`.

  Attributes:
    skipped: The number of steps whose gradients were replaced by zeros, int32
      scalar.
  """

  skipped: jax.Array


def skip_nonfinite(
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces all workers' gradients by zeros if one worker's are not finite.

  .. math:: g_i \leftarrow g_i \prod_j [g_j \text{ is finite}]

  It must be the first element of a chain, in front of a method, whose means
  then stay finite.  All workers, and all stages of a pipeline, decide alike, by
  one scalar all-reduce in every step.  Rounds and schedules continue, momenta
  and weight decay act as on a gradient of zero.  `optax.apply_if_finite` stops
  the whole optimizer instead, each worker by itself, after which workers would
  end their rounds in different steps.

  Returns:
    A transformation.  `transforms.skipped` reads the count from a chain's
    state.

  >>> optimizer = optax.chain(skip_nonfinite(None), optax.sgd(0.1))
  >>> state = optimizer.init(jnp.zeros(2))
  >>> updates, state = optimizer.update(jnp.array([1.0, jnp.nan]), state)
  >>> updates.tolist(), skipped(state).item()
  ([-0.0, -0.0], 1)
  """
  collectives.check_axis(axis)

  def init_fn(params: optax.Params) -> SkipNonfiniteState:
    del params
    return SkipNonfiniteState(jnp.zeros((), jnp.int32))

  def update_fn(
    updates: optax.Updates,
    state: SkipNonfiniteState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, SkipNonfiniteState]:
    del params, extra_args
    checks.check_gradients("updates", updates)
    found = [jnp.isfinite(x).all() for x in jax.tree.leaves(updates)]
    wrong = ~jnp.stack(found).all() if found else jnp.asarray(False)
    # The parts of one model are the stages of a pipeline; the axis has the
    # workers.
    count = collectives.sum_of_parts(wrong.astype(jnp.float32))
    wrong = collectives.sum(count, axis) > 0
    # The zeros are selected: NaN times zero is NaN.
    updates = jax.tree.map(
      lambda x: jnp.where(wrong, jnp.zeros_like(x), x), updates
    )
    return updates, SkipNonfiniteState(state.skipped + wrong.astype(jnp.int32))

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def skipped(state: Any) -> jax.Array | None:
  """Returns the number of steps that `skip_nonfinite` has skipped.

  Returns:
    An int32 scalar; None without `skip_nonfinite`.
  """
  guards = _anchor.parts(state, lambda x: isinstance(x, SkipNonfiniteState))
  return guards[0].skipped if guards else None


def proximal(
  strength: jax.typing.ArrayLike,
) -> optax.GradientTransformationExtraArgs:
  r"""Adds the gradient of a proximal term to the gradient.

  .. math:: g \leftarrow g + \mu (w - a), \qquad \text{the gradient of }
            f(w) + \tfrac\mu2 \lVert w - a \rVert^2

  with the anchor a.  Unlike `pull_to_anchor` it is not scaled to the interval
  and the learning rate: under plain SGD with the rate :math:`\eta` a worker
  loses :math:`\eta \mu` of its distance in each step.

  It must be in the inner chain of `local_steps`, which passes the anchor.

  Args:
    strength: mu >= 0; 0 adds nothing.

  Raises:
    ValueError: At trace time, outside of `local_steps`.

  References:
    Li et al., FedProx (arXiv 1812.06127), equation 2.

  >>> import jax.numpy as jnp
  >>> term = proximal(0.5)
  >>> w, anchor = jnp.array(3.0), jnp.array(1.0)
  >>> term.update(jnp.array(0.0), term.init(w), w, anchor=anchor)[0].item()
  1.0
  """
  checks.check_continuous("strength", strength)

  return _anchor.pull(
    "proximal",
    optax.EmptyState,
    # The strength is cast here, inside the update, because an injected one is
    # an array of the step.
    lambda state, _: (_anchor.scalar(strength), state),
  )
