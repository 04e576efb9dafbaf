"""Compiled programs of gradients' messages, alike at server and workers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist import codecs, training
from jdist.server import _message_codec
from jdist.server.h_ps import _bit_plans, _plan_codecs

PyTree = Any
_EXACT = _message_codec.MessageCodec(codecs.Dense())


class Pushed(NamedTuple):
  """Content of a push.

  Attributes:
    grads: a worker's gradient.
    change: of the batch statistics; of integers the new ones.
  """

  grads: PyTree
  change: PyTree


class MessagePlans(NamedTuple):
  """The codecs of a run's messages, by the number of their plan.

  Attributes:
    push: of gradients.
    pull: of the differences from what a worker holds; plan 0 is exact.
  """

  push: tuple[_message_codec.MessageCodec, ...]
  pull: tuple[_message_codec.MessageCodec, ...]


def message_plans(
  push_codec: _message_codec.MessageCodec | None = None,
  plans: _bit_plans.BitPlans | None = None,
) -> MessagePlans:
  """Returns codecs by a codec of all pushes, or by plans of bits; else exact.

  Raises:
    ValueError: when both are given.
  """
  if plans is None:
    return MessagePlans((push_codec or _EXACT,), (_EXACT,))
  if push_codec is not None:
    raise ValueError(
      "`push_codec` must be left out with `plans`, in whose place they are."
    )
  numbers = range(len(plans.bits))
  return MessagePlans(
    tuple(_plan_codecs.plan_codec(plans, i) for i in numbers),
    # The residual of a difference is in the next one.
    tuple(_plan_codecs.plan_codec(plans, i, feedback=False) for i in numbers),
  )


def first_states(
  plans: MessagePlans, like: PyTree, seed: int, number: int, num_workers: int
) -> tuple[PyTree, PyTree]:
  """Returns a worker's first states of pushes and pulls.

  Each rounds by random numbers of its own, in programs for all seeds.
  """
  moved = ((seed * num_workers + number) % 2048) << 20
  push, pull = plans.push[0].init(like), plans.pull[0].init(like)
  return push._replace(step=push.step + moved), pull._replace(
    step=pull.step + moved
  )


def _joined(
  codec: _message_codec.MessageCodec, tree: PyTree, state: PyTree, tail: PyTree
) -> tuple[jax.Array, PyTree]:
  buffer, state = codec.encode(tree, state)
  if not jax.tree.leaves(tail):
    return buffer, state
  end, _ = _EXACT.encode(tail, _EXACT.init(tail))
  return jnp.concatenate([buffer, end]), state


def _apart(
  codec: _message_codec.MessageCodec,
  buffer: jax.Array,
  like: PyTree,
  tail: PyTree,
) -> tuple[PyTree, PyTree]:
  cut = codec.num_bytes(like)
  found = codec.decode(buffer[:cut], like)
  if not jax.tree.leaves(tail):
    return found, tail
  return found, _EXACT.decode(buffer[cut:], tail)


def num_bytes(
  codec: _message_codec.MessageCodec, like: PyTree, tail: PyTree
) -> int:
  """Returns the payload's bytes of a message with such a tail."""
  more = _EXACT.num_bytes(tail) if jax.tree.leaves(tail) else 0
  return codec.num_bytes(like) + more


@functools.lru_cache(maxsize=16)
def gradient_program(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
  """Compiles a worker's gradient, a local step ahead of what it holds.

  Returns:
    `(params, model_state, last, lead_rate, batch, key, task) -> Pushed, loss`.
  """
  compute = training.make_gradient(loss_fn)

  @jax.jit
  def gradient(
    params: PyTree,
    model_state: PyTree,
    last: PyTree,
    lead_rate: jax.Array,
    batch: PyTree,
    key: jax.Array,
    task: jax.Array,
  ) -> tuple[Pushed, jax.Array]:
    if last is not None:
      params = jax.tree.map(
        lambda p, g: p - lead_rate.astype(p.dtype) * g, params, last
      )
    found = compute(params, model_state, batch, jax.random.fold_in(key, task))
    change = jax.tree.map(
      lambda new, old: (
        new - old if jnp.issubdtype(new.dtype, jnp.floating) else new
      ),
      found.model_state,
      model_state,
    )
    return Pushed(found.grads, change), found.loss

  return gradient


@functools.lru_cache(maxsize=32)
def encode_push(codec: _message_codec.MessageCodec) -> Callable[..., Any]:
  """Compiles `(Pushed, state) -> buffer, state`."""

  @jax.jit
  def encode(pushed: Pushed, state: PyTree) -> tuple[jax.Array, PyTree]:
    return _joined(codec, pushed.grads, state, pushed.change)

  return encode


@functools.lru_cache(maxsize=32)
def decode_push(codec: _message_codec.MessageCodec) -> Callable[..., Any]:
  """Compiles `(buffer, params, model_state) -> Pushed, whether finite`."""

  @jax.jit
  def decode(
    buffer: jax.Array, params: PyTree, model_state: PyTree
  ) -> tuple[Pushed, jax.Array]:
    pushed = Pushed(*_apart(codec, buffer, params, model_state))
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(pushed)]
    return pushed, jnp.stack(finite).all()

  return decode


@functools.lru_cache(maxsize=32)
def encode_pull(
  codec: _message_codec.MessageCodec, exact: bool
) -> Callable[..., Any]:
  """Compiles `(params, held, state, model_state) -> buffer, state`.

  The parameters themselves, or their difference from what a worker holds.
  """

  @jax.jit
  def encode(
    params: PyTree, held: PyTree, state: PyTree, model_state: PyTree
  ) -> tuple[jax.Array, PyTree]:
    sent = params if exact else jax.tree.map(jnp.subtract, params, held)
    return _joined(codec, sent, state, model_state)

  return encode


@functools.lru_cache(maxsize=32)
def receive_pull(
  codec: _message_codec.MessageCodec, exact: bool
) -> Callable[..., Any]:
  """Compiles `(buffer, held, model_state) -> held, model_state`.

  The server runs it, too: both then hold the same bits.
  """

  @jax.jit
  def receive(
    buffer: jax.Array, held: PyTree, model_state: PyTree
  ) -> tuple[PyTree, PyTree]:
    sent, model_state = _apart(codec, buffer, held, model_state)
    if not exact:
      sent = jax.tree.map(jnp.add, held, sent)
    return sent, model_state

  return receive


def tree_bytes(tree: PyTree) -> np.ndarray:
  """Returns all leaves' bytes, one after the other, uint8 [bytes]."""
  leaves = jax.device_get(jax.tree.leaves(tree))
  parts = [
    np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8) for x in leaves
  ]
  return np.concatenate([np.zeros(0, np.uint8), *parts])


def tree_of_bytes(buffer: np.ndarray, like: PyTree) -> PyTree:
  """Returns the tree of `tree_bytes`, in the shapes and dtypes of `like`.

  Raises:
    ValueError: when there are more or fewer bytes.

  >>> found = tree_of_bytes(tree_bytes({"w": np.ones(2)}), {"w": np.zeros(2)})
  >>> found["w"].tolist()
  [1.0, 1.0]
  """
  leaves, structure = jax.tree.flatten(like)
  sizes = [int(np.size(x)) * np.dtype(x.dtype).itemsize for x in leaves]
  if sum(sizes) != len(buffer):
    raise ValueError(
      f"`buffer` must have {sum(sizes)} bytes for such a tree, got "
      f"{len(buffer)}."
    )
  found, start = [], 0
  for leaf, size in zip(leaves, sizes, strict=True):
    part = np.array(buffer[start : start + size]).view(leaf.dtype)
    found.append(jnp.asarray(part.reshape(np.shape(leaf))))
    start += size
  return jax.tree.unflatten(structure, found)
