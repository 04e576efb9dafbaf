"""All learners and the syncer of Decoupled DiLoCo, for the virtual clock."""

from collections.abc import Callable, Sequence
from typing import Any

import optax

from jdist import signatures
from jdist.server import _messages
from jdist.server.decoupled import _fragment_runner, _fragment_syncer
from jdist.server.gradients import _learner

PyTree = Any


@signatures.checked
class FragmentLearner(_learner.Pair):
  """Pairs a `FragmentSyncer` with a `FragmentRunner` for each learner.

  The arguments are theirs; `options` are those of both: `fragments`,
  `push_codec` and `model_state`.

  Raises:
    ValueError: when an argument is not as described.
  """

  def __init__(
    self,
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    params: signatures.Arrays,
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
