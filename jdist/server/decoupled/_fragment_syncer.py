"""The syncer of Decoupled DiLoCo: outer steps, fragment by fragment."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import reducers, signatures, states, transforms
from jdist.server import _messages
from jdist.server.decoupled import _fragment_runner
from jdist.server.gradients import (
  _gradient_messages,
  _gradient_server,
  _learner,
  _merge,
)
from jdist.server.gradients._merge import Pushed

PyTree = Any
Leaves = list[jax.Array]
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
    outer = OUTER if outer is None else outer
    self._indices = _fragment_runner.fragment_indices(params, fragments)
    plans = _gradient_messages.message_plans(push_codec)
    super().__init__(workers, shared, plans.push * len(self._indices))
    leaves, self._structure = jax.tree.flatten(params)
    self._dtypes = [jnp.asarray(leaf).dtype for leaf in leaves]
    # Copies: the caller may overwrite or donate its own arrays.
    self.anchor: Leaves = [
      jnp.array(states.wide(jnp.asarray(x)), copy=True) for x in leaves
    ]
    self._opt_states = [outer.init(self.part(p)) for p in self._fragments]
    trial = self.part(0), self._opt_states[0], self.part(0)
    jax.eval_shape(transforms.lenient(outer, "outer").update, *trial)
    self._outer_step = _outer_step(outer)
    model_state = {} if model_state is None else model_state
    self.model_state = jax.tree.map(jnp.array, model_state)
    # The last push of a learner that is in each fragment, or -1.
    self._settled = [[-1] * len(self._fragments) for _ in workers]
    # The position of each learner's schedules: a learner starts again where the
    # run is, and counts the local steps of decoded pushes from there.
    self._steps = [0] * len(workers)

  @property
  def _fragments(self) -> range:
    return range(len(self._indices))

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
    return _learner.ServerModel(params, self._opt_states, self.model_state)

  def part(self, fragment: int) -> Leaves:
    """Returns a fragment's leaves."""
    return [self.anchor[i] for i in self._indices[fragment]]

  def prepare(self) -> None:
    """Compiles what messages and merges need, before the first of them."""
    for fragment in self._fragments:
      pushed = self._empty_push(fragment)
      for width, factors in _merge.forms(self.num_workers):
        moved = self._outer_step(
          self.part(fragment), self._opt_states[fragment], [pushed] * width,
          factors,
        )  # fmt: skip
        jax.block_until_ready(moved)

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
    if reply.pull_plan is None:
      return more, None
    if reply.pulled is None:
      sent: PyTree = (list(self.anchor), self.model_state)
    else:
      # Exactly: an error of the anchor would stay with the learner, as its
      # progress is counted from there.
      sent = [self.part(p) for p in reply.pulled]
    return more, sent

  def push(self, task: int, more: dict[str, Any], payload: Any) -> None:
    """Decodes a push, or refuses it."""
    super().push(task, more, payload)
    # Once a push is decoded: steps that a failure has undone do not count.
    given = self.tasks[task]
    self._steps[given.worker] += given.passes

  def apply(self, update: _messages.Apply) -> None:
    """Makes the outer step of pushes, which are of one fragment."""
    tasks, pushes, _, _ = self._take(update)
    for number, task in zip(update.tasks, tasks, strict=True):
      self._settled[task.worker][task.kind] = number
    fragment, whole = tasks[0].kind, sum(update.weights)
    parts = [x / whole for x in update.weights]
    # Statistics have no fragments: each merge replaces all of them.
    part, self._opt_states[fragment], self.model_state = self._outer_step(
      self.part(fragment), self._opt_states[fragment],
      *_merge.narrowed(pushes, update.weights, parts, self.num_workers),
    )  # fmt: skip
    for i, x in zip(self._indices[fragment], part, strict=True):
      self.anchor[i] = x

  def save(self, *, whole: bool = False) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the parameters, pushes that are not merged, and positions."""
    del whole  # Nothing that learners hold is kept here.
    notes, pushes = self._save()
    notes |= {"settled": self._settled, "steps": self._steps}
    return notes, _gradient_messages.tree_bytes((self._arrays(), pushes))

  def _arrays(self) -> PyTree:
    return self.anchor, self._opt_states, self.model_state

  def load(self, notes: dict[str, Any], payload: np.ndarray) -> None:
    """Restores what `save` returned."""
    arrays = self._read(notes, payload, self._arrays())
    self.anchor, self._opt_states, self.model_state = arrays
    self._settled, self._steps = notes["settled"], notes["steps"]


@functools.lru_cache(maxsize=16)
def _outer_step(outer: optax.GradientTransformation) -> Callable[..., Any]:
  @jax.jit
  def move(
    part: Leaves,
    opt_state: PyTree,
    pushes: Sequence[Pushed],
    factors: jax.Array,
  ) -> tuple[Leaves, PyTree, PyTree]:
    total = _merge.merge(pushes, factors)
    updates, opt_state = outer.update(total.grads, opt_state, part)
    return optax.apply_updates(part, updates), opt_state, total.change

  return move
