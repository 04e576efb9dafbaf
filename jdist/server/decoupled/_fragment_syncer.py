"""The syncer of Decoupled DiLoCo: outer steps, fragment by fragment."""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import reducers, signatures, transforms
from jdist.server import _messages
from jdist.server.decoupled import _decoupled_diloco, _merged_model
from jdist.server.gradients import (
  _gradient_messages,
  _gradient_server,
  _learner,
)

PyTree = Any
# DiLoCo's outer optimizer.
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


@signatures.checked
class FragmentSyncer(_gradient_server.ServerLedger):
  r"""Merges learners' progress on fragments, and sends what was merged.

  .. math:: \Theta_p \leftarrow \Theta_p + \mathrm{outer}\Bigl(\sum_m w_m
            \Delta_{m,p}\Bigr)

  The `ServerLearner` of `DecoupledDiLoCo`; `FragmentRunner` is its worker.
  Each fragment has an outer optimizer's state of its own.  Batch statistics
  become the mean of the learners', with the same weights.  Merged fragments are
  sent exactly, and pushes are encoded by `push_codec`.  A push of another size
  than its fragment's message, or with a number that is not finite, is refused.

  Args:
    params: The first parameters.
    workers: The names of all learners, in the order of the data's numbers.
    outer: The outer optimizer, any Optax chain, whose schedules count a
      fragment's merges; DiLoCo's Nesterov momentum if None.
    fragments: As in `transforms.fragment_steps`; the protocol has as many.
    push_codec: Codec of the learners' progress; None sends it exactly.
    shared: Whether all learners take from one stream of samples.
    model_state: The first batch statistics, if any.

  Attributes:
    anchor: Leaves of all parameters, float32 at least.
    model_state: Batch statistics.
    messages: The messages of the last merges, by task, if learners merge.
  """

  def __init__(
    self,
    params: signatures.Numbers,
    *,
    workers: Sequence[_messages.Worker],
    outer: signatures.Optimizer | None = None,
    fragments: transforms.Fragments = 1,
    push_codec: reducers.MessageCodec | None = None,
    shared: bool = True,
    model_state: signatures.Arrays = None,
  ):
    leaves, self._structure = jax.tree.flatten(params)
    self.merged = _merged_model.MergedModel(
      leaves, model_state, outer=OUTER if outer is None else outer,
      indices=_merged_model.fragment_indices(params, fragments),
      num_workers=len(workers),
    )  # fmt: skip
    plans = _gradient_messages.message_plans(push_codec)
    super().__init__(workers, shared, plans.push * len(self._fragments))
    self.shapes = _gradient_messages.shapes_of(leaves, model_state)
    self._dtypes = [jnp.asarray(leaf).dtype for leaf in leaves]
    # The last push of a learner that is in each fragment, or -1.
    self._settled = [[-1] * len(self._fragments) for _ in workers]
    # The position of each learner's schedules: a learner starts again where the
    # run is, and counts the local steps of decoded pushes from there.
    self._steps = [0] * len(workers)
    kept = _decoupled_diloco.KEPT_MERGES * len(self._fragments)
    self._merges = collections.deque[tuple[int, ...]](maxlen=kept)
    self._peers, self.messages = False, dict[int, np.ndarray]()

  @property
  def anchor(self) -> list[jax.Array]:
    """Leaves of all parameters."""
    return self.merged.anchor

  @property
  def model_state(self) -> PyTree:
    """Batch statistics."""
    return self.merged.model_state

  def part(self, fragment: int) -> list[jax.Array]:
    """Returns a fragment's leaves."""
    return self.merged.part(fragment)

  @property
  def _fragments(self) -> range:
    return self.merged.numbers

  @property
  def parts(self) -> tuple[float, ...]:
    """Parameters in each fragment, for `DecoupledDiLoCo(parts=...)`."""
    return tuple(
      float(sum(x.size for x in self.part(p))) for p in self._fragments
    )

  @property
  def model(self) -> _learner.ServerModel:
    """The model as it is evaluated."""
    leaves = [
      a.astype(x) for a, x in zip(self.anchor, self._dtypes, strict=True)
    ]
    params = jax.tree.unflatten(self._structure, leaves)
    opt_states = self.merged.opt_states
    return _learner.ServerModel(params, opt_states, self.model_state)

  def prepare(self) -> None:
    """Compiles what messages and merges need, before the first of them."""
    for fragment in self._fragments:
      self.merged.prepare(fragment, self._empty_push(fragment))

  def _like(self, kind: int) -> tuple[PyTree, PyTree]:
    return self.part(kind), self.model_state

  def reply(self, reply: _messages.Reply) -> tuple[dict[str, Any], Any]:
    """Takes samples for a task, and encodes the fragments that are sent."""
    if reply.fragment not in self._fragments:
      raise ValueError(
        "`fragments` must be as many as the protocol's, got "
        f"{len(self._fragments)} for a task of number {reply.fragment}."
      )
    worker, start = self._give(reply, reply.fragment)
    if reply.pulled is None:
      self._steps[worker] = max(self._steps)
    more = {
      "start": start,
      "settled": list(self._settled[worker]),
      "steps": max(self._steps),
    }
    pulled, named = reply.pulled, reply.merges
    self._peers = named is not None
    if reply.pull_plan is None or (named and not self.decoded):
      return more, None
    if self._peers and not self.decoded:
      return more, self.merged.exact(pulled)
    if pulled is None:
      return more, (list(self.anchor), self.model_state)
    # Exactly: an error of the anchor would stay with the learner, as its
    # progress is counted from there.
    return more, [self.part(p) for p in pulled]

  def push(self, task: int, more: dict[str, Any], payload: Any) -> None:
    """Decodes a push, or refuses it."""
    super().push(task, more, payload)
    # Once a push is decoded: steps that a failure has undone do not count.
    given = self.tasks[task]
    self._steps[given.worker] += given.passes
    if self._peers:
      self.messages[task] = payload

  def apply(self, update: _messages.Apply) -> None:
    """Makes the outer step of pushes, which are of one fragment."""
    tasks, pushes, _, _ = self._take(update)
    for number, task in zip(update.tasks, tasks, strict=True):
      self._settled[task.worker][task.kind] = number
    fragment = tasks[0].kind
    self.merged.merge(fragment, pushes, update.weights)
    if self._peers:
      if len(self._merges) == self._merges.maxlen:
        for number in self._merges[0]:
          self.messages.pop(number, None)
      self._merges.append(update.tasks)

  def save(self, *, whole: bool = False) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the parameters, pushes that are not merged, and positions."""
    del whole  # Nothing that learners hold is kept here.
    notes, pushes = self._save()
    notes |= {"settled": self._settled, "steps": self._steps}
    return notes, _gradient_messages.tree_bytes((self._arrays(), pushes))

  def _arrays(self) -> PyTree:
    now = self.merged
    return now.anchor, now.opt_states, now.model_state

  def load(self, notes: dict[str, Any], payload: np.ndarray) -> None:
    """Restores what `save` returned."""
    now, arrays = self.merged, self._read(notes, payload, self._arrays())
    now.anchor, now.opt_states, now.model_state = arrays
    self._settled, self._steps = notes["settled"], notes["steps"]
