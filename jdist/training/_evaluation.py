"""Evaluation on the anchor, the parameters on which all workers agree."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import collectives, transforms
from jdist.training import _losses, _step, _train_state

PyTree = Any


class Evaluator:
  """Evaluates a state on a fixed set of batches.

  The workers share the batches out, and every process learns the totals.
  """

  def __init__(
    self,
    workers: collectives.Workers,
    apply: Callable[..., tuple[jax.Array, PyTree]],
    batches: Iterable[PyTree],
    *,
    normalize: Callable[[jax.Array], jax.Array] = lambda images: images,
    compute_dtype: Any = jnp.float32,
    optimizer: optax.GradientTransformation | None = None,
  ):
    """Places the batches once and prepares the programs.

    Args:
      workers: the run's workers.
      apply: the model, as of `jdist.models`.
      batches: `{"image", "label", "mask"}` with arrays `[workers, n, ...]`;
        samples whose mask is 0 do not count.
      normalize: turns stored images into the model's inputs.
      compute_dtype: the dtype in which the model computes.
      optimizer: if given, what it has begun and not yet applied is brought in
        first, in a copy (`transforms.drain`), which costs a round's
        communication that `Record.sent_bytes` does not count.  Needed with
        `update_first`.

    Raises:
      ValueError: when there are no batches; at the first evaluation, when the
        last step's update is still to come and `optimizer` is not given.
    """
    axis = workers.axis
    rows = list(workers.local_workers)
    self._batches = [
      workers.place(jax.tree.map(lambda x: np.asarray(x)[rows], batch))
      for batch in batches
    ]
    if not self._batches:
      raise ValueError("`batches` must hold at least one batch, got none.")

    def prepare(state: _train_state.TrainState) -> tuple[PyTree, PyTree]:
      params, opt_state = state.params, state.opt_state
      if optimizer is not None:
        params, opt_state = transforms.drain(optimizer, opt_state, params)
      elif transforms.update_pending(opt_state):
        raise ValueError(
          "`optimizer` must be given for a state of `update_first`, whose last "
          "update comes with the next step: without it the parameters are "
          "those of a step before. Build `Evaluator(..., optimizer=optimizer)`."
        )
      params = transforms.anchor(opt_state, params)
      return params, _step.mean_statistics(state.model_state, axis)

    def totals(params: PyTree, model_state: PyTree, batch: PyTree) -> PyTree:
      images = _losses.as_inputs(normalize(batch["image"]), compute_dtype)
      logits, _ = apply(
        _losses.cast(params, compute_dtype), model_state, images, train=False
      )
      logits = logits.astype(jnp.float32)
      losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["label"]
      )
      hits = (jnp.argmax(logits, -1) == batch["label"]).astype(jnp.float32)
      mask = batch["mask"]
      sums = jnp.stack([jnp.sum(x * mask) for x in (hits, losses)])
      return collectives.sum(jnp.append(sums, jnp.sum(mask)), axis)

    self._prepare = workers.jit(prepare)
    self._totals = workers.jit(totals)
    self._workers = workers

  def __call__(self, state: _train_state.TrainState) -> dict[str, float]:
    """Returns test `accuracy` and `loss`, means over all samples."""
    return self._measure(*self._prepare(state))

  def measure(
    self, params: PyTree, model_state: PyTree | None = None
  ) -> dict[str, float]:
    """Returns the same of one model, for instance a server's.

    Args:
      params: its parameters, without the workers' dimension.
      model_state: batch statistics, if it has any.
    """
    num = len(self._workers.local_workers)
    both = (params, {} if model_state is None else model_state)
    copies = jax.tree.map(lambda x: np.broadcast_to(x, (num, *x.shape)), both)
    return self._measure(*self._workers.place(copies))

  def _measure(self, params: PyTree, model_state: PyTree) -> dict[str, float]:
    totals = np.zeros(3)
    for batch in self._batches:
      # Read one by one: few steps in flight, see `jdist.training.Trainer`.
      total = self._totals(params, model_state, batch)
      totals += np.asarray(self._workers.view(total), np.float64)
    hits, loss, count = totals
    return {"accuracy": hits / count, "loss": loss / count}
