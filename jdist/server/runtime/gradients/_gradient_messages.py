"""Compiled programs of gradients' messages, alike at server and workers."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist import codecs, training
from jdist.server import _message_codec
from jdist.server.h_ps import _bit_plans, _local_step, _plan_codecs
from jdist.server.runtime import _engine

PyTree = Any
EXACT = _message_codec.MessageCodec(codecs.Dense())


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
    return MessagePlans((push_codec or EXACT,), (EXACT,))
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


def layout(
  codec: _message_codec.MessageCodec, like: PyTree, tail: PyTree
) -> PyTree:
  """Returns shapes and dtypes of a message: of a tree, and exact ones behind.

  Bytes are put together by NumPy: compiled for a CPU, turning 340 kB of
  float32 into bytes and back took 40 ms each way, and a copy takes 0.1.
  """
  return codec.payload_kinds(like), jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), tail
  )


def num_bytes(kinds: PyTree) -> int:
  """Returns the payload's bytes of a message of such a layout."""
  return sum(
    math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(kinds)
  )


@functools.lru_cache(maxsize=64)
def gradient_program(
  loss_fn: Callable[..., Any],
  local_step: _local_step.LocalStep | None = None,
  passes: int = 1,
) -> Callable[..., Any]:
  """Compiles a worker's gradient, a local step ahead of what it holds.

  Args:
    loss_fn: as of `training.make_step`.
    local_step: in front of what it holds; none without it.
    passes: batches into which a task is cut, whose gradients are averaged.

  Returns:
    `(params, model_state, last, control, batch, key, task) -> Pushed, loss,
    last`; the state of the local step, `last`, is `()` without one.
  """
  compute = training.make_gradient(loss_fn, accumulate=passes)

  @jax.jit
  def gradient(
    params: PyTree,
    model_state: PyTree,
    last: PyTree,
    control: Any,
    batch: PyTree,
    key: jax.Array,
    task: jax.Array,
  ) -> tuple[Pushed, jax.Array, PyTree]:
    held = params
    if local_step is not None:
      params, velocity = local_step.move(held, last, control)
    found = compute(params, model_state, batch, jax.random.fold_in(key, task))
    change = jax.tree.map(
      lambda new, old: (
        new - old if jnp.issubdtype(new.dtype, jnp.floating) else new
      ),
      found.model_state,
      model_state,
    )
    if local_step is not None:
      last = _local_step.LocalStepState(found.grads, held, velocity)
    return Pushed(found.grads, change), found.loss, last

  return gradient


@functools.lru_cache(maxsize=32)
def encode_push(codec: _message_codec.MessageCodec) -> Callable[..., Any]:
  """Compiles `(Pushed, state) -> message, state`."""

  @jax.jit
  def encode(pushed: Pushed, state: PyTree) -> tuple[PyTree, PyTree]:
    payload, state = codec.encode_payloads(pushed.grads, state)
    return (payload, pushed.change), state

  return encode


@functools.lru_cache(maxsize=32)
def decode_push(codec: _message_codec.MessageCodec) -> Callable[..., Any]:
  """Compiles `(message, params) -> Pushed, whether all is finite`."""

  @jax.jit
  def decode(message: PyTree, params: PyTree) -> tuple[Pushed, jax.Array]:
    payload, change = message
    pushed = Pushed(codec.decode_payloads(payload, params), change)
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(pushed)]
    return pushed, jnp.stack(finite).all()

  return decode


@functools.lru_cache(maxsize=32)
def encode_pull(
  codec: _message_codec.MessageCodec, exact: bool
) -> Callable[..., Any]:
  """Compiles `(params, held, state, model_state) -> message, state`.

  The parameters themselves, or their difference from what a worker holds.
  """

  @jax.jit
  def encode(
    params: PyTree, held: PyTree, state: PyTree, model_state: PyTree
  ) -> tuple[PyTree, PyTree]:
    sent = params if exact else jax.tree.map(jnp.subtract, params, held)
    payload, state = codec.encode_payloads(sent, state)
    return (payload, model_state), state

  return encode


@functools.lru_cache(maxsize=32)
def receive_pull(
  codec: _message_codec.MessageCodec, exact: bool
) -> Callable[..., Any]:
  """Compiles `(message, held) -> held, model_state`.

  The server runs it, too: both then hold the same bits.
  """

  @jax.jit
  def receive(message: PyTree, held: PyTree) -> tuple[PyTree, PyTree]:
    payload, model_state = message
    sent = codec.decode_payloads(payload, held)
    if not exact:
      sent = jax.tree.map(jnp.add, held, sent)
    return sent, model_state

  return receive


def padded_size(sizes: Sequence[int], count: int) -> int:
  """Returns the first of rising sizes that holds so many samples.

  Raises:
    ValueError: when none does.
  """
  for size in sizes:
    if size >= count:
      return size
  raise ValueError(
    f"`sizes` must reach the largest batch, got {list(sizes)} for {count} "
    "samples."
  )


def tree_of_push(payload: np.ndarray, kinds: PyTree) -> PyTree:
  """Returns the message of a push that somebody has sent.

  Raises:
    RefusedError: when it has another size than such a message.
  """
  size = num_bytes(kinds)
  if len(payload) != size:
    raise _engine.RefusedError(
      "shape", f"A push must have {size} bytes, got {len(payload)}."
    )
  return tree_of_bytes(payload, kinds)


def finite_loss(more: dict[str, Any], finite: Any) -> float:
  """Returns the loss that somebody has sent with a push.

  Args:
    more: of the push's header.
    finite: whether all that was pushed is.

  Raises:
    RefusedError: when the loss or the push is not finite.
  """
  loss = more.get("loss")
  if not isinstance(loss, float) or not math.isfinite(loss) or not finite:
    raise _engine.RefusedError("nan", "A push must be finite, got NaN.")
  return loss


def tree_bytes(tree: PyTree) -> np.ndarray:
  """Returns all leaves' bytes, one after the other, uint8 [bytes]."""
  leaves = map(np.ascontiguousarray, jax.device_get(jax.tree.leaves(tree)))
  parts = [x.reshape(-1).view(np.uint8) for x in leaves]
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
  sizes = [math.prod(x.shape) * x.dtype.itemsize for x in leaves]
  if sum(sizes) != len(buffer):
    raise ValueError(
      f"`buffer` must have {sum(sizes)} bytes for such a tree, got "
      f"{len(buffer)}."
    )
  found, start = [], 0
  for leaf, size in zip(leaves, sizes, strict=True):
    part = np.array(buffer[start : start + size]).view(leaf.dtype)
    found.append(part.reshape(leaf.shape))
    start += size
  return jax.tree.unflatten(structure, found)
