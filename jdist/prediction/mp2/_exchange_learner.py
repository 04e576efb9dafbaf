"""MP² under a server's protocol: the exchange as a pair of learners."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist import checks, server
from jdist.prediction.mp2 import _exchange

PyTree = Any


class ExchangeLearner(server.Pair):
  """Runs `Exchange` as the learner of a `server.Simulation`.

  Each worker takes a step of its own optimizer on the front and pushes minus
  that step; the server's optimizer moves the front by the mean and predicts
  the rear.  Under `server.BSP`, with batches of one size, every update is
  `Exchange.step` on the same batches.  The profile's `push_bytes` are then the
  front's, and its `pull_bytes` the whole network's.

  Args:
    exchange: predictor and workers' optimizer.
    loss_fn: as of `training.make_step`, without a model state.
    params: parameters of the whole network.
    predictor_params: parameters of the trained predictor.
    samples: source of the batches, such as a `data.SampleStream`.
    workers: the names of the workers, in the order of the stream's numbers.
    seed: seed of the random numbers in the loss.

  Raises:
    ValueError: when an argument is not as described; at an update, when a
      worker's push is missing, or batches differ in size.
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
    checks.check_type(
      "exchange", exchange, _exchange.Exchange, "a `prediction.Exchange`"
    )
    plans, front = server.message_plans(), _front(exchange)
    super().__init__(
      _ExchangeServer(
        _prediction(exchange, predictor_params),
        params,
        plans,
        workers=workers,
        shared=samples.shared,
      ),
      {
        name: server.GradientWorker(
          loss_fn,
          params,
          samples,
          plans,
          number=number,
          num_workers=len(workers),
          seed=seed,
          inner=front,
        )
        for number, name in enumerate(workers)
      },
    )


class _ExchangeServer(server.GradientServer):
  """Updates only by pushes of all workers, of batches of one size."""

  def apply(self, update: server.Apply) -> None:
    tasks = [self.tasks[task] for task in update.tasks]
    if len(tasks) < self.num_workers:
      raise ValueError(
        "`protocol` must push a gradient of every worker in each update, as "
        f"`server.BSP` without backups does, got {len(tasks)} of "
        f"{self.num_workers}."
      )
    sizes = [samples for _, samples, _ in tasks]
    if len(set(sizes)) > 1:
      raise ValueError(
        "`protocol` must have batches of one size, `server.FixedBatches`, got "
        f"{sizes}."
      )
    super().apply(update)


def _front(exchange: _exchange.Exchange) -> optax.GradientTransformation:
  """Returns the workers' optimizer of the front; the rear does not move."""
  optimizer, cut = exchange.optimizer, exchange.predictor.cut

  def update(
    gradients: PyTree, state: PyTree, params: PyTree = None
  ) -> tuple[PyTree, PyTree]:
    own, rear = cut.split(gradients)
    updates, state = optimizer.update(own, state, cut.split(params)[0])
    return cut.join(updates, jax.tree.map(jnp.zeros_like, rear)), state

  return optax.GradientTransformation(
    lambda params: optimizer.init(cut.split(params)[0]), update
  )


def _prediction(
  exchange: _exchange.Exchange, predictor_params: PyTree
) -> optax.GradientTransformation:
  """Returns the server's optimizer: the mean front, and the rear it predicts.

  The mean of pushes is minus the mean step of the workers.
  """
  predictor = exchange.predictor

  def update(
    steps: PyTree, state: PyTree, params: PyTree = None
  ) -> tuple[PyTree, PyTree]:
    moved = jax.tree.map(jnp.subtract, params, steps)
    front, _ = predictor.cut.split(moved)
    rear = predictor.apply(predictor_params, front)
    moved = predictor.cut.join(front, rear)
    return jax.tree.map(jnp.subtract, moved, params), state

  return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
