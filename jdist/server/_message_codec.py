"""Pushes and pulls by few bytes: a tree as one buffer, and back."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist import checks, codecs, collectives, reducers, states

PyTree = Any
_FEEDBACKS = (reducers.ErrorFeedback, reducers.MomentumCorrection)


@states.declare()
class MessageState(NamedTuple):
  """State of a sender.

  Attributes:
    step: messages so far, int32 scalar; random numbers come from it.
    feedback: the feedback's state, `()` without one.
  """

  step: jax.Array
  feedback: PyTree


@dataclasses.dataclass(frozen=True)
class MessageCodec:
  r"""Encodes a tree as one buffer of bytes, with the sender's feedback.

  .. math:: m = C(x + e), \qquad e \leftarrow x + e - D(m)

  leaf by leaf; the receiver needs the buffer alone.  A leaf that is not finite
  is NaN for the receiver: a byte for each says so.

  Attributes:
    codec: codec of every leaf, or a tuple with one for each.
    feedback: `reducers.ErrorFeedback`, whose residual is e,
      `MomentumCorrection`, or None.
    seed: seed of codecs that draw random numbers.

  Raises:
    ValueError: when an argument is of another kind, or the receiver would need
      more than the buffer.

  >>> message = MessageCodec(codecs.Cast("bfloat16"))
  >>> tree = {"w": jnp.array([1.0, 2.0])}
  >>> buffer, _ = message.encode(tree, message.init(tree))
  >>> buffer.nbytes, message.decode(buffer, tree)["w"].tolist()
  (5, [1.0, 2.0])
  """

  codec: codecs.Codec | tuple[codecs.Codec, ...]
  feedback: Any = None
  seed: int = 0

  def __post_init__(self) -> None:
    own = self.codec if isinstance(self.codec, tuple) else (self.codec,)
    for each in own:
      checks.check_type("codec", each, codecs.Codec, "a codec")
    if self.feedback is not None and not isinstance(self.feedback, _FEEDBACKS):
      raise ValueError(
        "`feedback` must be `reducers.ErrorFeedback()`, "
        "`reducers.MomentumCorrection()` or None, got "
        f"{checks.show(self.feedback)}: of others the receiver would need a "
        "state."
      )
    for each in own:
      feedback, contractive = self.feedback, each.contractive
      if feedback is not None and feedback.keeps_rest and not contractive:
        raise feedback.divergence_error("codec", each)
    # The receiver of a push does not know the sender's count of messages.
    if any(each.key == "shared" for each in own):
      raise ValueError(
        "`codec` must not choose entries by a seed that all share, got "
        f"{self.codec}. Take `shared=False`, which sends the seed."
      )
    checks.check_seed(self.seed)

  @property
  def stateless(self) -> bool:
    """Whether a message does not depend on the ones before it."""
    own = self.codec if isinstance(self.codec, tuple) else (self.codec,)
    return self.feedback is None and all(each.key == "none" for each in own)

  def init(self, like: PyTree) -> MessageState:
    """Returns a sender's first state for trees like `like`."""
    leaves = jax.tree.leaves(like)
    for leaf, codec in zip(leaves, self._codecs(leaves), strict=True):
      codec.check(leaf)
    feedback = () if self.feedback is None else self.feedback.init(like)
    return MessageState(jnp.zeros((), jnp.int32), feedback)

  def encode(
    self, tree: PyTree, state: MessageState
  ) -> tuple[jax.Array, MessageState]:
    """Returns the buffer, uint8 [num_bytes], and the sender's new state."""
    payloads, state = self.encode_payloads(tree, state)
    parts = collectives.pack_bytes(payloads)
    buffer = jnp.concatenate(
      [jax.lax.bitcast_convert_type(x, jnp.uint8).ravel() for x in parts]
    )
    return buffer, state

  def encode_payloads(
    self, tree: PyTree, state: MessageState
  ) -> tuple[PyTree, MessageState]:
    """Returns what a buffer is made of, in arrays of the codecs' own types.

    For a sender that puts bytes together by itself, outside of compiled
    programs, which take long to turn numbers into bytes.
    """
    # Residuals of half-precision gradients would vanish in half precision.
    wanted, feedback = jax.tree.map(states.wide, tree), state.feedback
    if self.feedback is not None:
      wanted, feedback = self.feedback.prepare(wanted, feedback)
    # The count of messages makes new random numbers for each message, and a
    # sender's first count makes them its own.
    key = jax.random.fold_in(jax.random.key(self.seed), state.step)
    payloads, leaves = [], jax.tree.leaves(wanted)
    for number, (leaf, codec) in enumerate(
      zip(leaves, self._codecs(leaves), strict=True)
    ):
      own = None
      if codec.key != "none":
        own = jax.random.fold_in(key, number)
      payloads.append(codec.encode(leaf, codec.init(leaf), own)[0])
    # An integer code cannot hold a NaN: a flag of each leaf says so, and the
    # server can then refuse the push.
    finite = [jnp.isfinite(leaf).all() for leaf in leaves]
    found = (payloads, finite)
    if self.feedback is not None:
      sent = self.decode_payloads(found, wanted)
      _, feedback = self.feedback.finish(sent, sent, wanted, feedback)
    return found, MessageState(state.step + 1, feedback)

  def decode(self, buffer: jax.Array, like: PyTree) -> PyTree:
    """Returns the tree of a buffer, in the shapes and dtypes of `like`."""
    kinds = self.payload_kinds(like)
    shapes = jax.eval_shape(collectives.pack_bytes, kinds)
    parts, start = [], 0
    for shape in shapes:
      end = start + math.prod(shape.shape) * shape.dtype.itemsize
      parts.append(_as_array(buffer[start:end], shape))
      start = end
    return self.decode_payloads(collectives.unpack_bytes(parts, kinds), like)

  def decode_payloads(self, found: PyTree, like: PyTree) -> PyTree:
    """Returns the tree of `encode_payloads`, in the shapes of `like`."""
    leaves, structure = jax.tree.flatten(like)
    payloads, finite = found
    decoded = [
      jnp.where(
        fine,
        codec.decode(payload, codec.init(x), states.wide_like(x)),
        jnp.nan,
      ).astype(x.dtype)
      for codec, payload, fine, x in zip(
        self._codecs(leaves), payloads, finite, leaves, strict=True
      )
    ]
    return jax.tree.unflatten(structure, decoded)

  def payload_kinds(self, like: PyTree) -> PyTree:
    """Returns the shapes and dtypes of `encode_payloads`."""
    return jax.eval_shape(self._payloads, jax.tree.leaves(like))

  def num_bytes(self, like: PyTree) -> int:
    """Returns the bytes of a message, `Profile.push_bytes`."""
    kinds = self.payload_kinds(like)
    return sum(
      math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(kinds)
    )

  def _payloads(
    self, leaves: list[Any]
  ) -> tuple[list[PyTree], list[jax.Array]]:
    """Returns trees of the shapes that `encode` packs."""
    payloads = [
      codec.encode(
        states.wide(jnp.zeros(x.shape, x.dtype)),
        codec.init(x),
        None if codec.key == "none" else jax.random.key(0),
      )[0]
      for codec, x in zip(self._codecs(leaves), leaves, strict=True)
    ]
    return payloads, [jnp.zeros((), bool) for _ in leaves]

  def _codecs(self, leaves: list[Any]) -> tuple[codecs.Codec, ...]:
    """Returns the codec of each leaf."""
    if not isinstance(self.codec, tuple):
      return (self.codec,) * len(leaves)
    if len(self.codec) != len(leaves):
      raise ValueError(
        f"`codec` must be one or one for each leaf, got {len(self.codec)} for "
        f"{len(leaves)} leaves."
      )
    return self.codec


def _as_array(part: jax.Array, like: Any) -> jax.Array:
  width = like.dtype.itemsize
  shape = (*like.shape, width) if width > 1 else like.shape
  return jax.lax.bitcast_convert_type(part.reshape(shape), like.dtype)
