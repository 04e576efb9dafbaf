"""One worker's training step, composed of a loss and an Optax chain."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist import collectives, transforms
from jdist.training import _train_state

PyTree = Any
Metrics = dict[str, jax.Array]
# (params, model_state, batch, key) -> loss, (model_state, metrics)
LossFn = Callable[
  [PyTree, PyTree, PyTree, jax.Array],
  tuple[jax.Array, tuple[PyTree, Metrics]],
]
Step = Callable[..., tuple[_train_state.TrainState, Metrics]]


def make_step(
  loss_fn: LossFn,
  optimizer: optax.GradientTransformation,
  *,
  axis: collectives.Axis,
  accumulate: int = 1,
) -> Step:
  """Makes what one worker does in a training step.

  Differentiates the loss on this worker's own parameters and batch, updates,
  ends rounds exactly on the anchor, and averages batch statistics whenever
  the workers come together.  Of a streamed method and of `update_first` it
  leaves them to each worker: their mean would hold up what is to be hidden
  (compilers merge it with other all-reduces, and all then wait for the merged
  one), no training step reads them, and running averages are linear, so that
  their mean at an evaluation, which `Evaluator` takes, is the same.

  Args:
    loss_fn: `(params, model_state, batch, key) -> loss, (model_state,
      metrics)`; the loss is a mean over the batch, metrics are scalars.
    optimizer: any Optax chain; it is given `loss=`.  With one from
      `transforms.update_first` the step begins with the last one's update.
    axis: the workers' axis.
    accumulate: into how many micro-batches a batch is cut; their gradients
      are averaged before the one update, so neither the optimizer's schedules
      nor local steps count them.

  Returns:
    `(state, batch) -> state, metrics` for one worker, to be run by
    `Workers.jit(step, donate_argnums=0)`.  Metrics are this worker's own and
    send nothing; besides the loss's there are `loss`, `rounds` and
    `interval`, and for a host that chooses between programs `ahead_0`, ..., the
    place in its round of the step after next.  The step passes the static
    `control` on to the optimizer.

  Raises:
    ValueError: when `accumulate` is below 1; at trace time, when it does not
      divide a batch, or `update_first` is inside another transformation.
  """
  if accumulate < 1:
    raise ValueError(f"`accumulate` must be at least 1, got {accumulate}.")
  first = optimizer if isinstance(optimizer, transforms.UpdateFirst) else None
  optimizer = optax.with_extra_args_support(optimizer)
  differentiate = jax.value_and_grad(loss_fn, has_aux=True)

  def step(
    state: _train_state.TrainState,
    batch: PyTree,
    control: transforms.Control | None = None,
  ) -> tuple[_train_state.TrainState, Metrics]:
    key = jax.random.wrap_key_data(state.key)
    key = jax.random.fold_in(key, state.step)
    key = jax.random.fold_in(key, collectives.index(axis))
    params, opt_state, model_state = (
      state.params,
      state.opt_state,
      state.model_state,
    )
    if first is not None:
      if control not in (None, transforms.Control()):
        raise ValueError(
          "`control` must be None for `update_first`, which has neither rounds "
          f"nor a stream, got {control}. Leave it out."
        )
      params, opt_state = first.begin(params, opt_state)
    elif transforms.update_pending(opt_state):
      raise ValueError(
        "`optimizer` must be what `update_first` gives, with nothing around "
        "it: as a part of another transformation its update is one step late, "
        f"and no longer synchronous SGD. Got {type(opt_state).__name__} around "
        "its state; write `update_first(outer(optimizer), axis=axis)` in place "
        "of `outer(update_first(optimizer, axis=axis))`."
      )
    if accumulate == 1:
      (loss, (model_state, metrics)), grads = differentiate(
        params, model_state, batch, key
      )
    else:
      loss, model_state, metrics, grads = _accumulated(
        differentiate,
        state._replace(params=params, model_state=model_state),
        batch,
        key,
        accumulate,
      )
    if first is not None:
      opt_state = first.hold(grads, opt_state, loss=loss)
    else:
      given = {} if control is None else {"control": control}
      updates, opt_state = optimizer.update(
        grads, opt_state, params, loss=loss, **given
      )
      params = transforms.apply_updates(params, updates, opt_state)
      if not transforms.streams(opt_state):
        ends = None if control is None else control.round_ends
        model_state = _synchronized(model_state, opt_state, axis, ends=ends)
    number = optax.safe_increment(state.step)
    metrics = metrics | {
      "loss": loss,
      "rounds": transforms.rounds(opt_state, number),
      "interval": jnp.asarray(transforms.interval(opt_state)),
    }
    if (ahead := transforms.rounds_ahead(opt_state)) is not None:
      # Where in its round the step after next is.
      places = ahead[..., 1, :].reshape(-1)
      metrics |= {f"ahead_{i}": place for i, place in enumerate(places)}
    new = _train_state.TrainState(
      step=number,
      params=params,
      opt_state=opt_state,
      model_state=model_state,
      key=state.key,
    )
    return new, metrics

  return step


def _synchronized(
  model_state: PyTree,
  opt_state: PyTree,
  axis: collectives.Axis,
  *,
  ends: bool | None,
) -> PyTree:
  """Averages batch statistics if the workers have just come together.

  Args:
    model_state: with the statistics.
    opt_state: which knows.
    axis: the workers' axis.
    ends: what the host has said, None if it has said nothing.
  """
  if not jax.tree.leaves(model_state):
    return model_state
  together = transforms.synchronized(opt_state) if ends is None else ends
  if together is True:
    return mean_statistics(model_state, axis)
  if together is False:
    return model_state
  return jax.lax.cond(
    collectives.agreed(jnp.asarray(together), axis),
    lambda tree: mean_statistics(tree, axis),
    lambda tree: collectives.varying(tree, axis),
    model_state,
  )


def mean_statistics(model_state: PyTree, axis: collectives.Axis) -> PyTree:
  """Averages what is a number; counters and keys stay each worker's own."""
  leaves, structure = jax.tree.flatten(model_state)
  chosen = [
    i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)
  ]
  means = collectives.mean([leaves[i] for i in chosen], axis)
  leaves = collectives.varying(leaves, axis)
  for i, value in zip(chosen, means, strict=True):
    leaves[i] = value
  return jax.tree.unflatten(structure, leaves)


def _accumulated(
  differentiate: Callable[..., Any],
  state: _train_state.TrainState,
  batch: PyTree,
  key: jax.Array,
  accumulate: int,
) -> tuple[jax.Array, PyTree, Metrics, PyTree]:
  """Loss, model state, metrics and gradients over micro-batches."""

  def cut(x: jax.Array) -> jax.Array:
    if x.ndim == 0 or x.shape[0] % accumulate:
      raise ValueError(
        f"`accumulate={accumulate}` must divide the batch, got an array of "
        f"shape {x.shape}."
      )
    return x.reshape(accumulate, x.shape[0] // accumulate, *x.shape[1:])

  def micro(carry: PyTree, xs: PyTree) -> tuple[PyTree, None]:
    model_state, sums = carry
    part, number = xs
    (loss, (model_state, metrics)), grads = differentiate(
      state.params, model_state, part, jax.random.fold_in(key, number)
    )
    sums = jax.tree.map(jnp.add, sums, _wide((loss, metrics, grads)))
    return (model_state, sums), None

  parts = jax.tree.map(cut, batch)
  first = jax.tree.map(lambda x: x[0], parts)
  shapes = jax.eval_shape(
    differentiate, state.params, state.model_state, first, key
  )
  (loss, (_, metrics)), grads = shapes
  # Zeros made of each worker's own values, so that the scan's carry has one
  # type from the first turn on.
  own = state.step.astype(jnp.float32) * 0
  zeros = jax.tree.map(
    lambda x: (
      jnp.zeros(x.shape, _wide_dtype(x.dtype))
      + own.astype(_wide_dtype(x.dtype))
    ),
    (loss, metrics, grads),
  )
  (model_state, sums), _ = jax.lax.scan(
    micro,
    (state.model_state, zeros),
    (parts, jnp.arange(accumulate)),
    # XLA's CPU loops run convolutions slowly, and a GPU gains nothing from
    # unrolling but compile time.
    unroll=jax.default_backend() == "cpu",
  )
  means = jax.tree.map(lambda x: x / accumulate, sums)
  loss, metrics, means = means
  grads = jax.tree.map(lambda m, g: m.astype(g.dtype), means, grads)
  return loss, model_state, metrics, grads


def _wide_dtype(dtype: Any) -> Any:
  narrow = not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 4
  return jnp.float32 if narrow else dtype


def _wide(tree: PyTree) -> PyTree:
  return jax.tree.map(lambda x: x.astype(_wide_dtype(x.dtype)), tree)


def classification_loss(
  apply: Callable[..., tuple[jax.Array, PyTree]],
  *,
  normalize: Callable[[jax.Array], jax.Array] = lambda images: images,
  compute_dtype: Any = jnp.float32,
  label_smoothing: float = 0.0,
  augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> LossFn:
  """Softmax cross-entropy of a model on `{"image", "label"}` batches.

  Args:
    apply: `(params, model_state, images, train=True) -> logits, model_state`,
      as of `jdist.models`.
    normalize: turns stored images into the model's inputs.
    compute_dtype: the dtype in which the model computes, for instance
      `jnp.bfloat16`; parameters, gradients and the loss stay float32.
    label_smoothing: in [0, 1).
    augment: changes stored images at random, `(images, key) -> images`, for
      instance `data.compose(data.random_crop(), data.random_flip())`.

  Returns:
    A loss for `make_step`, with the metric `accuracy`.
  """
  if not 0 <= label_smoothing < 1:
    raise ValueError(
      f"`label_smoothing` must be in [0, 1), got {label_smoothing}."
    )

  def loss_fn(
    params: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
  ) -> tuple[jax.Array, tuple[PyTree, Metrics]]:
    images = batch["image"]
    if augment is not None:
      images = augment(images, key)
    images = as_inputs(normalize(images), compute_dtype)
    logits, model_state = apply(
      cast(params, compute_dtype), model_state, images, train=True
    )
    logits = logits.astype(jnp.float32)
    targets = optax.smooth_labels(
      jax.nn.one_hot(batch["label"], logits.shape[-1]), label_smoothing
    )
    loss = optax.softmax_cross_entropy(logits, targets).mean()
    hits = jnp.argmax(logits, -1) == batch["label"]
    accuracy = hits.astype(jnp.float32).mean()
    return loss, (model_state, {"accuracy": accuracy})

  return loss_fn


def as_inputs(inputs: jax.Array, dtype: Any) -> jax.Array:
  """Inputs in the dtype of computation; token numbers stay what they are."""
  tokens = jnp.issubdtype(inputs.dtype, jnp.signedinteger)
  return inputs if tokens else inputs.astype(dtype)


def cast(tree: PyTree, dtype: Any) -> PyTree:
  """The floating leaves in another dtype.

  >>> cast({"w": jnp.ones(2), "n": jnp.array(1)}, jnp.bfloat16)["w"].dtype
  dtype(bfloat16)
  """
  return jax.tree.map(
    lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
    tree,
  )
