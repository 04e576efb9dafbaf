"""A decoder-only transformer, as a language model."""

import math
from typing import Any, get_args, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jdist import checks
from jdist.models import _layered_network, _layers, _normalization

Positions = Literal["learned", "rotary"]


class Transformer(_layered_network.LayeredNetwork):
  """A causal transformer that predicts the next token at every position.

    x = x + attention(norm(x));  x = x + dense(gelu(dense(norm(x))))

  in each layer, on embeddings of the tokens; a last norm and a dense layer
  compute the logits. With 12 layers of width 768, 12 heads, 1,024 positions, a
  vocabulary of 50,257 and `tied` it has the 124,439,808 parameters of GPT-2.

  Args:
    width: The size of the embeddings, a multiple of `num_heads`.
    hidden_size: The hidden size of dense layers, default `4 * width`.
    positions: "learned" (default) for an embedding of each position, or
      "rotary", which has no parameters and needs an even `width / num_heads`.
    tied: Whether logits are products with the token embeddings.

  References:
    Radford et al., "Language models are unsupervised multitask learners",
    2019. Rotary positions: Su et al., 2021, arXiv:2104.09864. Departures: no
    dropout; the untied last layer has no biases; dense layers start with
    variance 1 / fan_in, and those that write to the residual stream are scaled
    by (2 * num_layers)**-0.5.
  """

  takes_tokens = True

  def __init__(
    self,
    input_shape: tuple[int],
    num_classes: int,
    *,
    num_layers: int = 4,
    width: int = 128,
    num_heads: int = 4,
    hidden_size: int | None = None,
    positions: Positions = "learned",
    tied: bool = False,
    rngs: _layers.Keys,
  ):
    (length,) = input_shape
    hidden_size = 4 * width if hidden_size is None else hidden_size
    for option, value in (
      ("num_layers", num_layers), ("width", width), ("num_heads", num_heads),
      ("hidden_size", hidden_size),
    ):  # fmt: skip
      checks.check_int(option, value, 1)
    if width % num_heads:
      raise ValueError(
        f"`num_heads` must divide the width {width}, got {num_heads}."
      )
    checks.check_choice("positions", positions, get_args(Positions))
    if positions == "rotary" and width // num_heads % 2:
      raise ValueError(
        "`num_heads` must leave each head an even size for rotary positions, "
        f"got {num_heads} heads for a width of {width}."
      )
    # With leading zeros, names sort in the order of the layers.
    digits = len(str(num_layers + 2))
    names = [f"layer{i:0{digits}}" for i in range(num_layers + 3)]
    first, *layers, norm, head = names
    # Positions are drawn before tokens: a seed's numbers depend on
    # the order of draws.
    embeddings = {}
    if positions == "learned":
      embeddings[f"{first}_positions"] = _layers.Embedding(
        length, width, std=0.02, rngs=rngs
      )
    tokens = _layers.Embedding(num_classes, width, std=0.02, rngs=rngs)
    # Token embeddings are looked up before those of positions are added.
    embeddings = {f"{first}_tokens": tokens, **embeddings}
    self.add_part(embeddings, _run_first)
    for name in layers:
      layer = _Layer(
        width, num_heads, hidden_size, positions == "rotary", num_layers,
        rngs=rngs,
      )  # fmt: skip
      self.add_part({name: layer}, lambda x, mask, layer: layer(x))
    last: dict[str, nnx.Module] = {
      f"{norm}_norm": _normalization.LayerNorm(width)
    }
    if tied:
      # Tied token embeddings are a part of both the first and the last.
      last[f"{first}_tokens"] = tokens
    else:
      last[f"{head}_dense"] = _layers.dense(
        width, num_classes, last=True, use_bias=False, rngs=rngs
      )
    self.add_part(last, _run_last)


def _run_first(tokens: jax.Array, mask: Any, *modules: Any) -> jax.Array:
  del mask
  table, *positions = (module.table[...] for module in modules)
  # By default JAX clamps an index out of range and would return another token's
  # embedding; NaN makes the mistake visible.
  x = table.at[tokens].get(
    mode="fill", fill_value=jnp.nan, wrap_negative_indices=False
  )
  for vectors in positions:
    x = x + vectors[None, : x.shape[1]]
  return x


def _run_last(x: jax.Array, mask: Any, norm: Any, last: Any) -> jax.Array:
  del mask
  x = norm(x)
  tied = isinstance(last, _layers.Embedding)
  return x @ last.table[...].T if tied else last(x)


class _Layer(nnx.Module):
  """Causal attention, then dense layers for each position."""

  def __init__(
    self,
    width: int,
    num_heads: int,
    hidden_size: int,
    rotary: bool,
    num_layers: int,
    *,
    rngs: _layers.Keys,
  ):
    def dense(inputs: int, outputs: int, gain: float = 1.0) -> nnx.Linear:
      return _layers.dense(inputs, outputs, last=True, gain=gain, rngs=rngs)

    # Each of L layers adds twice to the residual stream, as in GPT-2.
    smaller = (2 * num_layers) ** -0.5
    # The numbers make names sort in the order of use.
    self.attend1_norm = _normalization.LayerNorm(width)
    self.attend2_qkv = dense(width, 3 * width)
    self.attend3_out = dense(width, width, smaller)
    self.dense1_norm = _normalization.LayerNorm(width)
    self.dense2_up = dense(width, hidden_size)
    self.dense3_down = dense(hidden_size, width, smaller)
    self.num_heads = num_heads
    self.rotary = rotary

  def __call__(self, x: jax.Array) -> jax.Array:
    qkv = self.attend2_qkv(self.attend1_norm(x))
    heads = qkv.reshape(*x.shape[:2], 3, self.num_heads, -1)
    q, k, v = (heads[:, :, i] for i in range(3))
    if self.rotary:
      q, k = _rotate(q), _rotate(k)
    x = x + self.attend3_out(_attend(q, k, v).reshape(x.shape))
    y = jax.nn.gelu(self.dense2_up(self.dense1_norm(x)))
    return x + self.dense3_down(y)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """Returns causal attention; all arrays are [batch, length, heads, n].

  The softmax is in float32, and the products are in the network's type.
  """
  _, length, _, size = q.shape
  # Queries are scaled before the product, which keeps bfloat16 scores small.
  scores = jnp.einsum("bqhn,bkhn->bhqk", q / math.sqrt(size), k)
  # The mask depends on the length alone, which is static.
  seen = jnp.tril(jnp.ones((1, 1, length, length), bool))
  scores = jnp.where(seen, scores.astype(jnp.float32), -jnp.inf)
  weights = jax.nn.softmax(scores).astype(v.dtype)
  return jnp.einsum("bhqk,bkhn->bqhn", weights, v)


def _rotate(x: jax.Array) -> jax.Array:
  """Rotates pairs of numbers by an angle proportional to the position.

  The product of two rotated vectors depends on their distance alone.
  """
  _, length, _, size = x.shape
  half = size // 2
  # Angles are in float32: bfloat16 cannot tell late positions apart.
  speed = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = jnp.arange(length, dtype=jnp.float32)[:, None] * speed[None]
  cos, sin = (f(angle)[None, :, None] for f in (jnp.cos, jnp.sin))
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
  return turned.astype(x.dtype)
