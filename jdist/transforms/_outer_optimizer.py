"""DiLoCo's outer optimizer, shared by methods, servers and the command line."""

from typing import Any

import jax
import optax

from jdist import checks


def outer_sgd(
  outer_learning_rate: optax.ScalarOrSchedule = 0.7,
  outer_momentum: jax.typing.ArrayLike | None = 0.9,
) -> optax.GradientTransformation:
  r"""Returns DiLoCo's outer optimizer, SGD with Nesterov's momentum.

  .. math:: m \leftarrow \mu m + \Delta, \qquad
            a \leftarrow a - \eta_{out} (\mu m + \Delta)

  Args:
    outer_learning_rate: A positive number or a schedule of the rounds; the
      paper's value is 0.7.
    outer_momentum: mu in [0, 1]; the paper's value is 0.9.  None is plain SGD.

  Raises:
    ValueError: If an argument is out of its range.

  References:
    Douillard et al., DiLoCo (arXiv 2311.08105), algorithm 1 and table 5.
  """
  checks.check_rate("outer_learning_rate", outer_learning_rate)
  if outer_momentum is not None:
    checks.check_continuous("outer_momentum", outer_momentum, high=1.0)
    outer_momentum = _as_float(outer_momentum)
  rate = _as_float(outer_learning_rate)
  return optax.sgd(rate, outer_momentum, nesterov=True)


def _as_float(x: Any) -> Any:
  """Returns a hyper-parameter as a float; a schedule stays as it is."""
  if isinstance(x, jax.Array):
    # `optax.inject_hyperparams` casts to the dtype of the parameters, but the
    # anchors that an outer optimizer moves are float32.
    return x.astype("float32")
  return float(x) if isinstance(x, int) else x
