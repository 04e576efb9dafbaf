"""Optimizers that see a whole model whose leaves lie on several devices."""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist import checks, collectives
from jdist.pipeline.runtime import _chain_check, _stage_arrays, _stages

PyTree = Any


class Layout:
  """Converts between a device's leaves and those of the whole model.

  An optimizer's state of the whole model is stored in equal parts on the
  devices: an array as `[size / devices]`, a scalar as it is.
  """

  def __init__(
    self,
    stages: Sequence[_stages.LayerLike],
    params: _stage_arrays.StageArrays,
    axis: str | None,
  ):
    """Takes the layout of parameters; `axis` is None to find shapes alone."""
    self._stages, self._params, self._axis = stages, params, axis

  def whole(self, own: PyTree) -> PyTree:
    """Gathers all stages' leaves, nested as in the unsplit model."""
    return _stages.merge(self._params.split(jax.tree.map(self._gather, own)))

  def own(self, whole: PyTree) -> PyTree:
    """Undoes `whole`."""
    arrays = self._params.join(
      [_stages.pick(whole, x.params) for x in self._stages]
    )
    device = collectives.index(self._axis)
    return jax.tree.map(lambda x: x[device], arrays)

  def cut(self, state: PyTree) -> PyTree:
    """Returns a device's part of a state that all of them have."""
    number = self._params.num_devices
    device = collectives.index(self._axis)

    def part(x: jax.Array) -> jax.Array:
      if not x.ndim:
        return x
      # Parts are padded, as all devices must hold arrays of one size.
      size = math.ceil(x.size / number)
      flat = jnp.pad(jnp.ravel(x), (0, number * size - x.size))
      return flat.reshape(number, size)[device]

    return jax.tree.map(part, state)

  def joined(self, parts: PyTree, like: PyTree) -> PyTree:
    """Undoes `cut`, given the shapes of the whole state."""

    def join(x: jax.Array, one: Any) -> jax.Array:
      if not one.ndim:
        return x
      return jnp.ravel(self._gather(x))[: one.size].reshape(one.shape)

    return jax.tree.map(join, parts, like)

  def _gather(self, x: jax.Array) -> jax.Array:
    if self._axis is not None:
      return jax.lax.all_gather(x, self._axis)
    return jnp.broadcast_to(x, (self._params.num_devices, *x.shape))


# An Optax chain has no argument by which a layout could reach a transformation
# inside of it, so the layout is a variable of the trace.
_LAYOUT: contextvars.ContextVar[Layout | None] = contextvars.ContextVar(
  "layout of a model over devices", default=None
)


@contextlib.contextmanager
def layout_of(layout: Layout | None) -> Iterator[None]:
  """Sets the layout for the optimizers that are traced inside."""
  token = _LAYOUT.set(layout)
  try:
    yield
  finally:
    _LAYOUT.reset(token)


def whole_model(
  optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  r"""Gives an optimizer the leaves of all stages, under their own names.

  In a pipeline of one program a device's optimizer sees the leaves of its own
  stages and communicates nothing, which suffices for most chains.  A chain that
  decides by all leaves (a global norm, a flag, a line search) or by a layer's
  name (a mask, a partition) would act differently than on the unsplit model.
  Inside of this wrapper it acts the same.

  `OneProgram` wraps chains with such a part of Optax's automatically.  Wrap by
  hand a transformation of your own, or one that stages of unlike shapes refuse
  (Muon, LARS).  Put the wrapper inside of a transformation that communicates,
  `local_sgd(whole_model(optimizer), 8, axis=axis)`: then workers exchange each
  device's own leaves only.

  The cost: in every step each device gathers gradients, parameters and this
  optimizer's state from the others and computes the update of all stages.
  Between steps the state is stored in equal parts on the devices.  To clip by
  the global norm, `OneProgram(clip_norm=...)` sends a single number instead.

  Args:
    optimizer: Any Optax chain without rounds or predicted weights; those
      belong outside of the wrapper.

  Returns:
    A transformation, which outside of a pipeline is `optimizer`.  In a pipeline
    `update` needs `params`.

  Raises:
    ValueError: At `init`, if `optimizer` has rounds or predicts weights.

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
    # A nested `whole_model` sees the whole model already.
    with layout_of(None):
      state = optimizer.init(layout.whole(params))
    _chain_check.check_state(state)
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
    # A transformation that agrees over stages by a collective has all of them
    # here already.
    with layout_of(None), collectives.model_parts(None):
      whole = layout.whole(params)
      like = jax.eval_shape(optimizer.init, whole)
      new, state = optimizer.update(
        layout.whole(updates), layout.joined(state, like), whole, **extra_args
      )
    return layout.own(new), layout.cut(state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
