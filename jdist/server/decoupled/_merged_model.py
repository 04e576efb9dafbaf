"""Merged parameters, at the server and at learners that merge themselves."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import states, transforms
from jdist.server.gradients import _gradient_messages, _merge
from jdist.server.gradients._merge import Pushed

PyTree = Any
Leaves = list[jax.Array]


class MergedModel:
  """The parameters that merges move, with all state of a merge.

  The server has one, and each worker has another one if workers merge.

  Attributes:
    indices: The numbers of each fragment's leaves.
    anchor: Leaves of all parameters, float32 at least.
    opt_states: The outer optimizer's state, by fragment.
    model_state: Batch statistics.
  """

  def __init__(
    self,
    leaves: Sequence[jax.Array],
    model_state: PyTree,
    *,
    outer: optax.GradientTransformation,
    indices: Sequence[tuple[int, ...]],
    num_workers: int,
  ):
    self.indices, self._num_workers = indices, num_workers
    # Copies: the caller may overwrite or donate its own arrays.
    self.anchor: Leaves = [
      jnp.array(states.wide(jnp.asarray(x)), copy=True) for x in leaves
    ]
    self.opt_states = [outer.init(self.part(p)) for p in self.numbers]
    trial = self.part(0), self.opt_states[0], self.part(0)
    jax.eval_shape(transforms.lenient(outer, "outer").update, *trial)
    self._outer_step = _outer_step(outer)
    model_state = {} if model_state is None else model_state
    self.model_state = jax.tree.map(jnp.array, model_state)

  @property
  def numbers(self) -> range:
    """The numbers of the fragments."""
    return range(len(self.indices))

  def part(self, fragment: int) -> Leaves:
    """Returns a fragment's leaves."""
    return [self.anchor[i] for i in self.indices[fragment]]

  def exact(self, fragments: Iterable[int] | None) -> PyTree:
    """Returns all that merges of some fragments, or of all, have moved."""
    numbers = self.numbers if fragments is None else tuple(fragments)
    parts, own = map(self.part, numbers), [self.opt_states[p] for p in numbers]
    return list(parts), own, self.model_state

  def take(self, fragments: Iterable[int] | None, found: PyTree) -> None:
    """Takes what another one's `exact` has returned."""
    numbers = self.numbers if fragments is None else fragments
    parts, own, self.model_state = jax.tree.map(jnp.asarray, found)
    for p, part, opt_state in zip(numbers, parts, own, strict=True):
      self._set(p, part, opt_state)

  def _set(self, fragment: int, part: Leaves, opt_state: PyTree) -> None:
    self.opt_states[fragment] = opt_state
    for i, x in zip(self.indices[fragment], part, strict=True):
      self.anchor[i] = x

  def prepare(self, fragment: int, pushed: Pushed) -> None:
    """Compiles a fragment's merges, before the first of them."""
    part, opt_state = self.part(fragment), self.opt_states[fragment]
    for width, factors in _merge.forms(self._num_workers):
      moved = self._outer_step(part, opt_state, [pushed] * width, factors)
      jax.block_until_ready(moved)

  def merge(
    self, fragment: int, pushes: Sequence[Pushed], weights: Sequence[float]
  ) -> None:
    """Makes the outer step of a fragment's pushes."""
    whole = sum(weights)
    parts = [x / whole for x in weights]
    # Statistics have no fragments: each merge replaces all of them.
    part, opt_state, self.model_state = self._outer_step(
      self.part(fragment), self.opt_states[fragment],
      *_merge.narrowed(pushes, weights, parts, self._num_workers),
    )  # fmt: skip
    self._set(fragment, part, opt_state)


def fragment_indices(
  params: PyTree, fragments: transforms.Fragments
) -> tuple[tuple[int, ...], ...]:
  """Returns the numbers of each fragment's leaves, in the tree's order."""
  labels = transforms.fragments_of(params, fragments)
  return tuple(
    tuple(i for i, label in enumerate(labels) if label == fragment)
    for fragment in range(max(labels) + 1)
  )


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


class PeerMerges(MergedModel):
  """A learner's copy, which is moved by messages from its peers.

  It is on the learner's CPU, as the server's is: the learner's accelerator
  keeps its memory, and all copies have the same bits if their processes compile
  for one kind of CPU.
  """

  def __init__(
    self,
    leaves: Sequence[jax.Array],
    model_state: PyTree,
    *,
    codec: _gradient_messages.Codec,
    **options: Any,
  ):
    with _on_cpu():
      super().__init__(*jax.device_get((leaves, model_state)), **options)
      self._kinds = [
        _gradient_messages.layout(codec, self.part(p), self.model_state)
        for p in self.numbers
      ]
    self._codec = codec

  def prepare_messages(self, fragment: int, message: PyTree) -> None:
    """Compiles a fragment's merges of such messages."""
    payload = _gradient_messages.bytes_of(message)
    with _on_cpu():
      self.prepare(fragment, self._decoded(fragment, payload))

  def receive(self, header: dict[str, Any], payload: np.ndarray) -> PyTree:
    """Makes a task's merges; returns its fragments, or all and the statistics.

    If the task names no merges, the server has sent parameters and states.
    """
    pulled = header["pulled"]
    with _on_cpu():
      if header["merges"]:
        messages = iter(header["messages"])
        for fragment, tasks, weights, _ in header["merges"]:
          pushes = [self._decoded(fragment, next(messages)) for _ in tasks]
          self.merge(fragment, pushes, weights)
      else:
        like = self.exact(pulled)
        self.take(pulled, _gradient_messages.tree_of_bytes(payload, like))
      if pulled is None:
        return jax.device_get((self.anchor, self.model_state))
      return jax.device_get([self.part(p) for p in pulled])

  def _decoded(self, fragment: int, payload: np.ndarray) -> Any:
    return _gradient_messages.received_push(
      self._codec, self._kinds[fragment], {"loss": 0.0}, payload,
      self.part(fragment),
    )[0]  # fmt: skip


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
  """Makes a CPU the default device, unless JAX_PLATFORMS leaves it out."""
  try:
    return jax.default_device(jax.local_devices(backend="cpu")[0])
  except RuntimeError:
    return contextlib.nullcontext()
