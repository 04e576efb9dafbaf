"""A learner of Decoupled DiLoCo in a process of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks, states, transforms
from jdist.server import _message_codec
from jdist.server.decoupled import _fragment_worker
from jdist.server.gradients import _gradient_messages, _learner
from jdist.server.gradients._merge import Pushed

PyTree = Any
Leaves = list[jax.Array]


class FragmentRunner:
  """Takes local steps from what it was sent, and pushes their progress.

  The `WorkerLearner` of `DecoupledDiLoCo`, as `FragmentWorker` describes it;
  `FragmentSyncer` is its server.  Its parameters, its inner optimizer's state
  and its feedback stay here: who begins anew has new ones, but for the
  feedback.

  Args:
    loss_fn: as of `training.make_step`; it heeds a batch's `"mask"`.
    optimizer: the inner one, any Optax chain; its schedules count local steps.
    params: for their structure.
    samples: where batches come from.
    number: of this learner, from 0.
    num_workers: of all.
    sizes: to which batches are padded; each is compiled beforehand.
    fragments: as of `transforms.fragment_steps`.
    push_codec: of the progress; None sends every bit.
    model_state: batch statistics, for their structure.
    seed: of the random numbers in the loss, and of the rounding.
  """

  def __init__(
    self,
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    params: PyTree,
    samples: _learner.Samples,
    *,
    number: int,
    num_workers: int,
    sizes: Sequence[int] | None = None,
    fragments: transforms.Fragments = 1,
    push_codec: _message_codec.MessageCodec | None = None,
    model_state: PyTree | None = None,
    seed: int = 0,
  ):
    checks.check_optimizer("optimizer", optimizer)
    self._worker = _fragment_worker.FragmentWorker(
      loss_fn, optimizer, params, fragments
    )
    (self._codec,) = _gradient_messages.message_plans(push_codec).push
    self._samples, self._number = samples, number
    self._sizes = None if sizes is None else sorted(set(sizes))
    self._key = jax.random.key(checks.check_seed(seed))
    self._model_state = jax.tree.map(jnp.array, model_state or {})
    self._anchor = [
      states.wide(jnp.asarray(x)) for x in jax.tree.leaves(params)
    ]
    parts = self._parts(self._anchor)
    self._push_states = [
      _gradient_messages.first_state(
        self._codec, part, (seed * num_workers + number) * len(parts) + i
      )
      for i, part in enumerate(parts)
    ]
    self._state: _fragment_worker.WorkerState | None = None
    self._unmerged = _fragment_worker.Unmerged()

  def _parts(self, leaves: Sequence[jax.Array]) -> list[Leaves]:
    return [[leaves[i] for i in own] for own in self._worker.indices]

  def prepare(self) -> None:
    """Compiles a step of each size, and each fragment's messages."""
    state = self._worker.start(self._anchor, self._model_state)
    for size in self._sizes or ():
      batch = self._samples.batch(self._number, 0, 1, size=size)
      found, _ = self._worker.step(state, batch, self._key)
    for fragment, part in enumerate(self._parts(self._anchor)):
      _, progress = self._worker.push(found, fragment)
      sent = self._encode(fragment, progress, found.model_state)[2]
      for count in range(3):
        taken = self._worker.take(
          found, {fragment: part}, {fragment: [sent] * count}
        )
        jax.block_until_ready(taken.base)

  @property
  def stateless(self) -> bool:
    """False: all local steps build on each other."""
    return False

  def receive(self, header: dict[str, Any], payload: np.ndarray | None) -> None:
    """Takes the merged fragments that were sent with a task."""
    pulled, more = header["pulled"], header["more"]
    payload = np.zeros(0, np.uint8) if payload is None else payload
    if pulled is None:
      self._unmerged.clear()
      anchor, model_state = _gradient_messages.tree_of_bytes(
        payload, (self._anchor, self._model_state)
      )
      self._state = self._worker.start(
        list(map(jnp.asarray, anchor)),
        jax.tree.map(jnp.asarray, model_state),
        more["steps"],
      )
      return
    assert self._state is not None, "a learner begins with all fragments"
    if not pulled:
      return
    self._unmerged.settle({p: more["settled"][p] for p in pulled})
    parts = self._parts(self._anchor)
    arrived = _gradient_messages.tree_of_bytes(
      payload, [parts[p] for p in pulled]
    )
    self._state = self._worker.take(
      self._state,
      dict(zip(pulled, arrived, strict=True)),
      self._unmerged.of(pulled),
    )

  def compute(
    self, header: dict[str, Any]
  ) -> tuple[dict[str, Any], np.ndarray]:
    """Makes the local steps of a task, and returns their progress."""
    task, fragment = header["task"], header["fragment"]
    samples, passes = header["samples"], header["passes"]
    assert self._state is not None, "a task is received before it is computed"
    each = -(-samples // passes)
    state, loss = self._worker.steps(
      self._state,
      self._samples,
      self._number,
      (header["more"]["start"], samples, passes),
      jax.random.fold_in(self._key, task),
      # Without sizes no padding: all steps of a learner are of one size.
      _gradient_messages.padded_size(self._sizes or [each], each),
    )
    self._state, progress = self._worker.push(state, fragment)
    found, self._push_states[fragment], sent = self._encode(
      fragment, progress, state.model_state
    )
    self._unmerged.add(fragment, task, sent)
    return {"loss": float(loss)}, _gradient_messages.tree_bytes(found)

  def _encode(
    self, fragment: int, progress: Leaves, model_state: PyTree
  ) -> tuple[PyTree, PyTree, Leaves]:
    """Returns the message, the feedback's state, and what is decoded."""
    encode = _gradient_messages.encode_push(self._codec)
    pushed = Pushed(progress, model_state)
    message, state = encode(pushed, self._push_states[fragment])
    decoded, _ = _gradient_messages.decode_push(self._codec)(message, progress)
    return message, state, decoded.grads

  def restart(self) -> None:
    """Forgets its parameters; the residual of its feedback stays."""
    self._state = None
    self._unmerged.clear()

  def save(self, *, whole: bool = False) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the feedback's state, or all state."""
    if not whole:
      return {}, _gradient_messages.tree_bytes(self._push_states)
    notes = {
      "begun": self._state is not None,
      "unmerged": [[p, list(own)] for p, own in self._unmerged.items()],
    }
    unmerged = [list(own.values()) for own in self._unmerged.values()]
    return notes, _gradient_messages.tree_bytes(
      (self._push_states, self._state, unmerged)
    )

  def load(self, notes: dict[str, Any], payload: np.ndarray) -> None:
    """Restores what `save` returned."""
    read = _gradient_messages.tree_of_bytes
    if "begun" not in notes:
      self._push_states = read(payload, self._push_states)
      return
    parts = self._parts(self._anchor)
    state = None
    if notes["begun"]:
      state = self._worker.start(self._anchor, self._model_state)
    unmerged = [[parts[p]] * len(own) for p, own in notes["unmerged"]]
    self._push_states, self._state, found = read(
      payload, (self._push_states, state, unmerged)
    )
    for (p, tasks), pushes in zip(notes["unmerged"], found, strict=True):
      self._unmerged[p] = dict(zip(tasks, pushes, strict=True))
