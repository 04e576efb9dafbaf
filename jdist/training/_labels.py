"""The labels and the mask of a batch, and the samples that they leave."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks

PyTree = Any
# PyTorch's `ignore_index`, by which tokenizers mark prompts and padding.
IGNORED = -100


def labels_of(batch: PyTree) -> jax.Array:
  """Returns the classes to predict: labels of images, next tokens of texts."""
  if not isinstance(batch, Mapping) or not {"label", "targets"} & batch.keys():
    raise ValueError(
      "`batch` must have the classes to predict, `label` or with `tokens` "
      f"`targets`, got {checks.show(batch)}."
    )
  return batch["targets" if "tokens" in batch else "label"]


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
  mask, inside = mask_of(batch), None
  if mask is not None:
    inside = mask != 0
  if has_labels(batch) and (mask is None or mask.ndim <= labels_of(batch).ndim):
    inside = counted(batch)
  if inside is None:
    first = next(iter(jax.tree.leaves(batch)), None)
    shape = np.shape(first)
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
