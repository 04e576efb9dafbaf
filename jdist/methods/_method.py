"""Methods as data for the command line, experiments and tests."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optax

from jdist import collectives, transforms


class Run(NamedTuple):
  """The facts of a training run on which methods depend.

  Attributes:
    num_steps: The number of local steps in the whole run.
    warmup_steps: The number of steps in which the learning rate rises.
    learning_rate: A schedule over local steps.
    steps_per_epoch: The number of steps in one pass over the training set,
      rounded up.
    interval: The number of local steps in the first round.
    optimizer: The kind of each worker's optimizer, "sgd" or "adamw".
    momentum: The momentum of SGD.
    weight_decay: The decoupled weight decay.
  """

  num_steps: int
  warmup_steps: int
  learning_rate: optax.Schedule
  steps_per_epoch: int = 1
  interval: int = 1
  optimizer: str = "sgd"
  momentum: float = 0.0
  weight_decay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Method:
  """An entry of the registry: how a method is built from the facts of a run.

  Attributes:
    summary: One line of help.
    factory: A function of `jdist.methods`, or another one with arguments of
      the same names, for instance
      `functools.partial(transforms.local_steps, rule=...)`.
    from_run: Arguments of the factory that follow from a run.  An argument
      called `learning_rate` is the run's schedule and needs no entry.
    interval_policy: The default interval policy, a name of
      `jdist.transforms.intervals`; None if the interval must be a number.
    late: The overlap of a method whose means are late by definition.
    own_momentum: Whether the method applies the momentum itself, so that its
      optimizer must be plain SGD.

  >>> def mean_sgd(optimizer, *, axis, compression=None):
  ...   mean = transforms.average_gradients(axis, compression)
  ...   return optax.chain(mean, optimizer)
  >>> method = Method("a mean in every step", mean_sgd)
  >>> sorted(method.arguments), sorted(method.required)
  (['axis', 'compression', 'optimizer'], ['axis', 'optimizer'])
  """

  summary: str
  factory: Callable[..., optax.GradientTransformationExtraArgs]
  from_run: Mapping[str, Callable[[Run], Any]] = dataclasses.field(
    default_factory=dict
  )
  interval_policy: str | None = "fixed"
  late: transforms.Delayed | None = None
  own_momentum: bool = False

  @functools.cached_property
  def arguments(self) -> frozenset[str]:
    """The names of the factory's arguments."""
    return frozenset(inspect.signature(self.factory).parameters)

  @functools.cached_property
  def required(self) -> frozenset[str]:
    """The names of the factory's arguments that have no default."""
    parameters = inspect.signature(self.factory).parameters.values()
    return frozenset(
      one.name for one in parameters if one.default is inspect.Parameter.empty
    )

  @property
  def in_rounds(self) -> bool:
    """Returns whether the method needs the run's interval."""
    # MP² has a default, as published, and is not a method of rounds.
    return "interval" in self.required

  def build(
    self,
    optimizer: optax.GradientTransformation,
    run: Run,
    *,
    axis: collectives.Axis,
    **options: Any,
  ) -> optax.GradientTransformationExtraArgs:
    """Builds the method's chain for a run.

    Args:
      optimizer: Each worker's own optimizer; ignored by a method that makes
        one itself.
      run: The source of arguments that `options` do not contain.
      axis: The axis of the workers.
      **options: Arguments of the factory.
    """
    # A factory takes some of these: `muloco`, for instance, has no optimizer.
    found: dict[str, Any] = {
      "optimizer": optimizer,
      # `local_steps`, on which users build methods, has this name for it.
      "inner": optimizer,
      "learning_rate": run.learning_rate,
    }
    if self.in_rounds:
      found["interval"] = run.interval
    found = {k: v for k, v in found.items() if k in self.arguments}
    found |= {name: of(run) for name, of in self.from_run.items()}
    # An explicit setting of the user takes precedence over the run.
    return self.factory(**(found | options), axis=axis)
