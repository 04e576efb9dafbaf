"""MP² under a server's protocol: the exchange, with real gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist import checks, server, training
from jdist.prediction.mp2 import _exchange

PyTree = Any


class ExchangeLearner:
  """Runs `Exchange` as the learner of a `server.Simulation`.

  Under `server.BSP`, with batches of one size: every update gives the bits of
  `Exchange.step` on the same batches.  The profile's `push_bytes` are then the
  front's, and its `pull_bytes` the whole network's.

  Attributes:
    state: the exchange's.

  Raises:
    ValueError: at an update, when a worker's gradient is missing, or batches
      differ in size.
  """

  def __init__(
    self,
    exchange: _exchange.Exchange,
    loss_fn: Callable[..., Any],
    params: PyTree,
    predictor_params: PyTree,
    samples: server.Samples,
    *,
    workers: Sequence[server.Worker],
    seed: int = 0,
  ):
    """Makes the exchange's first state.

    Args:
      exchange: predictor and workers' optimizer.
      loss_fn: as of `training.make_step`, without a model state.
      params: the whole network's.
      predictor_params: the trained predictor's.
      samples: where batches come from, such as a `data.SampleStream`.
      workers: the names of the workers, in the order of the stream's numbers.
      seed: of the random numbers in the loss.
    """
    checks.check_type(
      "exchange", exchange, _exchange.Exchange, "a `prediction.Exchange`"
    )
    self.state = exchange.init(params, len(workers))
    self._samples = samples
    self._numbers = {worker: i for i, worker in enumerate(workers)}
    self._key = jax.random.key(checks.check_seed(seed))
    self._tasks: dict[int, tuple[int, int, int]] = {}
    self._taken: dict[int, int] = {}
    gradient = training.make_gradient(loss_fn)

    @jax.jit
    def step(state: Any, batches: PyTree, keys: jax.Array) -> Any:
      found = jax.vmap(
        lambda batch, key: gradient(state.params, {}, batch, key).grads
      )(batches, keys)
      return exchange.step(state, found, predictor_params)

    self._step = step

  def pull(self, reply: server.Reply) -> None:
    """Takes the samples of a task."""
    worker = self._numbers[reply.worker]
    whose = 0 if self._samples.shared else worker
    start = self._taken.get(whose, 0)
    self._taken[whose] = start + reply.samples
    self._tasks[reply.task] = (worker, start, reply.samples)

  def apply(self, update: server.Apply) -> None:
    """Takes one step of all workers and of the server."""
    # With its number, by which a batch has its random numbers.
    tasks = sorted((*self._tasks.pop(task), task) for task in update.tasks)
    if [worker for worker, *_ in tasks] != list(range(len(self._numbers))):
      raise ValueError(
        "`protocol` must push a gradient of every worker in each update, as "
        f"`server.BSP` without backups does, got {len(tasks)} of "
        f"{len(self._numbers)}."
      )
    if len({count for _, _, count, _ in tasks}) > 1:
      raise ValueError(
        "`protocol` must have batches of one size, `server.FixedBatches`, got "
        f"{[count for _, _, count, _ in tasks]}."
      )
    batches = [self._samples.batch(*samples) for *samples, _ in tasks]
    keys = jnp.stack(
      [jax.random.fold_in(self._key, task) for *_, task in tasks]
    )
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    self.state = self._step(self.state, stacked, keys)

  def discard(self, task: int) -> None:
    """Drops a task."""
    del self._tasks[task]
