"""A server and all workers of plain gradients, for the virtual clock."""

from collections.abc import Callable, Sequence
from typing import Any

import optax

from jdist import reducers, signatures
from jdist.server import _messages
from jdist.server.gradients import (
  _gradient_messages,
  _gradient_server,
  _gradient_worker,
  _learner,
)
from jdist.server.h_ps import _bit_plans

PyTree = Any


@signatures.checked
class GradientLearner(_learner.Pair):
  """Pairs a `GradientServer` with a `GradientWorker` for each name.

  The arguments are theirs, and those of `server.message_plans`; `options` are
  the workers' alone: `sizes` and `local_step`.
  """

  def __init__(
    self,
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    params: signatures.Numbers,
    samples: _learner.Samples,
    *,
    workers: Sequence[_messages.Worker],
    push_codec: reducers.MessageCodec | None = None,
    plans: _bit_plans.BitPlans | None = None,
    compensation: float = 0.0,
    model_state: signatures.Arrays = None,
    seed: int = 0,
    **options: Any,
  ):
    # The same object on both sides, so that both run the same programs.
    codecs = _gradient_messages.message_plans(push_codec, plans)
    common: dict[str, Any] = {"model_state": model_state, "seed": seed}
    server = _gradient_server.GradientServer(
      optimizer, params, codecs, workers=workers, shared=samples.shared,
      compensation=compensation, **common,
    )  # fmt: skip
    learners = {
      name: _gradient_worker.GradientWorker(
        loss_fn,
        params,
        samples,
        codecs,
        number=number,
        num_workers=len(workers),
        **common,
        **options,
      )
      for number, name in enumerate(workers)
    }
    super().__init__(server, learners)
