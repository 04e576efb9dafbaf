"""Weight nowcasters: each weight is predicted from its last five values.

A network sees one entry of the parameters at a time, so that it fits any model.
There are three networks, one for each kind of entry.  MP² is compared with
them; the rows show no gain, so that they are not part of the library.
"""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import collectives, transforms

PyTree = Any
Kind = Literal["conv", "dense", "bias"]
Networks = dict[Kind, dict[str, Any]]

HISTORY_LENGTH = 5
KINDS: tuple[Kind, ...] = ("conv", "dense", "bias")
_HIDDEN, _SQUEEZED, _LAST = 64, 8, 32
_LARGEST_EXPONENT = 30.0
# A hidden layer of this many entries takes 16 MB.
_CHUNK = 1 << 16
_DEVICE = transforms.Control()


def kind_of(shape: tuple[int, ...]) -> Kind:
  """Returns the kind of one worker's leaf by its rank, a reconstruction."""
  if len(shape) > 2:
    return "conv"
  return "dense" if len(shape) == 2 else "bias"


def init_nowcaster(key: jax.Array) -> dict[str, Any]:
  """Draws the first parameters of one network, 9,425 float32 numbers.

  Kernels are drawn by LeCun's rule and biases are zero: a reconstruction.
  """
  values, steps, head = jax.random.split(key, 3)
  return {
    "values": _init_stream(values, HISTORY_LENGTH),
    "steps": _init_stream(steps, HISTORY_LENGTH - 1),
    "head": _init_dense(head, 2 * _LAST, 1),
  }


def init_nowcasters(key: jax.Array) -> Networks:
  """Draws a network for each kind of entry."""
  keys = jax.random.split(key, len(KINDS))
  return {kind: init_nowcaster(k) for kind, k in zip(KINDS, keys, strict=True)}


def normalize(history: jax.Array) -> tuple[jax.Array, jax.Array]:
  r"""Shifts histories [..., 5] to 0 and scales them to at most one half.

  .. math:: r = \max x - \min x + 10^{-8}, \qquad
            s = 2 (r + 10^{-5}), \qquad x' = (x - x_0) / s

  Returns x' and s.
  """
  spread = history.max(-1) - history.min(-1) + 1e-8
  scale = 2 * (spread + 1e-5)
  return (history - history[..., :1]) / scale[..., None], scale


def nowcast_entries(params: dict[str, Any], history: jax.Array) -> jax.Array:
  r"""Predicts later values of entries from their last five.

  .. math:: \hat w = (x'_4 + \mathrm{net}(x', \mathrm{diff}(x')))\, s + x_0

  The network has two streams, one of the five normalized values and one of
  their four differences: Dense 64, TrAct, Dense 32, leaky ReLU.  Both
  together go through Dense 1 and tanh, so that no weight moves further than s,
  about twice its spread before.  TrAct is an activation that learns its form:

  .. math:: z = \mathrm{ReLU}(\mathrm{Dense}_8(h)), \qquad
            y = A(z) + B(z) \exp(C(z) h)

  References:
    Jang et al., Learning to Boost Training by Periodic Nowcasting Near Future
    Weights (ICML 2023).  Reconstruction: the slope of the leaky ReLU, 0.01.
    Departure: exponents above 30 count as 30, so that nothing overflows.
  """
  scaled, scale = normalize(history)
  streams = [
    _stream(params["values"], scaled),
    _stream(params["steps"], jnp.diff(scaled)),
  ]
  out = _dense(params["head"], jnp.concatenate(streams, -1))
  return (scaled[..., -1] + jnp.tanh(out[..., 0])) * scale + history[..., 0]


def nowcast(history: PyTree, networks: Networks) -> PyTree:
  """Predicts a whole tree of parameters, each entry separately.

  Args:
    history: The parameters at the ends of the last five epochs, float32 leaves
      [5, *shape], oldest first.
    networks: A network for each kind of leaf.  Leaves of a kind without a
      network keep their last value.

  >>> nets = init_nowcasters(jax.random.key(0))
  >>> still = {"w": jnp.full((5, 2, 3), 0.5)}
  >>> predicted = nowcast(still, nets)["w"]
  >>> predicted.shape, bool(jnp.allclose(predicted, 0.5, atol=3e-5))
  ((2, 3), True)
  """

  def one(leaf: jax.Array) -> jax.Array:
    network = networks.get(kind_of(leaf.shape[1:]))
    return leaf[-1] if network is None else _predict_leaf(network, leaf)

  return jax.tree.map(one, history)


class NowcastState(NamedTuple):
  """State of `nowcast_weights`.

  Attributes:
    step: The number of updates so far, int32 scalar.
    history: The parameters at the ends of epochs, float32 [5, *shape]; row
      e mod 5 holds those of epoch e, so that all five are in order when they
      are used.
    networks: The trained networks, which do not change.
  """

  step: jax.Array
  history: PyTree
  networks: PyTree


def nowcast_weights(
  networks: Networks, steps_per_epoch: int, *, axis: collectives.Axis
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces the parameters by their prediction after every fifth epoch.

  With the parameters :math:`w^{(e)}` at the end of epoch e = 0, 1, ..., and
  when e mod 5 = 4,

  .. math:: w \leftarrow \mathrm{nowcast}(w^{(e-4)}, \dots, w^{(e)})

  It must be last in a chain behind `ssgd`, where updates are as they will be
  applied.  Behind a method with rounds the jump would be lost on the anchor.
  Neither the optimizer's state nor the number of steps changes.

  Args:
    networks: The trained networks.
    steps_per_epoch: The number of updates in an epoch.
    axis: The axis of the workers.

  References:
    Jang et al., Learning to Boost Training by Periodic Nowcasting Near Future
    Weights (ICML 2023).

  >>> networks = init_nowcasters(jax.random.key(0))
  >>> optimizer = optax.chain(
  ...   optax.sgd(1.0), nowcast_weights(networks, 1, axis=None)
  ... )
  >>> w, moves = jnp.array([0.0]), []
  >>> state, update = optimizer.init(w), jax.jit(optimizer.update)
  >>> for _ in range(6):
  ...   updates, state = update(jnp.array([-1.0]), state, w)
  ...   w = w + updates
  ...   moves.append(updates.item())
  >>> moves[:4] + moves[5:]  # The fifth is the jump.
  [1.0, 1.0, 1.0, 1.0, 1.0]
  """

  def init_fn(params: optax.Params) -> NowcastState:
    return NowcastState(
      step=jnp.zeros((), jnp.int32),
      history=jax.tree.map(
        lambda x: jnp.zeros((HISTORY_LENGTH, *jnp.shape(x)), jnp.float32),
        params,
      ),
      # The state may be donated, and needs buffers of its own.
      networks=jax.tree.map(lambda x: jnp.array(x, copy=True), networks),
    )

  def update_fn(
    updates: optax.Updates,
    state: NowcastState,
    params: optax.Params | None = None,
    *,
    control: transforms.Control = _DEVICE,
    **extra_args: Any,
  ) -> tuple[optax.Updates, NowcastState]:
    del extra_args
    if control.drain:
      return updates, state
    state = state._replace(step=optax.safe_increment(state.step))
    return jax.lax.cond(
      collectives.agreed(state.step % steps_per_epoch == 0, axis),
      end_epoch,
      lambda *given: collectives.varying(given[:2], axis),
      updates,
      state,
      params,
    )

  def end_epoch(
    updates: optax.Updates, state: NowcastState, params: optax.Params
  ) -> tuple[optax.Updates, NowcastState]:
    epoch = state.step // steps_per_epoch - 1
    # The worker will hold the parameters after the cast to their dtype.
    local = jax.tree.map(
      lambda w: w.astype(jnp.float32),
      transforms.apply_updates(params, updates),
    )
    history = jax.tree.map(
      lambda h, w: h.at[epoch % HISTORY_LENGTH].set(w), state.history, local
    )
    updates = jax.lax.cond(
      collectives.agreed(epoch % HISTORY_LENGTH == HISTORY_LENGTH - 1, axis),
      jump,
      lambda updates, *_: collectives.varying(updates, axis),
      updates,
      local,
      history,
      state.networks,
    )
    state = state._replace(history=history)
    return collectives.varying((updates, state), axis)

  def jump(
    updates: optax.Updates, local: PyTree, history: PyTree, networks: PyTree
  ) -> optax.Updates:
    target = nowcast(history, networks)
    return collectives.varying(
      jax.tree.map(
        lambda u, t, w: (u.astype(jnp.float32) + (t - w)).astype(u.dtype),
        updates, target, local,
      ),
      axis,
    )  # fmt: skip

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _predict_leaf(network: dict[str, Any], leaf: jax.Array) -> jax.Array:
  shape = leaf.shape[1:]
  if math.prod(shape) <= _CHUNK:
    return nowcast_entries(network, jnp.moveaxis(leaf, 0, -1))
  rows = leaf.reshape(HISTORY_LENGTH, -1).T
  predicted = jax.lax.map(
    lambda row: nowcast_entries(network, row), rows, batch_size=_CHUNK
  )
  return predicted.reshape(shape)


def _init_dense(key: jax.Array, fan_in: int, fan_out: int) -> dict[str, Any]:
  draw = jax.nn.initializers.lecun_normal()
  return {
    "kernel": draw(key, (fan_in, fan_out), jnp.float32),
    "bias": jnp.zeros(fan_out, jnp.float32),
  }


def _init_stream(key: jax.Array, length: int) -> dict[str, Any]:
  sizes = {
    "first": (length, _HIDDEN),
    "squeeze": (_HIDDEN, _SQUEEZED),
    "offset": (_SQUEEZED, _HIDDEN),
    "gain": (_SQUEEZED, _HIDDEN),
    "rate": (_SQUEEZED, _HIDDEN),
    "last": (_HIDDEN, _LAST),
  }
  keys = jax.random.split(key, len(sizes))
  return {
    name: _init_dense(k, *size)
    for k, (name, size) in zip(keys, sizes.items(), strict=True)
  }


def _dense(layer: dict[str, Any], x: jax.Array) -> jax.Array:
  return x @ layer["kernel"] + layer["bias"]


def _stream(layers: dict[str, Any], x: jax.Array) -> jax.Array:
  h = _dense(layers["first"], x)
  z = jax.nn.relu(_dense(layers["squeeze"], h))
  rise = jnp.exp(jnp.minimum(_dense(layers["rate"], z) * h, _LARGEST_EXPONENT))
  y = _dense(layers["offset"], z) + _dense(layers["gain"], z) * rise
  return jax.nn.leaky_relu(_dense(layers["last"], y))
