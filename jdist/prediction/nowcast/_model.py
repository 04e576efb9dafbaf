"""Weight nowcaster networks: the next values of a weight from its last five.

A network sees one entry of the parameters at a time, so that it fits any model.
There are three, one for each kind of entry.
"""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jdist import checks

PyTree = Any
Kind = Literal["conv", "dense", "bias"]

HISTORY_LENGTH = 5
KINDS: tuple[Kind, ...] = ("conv", "dense", "bias")
_HIDDEN, _SQUEEZED, _LAST = 64, 8, 32
_LARGEST_EXPONENT = 30.0
# Entries at a time: a hidden layer of that many is 16 MB.
_CHUNK = 1 << 16


def kind_of(shape: tuple[int, ...]) -> Kind:
  """Returns the kind of one worker's leaf, by its rank: a reconstruction."""
  if len(shape) > 2:
    return "conv"
  return "dense" if len(shape) == 2 else "bias"


def init_nowcaster(key: jax.Array) -> dict[str, Any]:
  """Draws the first parameters of one network, 9,425 float32 numbers.

  Kernels are drawn by LeCun's rule and biases are zero: a reconstruction.
  """
  checks.check_key(key)
  values, steps, head = jax.random.split(key, 3)
  return {
    "values": _init_stream(values, HISTORY_LENGTH),
    "steps": _init_stream(steps, HISTORY_LENGTH - 1),
    "head": _init_dense(head, 2 * _LAST, 1),
  }


def init_nowcasters(key: jax.Array) -> dict[Kind, dict[str, Any]]:
  """Draws a network for each kind of entry, by kind, as `init_nowcaster`."""
  checks.check_key(key)
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
  together go through Dense 1 and tanh, so that no weight goes further than s,
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


def nowcast(history: PyTree, params: dict[Kind, dict[str, Any]]) -> PyTree:
  """Predicts a whole tree of parameters, each entry for itself.

  Pure, and the same on all workers that hold the same history: nothing is
  sent.

  Args:
    history: parameters at the ends of the last five epochs, float32 leaves
      [5, *shape], oldest first.
    params: a network for each kind of leaf: "conv", of three dimensions and
      more, "dense" and "bias".  Leaves of a kind without a network keep their
      last value.

  Returns:
    The predicted parameters, float32 leaves [*shape].

  Raises:
    ValueError: when a kind is unknown, or a leaf has no five values.

  >>> nets = init_nowcasters(jax.random.key(0))
  >>> still = {"w": jnp.full((5, 2, 3), 0.5)}
  >>> predicted = nowcast(still, nets)["w"]
  >>> predicted.shape, bool(jnp.allclose(predicted, 0.5, atol=3e-5))
  ((2, 3), True)
  """
  check_nowcasters(params)

  def one(path: Any, leaf: jax.Array) -> jax.Array:
    if jnp.ndim(leaf) == 0 or leaf.shape[0] != HISTORY_LENGTH:
      raise ValueError(
        f"`history` must hold {HISTORY_LENGTH} values of every entry, oldest "
        f"first, [{HISTORY_LENGTH}, ...], but leaf "
        f"`{jax.tree_util.keystr(path)}` has shape {jnp.shape(leaf)}."
      )
    network = params.get(kind_of(leaf.shape[1:]))
    return leaf[-1] if network is None else _predict_leaf(network, leaf)

  return jax.tree_util.tree_map_with_path(one, history)


def check_nowcasters(params: Any, *, some: bool = False) -> None:
  """Raises a ValueError unless all, or `some`, are networks of known kinds."""
  remedy = "Take those of `fit_nowcasters` or `load_nowcasters`."
  if not isinstance(params, dict) or not set(params) <= set(KINDS):
    found = sorted(params) if isinstance(params, dict) else checks.show(params)
    raise ValueError(
      f"`params` must be a dict with a network for some of {', '.join(KINDS)}, "
      f"got {found}. {remedy}"
    )
  if some and not params:
    raise ValueError(
      "`params` must hold a network for one kind at least of "
      f"{', '.join(KINDS)}, got none. {remedy}"
    )
  for kind, network in params.items():
    rule = f"`params` must hold networks as of `init_nowcasters`, but in {kind}"
    checks.check_shapes(rule, remedy, checks.named_leaves(network), _shapes())


@functools.cache
def _shapes() -> dict[str, tuple[int, ...]]:
  like = jax.eval_shape(init_nowcaster, jax.random.key(0))
  return {name: leaf.shape for name, leaf in checks.named_leaves(like).items()}


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
