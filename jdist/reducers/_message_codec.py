"""Messages of few bytes: a tree as coded arrays, and back."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist import checks, codecs, signatures, states
from jdist.reducers import _chunked, _feedback, _momentum_feedback
from jdist.states import PyTree


@states.declare()
class MessageState(NamedTuple):
  """State of a sender.

  Attributes:
    step: Messages so far, int32 scalar; random numbers come from it.
    feedback: The feedback's state, `()` without one.
  """

  step: jax.Array
  feedback: PyTree


@signatures.checked
@dataclasses.dataclass(frozen=True)
class MessageCodec(signatures.Explained):
  r"""Encodes a tree in few bytes, with the sender's feedback.

  .. math:: m = C(x + e), \qquad e \leftarrow x + e - D(m)

  leaf by leaf; the receiver needs the message alone.  A leaf that is not finite
  is NaN for the receiver: a byte for each says so.

  Attributes:
    codec: Codec of every leaf, or a tuple with one for each.
    feedback: `reducers.ErrorFeedback`, whose residual is e,
      `MomentumCorrection`, or None.
    seed: Seed of codecs that draw random numbers.
    first: Number of the first leaf, from which its random numbers follow.
    chunks: Has chunks of a tree encoded in place of its leaves; None does not.

  Raises:
    ValueError: If an argument is of another kind, or the receiver would need
      more than the message.

  >>> message = MessageCodec(codecs.Cast("bfloat16"))
  >>> tree = {"w": jnp.array([1.0, 2.0])}
  >>> found, _ = message.encode(tree, message.init(tree))
  >>> message.num_bytes(tree), message.decode(found, tree)["w"].tolist()
  (5, [1.0, 2.0])
  """

  codec: codecs.Codec | tuple[codecs.Codec, ...]
  feedback: Any = None
  seed: signatures.Seed = 0
  first: int = 0
  chunks: _chunked.Chunked | None = None

  def __post_init__(self) -> None:
    checks.check_type(
      "feedback",
      self.feedback,
      _feedback.ErrorFeedback | _momentum_feedback.MomentumCorrection | None,
      "`reducers.ErrorFeedback()`, `reducers.MomentumCorrection()` or None, as "
      "the receiver would need the state of another one",
    )
    own = self.codec if isinstance(self.codec, tuple) else (self.codec,)
    for each in own:
      checks.check_type("codec", each, codecs.Codec, "a codec")
      feedback, contractive = self.feedback, each.contractive
      if feedback is not None and feedback.keeps_rest and not contractive:
        raise feedback.divergence_error("codec", each)
    # The receiver of a push does not know the sender's count of messages.
    if any(each.key == "shared" for each in own):
      raise ValueError(
        "`codec` must not choose entries by a seed that all share, got "
        f"{self.codec}. Take `shared=False`, which sends the seed."
      )

  @property
  def stateless(self) -> bool:
    """Whether a message does not depend on the ones before it."""
    own = self.codec if isinstance(self.codec, tuple) else (self.codec,)
    return self.feedback is None and all(each.key == "none" for each in own)

  def part(self, first: int, end: int) -> "MessageCodec":
    """Returns the codec of some leaves, which draws the same random numbers."""
    if self.chunks is not None:
      raise ValueError(
        "`chunks` must be None where servers divide the leaves, got "
        f"{self.chunks}. Take one server."
      )
    codec = self.codec
    own = codec[first:end] if isinstance(codec, tuple) else codec
    return dataclasses.replace(self, codec=own, first=self.first + first)

  def init(self, like: PyTree) -> MessageState:
    """Returns a sender's first state for trees like `like`."""
    leaves = jax.eval_shape(self._arrays, jax.tree.map(states.wide_like, like))
    for leaf, codec in zip(leaves, self._codecs(leaves), strict=True):
      codec.check(leaf)
    feedback = () if self.feedback is None else self.feedback.init(like)
    return MessageState(jnp.zeros((), jnp.int32), feedback)

  def encode(
    self, tree: PyTree, state: MessageState
  ) -> tuple[PyTree, MessageState]:
    """Returns the message and the sender's new state.

    It is a tree of the codecs' own arrays: compiled programs take long to turn
    numbers into bytes, which a channel does instead.
    """
    # Codecs see float32 at least, and the receiver casts the decoded tree.
    # Residuals of half-precision gradients would vanish in half precision.
    wanted, feedback = jax.tree.map(states.wide, tree), state.feedback
    if self.feedback is not None:
      prepare = signatures.plain(type(self.feedback).prepare)
      wanted, feedback = prepare(self.feedback, wanted, feedback)
    # The count of messages makes new random numbers for each message, and a
    # sender's first count makes them its own.
    key = jax.random.fold_in(jax.random.key(self.seed), state.step)
    payloads, leaves = [], self._arrays(wanted)
    for number, (leaf, codec) in enumerate(
      zip(leaves, self._codecs(leaves), strict=True)
    ):
      own = None
      if codec.key != "none":
        own = jax.random.fold_in(key, self.first + number)
      payloads.append(codec.encode(leaf, codec.init(leaf), own)[0])
    # An integer code cannot hold a NaN: a flag of each leaf says so, and the
    # server can then refuse the push.
    finite = [jnp.isfinite(leaf).all() for leaf in leaves]
    found = (payloads, finite)
    if self.feedback is not None:
      sent = self.decode(found, wanted)
      _, feedback = self.feedback.finish(sent, sent, wanted, feedback)
    return found, MessageState(state.step + 1, feedback)

  def decode(self, found: PyTree, like: PyTree) -> PyTree:
    """Returns the tree of a message, in the shapes and dtypes of `like`."""
    payloads, finite = found
    wide = jax.tree.map(states.wide_like, like)
    arrays = jax.eval_shape(self._arrays, wide)
    decoded = [
      jnp.where(fine, codec.decode(payload, codec.init(x), x), jnp.nan)
      for codec, payload, fine, x in zip(
        self._codecs(arrays), payloads, finite, arrays, strict=True
      )
    ]
    if self.chunks is None:
      tree = jax.tree.unflatten(jax.tree.structure(like), decoded)
    else:
      rows = iter(decoded)
      tree = self.chunks.unpack(
        {
          bucket.dtype: jnp.stack([next(rows) for _ in range(bucket.num_rows)])
          for bucket in self.chunks.buckets(wide).buckets
        },
        wide,
      )
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)

  def kinds(self, like: PyTree) -> PyTree:
    """Returns the shapes and dtypes of a message."""
    empty = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), like
    )
    found: PyTree = jax.eval_shape(
      lambda tree: self.encode(tree, self.init(tree))[0], empty
    )
    return found

  def num_bytes(self, like: PyTree) -> int:
    """Returns the bytes of a message, `Profile.push_bytes`."""
    return states.num_bytes(self.kinds(like))

  def _arrays(self, tree: PyTree) -> list[jax.Array]:
    """Returns what the codec encodes, one by one."""
    if self.chunks is None:
      return jax.tree.leaves(tree)
    return [row for rows in self.chunks.pack(tree).values() for row in rows]

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
