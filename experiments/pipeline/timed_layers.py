"""Layers whose seconds are given: they sleep; and layers that compute."""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist import models


class Slowness:
  """By what this process's sleeps are stretched."""

  factor = 1.0


def _pause(x: jax.Array, seconds: float) -> jax.Array:
  """Returns a zero, after so many seconds."""

  def sleep(_: Any) -> np.ndarray:
    time.sleep(seconds * Slowness.factor)
    return np.zeros((), x.dtype)

  if not seconds:
    return jnp.zeros((), x.dtype)
  like = jax.ShapeDtypeStruct((), x.dtype)
  return jax.pure_callback(sleep, like, x.ravel()[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _wait(x: jax.Array, forward_s: float, backward_s: float) -> jax.Array:
  del backward_s
  return x + _pause(x, forward_s)


def _wait_forward(
  x: jax.Array, forward_s: float, backward_s: float
) -> tuple[jax.Array, None]:
  return _wait(x, forward_s, backward_s), None


def _wait_backward(
  forward_s: float, backward_s: float, _: None, cotangent: jax.Array
) -> tuple[jax.Array]:
  del forward_s
  return (cotangent + _pause(cotangent, backward_s),)


_wait.defvjp(_wait_forward, _wait_backward)


def sleeping(
  name: str,
  width: int,
  forward_s: float,
  backward_s: float,
  weight_s: float = 0.0,
) -> models.Layer:
  """A small dense layer whose passes take so many seconds longer.

  The gradient of its parameters takes `weight_s`, by itself.
  """

  def apply(
    params: Any, state: Any, x: jax.Array, *, train: bool, mask: Any = None
  ) -> tuple[jax.Array, Any]:
    del train, mask
    w = params[name]["w"]
    y = x @ (_wait(w, 0.0, weight_s) if weight_s else w)
    # Before what a backward pass reads: a pass that runs again sleeps again.
    return jnp.tanh(_wait(y, forward_s, backward_s)), state

  return models.Layer(name, _matrix(name, width), {}, apply)


def dense(name: str, width: int) -> models.Layer:
  """A dense layer."""

  def apply(
    params: Any, state: Any, x: jax.Array, *, train: bool, mask: Any = None
  ) -> tuple[jax.Array, Any]:
    del train, mask
    return jnp.tanh(x @ params[name]["w"]), state

  return models.Layer(name, _matrix(name, width), {}, apply)


@jax.custom_vjp
def _products(w: jax.Array, x: jax.Array, turns: jax.Array) -> jax.Array:
  """Returns x after a product with w and a tanh for each of the turns."""
  y, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, turns)
  return y


def _products_forward(
  w: jax.Array, x: jax.Array, turns: jax.Array
) -> tuple[jax.Array, Any]:
  def turn(h: jax.Array, _: Any) -> tuple[jax.Array, Any]:
    y = jnp.tanh(h @ w)
    return y, (h, y)

  y, kept = jax.lax.scan(turn, x, turns)
  return y, (w, kept)


def _products_backward(
  rest: Any, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
  w, (inputs, outputs) = rest

  def turn(c: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    d = c * (1 - y * y)
    return d @ w.T, d

  # A loop for each of the parts into which a table may split the pass.
  dx, kept = jax.lax.scan(turn, cotangent, outputs, reverse=True)
  dw, _ = jax.lax.scan(
    lambda total, pair: (total + pair[0].T @ pair[1], None),
    jnp.zeros_like(w),
    (inputs, kept),
  )
  return dw, dx, None


_products.defvjp(_products_forward, _products_backward)


def looped(name: str, width: int, turns: int) -> models.Layer:
  """A dense layer that is applied so many times, on one core.

  XLA runs the few operations of a loop's body one after the other.  Outside of
  a loop independent products of a CPU's program run on several cores at once.
  """

  def apply(
    params: Any, state: Any, x: jax.Array, *, train: bool, mask: Any = None
  ) -> tuple[jax.Array, Any]:
    del train, mask
    return _products(params[name]["w"], x, jnp.arange(turns)), state

  return models.Layer(name, _matrix(name, width), {}, apply)


def _matrix(name: str, width: int) -> dict[str, dict[str, np.ndarray]]:
  generator = np.random.default_rng(sum(name.encode()))
  weights = generator.normal(size=(width, width)) / np.sqrt(width)
  return {name: {"w": weights.astype(np.float32)}}


def squared_error(outputs: jax.Array, batch: Any) -> tuple[jax.Array, Any]:
  """The loss of the layers' outputs."""
  return jnp.mean((outputs - batch["y"]) ** 2), {}


def make_batches(
  number: int, samples: int, width: int
) -> list[dict[str, np.ndarray]]:
  """Random inputs and targets."""
  generator = np.random.default_rng(1)
  return [
    {
      name: generator.normal(size=(samples, width)).astype(np.float32)
      for name in ("x", "y")
    }
    for _ in range(number)
  ]
