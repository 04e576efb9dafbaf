"""MP² as published: a server that predicts, and workers that pull it all."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks
from jdist.prediction.mp2 import _predictor

PyTree = Any


class ServerState(NamedTuple):
  """What the server and its workers remember.

  Attributes:
    params: the whole network, as the workers pull it.
    optimizer: of every worker's front, [workers, ...].
    ranks: of the workers, int32 [workers]; says how many there are, where the
      optimizer remembers nothing.
  """

  params: PyTree
  optimizer: PyTree
  ranks: jax.Array

  @property
  def num_workers(self) -> int:
    """How many workers there are."""
    return int(self.ranks.shape[0])


class Server:
  r"""The published protocol, with one logical server.

  In every step all workers pull the parameters (f, r), and worker i takes a
  step of its own optimizer on the front alone, which it pushes; the server
  averages and predicts:

  .. math:: f_i = f + \mathrm{optimizer}_i(\partial L_i / \partial f), \qquad
            f \leftarrow \tfrac1N \sum_i f_i, \qquad
            r \leftarrow \mathrm{predict}(\theta, f)

  Pure, for one device: the reference for `methods.mp2`, which does the same
  without a server. (Fronts are averaged in the parameters' own type, where
  `mp2` keeps float32 anchors: of half precision the two differ by roundings.)

  >>> from jdist import models, prediction
  >>> model = models.build("mlp", input_shape=(4, 4, 1), num_classes=2)
  >>> predictor = prediction.predictor(prediction.cut(model, 1))
  >>> server = Server(predictor, optax.adam(1e-3))
  >>> state = server.init(model.params, num_workers=4)
  >>> gradients = jax.tree.map(lambda x: jnp.ones((4, *x.shape)), state.params)
  >>> theta = predictor.init(jax.random.key(0))
  >>> with jax.numpy_dtype_promotion("standard"):  # For Optax's Adam.
  ...   state = server.step(state, gradients, theta)

  References:
    MP², model parameter prediction, the authors' protocol. Departure: nothing
    is sent here, so no front is pushed in float64; `prediction.traffic` counts
    what would be.
  """

  def __init__(
    self,
    predictor: _predictor.Predictor,
    optimizer: optax.GradientTransformation,
  ):
    """Makes a server.

    Args:
      predictor: of the network's rear.
      optimizer: of the front; Adam in the paper.

    Raises:
      ValueError: when the predictor is none of `prediction.predictor(cut)`, or
        the optimizer none of Optax.
    """
    _predictor.check_predictor("predictor", predictor)
    checks.check_optimizer("optimizer", optimizer)
    self._cut, self._predictor = predictor.cut, predictor
    self._optimizer = optimizer

  def init(self, params: PyTree, num_workers: int) -> ServerState:
    """The first state; the rear is as given until the first step ends.

    Args:
      params: the whole network's.
      num_workers: how many workers, >= 1.

    Returns:
      The state before the first step.

    Raises:
      ValueError: when the parameters are not of the predictor's network, or
        `num_workers` is out of range.
    """
    num_workers = checks.check_int("num_workers", num_workers, 1)
    front, _ = self._cut.split(params)
    one = self._optimizer.init(front)
    rows = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (num_workers, *jnp.shape(x))), one
    )
    return ServerState(params, rows, jnp.arange(num_workers, dtype=jnp.int32))

  def step(
    self, state: ServerState, gradients: PyTree, predictor_params: PyTree
  ) -> ServerState:
    """One step of all workers and of the server.

    Args:
      state: the state; all workers take their gradients at `state.params`.
      gradients: of the whole network, [workers, ...]; those of the rear are
        ignored.
      predictor_params: the trained predictor's.

    Returns:
      The state after it.

    Raises:
      ValueError: when the gradients are of another number of workers, or the
        predictor's parameters are of another one.
    """
    checks.check_type("state", state, ServerState, "of `Server.init`")
    front, _ = self._cut.split(state.params)
    _check_rows(gradients, state)

    def push(gradients: PyTree, optimizer: PyTree) -> tuple[PyTree, PyTree]:
      own, _ = self._cut.split(gradients)
      updates, optimizer = self._optimizer.update(own, optimizer, front)
      return optax.apply_updates(front, updates), optimizer

    pushed, optimizer = jax.vmap(push)(gradients, state.optimizer)
    front = jax.tree.map(lambda x: x.mean(0), pushed)
    rear = self._predictor.apply(predictor_params, front)
    whole = self._cut.join(front, rear)
    return state._replace(params=whole, optimizer=optimizer)


def _check_rows(gradients: PyTree, state: ServerState) -> None:
  wanted: Any = jax.tree.structure(state.params)
  found: Any = jax.tree.structure(gradients)
  if found != wanted:
    raise ValueError(
      f"`gradients` must be a tree like the parameters, {wanted}, got {found}."
    )
  num_workers = state.num_workers
  for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
    if jnp.shape(leaf)[:1] != (num_workers,):
      raise ValueError(
        f"`gradients` must be of {num_workers} workers, [{num_workers}, ...], "
        f"got {list(jnp.shape(leaf))} at {jax.tree_util.keystr(path)!r}. Stack "
        "one gradient for each worker that the state was made for."
      )
