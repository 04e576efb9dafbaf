"""Local steps and merges in the order that a protocol dictates."""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks, transforms
from jdist.server import (
  _gradient_learner,
  _message_codec,
  _messages,
  _server_programs,
)
from jdist.server.decoupled import (
  _fragment_messages,
  _fragment_server,
  _fragment_worker,
)

PyTree = Any


@dataclasses.dataclass
class _Stretch:
  """Local steps up to a push: what a learner was sent for them.

  Attributes:
    reply: the task.
    start: of its samples in the stream.
    arrived: leaves of fragments that were merged; of all, to begin anew, if
      the reply says so.
    settled: of these fragments, the learner's last push that is in them.
    model_state: to begin anew with.
  """

  reply: _messages.Reply
  start: int
  arrived: dict[int, list[jax.Array]]
  settled: dict[int, int]
  model_state: PyTree


class _Pushed(NamedTuple):
  """A push for a merge to come."""

  fragment: int
  samples: int
  progress: list[jax.Array]
  model_state: PyTree
  loss: Any


class FragmentLearner:
  """Runs all learners and the syncer of `DecoupledDiLoCo` in one process.

  A learner's local steps are made when the protocol merges their push, each
  with what had arrived by then; the steps of who fails before a push are never
  made.

  Args:
    loss_fn: as of `training.make_step`; it heeds a batch's `"mask"`.
    optimizer: each learner's inner optimizer, any Optax chain; its schedules
      count local steps.
    params: the first parameters.
    samples: where batches come from.
    workers: the names of the learners, in the order of the stream's numbers.
    outer: the outer optimizer; DiLoCo's Nesterov momentum if None.
    fragments: as of `transforms.fragment_steps`; the protocol has as many.
    model_state: the first batch statistics, if any.
    seed: of the random numbers in the loss, and of the rounding.
    push_codec: of the learners' progress; None sends every bit.  A feedback
      keeps what was not sent of a fragment for its next push.

  Attributes:
    server: the syncer's part.
    position: samples taken from the stream, by learner; one entry, 0, of a
      shared stream.
    samples: of the pushes that were merged.
    losses: of the last merges, `(samples so far, loss)`, at most 1,000.

  Raises:
    ValueError: when an argument is not as described.
  """

  def __init__(
    self,
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    params: PyTree,
    samples: _gradient_learner.Samples,
    *,
    workers: Sequence[_messages.Worker],
    outer: optax.GradientTransformation | None = None,
    fragments: transforms.Fragments = 1,
    model_state: PyTree | None = None,
    seed: int = 0,
    push_codec: _message_codec.MessageCodec | None = None,
  ):
    checks.check_optimizer("optimizer", optimizer)
    if len(set(workers)) < len(workers) or not workers:
      raise ValueError(
        f"`workers` must be one or more different names, got {workers!r}."
      )
    self.server = _fragment_server.FragmentServer(
      outer or _fragment_server.OUTER, params, fragments, model_state
    )
    self._worker = _fragment_worker.FragmentWorker(
      loss_fn, optimizer, params, fragments
    )
    self._samples = samples
    self._numbers = {worker: i for i, worker in enumerate(workers)}
    self._key = jax.random.key(checks.check_seed(seed))
    self.position: collections.Counter[int] = collections.Counter()
    self.samples = 0
    self.losses: collections.deque[tuple[int, jax.Array]] = collections.deque(
      maxlen=1000
    )
    # By learner's number: what it holds, and what it has still to do.
    first = self._worker.start(self.server.anchor, self.server.model_state)
    self._states = [first] * len(workers)
    self._steps = [0] * len(workers)
    self._queues: list[collections.deque[_Stretch]] = [
      collections.deque() for _ in workers
    ]
    self._send = _fragment_messages.transfer(push_codec)
    parts = list(map(self.server.part, range(self.server.fragments)))
    self._feedbacks = [
      _fragment_messages.first_states(push_codec, parts, seed, i, len(workers))
      for i in range(len(workers))
    ]
    self._unmerged = [_fragment_worker.Unmerged() for _ in workers]
    self._pushed: dict[int, _Pushed] = {}
    # The last push of a learner that is in each fragment.
    self._settled: list[dict[int, int]] = [{} for _ in workers]
    self._worker_of: dict[int, int] = {}
    # On the way to a checkpoint only what follows from the messages is kept.
    self.replays = False

  @property
  def model(self) -> _server_programs.ServerModel:
    """Parameters and states now."""
    return self.server.model

  def pull(self, reply: _messages.Reply) -> None:
    """Keeps what a learner has been sent, and takes its samples."""
    worker = self._numbers[reply.worker]
    self.server.check_fragment(reply.fragment)
    whose = 0 if self._samples.shared else worker
    start = self.position[whose]
    self.position[whose] += reply.samples
    pulled = reply.pulled
    if pulled is None:
      pulled = tuple(range(self.server.fragments))
    settled = self._settled[worker]
    self._worker_of[reply.task] = worker
    self._queues[worker].append(
      _Stretch(
        reply,
        start,
        {p: self.server.part(p) for p in pulled},
        {p: settled.get(p, -1) for p in pulled},
        self.server.model_state,
      )
    )

  def apply(self, update: _messages.Apply) -> None:
    """Makes the outer step of pushes, whose local steps are made first."""
    for task in update.tasks:
      worker = self._worker_of.pop(task)
      while task not in self._pushed:
        self._run(worker, self._queues[worker].popleft())
      self._settled[worker][self._pushed[task].fragment] = task
    found = [self._pushed.pop(task) for task in update.tasks]
    whole = sum(push.samples for push in found)
    self.samples += whole
    if self.replays:
      return
    self.server.merge(
      found[0].fragment,
      [push.progress for push in found],
      [push.model_state for push in found],
      update.weights,
    )
    loss = sum(push.loss * (push.samples / whole) for push in found)
    self.losses.append((self.samples, loss))

  def discard(self, task: int) -> None:
    """Drops the local steps of a task; they are never made."""
    queue = self._queues[self._worker_of.pop(task)]
    for stretch in queue:
      if stretch.reply.task == task:
        queue.remove(stretch)
        return
    self._pushed.pop(task, None)

  def _run(self, worker: int, stretch: _Stretch) -> None:
    """Makes the local steps of a stretch, and its push."""
    reply, state = stretch.reply, self._states[worker]
    unmerged, fragment = self._unmerged[worker], reply.fragment
    before = self._steps[worker]
    self._steps[worker] += reply.passes
    if reply.pulled is None:
      unmerged.clear()
    unmerged.settle(stretch.settled)
    loss: Any = jnp.zeros(())
    progress = self.server.part(fragment)
    if not self.replays:
      if reply.pulled is None:
        state = self._worker.start(
          self.server.whole(stretch.arrived), stretch.model_state, before
        )
      elif stretch.arrived:
        state = self._worker.take(
          state, stretch.arrived, unmerged.of(stretch.arrived)
        )
      state, loss = self._worker.steps(
        state,
        self._samples,
        worker,
        (stretch.start, reply.samples, reply.passes),
        jax.random.fold_in(self._key, reply.task),
        -(-reply.samples // reply.passes),
      )
      state, progress = self._worker.push(state, fragment)
      feedbacks = self._feedbacks[worker]
      progress, feedbacks[fragment] = self._send(progress, feedbacks[fragment])
      self._states[worker] = state
    unmerged.add(fragment, reply.task, progress)
    self._pushed[reply.task] = _Pushed(
      fragment, reply.samples, progress, state.model_state, loss
    )

  def arrays(self) -> PyTree:
    """Returns all arrays that a resumed run needs, as a tree."""
    return {
      "server": self.server.arrays(),
      "workers": self._states,
      "feedbacks": self._feedbacks,
      "arrived": {
        str(x.reply.task): (list(x.arrived.values()), x.model_state)
        for queue in self._queues
        for x in queue
      },
      "unmerged": [
        {str(p): {str(k): x for k, x in own.items()} for p, own in each.items()}
        for each in self._unmerged
      ],
      "pushed": {
        str(task): (push.progress, push.model_state, push.loss)
        for task, push in self._pushed.items()
      },
    }  # fmt: skip

  def load(self, arrays: PyTree) -> None:
    """Takes over arrays after the messages until then were replayed."""
    self.server.load(arrays["server"])
    self._states = list(arrays["workers"])
    self._feedbacks = list(map(list, arrays["feedbacks"]))
    for queue in self._queues:
      for x in queue:
        arrived, x.model_state = arrays["arrived"][str(x.reply.task)]
        x.arrived = dict(zip(x.arrived, arrived, strict=True))
    for each, found in zip(self._unmerged, arrays["unmerged"], strict=True):
      for p, own in each.items():
        each[p] = {k: found[str(p)][str(k)] for k in own}
    for task, push in self._pushed.items():
      progress, model_state, loss = arrays["pushed"][str(task)]
      self._pushed[task] = push._replace(
        progress=progress, model_state=model_state, loss=loss
      )
    self.replays = False
