"""All learners and the syncer of Decoupled DiLoCo, for the virtual clock."""

from collections.abc import Callable, Sequence
from typing import Any

import optax

from jdist import transforms
from jdist.server import _message_codec, _messages
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
    fragments: as of `transforms.fragment_steps`; the protocol has as many.
    model_state: the first batch statistics, if any.
    seed: seed of the random numbers in the loss, and of the rounding.
    push_codec: codec of the learners' progress; None sends every bit.  A
      feedback keeps what was not sent of a fragment for its next push.

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
    fragments: transforms.Fragments = 1,
    model_state: PyTree | None = None,
    seed: int = 0,
    push_codec: _message_codec.MessageCodec | None = None,
  ):
    syncer = _fragment_syncer.FragmentSyncer(
      params,
      workers=workers,
      outer=outer,
      fragments=fragments,
      push_codec=push_codec,
      shared=samples.shared,
      model_state=model_state,
    )
    runners = {
      name: _fragment_runner.FragmentRunner(
        loss_fn,
        optimizer,
        params,
        samples,
        number=number,
        num_workers=len(workers),
        fragments=fragments,
        push_codec=push_codec,
        model_state=model_state,
        seed=seed,
      )
      for number, name in enumerate(workers)
    }
    super().__init__(syncer, runners)
