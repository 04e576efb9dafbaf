"""Sums over all leaves of a model that is split over several devices."""

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
  """Names the axis over which the leaves of one model are distributed.

  Updates that are traced in this context see a part of the leaves: those of a
  pipeline, whose devices hold the leaves of their own stages.

  Args:
    axis: the axis of the devices of one model; None where each holds all of it.

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
  """Adds a number over the devices that hold parts of one model.

  A norm or a flag of all leaves is then equal on all devices.  A device that
  holds all of the model sends nothing.

  >>> sum_of_parts(jax.numpy.array(2.0)).item()
  2.0
  """
  axis = _AXIS.get()
  return x if axis is None else _axis.sum(x, axis)
