"""One worker's training step, composed of a loss and an Optax chain."""

import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jdist import checks, collectives, states, transforms
from jdist.states import PyTree
from jdist.training import _gradient, _train_state

Metrics = _gradient.Metrics
# One worker's step: a state and a batch give the next state and metrics.
Step = Callable[..., tuple[_train_state.TrainState, Metrics]]


def make_step(
  loss_fn: _gradient.LossFn,
  optimizer: optax.GradientTransformation,
  *,
  axis: collectives.Axis,
  accumulate: int = 1,
  weighted: bool = False,
  independent: bool = False,
) -> Step:
  """Makes one worker's training step.

  The step differentiates the loss at this worker's own parameters, or where
  `transforms.predict_weights` expects the parameters to be, and updates. When a
  round ends, it also averages batch statistics. With a streamed method or
  `update_first` that mean would delay the hidden messages, so that `Evaluator`
  averages the statistics instead.

  Args:
    loss_fn: `(params, model_state, batch, key) -> loss, (model_state,
      metrics)`. The loss is a mean over the batch, and metrics are scalars.
    optimizer: Any Optax chain. It is given `loss=`, and the same as `value=`;
      without rounds that is the workers' mean, which is sent if it is used.
      With `transforms.update_first` a step begins with the previous update.
    axis: The workers' axis.
    accumulate: The number of micro-batches into which a batch is cut. Their
      gradients are averaged before the one update.
    weighted: Whether a worker counts by the samples of its batch, n: its loss,
      gradient, and change of batch statistics are multiplied by n over the
      workers' mean of n (a scalar all-reduce). A mean over the workers is then
      one over all samples, even if masks leave them different numbers.
    independent: Whether workers are meant never to communicate.

  Returns:
    `(state, batch, control=None) -> state, metrics` for one worker, to be run
    by `Workers.jit(step, donate_argnums=0)`. Metrics are this worker's own and
    are not sent. In addition to the loss's metrics there are `loss`, `rounds`,
    `interval`, with `skip_nonfinite` `skipped`, and `ahead_0`, ..., the place
    in its round of the step after next, from which a host chooses between
    programs. The static `control` is passed to the optimizer.

  Raises:
    ValueError: If `accumulate` is below 1; at trace time, if it does not divide
      a batch, if `update_first` is inside another transformation, or if the
      optimizer of several workers never communicates.
  """
  checks.check_choice("weighted", weighted, (True, False))
  gradient = _gradient.make_gradient(loss_fn, accumulate=accumulate)
  return step_by(
    gradient, optimizer, axis=axis, weighted=weighted, independent=independent
  )


def step_by(
  gradient: Callable[..., _gradient.Gradient],
  optimizer: optax.GradientTransformation,
  *,
  axis: collectives.Axis,
  weighted: bool = False,
  independent: bool = False,
) -> Step:
  """Makes the step of `make_step` from a function that gives the gradient."""
  first = optimizer if isinstance(optimizer, transforms.UpdateFirst) else None
  update = make_update(optimizer, axis=axis, independent=independent)

  def step(
    state: _train_state.TrainState,
    batch: PyTree,
    control: transforms.Control | None = None,
  ) -> tuple[_train_state.TrainState, Metrics]:
    # The key depends on the step and the worker alone, so that a resumed run
    # draws the same random numbers.
    key = jax.random.wrap_key_data(state.key)
    key = jax.random.fold_in(key, state.step)
    key = jax.random.fold_in(key, collectives.index(axis))
    if first is not None:
      params, opt_state = first.begin(state.params, state.opt_state)
      state = state._replace(params=params, opt_state=opt_state)
    read = transforms.predicted_weights(state.opt_state, state.params)
    found = gradient(read, state.model_state, batch, key)
    if weighted:
      found = _weighted(found, state.model_state, axis)
    return update(state, found, control)

  return step


def _weighted(
  gradient: _gradient.Gradient, before: PyTree, axis: collectives.Axis
) -> _gradient.Gradient:
  """Weights gradients and statistics by this worker's share of samples."""
  # A batch of padding on every worker has a mean of 0, and zero gradients.
  mean = jnp.maximum(collectives.mean(gradient.samples, axis), 1e-9)
  weight = gradient.samples / mean

  def changed(old: jax.Array, new: jax.Array) -> jax.Array:
    if not jnp.issubdtype(new.dtype, jnp.inexact):
      return new
    moved = old + _gradient.times(new - old, weight)
    # An infinity that stays, as that of a mask, has no difference.
    return jnp.where(new == old, new, moved)

  loss, grads = jax.tree.map(
    lambda x: _gradient.times(x, weight), (gradient.loss, gradient.grads)
  )
  return gradient._replace(
    loss=loss,
    grads=grads,
    model_state=jax.tree.map(changed, before, gradient.model_state),
  )


def make_update(
  optimizer: optax.GradientTransformation,
  *,
  axis: collectives.Axis,
  independent: bool = False,
) -> Step:
  """Makes the second half of a step, with the arguments of `make_step`.

  Returns:
    `(state, gradient, control=None) -> state, metrics`, with the result of
    `make_gradient` as the gradient.
  """
  collectives.check_axis(axis)
  checks.check_choice("independent", independent, (True, False))
  first = optimizer if isinstance(optimizer, transforms.UpdateFirst) else None
  optimizer = transforms.lenient(optimizer)

  def update(
    state: _train_state.TrainState,
    gradient: _gradient.Gradient,
    control: transforms.Control | None = None,
  ) -> tuple[_train_state.TrainState, Metrics]:
    checks.check_type("gradient", gradient, _gradient.Gradient, "a `Gradient`")
    params, opt_state = state.params, state.opt_state
    model_state, loss = gradient.model_state, gradient.loss
    if first is not None:
      if control not in (None, transforms.Control()):
        raise ValueError(
          "`control` must be None for `update_first`, which has neither rounds "
          f"nor a stream, got {control}. Leave it out."
        )
      opt_state = first.hold(gradient.grads, opt_state, loss=loss)
    else:
      if transforms.update_pending(opt_state):
        raise ValueError(
          "`optimizer` must be what `update_first` gives, with nothing around "
          "it: as a part of another transformation its update is one step "
          "late, and no longer synchronous SGD. Got "
          f"{type(opt_state).__name__} around its state; write "
          "`update_first(outer(optimizer), axis=axis)` in place of "
          "`outer(update_first(optimizer, axis=axis))`."
        )
      given = {} if control is None else {"control": control}
      if not independent:
        _check_communicates(optimizer, axis, gradient, opt_state, params)
      # Behind a mean workers must see one loss, which is sent if it is used.
      alike = not independent and transforms.synchronized(opt_state) is True
      value = collectives.mean(loss, axis) if alike else loss
      # An operation without an axis is an error in a team of several workers,
      # unless these are meant to be independent.
      with (
        collectives.team_of(None) if independent else contextlib.nullcontext()
      ):
        updates, opt_state = optimizer.update(
          gradient.grads, opt_state, params, loss=loss, value=value, **given
        )
      params = transforms.apply_updates(params, updates, opt_state)
      model_state = synchronize_statistics(
        model_state, opt_state, axis=axis, control=control, laws=state.laws
      )
    number = optax.safe_increment(state.step)
    metrics = gradient.metrics | {
      "loss": loss,
      "rounds": transforms.rounds(opt_state, number),
      "interval": jnp.asarray(transforms.interval(opt_state)),
    }
    if (skipped := transforms.skipped(opt_state)) is not None:
      metrics |= {"skipped": skipped}
    if (ahead := transforms.rounds_ahead(opt_state)) is not None:
      # The host reads metrics a step late, so it needs the place of the step
      # after next.
      places = ahead[..., 1, :].reshape(-1)
      metrics |= {f"ahead_{i}": place for i, place in enumerate(places)}
    new = state._replace(
      step=number, params=params, opt_state=opt_state, model_state=model_state
    )
    return new, metrics

  return update


def _check_communicates(
  optimizer: optax.GradientTransformationExtraArgs,
  axis: collectives.Axis,
  gradient: _gradient.Gradient,
  opt_state: PyTree,
  params: PyTree,
) -> None:
  """Raises a ValueError for an optimizer that leaves several workers apart."""
  if (size := collectives.size(axis)) == 1:
    return
  parts = filter(_skips, jax.tree.leaves(opt_state, is_leaf=_skips))
  if any(map(transforms.averages, parts)):
    raise ValueError(
      "`optimizer` must not skip a step of one worker alone around a mean, for "
      "which the others wait, nor go around it, as `optax.apply_if_finite`, "
      "`conditionally_transform`, `conditionally_mask`, and `MultiSteps` with "
      "`should_skip_update_fn` do. Put `transforms.skip_nonfinite(axis)` first "
      "into a chain instead, or the wrapper into the method."
    )
  if transforms.averages(opt_state):
    return
  # A transformation of the user may declare nothing, so it is traced once more.

  def update(grads: PyTree, loss: jax.Array) -> PyTree:
    return optimizer.update(grads, opt_state, params, loss=loss, value=loss)

  if not collectives.communicates(update, gradient.grads, gradient.loss):
    raise _train_state.silent_step_error("optimizer", size)


def _skips(state: PyTree) -> bool:
  """Returns whether a wrapper skips steps by this worker's gradients."""
  if isinstance(state, optax.MultiStepsState):
    return bool(jax.tree.leaves(state.skip_state))
  kinds = optax.ApplyIfFiniteState | optax.ConditionallyTransformState
  return isinstance(state, kinds | optax.ConditionallyMaskState)


def synchronize_statistics(
  model_state: PyTree,
  opt_state: PyTree,
  *,
  axis: collectives.Axis,
  control: transforms.Control | None = None,
  laws: states.Laws | tuple[()] = (),
) -> PyTree:
  """Averages batch statistics if the last update ended a round.

  `make_step` calls it after the update; a user's own step can do the same. With
  a streamed method or `update_first` the statistics stay each worker's own, and
  `Evaluator` averages them.

  Args:
    model_state: One worker's state, of which statistics are averaged, real and
      complex ones. Counters, keys and constants stay unchanged.
    opt_state: The state that `update` returned.
    axis: The workers' axis.
    control: The control that was given to this update, if any.
    laws: `TrainState.laws`.

  >>> from jdist import methods
  >>> optimizer = methods.local_sgd(optax.sgd(0.1), 2, axis="worker")
  >>> def step(w, mean):  # Runs both steps of a round.
  ...   state = optimizer.init(w)
  ...   _, state = optimizer.update(w, state, w)
  ...   first = synchronize_statistics({"mean": mean}, state, axis="worker")
  ...   _, state = optimizer.update(w, state, w)
  ...   last = synchronize_statistics(first, state, axis="worker")
  ...   return first["mean"], last["mean"]
  >>> first, last = jax.vmap(step, axis_name="worker")(
  ...   jnp.ones(2), jnp.array([1.0, 3.0])
  ... )
  >>> first.tolist(), last.tolist()
  ([1.0, 3.0], [2.0, 2.0])
  """
  later = transforms.streams(opt_state) or transforms.update_pending(opt_state)
  if later or not jax.tree.leaves(model_state):
    return model_state
  ends = None if control is None else control.round_ends
  together = transforms.synchronized(opt_state) if ends is None else ends
  if together is True:
    return transforms.mean_statistics(model_state, axis, laws=laws)
  if together is False:
    return model_state
  # `agreed` makes the predicate equal on all workers: under `vmap` a predicate
  # per worker would become a select, which runs the collective in every step.
  return jax.lax.cond(
    collectives.agreed(jnp.asarray(together), axis),
    lambda tree: transforms.mean_statistics(tree, axis, laws=laws),
    lambda tree: collectives.varying(tree, axis),
    model_state,
  )
