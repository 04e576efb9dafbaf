"""A model in stages, with the shapes that its stages pass on.

Both runtimes run a stage, weigh micro-batches and derive random keys by the
functions of this file, so that they compute the same numbers.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist import checks, training
from jdist.pipeline.runtime import _stages
from jdist.pipeline.schedule._table import Table
from jdist.states import PyTree

# (outputs of the last stage, micro-batch) -> loss, metrics
OutputLoss = Callable[[Any, PyTree], tuple[jax.Array, dict[str, jax.Array]]]


@dataclasses.dataclass(frozen=True, eq=False)
class TracedModel:
  """A model's stages and loss, and the shapes of their results.

  Attributes:
    stages: The stages of the model.
    loss: The loss of the last stage's outputs.
    inputs: Gives the first stage's inputs from a micro-batch and its key.
    microbatch: The shapes of one micro-batch.
    clip_norm: The greatest norm of the mean gradient of all stages, or None.
    between: The shapes of what each stage but the last passes on.
    loss_dtype: The dtype of the loss.
    metric_names: The names of the metrics, `"loss"` first.
  """

  stages: tuple[_stages.LayerLike, ...]
  loss: OutputLoss
  inputs: Callable[[PyTree, jax.Array | None], Any]
  microbatch: PyTree
  clip_norm: float | None = None
  between: tuple[PyTree, ...] = ()
  loss_dtype: Any = None
  metric_names: tuple[str, ...] = ()

  def run(
    self,
    number: int,
    params: PyTree,
    x: Any,
    state: PyTree,
    batch: PyTree,
    key: jax.Array,
  ) -> tuple[Any, tuple[PyTree, dict[str, jax.Array]]]:
    """Runs a stage on a micro-batch, and the loss after the last stage."""
    # Every pass of the first stage derives its inputs from the batch again, so
    # they need no room between passes.
    if not number:
      x = self.inputs(batch, key)
      if not jax.tree.leaves(x):
        raise ValueError(f"`inputs` must return arrays, got {checks.show(x)}.")
      checks.check_arrays("inputs", x)
    stage = self.stages[number]
    y, new = _stages.apply_layer(stage, params, state, x, batch, key)
    if number + 1 < len(self.stages):
      return y, (new, {})
    # The loss is checked here, while it is traced: a wrong one would fail deep
    # inside of `jax.vjp`.
    found = self.loss(y, batch)
    loss, metrics = checks.check_pair("loss", found, "a loss and metrics")
    training.check_loss("loss", loss, metrics)
    if not all(map(checks.is_number, metrics.values())):
      raise ValueError(
        "`loss` must return a number for each metric in a pipeline, got "
        f"{checks.show(metrics)}. Take the mean over the micro-batch."
      )
    return loss, (new, {"loss": loss, **metrics})

  def cut(
    self, batch: PyTree, number: int, name: str, front: tuple[int, ...] = ()
  ) -> PyTree:
    """Cuts a batch `[*front, n, ...]` into `[number, *front, samples, ...]`."""
    wanted: Any = jax.tree.structure(self.microbatch)
    given: Any = jax.tree.structure(batch)
    if given != wanted:
      raise ValueError(
        f"`{name}` must have the leaves of `microbatch`, {wanted}, got {given}."
      )

    def cut(x: Any, like: jax.ShapeDtypeStruct) -> Any:
      axis = len(front)
      rows = x.shape[axis : axis + 1] or (1,)
      if x.shape[:axis] != front or rows[0] % number:
        raise ValueError(
          f"`{name}` must divide into the table's {number} micro-batches for "
          f"each of {front[0] if front else 1} workers, got an array of shape "
          f"{list(x.shape)}. Take a multiple of {number} samples for each, or "
          "another table."
        )
      shape = rows[0] // number, *x.shape[axis + 1 :]
      known = jax.dtypes.canonicalize_dtype(x.dtype)
      dtype = "masked" if hasattr(x, "mask") else known  # NumPy drops a mask.
      if (shape, dtype) != (like.shape, like.dtype):
        raise ValueError(
          f"`{name}` must have micro-batches of shape {list(like.shape)} and "
          f"{like.dtype}, as `microbatch` has, got {list(shape)} and {dtype}."
        )
      return x.reshape(*front, number, *shape).swapaxes(0, axis)

    return jax.tree.map(cut, batch, self.microbatch)


def trace_model(
  stages: Sequence[_stages.LayerLike],
  loss: OutputLoss,
  table: Table,
  microbatch: PyTree,
  inputs: str | Callable[..., Any],
  clip_norm: float | None,
) -> TracedModel:
  """Checks a model for a table and traces the shapes of its results."""
  if len(stages) != table.num_stages:
    raise ValueError(
      f"`stages` must be the table's {table.num_stages}, got {len(stages)}. "
      f"Cut the layers by `cut_layers(layers, {table.num_stages})`."
    )
  if clip_norm is not None:
    clip_norm = checks.check_number("clip_norm", clip_norm, open_low=True)
  checks.check_function("loss", loss, "outputs and a micro-batch", 2)
  shapes = _stages.shapes_of(microbatch)
  first = _stages.make_inputs(inputs, shapes)
  model = TracedModel(tuple(stages), loss, first, shapes, clip_norm)
  # Only the shape matters: abstract models are traced without any array.
  key = jax.eval_shape(lambda: jax.random.key(0))
  # Each stage receives the shapes that the previous one returns.
  between, x, metrics = [], None, {}
  for number, stage in enumerate(stages):
    given = stage.params, x, stage.state, shapes, key
    run = functools.partial(model.run, number)
    x, (_, metrics) = jax.eval_shape(run, *given)
    between.append(x)
  return dataclasses.replace(
    model,
    between=tuple(between[:-1]),
    loss_dtype=between[-1].dtype,
    metric_names=("loss", *sorted(set(metrics) - {"loss"})),
  )


def microbatch_key(
  key: jax.Array,
  step: jax.Array | int,
  worker: jax.Array | int,
  microbatch: jax.Array | int,
  count: int,
) -> jax.Array:
  """Derives a micro-batch's key as `training.make_gradient` does."""
  # A step of a single micro-batch uses the worker's key itself.
  if jnp.ndim(worker):
    return jax.vmap(lambda x: microbatch_key(key, step, x, microbatch, count))(
      worker
    )
  key = jax.random.fold_in(jax.random.fold_in(key, step), worker)
  return jax.random.fold_in(key, microbatch) if count > 1 else key


def sample_weights(
  batches: PyTree, which: Any = ..., *, leading: int = 1
) -> Any:
  """Returns how much micro-batches count, by their samples.

  The weights of all have mean 1, so that a mean over micro-batches becomes a
  mean over samples.  Without a mask and labels this is 1 for all of them.
  Batches begin with `leading` axes, micro-batches and perhaps workers.
  """
  counts = training.sample_counts(batches, leading)
  if which is not ...:  # A traced index.
    counts = jnp.asarray(counts)
  return counts[which] / counts.mean(0).clip(1e-9)


def squared_norm(tree: PyTree) -> jax.Array:
  """Returns the sum of the squares of all entries, as a float."""
  total = jnp.zeros((), float)
  for x in jax.tree.leaves(tree):
    total += jnp.sum(jnp.square(jnp.abs(x).astype(total.dtype)))
  return total


def clip_scale(squared: jax.Array, most: float) -> jax.Array:
  """Returns the factor by which `optax.clip_by_global_norm` clips."""
  # A norm of zero gives infinity, and so 1.
  return jnp.minimum(1.0, most / jnp.sqrt(squared))
