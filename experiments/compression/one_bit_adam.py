"""1-bit Adam: Adam, then the signs of its momentum over a frozen variance.

Tang et al., 1-bit Adam (arXiv 2102.02888), algorithm 1, from public parts of
the library.  Departures: an entry whose frozen variance is zero does not move,
where the authors' code asks for a mask; each part of a leaf has a scale, where
that code has one for all parameters in a row.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import codecs, collectives, reducers, states

Chain = optax.GradientTransformationExtraArgs


@states.declare(shared=("step", "mu", "nu"), averages=True)
class FrozenAdamState(NamedTuple):
  """State of `frozen_adam`.

  Attributes:
    step: The number of updates so far, equal on all workers.
    mu: The momentum, equal on all workers.
    nu: The second moment, equal on all workers, constant after the warm-up.
    compression: The compression's state.
  """

  step: jax.Array
  mu: Any
  nu: Any
  compression: Any


def one_bit_adam(
  learning_rate: optax.ScalarOrSchedule,
  warmup_steps: int,
  *,
  axis: collectives.Axis,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
) -> Chain:
  r"""1-bit Adam, whose mean sends signs to owners of parts and back to all.

  In the first T steps it is Adam of the mean gradient without correction of the
  bias, and from then on

  .. math:: m \leftarrow C(\beta_1 m + (1 - \beta_1) g_i), \qquad
            w \leftarrow w - \eta \frac{m}{\sqrt{v_T} + \epsilon}

  The error of one-bit codes is then a part of the momentum and not of a
  gradient, and the variance, which would square it, does not change.

  Args:
    learning_rate: A number or a schedule of the step.
    warmup_steps: T; the paper takes 15 to 20 % of the run.
    axis: The axis of the workers.
    b1: The decay of the momentum.
    b2: The decay of the variance.
    eps: The term that is added to the root of the variance.

  Returns:
    A chain for real parameters; make its state where the axis is bound.
  """
  # The authors' scale keeps the norm of the momentum, not its mean magnitude.
  compression = reducers.Compression(
    codecs.Sign(scale="l2"), reducers.ErrorFeedback()
  )

  def init_fn(params: optax.Params) -> FrozenAdamState:
    mu = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
    return FrozenAdamState(
      step=jnp.zeros((), jnp.int32), mu=mu, nu=jax.tree.map(jnp.copy, mu),
      compression=compression.init(mu, axis),
    )  # fmt: skip

  def update_fn(
    updates: optax.Updates,
    state: FrozenAdamState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, FrozenAdamState]:
    collectives.check_local(updates, axis, what="`updates`", like=params)
    grads = jax.tree.map(lambda g, m: g.astype(m.dtype), updates, state.mu)
    # A conditional, so that each phase sends its own messages only.
    state = jax.lax.cond(
      collectives.agreed(state.step < warmup_steps, axis), exactly,
      by_few_bytes, grads, state,
    )  # fmt: skip
    scaled = jax.tree.map(
      lambda m, v, g: (m / (jnp.sqrt(v) + eps)).astype(g.dtype),
      state.mu, state.nu, updates,
    )  # fmt: skip
    return scaled, state._replace(step=optax.safe_increment(state.step))

  def exactly(grads: Any, state: FrozenAdamState) -> FrozenAdamState:
    with collectives.phase(0, warmup_steps):
      mean = collectives.mean(grads, axis)
    state = state._replace(
      mu=_blended(b1, state.mu, mean),
      nu=_blended(b2, state.nu, jax.tree.map(jnp.square, mean)),
    )
    return collectives.varying(state, axis)

  def by_few_bytes(grads: Any, state: FrozenAdamState) -> FrozenAdamState:
    # Each worker blends its own gradient into the common momentum.
    own = _blended(b1, state.mu, grads)
    with collectives.phase(warmup_steps):
      mu, memory = compression.mean(own, state.compression, axis)
    # A sign has no zero, and dividing it by `eps` would move the parameter far.
    mu = jax.tree.map(lambda m, v: jnp.where(v > 0, m, 0.0), mu, state.nu)
    state = state._replace(mu=mu, compression=memory)
    return collectives.varying(state, axis)

  return optax.chain(
    optax.GradientTransformationExtraArgs(init_fn, update_fn),
    optax.scale_by_learning_rate(learning_rate),
  )


def _blended(decay: float, old: Any, new: Any) -> Any:
  return jax.tree.map(lambda o, n: decay * o + (1 - decay) * n, old, new)
