"""Codes of the arrays that stages of different processes exchange."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist import reducers
from jdist.states import PyTree


class Edge:
  r"""Encodes what two consecutive stages in different processes exchange.

  A gradient g is sent as C(g), with the feedback of the message codec.  So is
  an output x, or, if samples have numbers, its change since the last message of
  the same sample i:

  .. math:: m = C(x_i - k_i), \qquad k_i \leftarrow k_i + D(m)

  and both processes take the new :math:`k_i` for :math:`x_i`.

  Attributes:
    kinds: The shapes and dtypes of a message: that of the codec for all leaves
      of floats, and the other leaves as they are.

  Reference: Wang et al. 2022, Fine-tuning Language Models over Slow Networks
  using Activation Compression with Guarantees (arXiv 2206.01299), algorithm 1.
  Departures: :math:`k_i` begins at zero, where the paper sends a sample's first
  message in full; gradients may have error feedback.
  """

  def __init__(
    self,
    message: reducers.MessageCodec,
    samples: tuple[str, int] | None,
    like: PyTree,
    microbatch: PyTree,
    jit: Callable[..., Any],
  ):
    """Makes the programs for outputs of the shapes `like`."""
    self._message, self._samples = message, samples
    leaves, self._structure = jax.tree.flatten(like)
    self._coded = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]
    self._floats, rest = self._split(leaves)
    self._payload = message.kinds(self._floats)
    self.kinds = [*jax.tree.leaves(self._payload), *rest]
    if samples is not None:
      known = microbatch if isinstance(microbatch, dict) else {}
      shape = known[samples[0]].shape if samples[0] in known else ()
      if len(shape) != 1 or any(x.shape[:1] != shape for x in self._floats):
        raise ValueError(
          "`edge_samples` must name a key of the micro-batch with the number "
          "of each sample, for stages that pass on arrays [samples, ...], got "
          f"{samples[0]!r}, outputs {self._floats} and micro-batch {known}."
        )
    self._encode = jit(self._encoded)
    # With sample numbers the sender runs it, too: both then know equal bits.
    self._decode = jit(self._decoded, donate_argnums=1)

  def init(self, sends: str, number: int) -> dict[str, PyTree]:
    """Returns the first state of the process that sends `sends`.

    Senders of other numbers draw other random numbers.
    """
    first = self._message.init(self._floats)
    state: dict[str, PyTree] = {
      sends: first._replace(step=jnp.int32(number % 128 << 24))
    }
    if self._samples is not None:
      state[f"known to {sends}"] = [
        jnp.zeros((self._samples[1], *x.shape[1:]), jnp.float32)
        for x in self._floats
      ]
    return state

  def encode(
    self, sends: str, value: PyTree, state: dict[str, PyTree], batch: PyTree
  ) -> list[Any]:
    """Returns the arrays of a message, and changes the state."""
    floats, rest = self._split(jax.tree.leaves(value))
    known, index = self._known(sends == "OUTPUT", sends, state, batch)
    found, state[sends] = self._encode(floats, state[sends], known, index)
    if known:
      _, state[f"known to {sends}"] = self._decode(found, known, index)
    return [*jax.tree.leaves(found), *rest]

  def decode(
    self, sends: str, arrays: Sequence[Any], state: Any, batch: PyTree
  ) -> PyTree:
    """Returns the value of a message to the process that sends `sends`."""
    number = len(jax.tree.leaves(self._payload))
    found = jax.tree.unflatten(
      jax.tree.structure(self._payload), arrays[:number]
    )
    known, index = self._known(sends == "GRADIENT", sends, state, batch)
    floats, known = self._decode(found, known, index)
    if known:
      state[f"known to {sends}"] = known
    parts = iter(arrays[number:]), iter(floats)
    leaves = [next(parts[coded]) for coded in self._coded]
    return jax.tree.unflatten(self._structure, leaves)

  def _split(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the leaves that are coded, and the others."""
    pairs = list(zip(leaves, self._coded, strict=True))
    return [x for x, coded in pairs if coded], [x for x, c in pairs if not c]

  def _known(
    self, outputs: bool, sends: str, state: Any, batch: PyTree
  ) -> tuple[list[Any], Any]:
    """Returns what is known of all samples, and the numbers of these."""
    if self._samples is None or not outputs:
      return [], None
    return state[f"known to {sends}"], batch[self._samples[0]]

  def _encoded(
    self, floats: list[Any], state: Any, known: list[Any], index: Any
  ) -> tuple[PyTree, Any]:
    if known:
      known = [k[index] for k in known]
      floats = jax.tree.map(lambda x, k: jnp.float32(x) - k, floats, known)
    return self._message.encode(floats, state)

  def _decoded(
    self, found: PyTree, known: list[Any], index: Any
  ) -> tuple[list[Any], list[Any]]:
    if not known:
      return self._message.decode(found, self._floats), []
    change = self._message.decode(found, [k[index] for k in known])
    rows = jax.tree.map(lambda k, c: k[index] + c, known, change)
    floats = jax.tree.map(lambda r, x: r.astype(x.dtype), rows, self._floats)
    known = jax.tree.map(lambda k, r: k.at[index].set(r), known, rows)
    return floats, known
