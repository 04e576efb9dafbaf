"""A cut of a small tree, and what predicts behind it."""

import jax.numpy as jnp
import numpy as np

from jdist import transforms

THETA = np.float32([0.5, -2.0, 1.0])


class Cut:
  """Two leaves in front, of which the rest is made."""

  def split(self, tree):
    front = {k: v for k, v in tree.items() if k in "ab"}
    return front, {k: v for k, v in tree.items() if k not in "ab"}

  def join(self, front, rest):
    return front | rest


def predict(theta, front):
  a, b = front["a"], front["b"]
  return {"c": theta * jnp.tanh(a), "d": jnp.outer(a, b)}


PARAMS = {
  "a": jnp.float32([0.5, -1.0, 2.0]),
  "b": jnp.float32([1.0, 3.0]),
  "c": jnp.float32([7.0, 8.0, 9.0]),
  "d": jnp.ones((3, 2)),
}


def whole(front, axis, rest=None, theta=THETA):
  return transforms.predict_rest(
    front, Cut(), predict, theta, axis=axis, rest=rest
  )
