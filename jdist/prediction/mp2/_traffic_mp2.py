"""How many bytes MP² sends, as its authors count and as others do."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdist.prediction.mp2 import _cut

# What the authors' messages have besides their numbers.
_HEADER_BYTES = 161


class Traffic(NamedTuple):
  """Bytes between one worker and the server in one round.

  Attributes:
    whole_bytes: all parameters, as they are: what synchronous training sends
      up, and down again. Those of fewer bits than float32 take fewer bytes,
      and the front is sent in float32 all the same: all shares are less then.
    pushed_bytes: the front in float32, `Cut.flatten_front`.
    published_bytes: the front as the authors push it, in float64 behind a
      header.
    pulled_bytes: what comes back from the server: the whole network, with the
      predicted rear.
  """

  whole_bytes: int
  pushed_bytes: int
  published_bytes: int
  pulled_bytes: int

  @property
  def uplink_saved_as_published(self) -> float:
    """The share that the authors' count saves: float64 against float32."""
    return 1 - self.published_bytes / self.whole_bytes

  @property
  def uplink_saved(self) -> float:
    """The share of the uplink that is saved, of what is really sent."""
    return 1 - self.pushed_bytes / self.whole_bytes

  @property
  def both_saved(self) -> float:
    """The share of both directions together that is saved.

    That of a server which sends the whole network back. Where every worker
    predicts for itself, only the front comes back, and `uplink_saved` is the
    share of both.
    """
    sent = self.pushed_bytes + self.pulled_bytes
    return 1 - sent / (2 * self.whole_bytes)


def traffic(cut: _cut.Cut) -> Traffic:
  """Counts the bytes of a round's messages.

  The messages are those that `Cut` makes, taken in shape only.

  Args:
    cut: where the network is cut.

  Returns:
    The counts, for one worker.

  Raises:
    ValueError: if that is no cut.

  >>> from jdist import prediction
  >>> found = prediction.traffic(prediction.published_cut("vgg15"))
  >>> found.published_bytes
  2081441
  >>> f"{found.uplink_saved_as_published:.2%}", f"{found.uplink_saved:.2%}"
  ('88.98%', '94.49%')
  >>> f"{found.both_saved:.1%}"
  '47.2%'

  References:
    MP², model parameter prediction: "88.98 %" is the first of these shares,
    for VGG-15. It compares float64 with float32 and leaves out what comes
    back.
  """
  _cut.check_cut("cut", cut)
  whole = cut.abstract()
  front, rear = jax.eval_shape(cut.split, whole)
  message = jax.eval_shape(cut.flatten_front, front)
  double = math.prod(message.shape) * jnp.dtype("float64").itemsize
  return Traffic(
    whole_bytes=_num_bytes(whole),
    pushed_bytes=_num_bytes(message),
    published_bytes=_HEADER_BYTES + double,
    pulled_bytes=_num_bytes(cut.join(front, rear)),
  )


def _num_bytes(tree: _cut.PyTree) -> int:
  return sum(
    math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)
  )
