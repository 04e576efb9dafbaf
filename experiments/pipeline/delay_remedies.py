"""Remedies for late gradients that ACCURACY.md compares with prediction.

The rows do not support them, so that they are not part of the library, whose
`transforms.predict_weights` is the remedy that they do support.  Each stands
inside `transforms.delay_gradients`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import transforms

PyTree = Any


class CompensateDelayState(NamedTuple):
  """State of `compensate_delay`.

  Attributes:
    step: The number of gradients so far, int32 scalar.
    past: The last k parameters of each leaf, arrays [k, ...]; row t mod k
      holds those of step t.
  """

  step: jax.Array
  past: PyTree


def compensate_delay(
  strength: float, delay: int
) -> optax.GradientTransformationExtraArgs:
  r"""Corrects late gradients to first order for the updates made since.

  .. math:: g \leftarrow g + \lambda \, g \odot g \odot (w_t - w_{t-k})

  Args:
    strength: lambda >= 0; the paper's value is 0.04.
    delay: k >= 1, in steps.

  References:
    Zheng et al., Asynchronous Stochastic Gradient Descent with Delay
    Compensation (arXiv 1609.08326): DC-ASGD-c, with a constant lambda.

  >>> optimizer = optax.chain(compensate_delay(0.5, 1), optax.sgd(1.0))
  >>> w = jnp.array(0.0)
  >>> state = optimizer.init(w)
  >>> for gradient in (2.0, 2.0):  # The second is 2 + 0.5 * 4 * (-2 - 0).
  ...   updates, state = optimizer.update(jnp.array(gradient), state, w)
  ...   w = optax.apply_updates(w, updates)
  ...   print(updates.item())
  -2.0
  2.0
  """

  def init_fn(params: optax.Params) -> CompensateDelayState:
    # Before the first update the parameters are the first ones.
    past = jax.tree.map(lambda p: jnp.stack([p] * delay), params)
    return CompensateDelayState(jnp.zeros((), jnp.int32), past)

  def update_fn(
    updates: optax.Updates,
    state: CompensateDelayState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, CompensateDelayState]:
    del extra_args
    row = state.step % delay

    def one(g: jax.Array, p: jax.Array, ring: jax.Array) -> jax.Array:
      factor = jnp.asarray(strength, g.dtype)
      # The squared gradient stands for the diagonal of the Hessian.
      return g + (factor * g * g * (p - ring[row])).astype(g.dtype)

    updates = jax.tree.map(one, updates, params, state.past)
    past = jax.tree.map(lambda p, ring: ring.at[row].set(p), params, state.past)
    return updates, CompensateDelayState(optax.safe_increment(state.step), past)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def scale_by_delay(
  delay: int, anneal_steps: float
) -> optax.GradientTransformation:
  r"""Divides updates by one more than their delay, less and less.

  .. math:: u \leftarrow u \, (1 + \tau)^{-(1 - \min(t / T, 1))}

  Args:
    delay: tau, in steps.
    anneal_steps: T > 0, the number of updates after which the rate is whole.

  References:
    Yang et al., PipeMare (MLSys 2021).  Departure: 1 + tau in place of tau.

  >>> optimizer = scale_by_delay(3, anneal_steps=2)
  >>> state = optimizer.init(jnp.array(0.0))
  >>> for _ in range(3):  # 4 ** -1, 4 ** -0.5, 4 ** 0
  ...   updates, state = optimizer.update(jnp.array(1.0), state)
  ...   print(updates.item())
  0.25
  0.5
  1.0
  """

  def factor(step: jax.Array) -> jax.Array:
    done = jnp.minimum(step.astype(jnp.float32) / anneal_steps, 1.0)
    return jnp.float32(1 + delay) ** -(1.0 - done)

  return optax.scale_by_schedule(factor)


class LookAheadState(NamedTuple):
  """State of `scale_by_look_ahead`.

  Attributes:
    momentum: The moving average of the gradients, in the parameters' dtypes.
  """

  momentum: PyTree


def scale_by_look_ahead(momentum: float) -> optax.GradientTransformation:
  r"""Takes Nesterov's steps with gradients discounted by the momentum.

  .. math:: m \leftarrow \gamma m + (1 - \gamma) g, \qquad
            u = \gamma m + (1 - \gamma) g

  A momentum near 1 makes a late gradient a small part of a long average, whose
  direction hardly turns during the delay.

  Args:
    momentum: gamma in [0, 1); the paper's value is 0.99.

  References:
    Ajanthan et al., Nesterov Method for Asynchronous Pipeline Parallel
    Optimization (arXiv 2505.01099), after its abstract and published code: a
    reconstruction.  Departures: one constant momentum, where the code warms it
    up; no correction of the first steps.

  >>> optimizer = optax.chain(scale_by_look_ahead(0.5), optax.scale(-1.0))
  >>> state = optimizer.init(jnp.array(0.0))
  >>> for _ in range(2):  # m = 0.5, 0.75
  ...   updates, state = optimizer.update(jnp.array(1.0), state)
  ...   print(updates.item())
  -0.75
  -0.875
  """

  def mixed(m: jax.Array, g: jax.Array) -> jax.Array:
    c = jnp.asarray(momentum, g.dtype)
    return c * m + (1 - c) * g

  def init_fn(params: optax.Params) -> LookAheadState:
    return LookAheadState(jax.tree.map(jnp.zeros_like, params))

  def update_fn(
    updates: optax.Updates,
    state: LookAheadState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, LookAheadState]:
    del params
    new = jax.tree.map(mixed, state.momentum, updates)
    return jax.tree.map(mixed, new, updates), LookAheadState(new)

  return optax.GradientTransformation(init_fn, update_fn)


def predict_by_repeating(
  optimizer: optax.GradientTransformation, delay: int
) -> optax.GradientTransformationExtraArgs:
  """Predicts weights by repeating the last update once for each late step.

  Its state is that of `transforms.predict_weights`, so that a training step
  takes gradients at the predicted weights.

  Args:
    optimizer: Any Optax optimizer.
    delay: The number of repeated updates.

  References:
    Chen et al., SpecTrain (arXiv 1809.02839); for Adam Guan et al., XPipe
    (arXiv 1911.04610).

  >>> optimizer = predict_by_repeating(optax.sgd(1.0), 2)
  >>> w = jnp.array(0.0)
  >>> _, state = optimizer.update(jnp.array(4.0), optimizer.init(w), w)
  >>> transforms.predicted_weights(state, jnp.array(-4.0)).item()
  -12.0
  """
  optimizer = optax.with_extra_args_support(optimizer)

  def init_fn(params: optax.Params) -> transforms.PredictWeightsState:
    ahead = jax.tree.map(jnp.zeros_like, params)
    return transforms.PredictWeightsState(ahead, optimizer.init(params))

  def update_fn(
    updates: optax.Updates,
    state: transforms.PredictWeightsState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, transforms.PredictWeightsState]:
    updates, inner = optimizer.update(
      updates, state.inner, params, **extra_args
    )
    ahead = jax.tree.map(
      lambda u, a: (delay * u).astype(a.dtype), updates, state.ahead
    )
    return updates, transforms.PredictWeightsState(ahead, inner)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
