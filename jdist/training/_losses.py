"""Losses: a model's error on a batch, as a step differentiates it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

PyTree = Any
Metrics = dict[str, jax.Array]
# (params, model_state, batch, key) -> loss, (model_state, metrics)
LossFn = Callable[
  [PyTree, PyTree, PyTree, jax.Array],
  tuple[jax.Array, tuple[PyTree, Metrics]],
]


def classification_loss(
  apply: Callable[..., tuple[jax.Array, PyTree]],
  *,
  normalize: Callable[[jax.Array], jax.Array] = lambda images: images,
  compute_dtype: Any = jnp.float32,
  label_smoothing: float = 0.0,
  augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> LossFn:
  """Softmax cross-entropy of a model on `{"image", "label"}` batches.

  With a `"mask"` in the batch, 1 for samples and 0 for padding, loss and
  accuracy are means over the samples, and the model is given the mask.

  Args:
    apply: `(params, model_state, images, train=True) -> logits, model_state`,
      as of `jdist.models`; with masks it takes `mask=`.
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

  inputs_of = model_inputs(
    normalize=normalize, compute_dtype=compute_dtype, augment=augment
  )

  def loss_fn(
    params: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
  ) -> tuple[jax.Array, tuple[PyTree, Metrics]]:
    mask = batch.get("mask")
    given = {} if mask is None else {"mask": mask}
    logits, model_state = apply(
      cast(params, compute_dtype),
      model_state,
      inputs_of(batch, key),
      train=True,
      **given,
    )
    loss, metrics = label_loss(logits, batch, label_smoothing=label_smoothing)
    return loss, (model_state, metrics)

  return loss_fn


def model_inputs(
  *,
  normalize: Callable[[jax.Array], jax.Array] = lambda images: images,
  compute_dtype: Any = jnp.float32,
  augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> Callable[[PyTree, jax.Array], jax.Array]:
  """Makes what turns a batch and a random key into a model's inputs.

  Args:
    normalize: as of `classification_loss`.
    compute_dtype: likewise.
    augment: likewise.
  """

  def inputs(batch: PyTree, key: jax.Array) -> jax.Array:
    images = batch["image"]
    if augment is not None:
      images = augment(images, key)
    return as_inputs(normalize(images), compute_dtype)

  return inputs


def label_loss(
  logits: jax.Array, batch: PyTree, *, label_smoothing: float = 0.0
) -> tuple[jax.Array, Metrics]:
  """Softmax cross-entropy of logits on a batch's labels, and the accuracy.

  Both are means over the samples, those of the batch's `"mask"` if it has one.

  Args:
    logits: [batch, classes], of any floating dtype; the loss is float32.
    batch: with `"label"` [batch].
    label_smoothing: in [0, 1).
  """
  logits, mask = logits.astype(jnp.float32), batch.get("mask")
  targets = optax.smooth_labels(
    jax.nn.one_hot(batch["label"], logits.shape[-1]), label_smoothing
  )
  losses = optax.softmax_cross_entropy(logits, targets)
  hits = jnp.argmax(logits, -1) == batch["label"]
  accuracy = masked_mean(hits.astype(jnp.float32), mask)
  return masked_mean(losses, mask), {"accuracy": accuracy}


def masked_mean(values: jax.Array, mask: jax.Array | None) -> jax.Array:
  """Averages [batch, ...] over the samples, where `mask` [batch] is not 0.

  Of padding alone the mean is 0.

  >>> masked_mean(jnp.array([1.0, 3.0, 99.0]), jnp.array([1, 1, 0])).item()
  2.0
  """
  if mask is None:
    return values.mean()
  inside = mask.astype(bool).reshape(-1, *(1,) * (values.ndim - 1))
  inside = jnp.broadcast_to(inside, values.shape)
  # Selected, not multiplied: padding may have given an inf.
  total = jnp.where(inside, values, jnp.zeros((), values.dtype)).sum()
  count = jnp.maximum(inside.sum(dtype=jnp.float32), 1.0)
  return total / count.astype(values.dtype)


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
