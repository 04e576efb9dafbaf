"""Averages of gradients and losses over the workers: data parallelism."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import optax

from jdist import collectives, reducers, states
from jdist.states import PyTree
from jdist.transforms import _control
from jdist.transforms.local import _anchor

# The names under which optimizers receive a loss: ours, and Optax's.
LOSSES = ("loss", "value")


@states.declare(averages=True)
class AverageGradientsState(NamedTuple):
  """State without arrays; its declaration says that workers stay equal."""


def average_gradients(
  axis: collectives.Axis, compression: reducers.Compression | None = None
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces every worker's gradients by their mean.

  .. math:: g \leftarrow \frac{1}{N} \sum_{i=1}^{N} g_i

  As the first element of a chain it makes any Optax optimizer synchronous
  data-parallel training: the following transformations see the same numbers on
  all workers, so parameters and state stay equal to the bit.  A loss passes
  through; `training.make_step` gives the mean as `value`, as `ssgd` does.

  With a compression the mean takes fewer bytes.  All workers decode the same
  bytes, so that the result is still equal on all of them.  The state then is a
  `CompressionState`, whose first value may depend on the number of workers:
  make it where the axis is bound, for instance
  `workers.jit(optimizer.init)(params)`.

  Args:
    axis: The axis of the workers: None (one worker, does nothing), a name, or
      (inner, outer).
    compression: A compression, for instance
      `jdist.Compression(codecs.TopK(0.01), ErrorFeedback())`; None takes the
      mean exactly, in one all-reduce.

  Returns:
    A transformation whose updates have the shapes and dtypes of the gradients.
    A bfloat16 gradient is sent in bfloat16; with a compression without feedback
    it is sent in its parameter's dtype if the reducer's state depends on that.
    An exact mean of float16 is summed in float16, and may overflow.

  Raises:
    ValueError: If an argument is of another kind; when the state is made, if
      the reducer does not suit the parameters; at trace time, if the gradients
      are already summed because the parameters are shared over the axis.

  >>> import jax, jax.numpy as jnp
  >>> optimizer = optax.chain(average_gradients("worker"), optax.sgd(0.1))
  >>> def step(w, gradient):
  ...   updates, _ = optimizer.update(gradient, optimizer.init(w), w)
  ...   return optax.apply_updates(w, updates)
  >>> gradients = jnp.array([1.0, 3.0])  # Two workers have one each.
  >>> new = jax.vmap(step, axis_name="worker")(jnp.ones(2), gradients)
  >>> [round(w, 6) for w in new.tolist()]
  [0.8, 0.8]
  """
  collectives.check_axis(axis)
  reducers.Compression.check(compression)

  def init_fn(params: optax.Params) -> Any:
    if compression is None:
      return AverageGradientsState()
    return compression.init(_anchor.by_fast(params, params)[1], axis)

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    *,
    control: _control.Control = _control.DEVICE,
    **extra_args: Any,
  ) -> tuple[optax.Updates, Any]:
    del extra_args
    if compression is not None and control.drain == "residuals":
      # No update has had these residuals yet: they go into the feedback.
      return updates, compression.absorb(updates, state, axis)
    updates, params = _anchor.by_fast(updates, params)
    collectives.check_local(updates, axis, what="`updates`", like=params)
    if compression is None:
      return collectives.mean(updates, axis), state
    sent = _suited(updates, params, state, compression, axis)
    mean, state = compression.mean(sent, state, axis)
    return optax.tree.cast_like(mean, updates), state

  return _anchor.transformation(init_fn, update_fn)


def _suited(
  updates: optax.Updates,
  params: optax.Params | None,
  state: reducers.CompressionState,
  compression: reducers.Compression,
  axis: collectives.Axis,
) -> optax.Updates:
  """Casts gradients to the parameters' dtypes if a reducer's state needs it."""
  # A feedback computes in float32, whatever the gradients are.
  if params is None or compression.feedback is not None:
    return updates
  dtypes = [jnp.result_type(x) for x in jax.tree.leaves(params)]
  if [x.dtype for x in jax.tree.leaves(updates)] == dtypes:
    return updates
  # The state was laid out by the parameters.  If it would have the same layout
  # for these gradients, they can be sent as they are.
  made = jax.eval_shape(lambda x: compression.init(x, axis), updates)
  if _anchor.layout(made) == _anchor.layout(state):
    return updates
  return optax.tree.cast_like(updates, params)


def with_mean_loss(
  optimizer: optax.GradientTransformation, axis: collectives.Axis
) -> optax.GradientTransformationExtraArgs:
  """Gives an optimizer the workers' mean loss, if it uses a loss.

  The loss is passed as `loss` or `value`.  By a loss of its own each worker's
  plateau schedule, for instance, would update its replica differently.

  Raises:
    ValueError: At trace time, if the optimizer uses a given `grad` or
      `value_fn`, as a line search does: these stay each worker's own.
  """
  optimizer = _anchor.lenient(optimizer)
  if axis is None:
    return optimizer

  def update_fn(
    updates: optax.Updates,
    state: PyTree,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, PyTree]:
    if (asked := extra_args.get("value_fn")) is not None:
      # Optax reads from a function's signature which arguments to pass to it,
      # so that the replacement must have the same one.
      refuse = functools.partial(_refuse, "value_fn")
      extra_args["value_fn"] = functools.update_wrapper(refuse, asked)

    def update(**changed: Any) -> tuple[optax.Updates, PyTree]:
      return optimizer.update(updates, state, params, **(extra_args | changed))

    grad = extra_args.get("grad")
    if grad is not None and _depends(lambda x: update(grad=x), grad):
      _refuse("grad")
    # The mean of a loss that nothing uses is no part of the compiled program.
    losses = {name: extra_args[name] for name in LOSSES if name in extra_args}
    return update(**{k: collectives.mean(x, axis) for k, x in losses.items()})

  return optax.GradientTransformationExtraArgs(optimizer.init, update_fn)


def _refuse(name: str, *args: Any, **options: Any) -> NoReturn:
  """Raises a ValueError; also stands in for a function that is called."""
  del args, options
  raise ValueError(
    f"`{name}` must not be used behind a mean of gradients: it stays each "
    "worker's own, and the workers would drift apart. Take an optimizer "
    "without a line search, for instance `optax.lbfgs(linesearch=None)`. One "
    "that is equal on all workers passes "
    "`optax.chain(average_gradients(axis), optimizer)`."
  )


def _depends(update: Callable[[PyTree], PyTree], loss: PyTree) -> bool:
  """Returns whether an update uses the loss, by its traced program.

  >>> _depends(lambda loss: 2 * loss, jax.numpy.ones(()))
  True
  >>> _depends(lambda loss: jax.numpy.ones(()), jax.numpy.ones(()))
  False
  """
  traced = jax.make_jaxpr(update)(loss).jaxpr
  used = [*traced.outvars, *(x for e in traced.eqns for x in e.invars)]
  return any(one is given for one in used for given in traced.invars)
