"""The syncer of Decoupled DiLoCo: outer steps, fragment by fragment."""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks, states, transforms
from jdist.server import _message_codec, _messages
from jdist.server.decoupled import _fragment_runner
from jdist.server.gradients import _gradient_messages, _learner, _merge
from jdist.server.gradients._merge import Pushed

PyTree = Any
Leaves = list[jax.Array]
# DiLoCo's outer optimizer.
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


class FragmentSyncer:
  r"""Merges learners' progress on fragments, and sends what was merged.

  .. math:: \Theta_p \leftarrow \Theta_p + \mathrm{outer}\Bigl(\sum_m w_m
            \Delta_{m,p}\Bigr)

  The `ServerLearner` of `DecoupledDiLoCo`; `FragmentRunner` is its worker.
  Each fragment has an outer optimizer's state of its own.  Batch statistics
  become the mean of the learners', with the same weights.  A pull sends the
  merged fragments in every bit, a push passes the codec.  A push whose size is
  not that of its fragment's message, or with a number that is not finite, is
  refused.

  Args:
    params: the first parameters.
    workers: the names of all learners, in the order of the data's numbers.
    outer: the outer optimizer, any Optax chain, whose schedules count a
      fragment's merges; DiLoCo's Nesterov momentum if None.
    fragments: as of `transforms.fragment_steps`; the protocol has as many.
    push_codec: codec of the learners' progress; None sends every bit.
    shared: whether all learners take from one stream of samples.
    model_state: the first batch statistics, if any.

  Attributes:
    anchor: leaves of all parameters, float32 at least.
    model_state: batch statistics.
    position: samples given out, by learner; one entry, 0, of a shared stream.
    samples: samples of the pushes that were merged.
    losses: `(samples so far, loss)` of the last merges, at most 1,000.

  Raises:
    ValueError: when an argument is not as described; at a task of a fragment
      that does not exist.
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
    outer = OUTER if outer is None else outer
    checks.check_optimizer("outer", outer)
    _gradient_messages.check_names(workers)
    (self._codec,) = _gradient_messages.message_plans(push_codec).push
    self._indices = _fragment_runner.fragment_indices(params, fragments)
    leaves, self._structure = jax.tree.flatten(params)
    self._dtypes = [leaf.dtype for leaf in leaves]
    # Copies: the caller may overwrite or donate its own arrays.
    self.anchor: Leaves = [
      jnp.array(states.wide(jnp.asarray(x)), copy=True) for x in leaves
    ]
    self._opt_states = [outer.init(self.part(p)) for p in self._fragments]
    self._outer_step = _outer_step(outer)
    self.model_state = jax.tree.map(jnp.array, model_state or {})
    self._shared = shared
    self._numbers = {name: i for i, name in enumerate(workers)}
    self._layouts = [
      _gradient_messages.layout(self._codec, self.part(p), self.model_state)
      for p in self._fragments
    ]
    # Tasks that are out: number of the learner, fragment, samples, steps.
    self._tasks: dict[int, tuple[int, int, int, int]] = {}
    self._pushes: dict[int, Pushed] = {}
    self._losses: dict[int, float] = {}
    # The last push of a learner that is in each fragment, or -1.
    self._settled = [[-1] * len(self._fragments) for _ in workers]
    # Local steps of decoded pushes: a learner that begins anew continues its
    # schedules from there.
    self._steps = [0] * len(workers)
    self.position: collections.Counter[int] = collections.Counter()
    self.samples = 0
    self.losses: collections.deque[tuple[int, float]] = collections.deque(
      maxlen=1000
    )

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
    for fragment, kinds in enumerate(self._layouts):
      empty = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), kinds)
      pushed, _ = self._decode(fragment, empty)
      for width in _merge.widths(len(self._numbers)):
        factors = np.zeros((2, width), np.float32)
        moved = self._outer_step(
          self.part(fragment), self._opt_states[fragment], [pushed] * width,
          factors,
        )  # fmt: skip
        jax.block_until_ready(moved)

  def _decode(self, fragment: int, message: PyTree) -> tuple[Pushed, jax.Array]:
    decode = _gradient_messages.decode_push(self._codec)
    return decode(message, self.part(fragment))

  def reply(self, reply: _messages.Reply) -> tuple[dict[str, Any], Any]:
    """Takes samples for a task, and encodes the fragments that are sent."""
    if reply.fragment not in self._fragments:
      raise ValueError(
        "`fragments` must be as many as the protocol's, got "
        f"{len(self._fragments)} for a task of number {reply.fragment}."
      )
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
      sent: PyTree = (list(self.anchor), self.model_state)
    else:
      # Every bit: an error of the anchor would stay with the learner, as its
      # progress is counted from there.
      sent = [self.part(p) for p in reply.pulled]
    return more, sent

  def push(self, task: int, more: dict[str, Any], payload: Any) -> None:
    """Decodes a push, or refuses it."""
    worker, fragment, _, steps = self._tasks[task]
    message = _gradient_messages.tree_of_push(payload, self._layouts[fragment])
    pushed, finite = self._decode(fragment, message)
    self._losses[task] = _gradient_messages.finite_loss(more, finite)
    self._pushes[task] = pushed
    # Once a push is decoded: steps that a failure has undone do not count.
    self._steps[worker] += steps

  def apply(self, update: _messages.Apply) -> None:
    """Makes the outer step of pushes, which are of one fragment."""
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
    self.merge(tasks[0][1], pushes, update.weights)
    self.losses.append((self.samples, loss))

  def merge(
    self, fragment: int, pushes: Sequence[Pushed], weights: Sequence[float]
  ) -> None:
    """Makes the outer step of a fragment.

    Args:
      fragment: number of the fragment.
      pushes: learners' progress, and their batch statistics.
      weights: weight of each push.
    """
    whole = sum(weights)
    parts = [x / whole for x in weights]
    # Statistics have no fragments: each merge replaces all of them.
    part, self._opt_states[fragment], self.model_state = self._outer_step(
      self.part(fragment), self._opt_states[fragment],
      *_merge.narrowed(pushes, weights, parts, len(self._numbers)),
    )  # fmt: skip
    for i, x in zip(self._indices[fragment], part, strict=True):
      self.anchor[i] = x

  def discard(self, task: int) -> None:
    """Drops a task, and its push if that has been decoded."""
    del self._tasks[task]
    self._pushes.pop(task, None)
    self._losses.pop(task, None)

  def leave(self, worker: _messages.Worker) -> None:
    """Does nothing: a learner that begins anew is sent all fragments."""
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
    tree = (self._arrays(), list(self._pushes.values()))
    return notes, _gradient_messages.tree_bytes(tree)

  def _arrays(self) -> PyTree:
    return self.anchor, self._opt_states, self.model_state

  def load(self, notes: dict[str, Any], payload: np.ndarray) -> None:
    """Restores what `save` returned."""
    self._tasks = {task: tuple(x) for task, *x in notes["tasks"]}
    like = [
      Pushed(self.part(self._tasks[task][1]), self.model_state)
      for task, _ in notes["pushes"]
    ]
    found = _gradient_messages.tree_of_bytes(payload, (self._arrays(), like))
    arrays, pushes = jax.tree.map(jnp.asarray, found)
    self.anchor, self._opt_states, self.model_state = arrays
    self._losses = dict(map(tuple, notes["pushes"]))
    self._pushes = dict(zip(self._losses, pushes, strict=True))
    self.samples = notes["samples"]
    self.position = collections.Counter(dict(map(tuple, notes["position"])))
    self._settled, self._steps = notes["settled"], notes["steps"]

  def snapshot(self) -> np.ndarray:
    """Returns the model's bytes, for `tree_of_bytes`."""
    model = self.model
    return _gradient_messages.tree_bytes((model.params, model.model_state))


@functools.lru_cache(maxsize=16)
def _outer_step(outer: optax.GradientTransformation) -> Callable[..., Any]:
  """Compiles the outer optimizer's step, once for equal optimizers."""

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
