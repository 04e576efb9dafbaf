"""The problem on which protocols are compared: data, model, loss, measures."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import optax

from jdist import collectives, data, models, server, training
from jdist.training import comparison


def _build(name: str, train: data.Dataset, seed: int) -> models.Model:
  return models.build(
    name,
    input_shape=train.input_shape,
    num_classes=train.num_classes,
    seed=seed,
  )


class Problem:
  """Programs and data of all trials of a comparison of protocols.

  A trial's model has its seed's initial parameters. Tuning trials train on a
  part of the training set and are measured on the rest.

  Args:
    dataset: A name of `jdist.data`.
    model: A name of `jdist.models`.
    batch_size: The samples of all workers together.
    momentum: The Nesterov momentum of SGD; 0 for none.

  Attributes:
    workloads: The workloads by the purpose of a trial.
    loss: The loss, as in `training.make_step`.
    optimizer: SGD, whose rate `set_rate` sets.
    evaluators: The evaluators by the purpose of a trial.
  """

  def __init__(
    self, dataset: str, model: str, batch_size: int, *, momentum: float = 0.0
  ):
    whole = comparison.Workload.load(
      dataset,
      functools.partial(_build, model),
      collectives.workers(1),
      batch_size,
      evaluation_batch=2000,
    )
    self.workloads = {"comparison": whole, "tuning": whole.hold_out()}
    # The rate is a part of the state, so that a new rate compiles nothing.
    self.optimizer = optax.inject_hyperparams(optax.sgd)(
      learning_rate=0.0, momentum=momentum or None, nesterov=bool(momentum)
    )
    apply = whole.model(0).apply
    # Only the parameters depend on the seed: one `apply` serves all models.
    self.loss = whole.loss(apply)
    self.evaluators: dict[str, training.Evaluator] = {
      purpose: workload.evaluator(apply)
      for purpose, workload in self.workloads.items()
    }

  def train_set(self, trial: comparison.Trial) -> data.Dataset:
    """Returns the samples on which a trial may train."""
    # Protocols draw single samples, which texts do not have.
    found = self.workloads[trial.purpose].train
    assert isinstance(found, data.Dataset)
    return found

  def model(self, seed: int) -> models.Model:
    """Returns the model with the initial parameters of a seed."""
    return self.workloads["comparison"].model(seed)

  def fragment_pair(
    self,
    trial: comparison.Trial,
    samples: data.SampleStream,
    workers: Sequence[str],
    *,
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
  ) -> server.Pair:
    """Builds learners of local steps, and the server's of outer steps.

    Args:
      trial: The trial, whose seed is that of the parameters.
      samples: The samples of all workers.
      workers: The workers' names.
      inner: The optimizer of the local steps.
      outer: The optimizer of the outer steps.
    """
    model = self.model(trial.seed)
    common: dict[str, Any] = {"model_state": model.state}
    syncer = server.FragmentSyncer(
      model.params, workers=workers, outer=outer, shared=samples.shared,
      **common,
    )  # fmt: skip
    runners = {
      name: server.FragmentRunner(
        self.loss, inner, model.params, samples, number=number,
        num_workers=len(workers), seed=trial.seed, **common,
      )
      for number, name in enumerate(workers)
    }  # fmt: skip
    return server.Pair(syncer, runners)

  def evaluate(
    self, trial: comparison.Trial
  ) -> Callable[[Any], dict[str, float]]:
    """Returns a function that measures a server's model in a trial."""
    # One evaluator for all runs, whose program is compiled once.
    evaluator = self.evaluators[trial.purpose]
    return lambda model: evaluator.measure(model.params, model.model_state)


def set_rate(opt_state: Any, learning_rate: float) -> Any:
  """Returns the state of `Problem.optimizer` with a learning rate.

  >>> optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.0)
  >>> state = set_rate(optimizer.init({}), 0.25)
  >>> float(state.hyperparams["learning_rate"])
  0.25
  """
  return optax.tree_utils.tree_set(opt_state, learning_rate=learning_rate)
