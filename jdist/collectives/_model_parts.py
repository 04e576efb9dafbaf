"""A model whose leaves lie on several devices: sums over all of it."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

from jdist.collectives import _axis

_AXIS: contextvars.ContextVar[_axis.Axis] = contextvars.ContextVar(
  "axis of a model's parts", default=None
)


@contextlib.contextmanager
def model_parts(axis: _axis.Axis) -> Iterator[None]:
  """Names the axis over which the leaves lie that an optimizer sees in parts.

  For the updates that are traced in it: a pipeline's, whose devices have the
  leaves of their own stages.

  Args:
    axis: of the devices of one model; None where each has all of it.

  >>> def update(gradient):
  ...   with model_parts("stage"):
  ...     return sum_of_parts(gradient)
  >>> jax.vmap(update, axis_name="stage")(jax.numpy.array([1.0, 2.0])).tolist()
  [3.0, 3.0]
  """
  _axis.check_axis(axis)
  token = _AXIS.set(axis)
  try:
    yield
  finally:
    _AXIS.reset(token)


def sum_of_parts(x: jax.Array) -> jax.Array:
  """Adds up what each device found in its part of the model.

  What decides by all leaves at once, a norm or a flag, decides alike on all
  devices with it.  A device with all of the model sends nothing.

  >>> sum_of_parts(jax.numpy.array(2.0)).item()
  2.0
  """
  axis = _AXIS.get()
  return x if axis is None else _axis.sum(x, axis)
