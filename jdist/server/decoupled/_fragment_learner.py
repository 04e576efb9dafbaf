"""All learners and the syncer of Decoupled DiLoCo, for the virtual clock."""

from collections.abc import Callable, Sequence
from typing import Any

import optax

from jdist.server import _messages
from jdist.server.decoupled import _fragment_runner, _fragment_syncer
from jdist.server.gradients import _learner

PyTree = Any


class FragmentLearner(_learner.Pair):
  """Pairs a `FragmentSyncer` with a `FragmentRunner` for each learner.

  Args:
    loss_fn: as of `training.make_step`; it heeds a batch's `"mask"`.
    optimizer: each learner's inner optimizer, any Optax chain; its schedules
      count local steps.
    params: the first parameters.
    samples: source of the batches.
    workers: the names of the learners, in the order of the stream's numbers.
    outer: the outer optimizer; DiLoCo's Nesterov momentum if None.
    seed: seed of the random numbers in the loss, and of the rounding.
    **options: `fragments`, `push_codec` and `model_state`, as of both.

  Raises:
    ValueError: when an argument is not as described.
  """

  def __init__(
    self,
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    params: PyTree,
    samples: _learner.Samples,
    *,
    workers: Sequence[_messages.Worker],
    outer: optax.GradientTransformation | None = None,
    seed: int = 0,
    **options: Any,
  ):
    syncer = _fragment_syncer.FragmentSyncer(
      params, workers=workers, outer=outer, shared=samples.shared, **options
    )
    runners = {
      name: _fragment_runner.FragmentRunner(
        loss_fn,
        optimizer,
        params,
        samples,
        number=number,
        num_workers=len(workers),
        seed=seed,
        **options,
      )
      for number, name in enumerate(workers)
    }
    super().__init__(syncer, runners)
