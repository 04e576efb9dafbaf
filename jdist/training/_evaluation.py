"""Evaluation on the anchor, the parameters on which all workers agree."""

import math
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
      batches: `{"image", "label", "mask"}` or, of texts, `{"tokens",
        "targets", "mask"}` with arrays `[workers, n, ...]`; samples or tokens
        whose mask is 0 do not count.
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
    inputs_of = _losses.model_inputs(
      normalize=normalize, compute_dtype=compute_dtype
    )
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
      # Nothing is changed at random here, so that any key will do.
      inputs = inputs_of(batch, jax.random.key(0))
      logits, _ = apply(
        _losses.cast(params, compute_dtype), model_state, inputs, train=False
      )
      logits, labels = logits.astype(jnp.float32), _losses.labels_of(batch)
      losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
      hits = (jnp.argmax(logits, -1) == labels).astype(jnp.float32)
      mask = batch["mask"]
      # Of a sample's mask all its tokens count.
      mask = mask.reshape(*mask.shape, *(1,) * (labels.ndim - mask.ndim))
      mask = jnp.broadcast_to(mask, labels.shape)
      # Selected, not multiplied: padding may have given a NaN.
      counted = [jnp.where(mask != 0, x * mask, 0.0) for x in (hits, losses)]
      sums = jnp.stack([jnp.sum(x) for x in counted])
      return collectives.sum(jnp.append(sums, jnp.sum(mask)), axis)

    self._prepare = workers.jit(prepare)
    self._totals = workers.jit(totals)
    self._workers = workers
    self._of_text = "tokens" in self._batches[0]

  def __call__(self, state: _train_state.TrainState) -> dict[str, float]:
    """Returns test `accuracy` and `loss`, means over all samples.

    Of a text means over all tokens, and beside them what the field says of
    language models: `perplexity`, `exp(loss)`, and `bits_per_token`, `loss / ln
    2`: bits per byte where bytes are the tokens.
    """
    return self._measure(*self._prepare(state))

  def model(self, state: _train_state.TrainState) -> tuple[PyTree, PyTree]:
    """Returns the parameters that are evaluated, and the batch statistics.

    Of one model, without the workers' dimension: the anchor, in which all that
    the optimizer has begun is brought in.
    """
    both = self._prepare(state)
    return jax.tree.map(self._workers.view, both)

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
    hits, loss = totals[:2] / totals[2]
    metrics = {"accuracy": hits, "loss": loss}
    if self._of_text:
      with np.errstate(over="ignore"):  # Of a diverged model it is infinite.
        metrics["perplexity"] = float(np.exp(loss))
      metrics["bits_per_token"] = loss / math.log(2)
    return metrics
