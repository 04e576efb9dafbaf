"""Forms of three frameworks' layers, and of JAX's less common doors."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import io_callback

# Rows of three numbers are sequences of one feature.
_SEQUENCES = jnp.ones((4, 3, 1))
_linen = nn.RNN(nn.LSTMCell(3))
_lengths = nn.RNN(nn.OptimizedLSTMCell(3))
_weights = nn.WeightNorm(nn.Dense(3))
_graph, _nnx, _rest = nnx.split(
  nnx.RNN(nnx.LSTMCell(1, 3, rngs=nnx.Rngs(0))), nnx.Param, ...
)
_gru, _static = eqx.partition(
  eqx.nn.GRUCell(1, 3, key=jax.random.key(0)), eqx.is_inexact_array
)


def _init(module, x):
  return module.init(jax.random.key(0), x)


def _linen_lengths(params, x):
  lengths = jnp.array([1, 2, 3, 3])[: len(x)]
  found = _lengths.apply(params, x[..., None], seq_lengths=lengths)
  return found.sum((1, 2))


def _nnx_rnn(params, x):
  state = jax.tree.map(lambda leaf: leaf, _nnx)
  nnx.replace_by_pure_dict(state, params)
  model = nnx.merge(_graph, state, _rest)
  return model(x[..., None], rngs=nnx.Rngs(0)).sum((1, 2))


def _equinox_gru(params, x):
  cell = eqx.combine(params, _static)

  def row(one):
    first = jnp.zeros(3)
    return jax.lax.scan(lambda h, z: (cell(z[None], h), None), first, one)[0]

  return jax.vmap(row)(x).sum(1)


def _from_host(params, x):
  shape = jax.ShapeDtypeStruct((), jnp.float32)
  given = jax.lax.stop_gradient(x[0, 0])
  return (x @ params["w"]).sum(-1) * io_callback(
    lambda value: np.float32(2.0), shape, given
  )


def _seen_in_scan(params, x):
  def body(carry, _):
    jax.debug.callback(lambda value: None, carry[0, 0])
    return jnp.tanh(carry @ params["w"]), None

  return jax.lax.scan(body, x, None, 2)[0].sum(-1)


@jax.custom_gradient
def _squared(x):
  return x**2, lambda g: 2 * g * x


# Parameters, None for the matrix of the other forms, and the outputs.
LAYERS = {
  "linen RNN of LSTM cells": (
    _init(_linen, _SEQUENCES),
    lambda p, x: _linen.apply(p, x[..., None]).sum((1, 2)),
  ),
  "linen RNN with lengths": (_init(_lengths, _SEQUENCES), _linen_lengths),
  "linen weight norm": (
    _init(_weights, jnp.ones((4, 3))),
    lambda p, x: _weights.apply(p, x).sum(-1),
  ),
  "nnx RNN of LSTM cells": (nnx.to_pure_dict(_nnx), _nnx_rnn),
  "equinox GRU in a scan": (_gru, _equinox_gru),
  "io_callback with a result": (None, _from_host),
  "callback in a scan": (None, _seen_in_scan),
  # A larger output's fourth power diverges.
  "custom_gradient": (
    None, lambda p, x: _squared(0.1 * (x @ p["w"]).sum(-1))
  ),
}  # fmt: skip
