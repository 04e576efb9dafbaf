"""Evaluation at the anchor, the parameters on which all workers agree."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks, collectives, signatures, transforms
from jdist.states import PyTree
from jdist.training import _gradient, _losses, _train_state


@signatures.checked
class Evaluator:
  """Evaluates a state on a fixed set of batches.

  Each worker evaluates a part of every batch, and all processes get the totals.
  """

  def __init__(
    self,
    workers: collectives.Workers,
    apply: signatures.Apply,
    batches: Iterable[Mapping[str, Any]],
    *,
    normalize: Callable[[jax.Array], jax.Array] = lambda images: images,
    compute_dtype: signatures.Dtype = jnp.float32,
    optimizer: optax.GradientTransformation | None = None,
  ):
    """Places the batches once and prepares the programs.

    Args:
      workers: The run's workers.
      apply: The model, as in `jdist.models`.
      batches: `{"image", "label", "mask"}` or, for texts, `{"tokens",
        "targets", "mask"}` with arrays `[workers, n, ...]`. Samples or tokens
        whose mask is 0, or whose label is -100, do not count.
      normalize: Turns stored images into the model's inputs.
      compute_dtype: The dtype in which the model computes.
      optimizer: The optimizer, whose pending updates are first applied to a
        copy of the state (`transforms.drain`). That costs a round's
        communication, which `Record.sent_bytes` does not count. It is required
        with `update_first`; by default the state is evaluated as it is.

    Raises:
      ValueError: If no sample counts; at the first evaluation, if a label is no
        class, or if the last step's update is pending and `optimizer` is not
        given.
    """
    axis = workers.axis
    inputs_of = _losses.model_inputs(
      normalize=normalize, compute_dtype=compute_dtype
    )

    def rows(x: Any) -> np.ndarray:
      if np.shape(x)[:1] != (workers.num_workers,):
        wanted = f"[workers, n, ...] of {workers.num_workers} workers"
        raise ValueError(f"`batches` must be {wanted}, got {checks.show(x)}.")
      return np.asanyarray(x)[list(workers.local_workers)]

    own, counts = [], False
    for batch in batches:
      own.append(jax.tree.map(rows, batch))
      # All workers count: a process may have padding alone.
      counts = counts or bool(np.any(_gradient.counted(batch)))
    self._batches = list(map(workers.place, own))
    labels = [_gradient.labels_of(x)[_gradient.counted(x)] for x in own]
    extremes = [f(x) for x in labels if x.size for f in (np.min, np.max)]
    if not counts:
      raise ValueError(
        "`batches` must hold at least one batch with a sample that counts, got "
        "none. Labels of -100 and masks of 0 leave samples out."
      )

    def prepare(state: _train_state.TrainState) -> Any:
      params, opt_state = state.params, state.opt_state
      if optimizer is not None:
        params, opt_state = transforms.drain(optimizer, opt_state, params)
      elif transforms.update_pending(opt_state):
        raise ValueError(
          "`optimizer` must be given for a state of `update_first`, whose last "
          "update is applied in the next step: without it the parameters are "
          "one step old. Build `Evaluator(..., optimizer=optimizer)`."
        )
      return transforms.evaluation_params(
        opt_state, params, state.model_state, axis=axis, laws=state.laws
      )

    def totals(params: PyTree, model_state: PyTree, batch: PyTree) -> PyTree:
      # Evaluation does not augment, so that the key is not used.
      inputs = inputs_of(batch, jax.random.key(0))
      found = apply(
        _losses.cast(params, compute_dtype), model_state, inputs, train=False
      )
      logits, _ = checks.check_pair("apply", found, "logits, state")
      # Here alone the number of classes and the labels are both known.
      remedy = "Label others -100, or give them a mask of 0."
      losses, hits, inside = _losses.label_scores(logits, batch)
      for label in extremes:
        checks.check_int("label", int(label), 0, logits.shape[-1] - 1, remedy)
      # Padding may have produced NaN, and 0 * NaN would be NaN.
      counted = (hits, losses, jnp.ones_like(losses))
      sums = [jnp.where(inside, x, 0.0).sum() for x in counted]
      # One all-reduce of three numbers instead of three.
      return collectives.sum(jnp.stack(sums), axis)

    self._prepare = workers.jit(prepare)
    self._totals = workers.jit(totals)
    self._workers = workers
    self._of_text = "tokens" in self._batches[0]

  def __call__(self, state: _train_state.TrainState) -> dict[str, float]:
    """Returns test `accuracy` and `loss`, means over all samples or tokens.

    For texts there are also `perplexity`, `exp(loss)`, and `bits_per_token`,
    `loss / ln 2`, which are bits per byte if bytes are the tokens.
    """
    return self._measure(*self._prepare(state))

  def model(self, state: _train_state.TrainState) -> tuple[PyTree, PyTree]:
    """Returns the parameters that are evaluated, and the batch statistics.

    These are the anchor, after all pending updates, and the workers' mean
    statistics, without the workers' dimension.
    """
    return jax.tree.map(self._workers.view, self._prepare(state))

  def measure(
    self, params: PyTree, model_state: PyTree | None = None
  ) -> dict[str, float]:
    """Evaluates one model without the workers' axis, such as a server's."""
    both = (params, {} if model_state is None else model_state)
    return self._measure(*self._workers.replicate(both))

  def _measure(self, params: PyTree, model_state: PyTree) -> dict[str, float]:
    totals = np.zeros(3)
    for batch in self._batches:
      # Read one by one, since virtual CPU devices deadlock with many programs
      # in flight. The sum is in float64, because there may be many batches.
      total = self._totals(params, model_state, batch)
      totals += np.asarray(self._workers.view(total), np.float64)
    hits, loss = (totals[:2] / totals[2]).tolist()
    metrics = {"accuracy": hits, "loss": loss}
    if self._of_text:
      # A diverged model has an infinite perplexity.
      with np.errstate(over="ignore"):
        metrics["perplexity"] = float(np.exp(loss))
      metrics["bits_per_token"] = loss / math.log(2)
    return metrics
