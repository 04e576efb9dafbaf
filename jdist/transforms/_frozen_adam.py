"""Adam with a frozen variance, which is linear and can be compressed."""

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jdist import checks, collectives, reducers, states
from jdist.transforms import _clipping, _control
from jdist.transforms.local import _anchor

PyTree: TypeAlias = Any


@states.declare(shared=("step", "mu", "nu"), averages=True)
class FrozenAdamState(NamedTuple):
  """State of `scale_by_frozen_adam`.

  Attributes:
    step: The number of updates so far, int32 scalar, equal on all workers.
    mu: The momentum, float32, equal on all workers.
    nu: The second moment, float32, equal on all workers; constant after the
      warm-up.
    compression: The compression's state.
  """

  step: jax.Array
  mu: PyTree
  nu: PyTree
  compression: PyTree


def scale_by_frozen_adam(
  warmup_steps: int,
  axis: collectives.Axis,
  compression: reducers.Compression,
  *,
  b1: jax.typing.ArrayLike = 0.9,
  b2: jax.typing.ArrayLike = 0.999,
  eps: jax.typing.ArrayLike = 1e-8,
) -> optax.GradientTransformationExtraArgs:
  r"""Adam of exact means, then a mean momentum over a frozen variance.

  In the first T steps, with the exact mean g of the workers' gradients,

  .. math:: m \leftarrow \beta_1 m + (1-\beta_1) g, \qquad
            v \leftarrow \beta_2 v + (1-\beta_2) g^2, \qquad
            \text{output } \frac{m}{\sqrt v + \epsilon}

  and from then on, with each worker's own gradient,

  .. math:: m \leftarrow \mathrm{mean}_i(\beta_1 m + (1-\beta_1) g_i), \qquad
            \text{output } \frac{m}{\sqrt{v_T} + \epsilon}

  where the mean is compressed.  The error of one-bit codes is then a part of
  the momentum and not of a gradient, and the variance, which would square it,
  does not change.

  Args:
    warmup_steps: T; the paper takes 15 to 20 % of the run, until the variance
      has settled.  It should cover the warm-up of the learning rate.
    axis: The axis of the workers.
    compression: The compression of the mean after the warm-up.
    b1: The decay of the momentum, in [0, 1].
    b2: The decay of the second moment, in [0, 1].
    eps: The positive term that is added to the root of the second moment.

  Returns:
    A transformation with the dtypes of the gradients, whose updates are equal
    on all workers.  Its state may depend on the number of workers: make it
    where the axis is bound.

  Raises:
    ValueError: If an argument is out of its range.

  References:
    Tang et al., 1-bit Adam (arXiv 2102.02888), algorithm 1, which does not
    correct the bias.  Departure: an entry whose frozen variance is zero (a
    parameter without gradient in the warm-up) does not move; the authors' code
    asks the user for a mask instead.

  >>> exact = reducers.Compression(reducers.Exact())
  >>> adam = scale_by_frozen_adam(1, None, exact, b1=0.5, b2=0.75, eps=1e-30)
  >>> state = adam.init(jnp.array(0.0))
  >>> for g in (2.0, 8.0):  # m is 1 and 4.5, the root of v is 1 and stays.
  ...   updates, state = adam.update(jnp.array(g), state)
  ...   print(updates.item())
  1.0
  4.5
  """
  warmup_steps = checks.check_structural(
    "warmup_steps", warmup_steps, minimum=1
  )
  collectives.check_axis(axis)
  checks.check_continuous("b1", b1, high=1.0)
  checks.check_continuous("b2", b2, high=1.0)
  checks.check_continuous("eps", eps, open_low=True)
  wanted = (
    "a `jdist.Compression`, for instance "
    "`Compression(codecs.Sign(), ErrorFeedback())`"
  )
  checks.check_type("compression", compression, reducers.Compression, wanted)

  def init_fn(params: optax.Params) -> FrozenAdamState:
    mu = jax.tree.map(
      lambda x: jnp.zeros_like(_anchor.wide(jnp.asarray(x))), params
    )
    return FrozenAdamState(
      step=jnp.zeros((), jnp.int32), mu=mu, nu=jax.tree.map(jnp.copy, mu),
      compression=compression.init(mu, axis),
    )  # fmt: skip

  def update_fn(
    updates: optax.Updates,
    state: FrozenAdamState,
    params: optax.Params | None = None,
    *,
    control: _control.Control = _control.DEVICE,
    **extra_args: Any,
  ) -> tuple[optax.Updates, FrozenAdamState]:
    del extra_args
    if control.drain == "residuals":
      memory = compression.absorb(state.mu, state.compression, axis)
      return updates, state._replace(compression=memory)
    collectives.check_local(updates, axis, what="`updates`", like=params)
    grads = jax.tree.map(lambda g, m: g.astype(m.dtype), updates, state.mu)
    # A conditional, so that each phase sends its own messages only.
    state = jax.lax.cond(
      collectives.agreed(state.step < warmup_steps, axis), exactly,
      by_few_bytes, grads, state,
    )  # fmt: skip
    scaled = jax.tree.map(
      lambda m, v, g: (m / (jnp.sqrt(v) + _anchor.scalar(eps))).astype(g.dtype),
      state.mu, state.nu, updates,
    )  # fmt: skip
    return scaled, state._replace(step=optax.safe_increment(state.step))

  def exactly(grads: PyTree, state: FrozenAdamState) -> FrozenAdamState:
    with collectives.phase(0, warmup_steps):
      mean = collectives.mean(grads, axis)
    squares = jax.tree.map(lambda x: _clipping.squared(x).astype(x.dtype), mean)
    state = state._replace(
      mu=_blended(_anchor.scalar(b1), state.mu, mean),
      nu=_blended(_anchor.scalar(b2), state.nu, squares),
    )
    return collectives.varying(state, axis)

  def by_few_bytes(grads: PyTree, state: FrozenAdamState) -> FrozenAdamState:
    # Each worker blends its own gradient into the common momentum.
    own = _blended(_anchor.scalar(b1), state.mu, grads)
    with collectives.phase(warmup_steps):
      mu, memory = compression.mean(own, state.compression, axis)
    # A sign has no zero, and dividing it by `eps` would move the parameter far.
    mu = jax.tree.map(lambda m, v: jnp.where(v > 0, m, 0.0), mu, state.nu)
    state = state._replace(mu=mu, compression=memory)
    return collectives.varying(state, axis)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _blended(decay: jax.Array, old: PyTree, new: PyTree) -> PyTree:
  return jax.tree.map(lambda o, n: decay * o + (1 - decay) * n, old, new)
