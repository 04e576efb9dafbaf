"""Delay compensation: a late gradient, corrected to the present parameters."""

import jax


def compensated(
  gradient: jax.Array,
  strength: jax.typing.ArrayLike,
  now: jax.Array,
  then: jax.Array,
) -> jax.Array:
  r"""Returns :math:`g + \lambda \, g \odot g \odot (w_{now} - w_{then})`.

  Args:
    gradient: The gradient g at the parameters `then`.
    strength: The factor lambda >= 0; the paper's value is 0.04.
    now: The parameters to which the gradient will be applied.
    then: The parameters at which the gradient was computed.

  References:
    Zheng et al., Asynchronous Stochastic Gradient Descent with Delay
    Compensation (arXiv 1609.08326).
  """
  # The squared gradient stands for the diagonal of the Hessian.
  term = strength * gradient * gradient * (now - then)
  return gradient + term.astype(gradient.dtype)
