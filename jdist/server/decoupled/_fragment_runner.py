"""A learner of Decoupled DiLoCo: local steps, fragment by fragment."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks, reducers, signatures, states, transforms
from jdist.server.decoupled import _learner_programs, _merged_model
from jdist.server.gradients import _gradient_messages, _learner

PyTree = Any
Leaves = list[jax.Array]


class LearnerState(NamedTuple):
  """State of a learner.

  Attributes:
    params: Its parameters.
    opt_state: State of its inner optimizer.
    model_state: Its batch statistics.
    base: Leaves from which its progress is counted, float32 at least.
    anchor: Leaves as the server sent them last, float32 at least.
  """

  params: PyTree
  opt_state: PyTree
  model_state: PyTree
  base: Leaves
  anchor: Leaves


@signatures.checked
class FragmentRunner:
  r"""Takes local steps from the server's parameters, and pushes their progress.

  The `WorkerLearner` of `DecoupledDiLoCo`; `FragmentSyncer` is its server.  A
  push of fragment p is the progress since the last one, :math:`\Delta_p = b_p -
  w_p`.  When :math:`\Theta_p` is received, the learner keeps what it has done
  that is not in it: the pushes U that are not merged yet, and what it has not
  pushed,

  .. math:: w_p \leftarrow \Theta_p - \sum_{j \in U} \Delta_{p,j}
            - (b_p - w_p)

  With `mix` it moves to a mixture in place of the last term,

  .. math:: b_p \leftarrow \Theta_p - \sum_{j \in U} \Delta_{p,j}, \qquad
            w_p \leftarrow \alpha w_p + (1 - \alpha) b_p

  Its parameters, its inner optimizer's state and its feedback stay here.  A
  learner that starts again keeps only the feedback.  It computes where `params`
  are: if they are sharded over its devices, so is all of its state, and each
  step is one program for all of them.

  Arguments not named here are those of `server.GradientWorker`; without `sizes`
  nothing is padded.

  Args:
    optimizer: The inner optimizer, any Optax chain; its schedules count local
      steps.
    samples: The source of batches; None if a subclass makes the local steps.
    fragments: As in `transforms.fragment_steps`.
    push_codec: Codec of the progress; None sends it exactly.
    interval: H, for inner optimizers that take `interval_steps`, as
      `transforms.pull_to_anchor` does.
    mix: alpha in [0, 1]; None keeps all progress on top of what is received.
    outer: The outer optimizer of a learner that makes the merges itself, on its
      CPU, by the messages of its peers; with None merged fragments are sent.
  """

  # All local steps build on each other.
  stateless = False
  # As of `ServerLedger`.
  decoded = False
  # Whether a subclass takes the local steps, and needs no samples.
  takes_own_steps = False

  def __init__(
    self,
    loss_fn: Callable[..., Any],
    optimizer: signatures.Optimizer,
    params: signatures.Numbers,
    samples: _learner.Samples | None,
    *,
    number: signatures.NonNegativeInt,
    num_workers: signatures.PositiveInt,
    sizes: Sequence[int] | None = None,
    fragments: transforms.Fragments = 1,
    push_codec: reducers.MessageCodec | None = None,
    model_state: signatures.Arrays = None,
    seed: signatures.Seed = 0,
    interval: signatures.PositiveInt = 1,
    mix: signatures.UnitFloat | None = None,
    outer: signatures.Optimizer | None = None,
  ):
    if samples is None and not self.takes_own_steps:
      raise ValueError(
        "`samples` must be a source of batches, got None. Only a learner that "
        "is given its local steps needs none."
      )
    checks.check_int("number", number, 0, num_workers - 1)
    self._interval, self._mix = interval, mix
    inner = jax.eval_shape(optimizer.init, params)
    transforms.refuse_iterates(inner, "decoupled DiLoCo", "optimizer")
    if states.exceptions(model_state):
      raise ValueError(
        "`model_state` must be finite for decoupled DiLoCo, which refuses what "
        "is not as diverged. Keep masks with infinities in the loss."
      )
    self._optimizer, self._loss_fn = optimizer, loss_fn
    (self._codec,) = _gradient_messages.message_plans(push_codec).push
    self._samples, self._number = samples, number
    self._sizes = None if sizes is None else sorted(set(sizes))
    self._key = jax.random.key(seed)
    self._model_state = jax.tree.map(
      jnp.array, {} if model_state is None else model_state
    )
    self._indices = _merged_model.fragment_indices(params, fragments)
    leaves, self._structure = jax.tree.flatten(params)
    self.shapes = _gradient_messages.shapes_of(leaves, self._model_state)
    self._dtypes = [jnp.asarray(leaf).dtype for leaf in leaves]
    self._anchor = [states.wide(jnp.asarray(x)) for x in leaves]
    # None where JAX may choose the device.
    self._shardings = tuple(
      x.sharding if getattr(x, "committed", False) else None for x in leaves
    )
    self._stream = seed * num_workers + number
    self._push_states = self._first_push_states()
    self._state: LearnerState | None = None
    # Pushes that are not merged, by fragment and task, as the server has them.
    self._unmerged: dict[int, dict[int, Leaves]] = {}
    self._outer, self._num_workers = outer, num_workers

  def _first_push_states(self) -> list[PyTree]:
    parts, first = self._parts(self._anchor), _gradient_messages.first_state
    stream = self._stream * len(parts)
    return [first(self._codec, x, stream + i) for i, x in enumerate(parts)]

  @functools.cached_property
  def _programs(self) -> tuple[Callable[..., Any], ...]:
    return _learner_programs.programs(
      self._loss_fn, self._optimizer, self._codec, self.decoded,
      self._interval, self._mix, self._shardings,
    )  # fmt: skip

  @functools.cached_property
  def _merging(self) -> _merged_model.PeerMerges | None:
    """The learner's own merges; a pair's server sends the same bits."""
    if self._outer is None or self.decoded:
      return None
    return _merged_model.PeerMerges(
      self._anchor, self._model_state, outer=self._outer,
      indices=self._indices, num_workers=self._num_workers, codec=self._codec,
    )  # fmt: skip

  def _placed(
    self, leaves: Sequence[jax.Array], numbers: Sequence[int]
  ) -> Leaves:
    own = [self._shardings[i] for i in numbers]
    return list(map(jax.device_put, leaves, own))

  def _parts(self, leaves: Sequence[jax.Array]) -> list[Leaves]:
    return [[leaves[i] for i in own] for own in self._indices]

  def prepare(self) -> None:
    """Compiles a step of each size, and each fragment's messages."""
    start = self.first_state(self._anchor, self._model_state)
    found = start
    for size in self._sizes or ():
      found, _ = self._local_step(start, (0, size, size), self._key)
    for fragment, part in enumerate(self._parts(self._anchor)):
      states_before = list(self._push_states)
      _, message, sent, _ = self.push_of(found, fragment, jnp.zeros(()))
      if self._merging is not None:
        self._merging.prepare_messages(fragment, message)
      self._push_states = states_before
      # The program depends on the number of pushes that are not merged.
      for count in range(3):
        taken = self.merged(found, {fragment: part}, {fragment: [sent] * count})
        jax.block_until_ready(taken.base)

  def first_state(
    self, anchor: Sequence[jax.Array], model_state: PyTree, steps: int = 0
  ) -> LearnerState:
    """Returns the state of a learner at its first or at a new start.

    Schedules continue after the local `steps` that it took before.
    """
    anchor = self._placed(anchor, range(len(self._dtypes)))
    leaves = [a.astype(x) for a, x in zip(anchor, self._dtypes, strict=True)]
    params = jax.tree.unflatten(self._structure, leaves)
    opt_state = self._optimizer.init(params)
    if steps:
      # Moments start again, as the parameters do; a schedule must not.
      opt_state = _learner_programs.with_count(opt_state, steps)
    return LearnerState(params, opt_state, model_state, anchor, list(anchor))

  def receive(self, header: dict[str, Any], payload: Any) -> None:
    """Takes the merged fragments that were sent with a task."""
    pulled, more = header["pulled"], header["more"]
    if pulled is not None and not pulled:
      return
    fresh = self._merged(header, payload)
    if pulled is None:
      self._unmerged.clear()
      anchor, model_state = fresh
      model_state = jax.tree.map(jnp.asarray, model_state)
      self._state = self.first_state(anchor, model_state, more["steps"])
      return
    assert self._state is not None, "a learner begins with all fragments"
    # Drops the pushes that are part of these fragments.
    for p in pulled:
      self._unmerged[p] = {
        task: push
        for task, push in self._unmerged.get(p, {}).items()
        if task > more["settled"][p]
      }
    self._state = self.merged(
      self._state,
      dict(zip(pulled, fresh, strict=True)),
      {p: list(self._unmerged[p].values()) for p in pulled},
    )

  def _merged(self, header: dict[str, Any], payload: Any) -> PyTree:
    """Returns the merged fragments of a task, or all and the statistics."""
    payload = np.zeros(0, np.uint8) if payload is None else payload
    if header.get("merges") is not None and not self.decoded:
      if self._merging is None:
        raise ValueError(
          "`outer` must be the server's outer optimizer with a protocol of "
          "`peers=True`, got None. Give it, or take `peers=False`."
        )
      return self._merging.receive(header, payload)
    kinds: PyTree = (self._anchor, self._model_state)
    if header["pulled"] is not None:
      kinds = [self._parts(self._anchor)[p] for p in header["pulled"]]
    return _gradient_messages.message_of(payload, kinds)

  def merged(
    self,
    state: LearnerState,
    fresh: Mapping[int, Sequence[jax.Array]],
    unmerged: Mapping[int, Sequence[Leaves]],
  ) -> LearnerState:
    """Returns the state once merged fragments have been received.

    This learner's `unmerged` pushes are not in the `fresh` leaves.
    """
    leaves, base = jax.tree.leaves(state.params), list(state.base)
    anchors = list(state.anchor)
    for fragment, anchor in fresh.items():
      own = self._indices[fragment]
      anchor = self._placed(anchor, own)
      params, bases = self._programs[1](
        [leaves[i] for i in own],
        [base[i] for i in own],
        anchor,
        list(unmerged.get(fragment, ())),
      )
      for i, x, b, a in zip(own, params, bases, anchor, strict=True):
        leaves[i], base[i], anchors[i] = x, b, a
    params = jax.tree.unflatten(self._structure, leaves)
    return state._replace(params=params, base=base, anchor=anchors)

  def compute(self, header: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Makes the local steps of a task, and returns their progress."""
    task, fragment = header["task"], header["fragment"]
    samples, passes = header["samples"], header["passes"]
    start = header["more"]["start"]
    key = jax.random.fold_in(self._key, task)
    # Without sizes no padding: all steps of a learner are of one size.
    each = -(-samples // passes)
    size = _gradient_messages.padded_size(self._sizes or [each], each)
    state, loss = self._state, jnp.zeros(())
    assert state is not None, "a task is received before it is computed"
    for i in range(passes):
      count = samples * (i + 1) // passes - samples * i // passes
      state, own = self._local_step(
        state, (start, count, size), jax.random.fold_in(key, i)
      )
      start += count
      loss = loss + own * (count / samples)
    self._state, found, sent, loss = self.push_of(state, fragment, loss)
    self._unmerged.setdefault(fragment, {})[task] = sent
    if self.decoded and any(self._shardings):
      found = jax.device_get(found)  # The server computes elsewhere.
    return {"loss": loss}, found

  def _local_step(
    self, state: LearnerState, samples: tuple[int, int, int], key: jax.Array
  ) -> tuple[LearnerState, jax.Array]:
    """Returns the state after a local step, and the loss before it.

    The samples are their position, their number and the padded size.
    """
    start, count, size = samples
    assert self._samples is not None  # `__init__` has refused it.
    batch = self._samples.batch(self._number, start, count, size=size)
    _gradient_messages.check_rows(batch, count, size)
    anchor = jax.tree.unflatten(self._structure, state.anchor)
    *new, loss = self._programs[0](*state[:3], batch, key, anchor)
    params, opt_state, model_state = new
    return LearnerState(
      params, opt_state, model_state, state.base, state.anchor
    ), loss

  def push_of(
    self, state: LearnerState, fragment: int, loss: Any = 0.0
  ) -> tuple[LearnerState, PyTree, Leaves, jax.Array]:
    """Pushes the progress of a fragment since its last push.

    Returns:
      The state; the message; the decoded message, which the server merges and
      which alone may be subtracted from later pushes; the loss, NaN if the push
      is not finite.
    """
    leaves, base = jax.tree.leaves(state.params), list(state.base)
    own = self._indices[fragment]
    now, message, sent, loss, self._push_states[fragment] = self._programs[2](
      [base[i] for i in own], [leaves[i] for i in own], state.model_state,
      loss, self._push_states[fragment],
    )  # fmt: skip
    for i, x in zip(own, now, strict=True):
      base[i] = x
    return state._replace(base=base), message, sent, loss

  def restart(self, *, lost: bool = False) -> None:
    """Forgets its parameters, and the feedback's residual if it was lost."""
    self._state = None
    self._unmerged.clear()
    if lost:
      self._push_states = self._first_push_states()

  def save(self, *, whole: bool = False) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the feedback's state, or all state."""
    if not whole:
      return {}, _gradient_messages.tree_bytes(self._push_states)
    notes = {
      "begun": self._state is not None,
      "unmerged": [[p, list(own)] for p, own in self._unmerged.items()],
    }
    unmerged = [list(own.values()) for own in self._unmerged.values()]
    kept = self._push_states, self._state, unmerged
    return notes, _gradient_messages.tree_bytes(kept)

  def load(self, notes: dict[str, Any], payload: np.ndarray) -> None:
    """Restores what `save` returned."""
    read = _gradient_messages.tree_of_bytes
    if "begun" not in notes:
      self._push_states = read(payload, self._push_states)
      return
    parts = self._parts(self._anchor)
    start = self._anchor, self._model_state
    state = self.first_state(*start) if notes["begun"] else None
    unmerged = [[parts[p]] * len(own) for p, own in notes["unmerged"]]
    self._push_states, self._state, found = read(
      payload, (self._push_states, state, unmerged)
    )
    for (p, tasks), pushes in zip(notes["unmerged"], found, strict=True):
      self._unmerged[p] = dict(zip(tasks, pushes, strict=True))
