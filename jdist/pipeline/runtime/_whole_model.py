"""Optimizers that see a whole model, whose leaves lie on several devices."""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist import checks, collectives, transforms
from jdist.pipeline.runtime import _stage_arrays, _stages

PyTree = Any


class Layout:
  """Converts between a device's leaves and those of the whole model.

  A state that an optimizer keeps of the whole model lies in equal parts on the
  devices: an array as `[size / devices]`, a scalar as it is.
  """

  def __init__(
    self,
    stages: Sequence[_stages.LayerLike],
    params: _stage_arrays.StageArrays,
    axis: str | None,
  ):
    """Takes the layout of parameters.

    Args:
      stages: of the model.
      params: their arrays' layout.
      axis: of the devices; None for one device, and for shapes alone.
    """
    self._stages, self._params, self._axis = stages, params, axis

  def whole(self, own: PyTree) -> PyTree:
    """Gives a device all stages' leaves, nested as in the unsplit model."""
    return _stages.merge(self._params.split(jax.tree.map(self._gather, own)))

  def own(self, whole: PyTree) -> PyTree:
    """Undoes `whole`."""
    arrays = self._params.join(
      [_stages.pick(whole, x.params) for x in self._stages]
    )
    device = collectives.index(self._axis)
    return jax.tree.map(lambda x: x[device], arrays)

  def cut(self, state: PyTree) -> PyTree:
    """Returns a device's part of what all of them have."""
    number = self._params.num_devices
    device = collectives.index(self._axis)

    def part(x: jax.Array) -> jax.Array:
      if not x.ndim:
        return x
      size = math.ceil(x.size / number)
      flat = jnp.pad(jnp.ravel(x), (0, number * size - x.size))
      return flat.reshape(number, size)[device]

    return jax.tree.map(part, state)

  def joined(self, parts: PyTree, like: PyTree) -> PyTree:
    """Undoes `cut`.

    Args:
      parts: of this device.
      like: shapes of the state.
    """

    def join(x: jax.Array, one: Any) -> jax.Array:
      if not one.ndim:
        return x
      return jnp.ravel(self._gather(x))[: one.size].reshape(one.shape)

    return jax.tree.map(join, parts, like)

  def _gather(self, x: jax.Array) -> jax.Array:
    if self._axis is not None:
      return jax.lax.all_gather(x, self._axis)
    return jnp.broadcast_to(x, (self._params.num_devices, *x.shape))


_LAYOUT: contextvars.ContextVar[Layout | None] = contextvars.ContextVar(
  "layout of a model over devices", default=None
)


@contextlib.contextmanager
def layout_of(layout: Layout | None) -> Iterator[None]:
  """Names the layout for the optimizers that are traced in it."""
  token = _LAYOUT.set(layout)
  try:
    yield
  finally:
    _LAYOUT.reset(token)


def whole_model(
  optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  r"""Gives an optimizer the leaves of all stages, under their own names.

  In a pipeline of one program a device's optimizer sees the leaves of the
  device's own stages, which is all that most chains need, and sends nothing.
  What decides by all leaves (a global norm, a flag, a line search), or by a
  layer's name (a mask, a partition), would do otherwise than for the unsplit
  model: inside this it does the same.

  `OneProgram` puts this around chains that hold such a part of Optax's by
  itself.  By hand it stands around one's own that do so, around what stages of
  unlike shapes would refuse (Muon, LARS), and inside of what sends: then the
  workers exchange each device's own leaves only, `local_sgd(whole_model(
  optimizer), 8, axis=axis)`.

  What it costs: in every step each device gathers gradients, parameters and
  this optimizer's state from the others, and computes the update of all stages.
  The state lies in equal parts on the devices between steps.  To clip by the
  global norm, `OneProgram(clip_norm=...)` sends a number instead.

  Args:
    optimizer: any Optax chain without rounds or predicted weights, which stand
      outside.

  Returns:
    A transformation; outside of a pipeline it is `optimizer`.  `update` needs
    `params` in one.

  Raises:
    ValueError: at `init`, when `optimizer` has rounds or predicts weights.

  >>> clip = whole_model(optax.clip_by_global_norm(1.0))
  >>> g = {"a": jnp.array(3.0), "b": jnp.array(4.0)}
  >>> clipped, _ = clip.update(g, clip.init(g))
  >>> [round(x.item(), 6) for x in jax.tree.leaves(clipped)]
  [0.6, 0.8]
  """
  optimizer = optax.with_extra_args_support(
    checks.check_optimizer("optimizer", optimizer)
  )

  def init_fn(params: optax.Params) -> PyTree:
    layout = _LAYOUT.get()
    if layout is None:
      return optimizer.init(params)
    with layout_of(None):
      state = optimizer.init(layout.whole(params))
    check_state(state)
    return layout.cut(state)

  def update_fn(
    updates: optax.Updates,
    state: PyTree,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, PyTree]:
    layout = _LAYOUT.get()
    if layout is None:
      return optimizer.update(updates, state, params, **extra_args)
    # What agrees over stages has all of them here.
    with layout_of(None), collectives.model_parts(None):
      whole = layout.whole(params)
      like = jax.eval_shape(optimizer.init, whole)
      new, state = optimizer.update(
        layout.whole(updates), layout.joined(state, like), whole, **extra_args
      )
    return layout.own(new), layout.cut(state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def check_state(state: PyTree) -> None:
  """Raises a ValueError for a state with rounds or predicted weights."""

  def refused(x: Any) -> bool:
    predicts = isinstance(x, transforms.PredictWeightsState)
    return predicts or getattr(type(x), "rounds", False) is True

  for x in jax.tree.leaves(state, is_leaf=refused):
    if refused(x):
      raise ValueError(
        "`optimizer` must have neither rounds nor predicted weights where it "
        f"is given all stages' leaves, got one with {type(x).__name__}. Put "
        "`pipeline.whole_model` around the Optax chain inside of it: "
        "`local_sgd(whole_model(chain), 8, axis=axis)`, "
        "`predict_weights(whole_model(chain), delay)`."
      )
