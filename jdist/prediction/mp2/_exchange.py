"""MP² as published: workers push fronts, a server predicts, all pull."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks
from jdist.prediction.mp2 import _cut, _predictor

PyTree = Any
# The authors' messages have a header besides their numbers.
_HEADER_BYTES = 161


class ExchangeState(NamedTuple):
  """State of `Exchange`.

  Attributes:
    params: the whole network, as the workers pull it.
    optimizer: of every worker's front, [workers, ...].
    ranks: of the workers, int32 [workers]; it gives their number, also where
      the optimizer has no state.
  """

  params: PyTree
  optimizer: PyTree
  ranks: jax.Array

  @property
  def num_workers(self) -> int:
    """The number of workers."""
    return int(self.ranks.shape[0])


class Exchange:
  r"""Exchanges parameters as published, with one logical server.

  In every step all workers pull the parameters (f, r), and worker i takes a
  step of its own optimizer on the front alone, which it pushes; the server
  averages and predicts:

  .. math:: f_i = f + \mathrm{optimizer}_i(\partial L_i / \partial f), \qquad
            f \leftarrow \tfrac1N \sum_i f_i, \qquad
            r \leftarrow \mathrm{predict}(\theta, f)

  Pure, for one device: the reference for `methods.mp2`, which does the same
  without a server and, in half precision, with float32 anchors.

  References:
    MP², model parameter prediction, the authors' protocol.  Departure: nothing
    is sent here, so no front is pushed in float64; `prediction.exchange_bytes`
    counts the bytes.
  """

  def __init__(
    self,
    predictor: _predictor.Predictor,
    optimizer: optax.GradientTransformation,
  ):
    """Checks and keeps its parts.

    Args:
      predictor: of the network's rear.
      optimizer: of the front; Adam in the paper.
    """
    _predictor.check_predictor("predictor", predictor)
    optimizer = checks.check_optimizer("optimizer", optimizer)
    self.predictor, self.optimizer = predictor, optimizer

  def init(self, params: PyTree, num_workers: int) -> ExchangeState:
    """Returns the first state; the rear is as given until the first step ends.

    Args:
      params: the whole network's.
      num_workers: at least 1.
    """
    num_workers = checks.check_int("num_workers", num_workers, 1)
    front, _ = self.predictor.cut.split(params)
    rows = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (num_workers, *jnp.shape(x))),
      self.optimizer.init(front),
    )
    return ExchangeState(params, rows, jnp.arange(num_workers, dtype=jnp.int32))

  def step(
    self, state: ExchangeState, gradients: PyTree, predictor_params: PyTree
  ) -> ExchangeState:
    """Takes one step of all workers and of the server.

    Args:
      state: all workers take their gradients at `state.params`.
      gradients: of the whole network, [workers, ...]; those of the rear are
        ignored.
      predictor_params: the trained predictor's.

    Raises:
      ValueError: when the gradients are of another number of workers, or the
        predictor's parameters are of another one.
    """
    checks.check_type("state", state, ExchangeState, "of `Exchange.init`")
    num, params = state.num_workers, checks.named_leaves(state.params)
    checks.check_shapes(
      f"`gradients` must be a tree like the parameters, of {num} workers, but",
      "Stack one gradient for each worker that the state was made for.",
      checks.named_leaves(gradients),
      {name: (num, *jnp.shape(x)) for name, x in params.items()},
    )
    cut = self.predictor.cut
    front, _ = cut.split(state.params)

    def push(gradients: PyTree, optimizer: PyTree) -> tuple[PyTree, PyTree]:
      own, _ = cut.split(gradients)
      updates, optimizer = self.optimizer.update(own, optimizer, front)
      return optax.apply_updates(front, updates), optimizer

    pushed, optimizer = jax.vmap(push)(gradients, state.optimizer)
    front = jax.tree.map(lambda x: x.mean(0), pushed)
    rear = self.predictor.apply(predictor_params, front)
    return state._replace(params=cut.join(front, rear), optimizer=optimizer)


class ExchangeBytes(NamedTuple):
  """Bytes between one worker and the server in one round.

  Attributes:
    whole_bytes: all parameters in their own types: the message of synchronous
      training in each direction.
    pushed_bytes: the front in float32, `Cut.flatten_front`.
    published_bytes: the front as the authors push it, in float64 behind a
      header.
    pulled_bytes: the whole network with the predicted rear.
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
    """The share of the uplink that is saved, like for like."""
    return 1 - self.pushed_bytes / self.whole_bytes

  @property
  def both_saved(self) -> float:
    """The share of both directions together, with a server that predicts."""
    sent = self.pushed_bytes + self.pulled_bytes
    return 1 - sent / (2 * self.whole_bytes)


def exchange_bytes(cut: _cut.Cut) -> ExchangeBytes:
  """Counts the bytes of a round's messages at a cut, for one worker.

  >>> from jdist import prediction
  >>> found = exchange_bytes(prediction.published_cut("vgg15"))
  >>> found.published_bytes
  2081441
  >>> f"{found.uplink_saved_as_published:.2%}", f"{found.uplink_saved:.2%}"
  ('88.98%', '94.49%')
  >>> f"{found.both_saved:.1%}"
  '47.2%'

  References:
    MP², model parameter prediction: "88.98 %" is the first of these shares,
    for VGG-15.  It compares float64 with float32 and leaves out the downlink.
  """
  _cut.check_cut("cut", cut)
  whole = sum(
    x.size * x.dtype.itemsize for x in jax.tree.leaves(cut.abstract())
  )
  return ExchangeBytes(
    whole_bytes=whole,
    pushed_bytes=4 * cut.num_front,
    published_bytes=_HEADER_BYTES + 8 * cut.num_front,
    pulled_bytes=whole,
  )
