"""One worker's gradient, the first half of a step, and its batch's labels."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks, states
from jdist.states import PyTree

# PyTorch's `ignore_index`, by which tokenizers mark prompts and padding.
IGNORED = -100
Metrics = dict[str, jax.Array]
# (params, model_state, batch, key) -> loss, (model_state, metrics)
LossFn = Callable[
  [PyTree, PyTree, PyTree, jax.Array], tuple[jax.Array, tuple[PyTree, Metrics]]
]


class Gradient(NamedTuple):
  """A worker's gradient and the other results of the loss.

  Attributes:
    grads: The gradients, a tree like the parameters.
    loss: The mean loss over the samples, a scalar.
    samples: The number of samples without padding, a float32 scalar.
    model_state: The model's state, with the batch's statistics.
    metrics: The scalars that the loss returned.
  """

  grads: PyTree
  loss: jax.Array
  samples: jax.Array
  model_state: PyTree
  metrics: Metrics


def make_gradient(
  loss_fn: LossFn, *, accumulate: int = 1
) -> Callable[..., Gradient]:
  """Makes a function that computes one worker's gradient.

  `make_step` combines it with `make_update`. A worker of a parameter server
  uses it alone.

  Args:
    loss_fn: As in `make_step`.
    accumulate: The number of micro-batches into which a batch is cut. Their
      gradients are averaged, weighted by their samples, see `num_samples`.

  Returns:
    `(params, model_state, batch, key) -> Gradient`.

  >>> def loss_fn(params, model_state, batch, key):
  ...   return jnp.mean((params - batch["x"]) ** 2), (model_state, {})
  >>> found = make_gradient(loss_fn)(
  ...   jnp.array(1.0), {}, {"x": jnp.array([2.0, 4.0])}, jax.random.key(0)
  ... )
  >>> found.grads.item(), found.samples.item()
  (-4.0, 2.0)
  """
  accumulate = checks.check_structural("accumulate", accumulate, minimum=1)
  arguments = "params, model_state, batch, key"
  checks.check_function("loss_fn", loss_fn, arguments, 4)

  def checked(params: PyTree, before: PyTree, *given: Any) -> Any:
    # A copy, since Equinox lets a program use a `State` only once.
    found = loss_fn(params, jax.tree.map(lambda x: x, before), *given)
    match found:
      case tuple((loss, tuple((after, metrics)))):
        check_loss("loss_fn", loss, metrics)
        rule = "`loss_fn` must return `model_state` in its form"
        checks.check_form(rule, after, before, exact=True)
        return found
    raise ValueError(
      "`loss_fn` must return `loss, (model_state, metrics)`, got "
      f"{checks.show(found)}. Without batch statistics and metrics: `loss, "
      "(model_state, {})`."
    )

  # Integer leaves, for instance counters in a tree of parameters, are allowed.
  value_and_grad = jax.value_and_grad(checked, has_aux=True, allow_int=True)

  def differentiate(params: PyTree, *given: Any) -> tuple[Any, PyTree]:
    found, grads = value_and_grad(params, *given)
    return found, jax.tree.map(_number, params, grads)

  run = differentiate
  if accumulate > 1:
    run = functools.partial(_accumulated, differentiate, accumulate)

  def gradient(
    params: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
  ) -> Gradient:
    samples = num_samples(batch)
    found, grads = run(params, model_state, batch, key)
    loss, (model_state, metrics) = found
    return Gradient(grads, loss, samples, model_state, metrics)

  return gradient


def check_loss(name: str, loss: Any, metrics: Any) -> None:
  """Raises a ValueError unless a function's loss is a float, with metrics."""
  kind = jnp.result_type(loss) if checks.is_number(loss) else object
  named = isinstance(metrics, Mapping) and {str} >= {type(x) for x in metrics}
  if not (named and jnp.issubdtype(kind, jnp.floating)):
    raise ValueError(
      f"`{name}` must return one float as its loss, and a dict of metrics, got "
      f"{checks.show(loss)} and {checks.show(metrics)}. Take the mean over the "
      "batch, and texts as the metrics' names."
    )
  checks.check_arrays("metrics", metrics, keys=False)


def _number(param: jax.Array, gradient: Any) -> jax.Array:
  """Returns an array of zeros for an integer's gradient, of dtype float0."""
  if gradient.dtype == jax.dtypes.float0:
    dtype = jnp.int32 if states.is_key(param) else jnp.asarray(param).dtype
    return jnp.zeros(gradient.shape, dtype)
  return gradient


def _accumulated(
  differentiate: Callable[..., Any],
  accumulate: int,
  params: PyTree,
  model_state: PyTree,
  batch: PyTree,
  key: jax.Array,
) -> tuple[Any, PyTree]:
  """Returns the results of `differentiate` over micro-batches."""
  masked = mask_of(batch) is not None
  weighted = masked or has_labels(batch)

  def cut(x: jax.Array) -> jax.Array:
    if x.ndim == 0 or x.shape[0] % accumulate:
      raise ValueError(
        f"`accumulate={accumulate}` must divide the batch, got an array of "
        f"shape {x.shape}."
      )
    return x.reshape(accumulate, x.shape[0] // accumulate, *x.shape[1:])

  def weight(part: PyTree) -> jax.Array:
    # Without a mask weights are shares: they are 1, and change no bit, unless
    # labels are ignored.
    return num_samples(part) / (1 if masked else len(labels_of(part)))

  def micro(carry: PyTree, xs: PyTree) -> tuple[PyTree, None]:
    before, sums = carry
    part, number = xs
    (loss, (model_state, metrics)), grads = differentiate(
      params, before, part, jax.random.fold_in(key, number)
    )
    found = jax.tree.map(
      lambda x: jnp.asarray(x, _wide_dtype(jnp.result_type(x))),
      (loss, metrics, grads),
    )
    if weighted:
      # A mean over all samples weights each micro-batch by its own samples.
      count = weight(part)
      found = jax.tree.map(lambda x: times(x, count), found)
      # Padding alone has no statistics; counters advance on all workers.
      model_state = jax.tree.map(
        lambda old, new: (
          jnp.where(count > 0, new, old)
          if jnp.issubdtype(jnp.result_type(new), jnp.inexact)
          else new
        ),
        before, model_state,
      )  # fmt: skip
    return (model_state, jax.tree.map(jnp.add, sums, found)), None

  parts = jax.tree.map(cut, batch)
  first = jax.tree.map(lambda x: x[0], parts)
  shapes = jax.eval_shape(differentiate, params, model_state, first, key)
  (loss, (_, metrics)), grads = shapes
  # A scan's carry must keep its type. Under `shard_map` gradients vary over the
  # workers, so the initial zeros are derived from a value that varies, too.
  own = jax.random.key_data(key).ravel()[0].astype(jnp.float32) * 0
  zeros = jax.tree.map(
    lambda x: jnp.broadcast_to(own.astype(_wide_dtype(x.dtype)), x.shape),
    (loss, metrics, grads),
  )
  (model_state, sums), _ = jax.lax.scan(
    micro,
    (model_state, zeros),
    (parts, jnp.arange(accumulate)),
    # XLA's CPU compiler runs convolutions inside loops slowly. On a GPU
    # unrolling would only cost compile time.
    unroll=jax.default_backend() == "cpu",
  )
  count: Any = accumulate
  if weighted:
    count = jax.vmap(weight)(parts).sum()
    count = jnp.where(count > 0, count, 1.0)
  loss, metrics, means = jax.tree.map(lambda x: x / count, sums)
  grads = jax.tree.map(lambda m, g: m.astype(g.dtype), means, grads)
  return (loss, (model_state, metrics)), grads


def times(x: jax.Array, count: jax.Array) -> jax.Array:
  """Returns x times a count of samples; 0 without any, also of a NaN."""
  # The mean of a user over no sample is 0 / 0.
  wide = states.wide(x)
  found = (wide * count.astype(wide.dtype)).astype(x.dtype)
  return jnp.where(count > 0, found, jnp.zeros_like(x))


# Sums over many micro-batches would lose digits in a narrower dtype.
def _wide_dtype(dtype: Any) -> Any:
  # Metrics may be counts, whose mean is a float.
  is_inexact = jnp.issubdtype(dtype, jnp.inexact)
  return states.wide_dtype(dtype) if is_inexact else jnp.float32


def labels_of(batch: PyTree) -> jax.Array:
  """Returns the classes to predict: labels of images, next tokens of texts."""
  if not isinstance(batch, Mapping) or not {"label", "targets"} & batch.keys():
    raise ValueError(
      "`batch` must have the classes to predict, `label` or with `tokens` "
      f"`targets`, got {checks.show(batch)}."
    )
  name = "targets" if "tokens" in batch else "label"
  return checks.check_array(name, batch[name])


def mask_of(batch: PyTree) -> Any:
  """Returns the batch's mask, or None if it has none."""
  return batch.get("mask") if isinstance(batch, Mapping) else None


def counted(batch: PyTree) -> Any:
  """Returns which labels enter a mean, bools in the shape of the labels.

  The labels have a mask that is not 0, and are not `IGNORED`.
  """
  labels, mask = labels_of(batch), mask_of(batch)
  # An unsigned label cannot be -100, and NumPy refuses the comparison.
  signed = jnp.issubdtype(labels.dtype, jnp.signedinteger)
  known = labels != IGNORED if signed else labels == labels
  if mask is None:
    return known
  if mask.shape != labels.shape[: mask.ndim]:
    raise ValueError(
      "`mask` must have one entry a sample, or a token, got "
      f"{checks.show(mask)} for labels {checks.show(labels)}."
    )
  # A mask of samples holds for all tokens of a sample.
  return known & (mask != 0).reshape(
    *mask.shape, *(1,) * (labels.ndim - mask.ndim)
  )


def num_samples(batch: PyTree) -> jax.Array:
  """Counts a batch's samples by its mask and labels, or by its first array.

  Labels of -100 do not count, see `label_loss`: a text of which half the
  targets are ignored is half a sample. With a mask of tokens, tokens count.
  """
  return jnp.asarray(sample_counts(batch), jnp.float32)


def sample_counts(batch: PyTree, leading: int = 0) -> Any:
  """Counts the samples of each part of a batch `[*leading, n, ...]`.

  NumPy arrays are counted on the host.
  """
  mask = mask_of(batch)
  inside = None if mask is None else mask != 0
  if has_labels(batch) and (mask is None or mask.ndim <= labels_of(batch).ndim):
    inside = counted(batch)
  if inside is None:
    shape = np.shape(next(iter(jax.tree.leaves(batch)), None))
    return np.full(shape[:leading], (*shape, 1)[leading], np.float32)
  # Several labels of one sample count for it together.
  labels = inside.shape[leading + 1 if mask is None else mask.ndim :]
  axes = tuple(range(leading, inside.ndim))
  return inside.sum(axes, dtype=np.float32) / math.prod(labels)


def has_labels(batch: PyTree) -> bool:
  """Returns whether a batch has classes to predict, as `label_loss` does."""
  if not isinstance(batch, Mapping):
    return False
  labels = batch.get("targets" if "tokens" in batch else "label")
  return jnp.issubdtype(getattr(labels, "dtype", float), jnp.integer)
