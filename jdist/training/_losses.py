"""Loss functions of a model on a batch, which a step differentiates."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist import checks, signatures, states
from jdist.states import PyTree
from jdist.training import _gradient

Metrics = _gradient.Metrics


@signatures.checked
def classification_loss(
  apply: signatures.Apply,
  *,
  normalize: Callable[[jax.Array], jax.Array] = lambda images: images,
  compute_dtype: signatures.Dtype = jnp.float32,
  augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> _gradient.LossFn:
  """Softmax cross-entropy of a model on images or on texts.

  Batches of images are `{"image", "label"}`. Batches of texts are `{"tokens",
  "targets"}`, and the loss is that of a language model:

    loss = -mean of log softmax(logits)[i, t, targets[i, t]] over i and t

  in nats. With a `"mask"` in the batch, 1 for samples and 0 for padding, loss
  and accuracy are means over the samples, and the model is given the mask. The
  mask of a text is that of samples [batch] or of tokens [batch, length].

  Args:
    apply: `(params, model_state, inputs, train=True) -> logits, model_state`,
      as in `jdist.models`. With masks it takes `mask=`.
    normalize: Turns stored images into the model's inputs.
    compute_dtype: The dtype in which the model computes, for instance
      `jnp.bfloat16`. Parameters, gradients and the loss stay float32, and
      tokens stay integers.
    augment: Changes stored images at random, `(images, key) -> images`, for
      instance `data.compose(data.random_crop(), data.random_flip())`.

  Returns:
    A loss for `make_step`, with the metric `accuracy`.

  >>> def apply(params, state, tokens, train):
  ...   return jnp.zeros((*tokens.shape, 4)) + params, state
  >>> batch = {"tokens": jnp.array([[0, 1]]), "targets": jnp.array([[1, 0]])}
  >>> loss_fn = classification_loss(apply)
  >>> loss, (_, found) = loss_fn(jnp.zeros(4), {}, batch, jax.random.key(0))
  >>> round(float(loss / jnp.log(2.0)), 3), found["accuracy"].item()
  (2.0, 0.5)
  """
  inputs_of = model_inputs(
    normalize=normalize, compute_dtype=compute_dtype, augment=augment
  )
  return model_loss(apply, inputs_of, compute_dtype)


def model_loss(
  apply: Callable[..., tuple[jax.Array, PyTree]],
  inputs_of: Callable[[PyTree, jax.Array], jax.Array],
  compute_dtype: Any,
) -> _gradient.LossFn:
  """Makes the loss of a model whose inputs a function of the batch returns."""

  def loss_fn(
    params: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
  ) -> tuple[jax.Array, tuple[PyTree, Metrics]]:
    # Only a batch with a mask passes it on, since not every model takes one.
    inputs, mask = inputs_of(batch, key), _gradient.mask_of(batch)
    given = {} if mask is None else {"mask": mask}
    checks.check_apply("apply", apply, *given)
    found = apply(
      cast(params, compute_dtype), model_state, inputs, train=True, **given
    )
    logits, model_state = checks.check_pair("apply", found, "logits, state")
    loss, metrics = label_loss(logits, batch)
    return loss, (model_state, metrics)

  return loss_fn


def model_inputs(
  *,
  normalize: Callable[[jax.Array], jax.Array] = lambda images: images,
  compute_dtype: Any = jnp.float32,
  augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> Callable[[PyTree, jax.Array], jax.Array]:
  """Makes a function that turns a batch and a random key into inputs.

  The inputs of texts are their `"tokens"`, unchanged. The arguments are those
  of `classification_loss`.
  """

  def inputs(batch: PyTree, key: jax.Array) -> jax.Array:
    _gradient.labels_of(batch)
    if "tokens" in batch:
      return batch["tokens"]
    images = checks.check_array("batch['image']", batch.get("image"))
    if augment is not None:
      images = checks.check_array("augment(images)", augment(images, key))
    images = checks.check_array("normalize(images)", normalize(images))
    # A cast to bfloat16 would merge the numbers of tokens above 256.
    tokens = jnp.issubdtype(images.dtype, jnp.signedinteger)
    return images if tokens else images.astype(compute_dtype)

  return inputs


def label_loss(logits: jax.Array, batch: PyTree) -> tuple[jax.Array, Metrics]:
  """Softmax cross-entropy of logits on a batch's labels, and the accuracy.

  The labels of texts are their targets. Loss and accuracy are means over the
  labels that count: those of the batch's `"mask"`, if it has one, except labels
  of -100, which PyTorch's `ignore_index` and most tokenizers mark as ignored.
  Over micro-batches, and over the workers of `make_step(weighted=True)`, a mean
  is weighted by their number. Any other label that is no class, such as -1,
  makes the loss and its gradient NaN, as nothing else in a compiled program can
  report it; `Evaluator`, which sees the labels on the host, refuses them.

  Args:
    logits: [batch, classes] or [batch, length, vocabulary], of any floating
      dtype.
    batch: A batch with `"label"` [batch], or with `"tokens"` and `"targets"`
      [batch, length].
  """
  losses, hits, inside = label_scores(logits, batch)
  return masked_mean(losses, inside), {"accuracy": masked_mean(hits, inside)}


def label_scores(
  logits: jax.Array, batch: PyTree
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the loss of each label, whether it is hit, and whether it counts.

  All three are in the shape of the labels; the first two are float32.
  """
  labels, inside = _gradient.labels_of(batch), _gradient.counted(batch)
  # In bfloat16 the sum over many classes would lose most digits of the loss.
  logits = checks.check_array("logits", logits).astype(jnp.float32)
  whole = jnp.issubdtype(labels.dtype, jnp.integer)
  if labels.shape != logits.shape[:-1] or not whole:
    raise ValueError(
      "`batch` must have the number of a class for each row of logits, got "
      f"labels {checks.show(labels)} for logits {checks.show(logits)}."
    )
  # One byte could not hold the number of 256 classes.
  labels = labels.astype(jnp.int32)
  classes = logits.shape[-1]
  wrong = inside & ((labels < 0) | (labels >= classes))
  known = jnp.clip(labels, 0, classes - 1)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, known)
  # The place of a NaN, which `argmax` returns, is no class.
  hits = (jnp.argmax(logits, -1) == labels) & ~jnp.isnan(losses)
  # A product, since a selected NaN would leave the gradient finite.
  losses = losses * jnp.where(wrong, jnp.nan, 1.0)
  return losses, hits.astype(jnp.float32), inside


@signatures.explained
def masked_mean(values: jax.Array, mask: jax.Array | None) -> jax.Array:
  """Averages [batch, ...] where `mask`, over its first axes, is not 0.

  The mean over padding alone is 0.

  >>> masked_mean(jnp.array([1.0, 3.0, 99.0]), jnp.array([1, 1, 0])).item()
  2.0
  """
  if mask is None:
    return values.mean()
  ones = (1,) * (values.ndim - mask.ndim)
  inside = mask.astype(bool).reshape(*mask.shape, *ones)
  inside = jnp.broadcast_to(inside, values.shape)
  # Padding may have produced inf or NaN, and 0 * inf would be NaN. Hence a
  # selection, not a product.
  chosen = jnp.where(inside, values, jnp.zeros((), values.dtype))
  floats = jnp.issubdtype(values.dtype, jnp.inexact)
  of = values.dtype if floats else jnp.float32
  # Sums and counts do not fit into 16 bits.
  total = chosen.sum(dtype=states.wide_dtype(of))
  count = jnp.maximum(inside.sum(dtype=jnp.float32), 1.0)
  return (total / count.astype(total.dtype)).astype(of)


@signatures.explained
@signatures.checked
def cast(tree: PyTree, dtype: signatures.Dtype) -> PyTree:
  """Casts the floating leaves of a tree to another dtype.

  >>> cast({"w": jnp.ones(2), "n": jnp.array(1)}, jnp.bfloat16)["w"].dtype
  dtype(bfloat16)
  """
  return jax.tree.map(
    lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
    tree,
  )
