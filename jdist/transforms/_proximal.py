"""FedProx's proximal term, which keeps workers near the anchor."""

import jax
import optax

from jdist import checks
from jdist.transforms.local import _anchor


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
