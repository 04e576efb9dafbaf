"""The syncer of Decoupled DiLoCo for learners in other processes."""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import transforms
from jdist.server import _message_codec, _messages
from jdist.server.decoupled import _fragment_server
from jdist.server.gradients import _gradient_messages, _learner
from jdist.server.gradients._merge import Pushed

PyTree = Any


class FragmentSyncer:
  """Decodes fragments, merges them, and encodes what learners are sent.

  The `ServerLearner` of `DecoupledDiLoCo` on real workers; `FragmentRunner` is
  its worker.  A pull sends the merged fragments in every bit, a push passes the
  codec.  A push of another size than its fragment's message has, or with a
  number that is not finite, is refused.

  Args:
    params: the first parameters.
    workers: the names of all learners, in the order of the data's numbers.
    outer: the outer optimizer, any Optax chain; DiLoCo's Nesterov momentum if
      None.
    fragments: as of `transforms.fragment_steps`; the protocol has as many.
    push_codec: of the learners' progress; None sends every bit.
    shared: whether all learners take from one stream of samples.
    model_state: the first batch statistics, if any.

  Attributes:
    server: parameters and outer steps.
    position: samples given out, by learner; one entry, 0, of a shared stream.
    samples: of the pushes that were merged.
  """

  def __init__(
    self,
    params: PyTree,
    *,
    workers: Sequence[_messages.Worker],
    outer: optax.GradientTransformation | None = None,
    fragments: transforms.Fragments = 1,
    push_codec: _message_codec.MessageCodec | None = None,
    shared: bool = True,
    model_state: PyTree | None = None,
  ):
    self.server = _fragment_server.FragmentServer(
      _fragment_server.OUTER if outer is None else outer,
      params,
      fragments,
      model_state,
    )
    _gradient_messages.check_names(workers)
    (self._codec,) = _gradient_messages.message_plans(push_codec).push
    self._shared = shared
    self._numbers = {name: i for i, name in enumerate(workers)}
    self._layouts = [
      _gradient_messages.layout(
        self._codec, self.server.part(p), self.server.model_state
      )
      for p in range(self.server.fragments)
    ]
    # Of tasks that are out: number of the learner, fragment, samples, steps.
    self._tasks: dict[int, tuple[int, int, int, int]] = {}
    self._pushes: dict[int, Pushed] = {}
    self._losses: dict[int, float] = {}
    # The last push of a learner that is in each fragment, or -1.
    self._settled = [[-1] * self.server.fragments for _ in workers]
    # Local steps whose progress has come: schedules go on for who returns.
    self._steps = [0] * len(workers)
    self.position: collections.Counter[int] = collections.Counter()
    self.samples = 0
    self.losses: collections.deque[tuple[int, float]] = collections.deque(
      maxlen=1000
    )

  @property
  def model(self) -> _learner.ServerModel:
    """The model as it is evaluated."""
    return self.server.model

  @property
  def parts(self) -> tuple[float, ...]:
    """Parameters in each fragment, for `DecoupledDiLoCo(parts=...)`."""
    return self.server.parts

  def prepare(self) -> None:
    """Compiles what messages and merges need, before the first of them."""
    for fragment, kinds in enumerate(self._layouts):
      empty = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), kinds)
      pushed, _ = self._decode(fragment, empty)
      self.server.prepare(fragment, pushed)

  def _decode(self, fragment: int, message: PyTree) -> tuple[Pushed, jax.Array]:
    decode = _gradient_messages.decode_push(self._codec)
    return decode(message, self.server.part(fragment))

  def reply(
    self, reply: _messages.Reply
  ) -> tuple[dict[str, Any], np.ndarray | None]:
    """Takes samples for a task, and encodes the fragments that are sent."""
    self.server.check_fragment(reply.fragment)
    worker = self._numbers[reply.worker]
    whose = 0 if self._shared else worker
    more = {
      "start": self.position[whose],
      "settled": list(self._settled[worker]),
      "steps": self._steps[worker],
    }
    self.position[whose] += reply.samples
    self._tasks[reply.task] = (
      worker, reply.fragment, reply.samples, reply.passes,
    )  # fmt: skip
    if reply.pull_plan is None:
      return more, None
    if reply.pulled is None:
      sent: PyTree = (self.server.anchor, self.server.model_state)
    else:
      sent = [self.server.part(p) for p in reply.pulled]
    return more, _gradient_messages.tree_bytes(sent)

  def push(self, task: int, more: dict[str, Any], payload: np.ndarray) -> None:
    """Decodes a push, or refuses it."""
    worker, fragment, _, steps = self._tasks[task]
    message = _gradient_messages.tree_of_push(payload, self._layouts[fragment])
    pushed, finite = self._decode(fragment, message)
    self._losses[task] = _gradient_messages.finite_loss(more, finite)
    self._pushes[task] = pushed
    self._steps[worker] += steps

  def apply(self, update: _messages.Apply) -> None:
    """Makes the outer step of pushes."""
    tasks = [self._tasks.pop(task) for task in update.tasks]
    pushes = [self._pushes.pop(task) for task in update.tasks]
    whole = sum(samples for _, _, samples, _ in tasks)
    self.samples += whole
    loss = 0.0
    for number, (worker, fragment, samples, _) in zip(
      update.tasks, tasks, strict=True
    ):
      loss += samples / whole * self._losses.pop(number)
      self._settled[worker][fragment] = number
    self.server.merge(tasks[0][1], pushes, update.weights)
    self.losses.append((self.samples, loss))

  def discard(self, task: int) -> None:
    """Drops a task, and its push if it is here."""
    del self._tasks[task]
    self._pushes.pop(task, None)
    self._losses.pop(task, None)

  def leave(self, worker: _messages.Worker) -> None:
    """Has nothing to forget: who returns is sent everything."""
    del worker

  def save(self, *, whole: bool = False) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the parameters, pushes that are not merged, and positions."""
    del whole  # Nothing that learners hold is kept here.
    notes = {
      "samples": self.samples,
      "position": sorted(self.position.items()),
      "tasks": [[task, *x] for task, x in self._tasks.items()],
      "pushes": [[task, self._losses[task]] for task in self._pushes],
      "settled": self._settled,
      "steps": self._steps,
    }
    tree = (self.server.arrays(), list(self._pushes.values()))
    return notes, _gradient_messages.tree_bytes(tree)

  def load(self, notes: dict[str, Any], payload: np.ndarray) -> None:
    """Restores what `save` returned."""
    self._tasks = {task: tuple(x) for task, *x in notes["tasks"]}
    like = [
      Pushed(self.server.part(self._tasks[task][1]), self.server.model_state)
      for task, _ in notes["pushes"]
    ]
    found = _gradient_messages.tree_of_bytes(
      payload, (self.server.arrays(), like)
    )
    arrays, pushes = jax.tree.map(jnp.asarray, found)
    self.server.load(arrays)
    self._pushes = {
      task: pushed
      for (task, _), pushed in zip(notes["pushes"], pushes, strict=True)
    }
    self._losses = dict(map(tuple, notes["pushes"]))
    self.samples = notes["samples"]
    self.position = collections.Counter(dict(map(tuple, notes["position"])))
    self._settled, self._steps = notes["settled"], notes["steps"]

  def snapshot(self) -> np.ndarray:
    """Returns the model's bytes, for `tree_of_bytes`."""
    model = self.server.model
    return _gradient_messages.tree_bytes((model.params, model.model_state))

  def totals(self) -> dict[str, Any]:
    """Returns the samples that were merged, and the last of their losses."""
    return {"samples": self.samples, "losses": list(self.losses)[-50:]}
