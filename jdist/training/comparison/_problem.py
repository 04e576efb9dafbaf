"""The problem that protocols are compared on: data, model, loss, measures."""

from collections.abc import Callable
from typing import Any

import optax

from jdist import collectives, data, models
from jdist.training import _evaluation
from jdist.training.comparison import _rows, _workload


class Problem:
  """Programs and data of all trials of a comparison of protocols.

  A trial's model is that of its seed; tuning trials learn from a part of the
  training set, and are measured on the rest.  The learning rate is a part of
  the optimizer's state, so that no rate compiles anything anew.

  Args:
    dataset: a name of `jdist.data`.
    model: a name of `jdist.models`.
    batch_size: samples of all workers together.
    momentum: Nesterov momentum of SGD; none if 0.

  Attributes:
    workloads: by the purpose of a trial.
    loss: as of `training.make_step`.
    optimizer: SGD, whose rate `set_rate` sets.
    evaluators: by the purpose of a trial.
  """

  def __init__(
    self, dataset: str, model: str, batch_size: int, *, momentum: float = 0.0
  ):
    train = data.load(dataset)
    whole = _workload.Workload(
      collectives.workers(1),
      train,
      data.load(dataset, "test"),
      lambda seed: models.build(
        model,
        input_shape=train.input_shape,
        num_classes=train.num_classes,
        seed=seed,
      ),
      batch_size,
      evaluation_batch=2000,
    )
    self.workloads = {"comparison": whole, "tuning": whole.hold_out()}
    self.optimizer = optax.inject_hyperparams(optax.sgd)(
      learning_rate=0.0, momentum=momentum or None, nesterov=bool(momentum)
    )
    apply = whole.model(0).apply
    self.loss = whole.loss(apply)
    self.evaluators: dict[str, _evaluation.Evaluator] = {
      purpose: workload.evaluator(apply)
      for purpose, workload in self.workloads.items()
    }

  def train_set(self, trial: _rows.Trial) -> data.Dataset:
    """Returns the samples that a trial may learn from."""
    found = self.workloads[trial.purpose].train
    assert isinstance(found, data.Dataset)
    return found

  def model(self, seed: int) -> models.Model:
    """Returns the model with the first parameters of a seed."""
    return self.workloads["comparison"].model(seed)

  def evaluate(self, trial: _rows.Trial) -> Callable[[Any], dict[str, float]]:
    """Returns what measures a server's model on a trial's other samples."""
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
