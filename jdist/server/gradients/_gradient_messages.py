"""Compiled programs of gradients' messages, the same at server and workers."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks, reducers, signatures, states, training
from jdist.server.gradients import _learner, _merge, _packed
from jdist.server.gradients._merge import Pushed
from jdist.server.h_ps import _bit_plans, _local_step
from jdist.states import PyTree

# None sends the arrays' own bytes.
Codec = reducers.MessageCodec | None


class MessagePlans(NamedTuple):
  """The codecs of a run's messages, by the number of their plan.

  Attributes:
    push: Codecs of gradients.
    pull: Codecs of the parameters; plan 0, which is None, is exact, and every
      other plan sends the difference from what a worker holds.
    sizes: Entries of each leaf for which the plans were made; any if None.
  """

  push: tuple[Codec, ...]
  pull: tuple[Codec, ...]
  sizes: tuple[int, ...] | None = None

  def part(self, first: int, end: int) -> "MessagePlans":
    """Returns the codecs of some leaves, in the order of the tree."""
    push, pull = (
      tuple(codec and codec.part(first, end) for codec in codecs)
      for codecs in self[:2]
    )
    return MessagePlans(push, pull, self.sizes and self.sizes[first:end])

  def check_fits(self, params: PyTree) -> None:
    """Raises a ValueError unless plans of bits are of these parameters."""
    sizes = tuple(int(np.size(leaf)) for leaf in jax.tree.leaves(params))
    if self.sizes not in (None, sizes):
      raise ValueError(
        f"`plans` must be of the parameters' {len(sizes)} sizes, got "
        f"{checks.show(self.sizes)}. Make them with `server.fit_bit_plans`."
      )


@signatures.checked
def message_plans(
  push_codec: reducers.MessageCodec | None = None,
  plans: _bit_plans.BitPlans | None = None,
) -> MessagePlans:
  """Returns the codecs of a run's messages; without arguments all are exact.

  Args:
    push_codec: Codec of all workers' gradients.
    plans: Plans of bits, in place of the codec: a protocol chooses one for each
      push and pull.
  """
  if plans is None:
    return MessagePlans((push_codec,), (None,))
  if push_codec is not None:
    raise ValueError(
      "`plans` must be given without `push_codec`, in whose place they are."
    )
  numbers = range(len(plans.bits))
  # A difference needs no feedback: its error is part of the next difference.
  pull = [_bit_plans.plan_codec(plans, i, feedback=False) for i in numbers]
  return MessagePlans(
    # An exact push has a codec, too: it sends the residual of pushes before.
    tuple(_bit_plans.plan_codec(plans, i) for i in numbers),
    (None, *pull[1:]),
    plans.sizes,
  )


def first_state(codec: Codec, like: PyTree, stream: int) -> PyTree:
  """Returns a sender's first state, with random numbers of its own.

  Random numbers follow from the count of messages, which begins at another
  place for each stream, so one program serves all of them.
  """
  if codec is None:
    return ()
  state = codec.init(like)
  return state._replace(step=state.step + ((stream % 2048) << 20))


def layout(codec: Codec, like: PyTree, tail: PyTree) -> PyTree:
  """Returns the shapes and dtypes of a message: a coded tree and an exact one.

  Bytes are put together by NumPy: compiled for a CPU, turning 340 kB of
  float32 into bytes and back took 40 ms each way, and a copy takes 0.1.
  """

  def shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        jnp.shape(x), getattr(x, "dtype", type(x))
      ),
      tree,
    )

  kinds = shapes(like) if codec is None else codec.kinds(like)
  return kinds, shapes(tail)


@functools.lru_cache(maxsize=64)
def gradient_program(
  loss_fn: Callable[..., Any],
  local_step: _local_step.LocalStep | None = None,
  passes: int = 1,
  codec: Codec = None,
  decoded: bool = False,
) -> Callable[..., Any]:
  """Compiles a worker's push: the gradient, and its message.

  A task is cut into `passes`, whose gradients are averaged. With `decoded` the
  message is returned as the arrays that it decodes to.

  Returns:
    `(params, model_state, own, control, batch, key, task) -> message, loss,
    own`; `own` is the state of the codec and that of the local step, `()`
    without one, and the loss is NaN if a number of the push is not finite.
  """
  compute = training.make_gradient(loss_fn, accumulate=passes)

  # One program from the local step to the message: for small models the start
  # of a program takes longer than its arithmetic.
  @jax.jit
  def gradient(
    params: PyTree,
    model_state: PyTree,
    own: tuple[PyTree, PyTree],
    control: Any,
    batch: PyTree,
    key: jax.Array,
    task: jax.Array,
  ) -> tuple[PyTree, jax.Array, tuple[PyTree, PyTree]]:
    params, model_state, own = _packed.unpack((params, model_state, own))
    held, (push_state, last) = params, own
    if local_step is not None:
      params, velocity = local_step.move(held, last, control)
    # All workers have the server's keys, for instance of dropout.
    model_state = states.fold_keys(model_state, task)
    found = compute(params, model_state, batch, jax.random.fold_in(key, task))
    if local_step is not None:
      # The step foresees the server's update by what was computed, not by what
      # the message will decode to: the residual follows in a later message.
      last = _local_step.LocalStepState(found.grads, held, velocity)
    # An infinity that stays, as that of a mask, has no difference.
    change = jax.tree.map(
      lambda new, old: (
        jnp.where(new == old, jnp.zeros_like(new), new - old)
        if _merge.is_number(new)
        else new
      ),
      found.model_state,
      model_state,
    )
    message, _, loss, push_state = message_of_push(
      codec, decoded, Pushed(found.grads, change), found.loss, push_state
    )
    own = push_state, last
    if decoded:
      message, own = Pushed(*_packed.pack(*message)), _packed.pack(*own)
    return message, loss, own

  return gradient


def message_of_push(
  codec: Codec, decoded: bool, pushed: Pushed, loss: jax.Array, state: PyTree
) -> tuple[PyTree, Pushed, jax.Array, PyTree]:
  """Encodes a push, in a compiled program.

  Returns:
    The message, or with `decoded` the decoded message; the decoded message; the
    loss, NaN if the decoded message is not finite; the codec's new state.
  """
  sent, message = pushed, pushed[:2]
  if codec is not None:
    payload, state = codec.encode(pushed.grads, state)
    grads = codec.decode(payload, pushed.grads)
    sent, message = Pushed(grads, pushed.change), (payload, pushed.change)
  # One number for the server to fetch: a program that looks at the gradient
  # again would take as long as the update.
  loss = jnp.where(all_finite(sent), loss, jnp.nan)
  return sent if decoded else message, sent, loss, state


@functools.lru_cache(maxsize=32)
def decode_push(codec: Codec) -> Callable[..., Any]:
  """Compiles `(message, params) -> Pushed, whether all is finite`."""
  if codec is None:
    return _exact_push

  @jax.jit
  def decode(message: PyTree, params: PyTree) -> tuple[Pushed, jax.Array]:
    payload, change = message
    pushed = Pushed(codec.decode(payload, params), change)
    # In the program that decodes: the arrays are read once.
    return pushed, all_finite(pushed)

  return decode


def _exact_push(message: PyTree, params: PyTree) -> tuple[Pushed, bool]:
  del params
  # NumPy checks the received bytes, which it holds: a program would first copy
  # them.  Arrays of this process have been checked with their loss.
  received = (x for x in jax.tree.leaves(message) if isinstance(x, np.ndarray))
  return Pushed(*message), all(np.isfinite(leaf).all() for leaf in received)


def all_finite(tree: PyTree) -> jax.Array:
  """Returns whether all numbers of a tree are finite, in a compiled program."""

  def finite(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.float32:
      # A product by zero is NaN where a number is not finite.  XLA's loop over
      # single numbers takes as long on a CPU as half of a small net's gradient.
      x = jnp.atleast_1d(x) @ jnp.zeros(jnp.shape(x)[-1:] or 1, x.dtype)
    return jnp.isfinite(x).all()

  return jnp.stack(list(map(finite, jax.tree.leaves(tree)))).all()


@functools.lru_cache(maxsize=32)
def encode_pull(codec: Codec, decoded: bool) -> Callable[..., Any]:
  """Compiles `(params, held, state, model_state) -> message, state`.

  The message is the difference from the worker's parameters, or with `decoded`
  its new parameters; without a codec the message is the parameters.
  """
  if codec is None:
    return lambda params, held, state, rest: ((params, rest), state)

  @jax.jit
  def encode(
    params: PyTree, held: PyTree, state: PyTree, model_state: PyTree
  ) -> tuple[PyTree, PyTree]:
    params, held, state, model_state = _packed.unpack(
      (params, held, state, model_state)
    )
    change = jax.tree.map(jnp.subtract, params, held)
    payload, state = codec.encode(change, state)
    message = payload, model_state
    if not decoded:
      return message, state
    return _packed.pack(*_received(codec, message, held)), *_packed.pack(state)

  return encode


@functools.lru_cache(maxsize=32)
def receive_pull(codec: Codec) -> Callable[..., Any]:
  """Compiles `(message, held) -> held, model_state`.

  The server runs it, too: both then hold the same bits.
  """
  if codec is None:
    # NumPy's arrays: the gradient's program moves them to the device with its
    # other arguments, in a third of the time of a `device_put`.
    return lambda message, held: message
  return jax.jit(functools.partial(_received, codec))


def _received(
  codec: reducers.MessageCodec, message: PyTree, held: PyTree
) -> tuple[PyTree, PyTree]:
  payload, model_state = message
  change = codec.decode(payload, held)
  return jax.tree.map(jnp.add, held, change), model_state


def shapes_of(*trees: PyTree) -> dict[str, list[int]]:
  """Returns all leaves' shapes, which server and workers have in common."""
  leaves = enumerate(jax.tree.leaves(trees))
  return {f"as the shape of leaf {i}": list(np.shape(x)) for i, x in leaves}


def padded_size(sizes: Sequence[int] | None, count: int) -> int:
  """Returns the smallest size for `count` samples, a power of 2 by default."""
  if sizes is None:
    return 1 << (count - 1).bit_length()
  for size in sizes:
    if size >= count:
      return size
  raise ValueError(
    f"`sizes` must reach the largest batch, got {list(sizes)} for {count} "
    "samples. Add a larger size, or bound the batches (`maximum=`)."
  )


def check_rows(batch: PyTree, count: int, size: int) -> None:
  """Raises a ValueError if a batch has not the samples of its task."""
  rows = np.shape(next(iter(jax.tree.leaves(batch)), None))[:1]
  # Fewer would weigh as much as all that the task has.
  if rows not in ((), (count,), (size,)):
    raise ValueError(
      f"`samples.batch` must return {count} samples, padded to {size}, got "
      f"{rows[0]}. Begin again with the first ones where they end."
    )


def received_push(
  codec: Codec, kinds: PyTree, more: dict[str, Any], payload: Any, like: PyTree
) -> tuple[Pushed, float]:
  """Returns a push, of a message or its bytes, and its loss.

  Raises:
    RefusedError: If it has another size than a message of these kinds, or it
      or the loss is not finite.
  """
  if codec is None and type(payload) is Pushed:
    # It is of this process, where arrays have been checked with their loss.
    return payload, finite_loss(more, True)
  try:
    payload = message_of(payload, kinds)
  except ValueError as error:
    # A worker with another model, or a stranger, must not stop the server.
    raise _learner.RefusedError(
      "shape", f"A push is refused: {error}"
    ) from None
  pushed, finite = decode_push(codec)(payload, like)
  return pushed, finite_loss(more, finite)


def finite_loss(more: dict[str, Any], finite: Any) -> float:
  """Returns the loss of a push, or refuses a push that is not finite."""
  loss = more.get("loss")
  if isinstance(loss, jax.Array):
    # A view, in a fourth of the time of `float(loss)`.
    loss = np.asarray(loss).item()
  if not isinstance(loss, float) or not math.isfinite(loss) or not finite:
    raise _learner.RefusedError("nan", "A push must be finite, got NaN.")
  return loss


def message_of(payload: Any, kinds: PyTree) -> PyTree:
  """Returns the message of a payload, which is the message or its bytes."""
  if not isinstance(payload, np.ndarray):
    return payload
  return tree_of_bytes(payload, kinds)


def sendable(
  payload: Any, more: dict[str, Any]
) -> tuple[np.ndarray | None, dict[str, Any]]:
  """Returns a payload's bytes, and a header's part with numbers for JSON."""
  plain = {
    key: x.item() if isinstance(x, jax.Array) else x for key, x in more.items()
  }
  return None if payload is None else bytes_of(payload), plain


def bytes_of(payload: Any) -> np.ndarray:
  """Returns the bytes of a payload, for a channel or a file."""
  return payload if isinstance(payload, np.ndarray) else tree_bytes(payload)


def tree_bytes(tree: PyTree) -> np.ndarray:
  """Returns all leaves' bytes, one after the other, uint8 [bytes]."""
  leaves = jax.tree.leaves(tree)
  if not all(map(_is_plain, leaves)):
    leaves = [states.key_words(x) for x in leaves]
  arrays = map(np.ascontiguousarray, jax.device_get(leaves))
  parts = [x.reshape(-1).view(np.uint8) for x in arrays]
  return np.concatenate([np.zeros(0, np.uint8), *parts])


def tree_of_bytes(buffer: np.ndarray, like: PyTree) -> PyTree:
  """Returns the tree of `tree_bytes`, in the shapes and dtypes of `like`.

  >>> found = tree_of_bytes(tree_bytes({"w": np.ones(2)}), {"w": np.zeros(2)})
  >>> found["w"].tolist()
  [1.0, 1.0]
  """
  leaves, structure = jax.tree.flatten(like)
  sizes = [leaf.size * leaf.dtype.itemsize for leaf in leaves]
  if sum(sizes) != len(buffer):
    raise ValueError(
      f"`buffer` must have {sum(sizes)} bytes for such a tree, got "
      f"{len(buffer)}."
    )
  found, start = [], 0
  for leaf, size in zip(leaves, sizes, strict=True):
    # A copy is aligned, which a slice of a buffer of bytes need not be.
    part, plain = np.array(buffer[start : start + size]), _is_plain(leaf)
    like = leaf if plain else states.key_words(leaf)
    part = part.view(like.dtype).reshape(like.shape)
    found.append(part if plain else states.as_key(part, leaf))
    start += size
  return jax.tree.unflatten(structure, found)


def _is_plain(leaf: Any) -> bool:
  """Returns whether a leaf is no typed key, so that NumPy can hold it."""
  return isinstance(getattr(leaf, "dtype", np.dtype(float)), np.dtype)
