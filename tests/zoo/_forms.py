"""Forms of models, losses and batches that users bring.

Each form is what a user would hand to `training.make_step`: parameters of one
worker, a loss, and batches [workers, samples, ...] of a step.  None of them
knows of workers.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tests.zoo import _layers

WORKERS, SAMPLES, WIDTH = 4, 4, 3


def rows(step, width=WIDTH, samples=SAMPLES):
  """Random inputs and targets of all workers."""
  random = np.random.default_rng([7, step])
  x = random.normal(size=(WORKERS, samples, width)).astype(np.float32)
  return {"x": x, "y": x.sum(-1)}


def matrix(seed=0, shape=(WIDTH, WIDTH)):
  random = np.random.default_rng(seed)
  return (random.normal(size=shape) / 2).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Form:
  """A form: parameters, a model [samples, width] -> [samples], batches."""

  params: Any
  model: Callable[..., Any]
  batch: Callable[[int], Any] = rows
  state: Any = dataclasses.field(default_factory=dict)
  loss: Callable[..., Any] | None = None
  around: Callable[[], Any] = contextlib.nullcontext
  tolerance: float = 1e-5
  # `Trainer` warns of every shape of the batches but the first.
  num_shapes: int = 1

  def loss_fn(self, params, state, batch, key):
    if self.loss is not None:
      return self.loss(params, state, batch, key)
    found = self.model(params, batch["x"])
    return jnp.mean((found - batch["y"]) ** 2), (state, {})


_FLAGS = {
  "x64": (
    functools.partial(jax.enable_x64, True),
    functools.partial(jax.numpy_dtype_promotion, "standard"),
  ),
  "rank promotion": (functools.partial(jax.numpy_rank_promotion, "raise"),),
  "debug_nans": (
    functools.partial(jax.debug_nans, True),
    functools.partial(jax.debug_infs, True),
  ),
}
FLAGS = tuple(_FLAGS)


def under(flag, form):
  """Returns a form under a flag of JAX, by x64 in float64."""

  @contextlib.contextmanager
  def around():
    with contextlib.ExitStack() as stack:
      for enter in (form.around, *_FLAGS[flag]):
        stack.enter_context(enter())
      yield

  if flag != "x64":
    return dataclasses.replace(form, around=around)
  exact = form.tolerance <= 1e-4  # Of no narrow leaf.
  return dataclasses.replace(
    form, around=around, params=jax.tree.map(wide, form.params),
    batch=lambda step: jax.tree.map(wide, form.batch(step)),
    tolerance=1e-11 if exact else form.tolerance,
  )  # fmt: skip


def wide(x):
  """Returns arrays of float32 and complex64 with twice as many bits."""
  kinds = {"float32": np.float64, "complex64": np.complex128}
  kind = kinds.get(str(getattr(x, "dtype", None)))
  return x if kind is None else np.asarray(x).astype(kind)


def linear(params, x):
  return (x @ params["w"]).sum(-1)


W = {"w": matrix()}


def scanned(params, x):
  def body(carry, _):
    return jnp.tanh(carry @ params["w"] + x), None

  return jax.lax.scan(body, jnp.zeros(x.shape), None, 3)[0].sum(-1)


def recurrent(params, x):
  """A cell over the inputs in turn, from a constant first state."""

  def cell(hidden, column):
    hidden = jnp.tanh(hidden @ params["w"] + column[:, None])
    return hidden, hidden.sum(-1)

  first = jnp.zeros((len(x), WIDTH))
  return jax.lax.scan(cell, first, x.T)[1].sum(0)


def for_loop(params, x):
  def body(_, hidden):
    return jnp.tanh(hidden @ params["w"] + x)

  return jax.lax.fori_loop(0, 3, body, jnp.zeros(x.shape)).sum(-1)


def while_loop(params, x):
  """A loop in front of the parameters, which has no gradient."""
  scale = jax.lax.while_loop(
    lambda s: s[0] < 5.0, lambda s: (s[0] * 2.0, s[1] + 1), (1.0, 0)
  )[0]
  return linear(params, x * scale / 8)


def branch(params, x):
  """A branch on data, whose constant side does not depend on any worker."""
  return jax.lax.cond(
    x[0, 0] > 0, lambda: (x @ params["w"]).sum(-1), lambda: jnp.ones(len(x))
  )


def switch(params, x):
  number = sum((x[0, i] > 0).astype(jnp.int32) for i in range(2))
  sides = [
    lambda p, x: (x @ p["w"]).sum(-1),
    lambda p, x: jnp.zeros(len(x)),
    lambda p, x: jnp.tanh(x @ p["w"]).sum(-1),
  ]
  return jax.lax.switch(number, sides, params, x)


def nested(params, x):
  """A branch in a scan in a jit."""

  @jax.jit
  def inner(x):
    def body(carry, step):
      found = jax.lax.cond(
        step % 2 == 0,
        lambda c: jnp.tanh(c @ params["w"]),
        lambda c: jnp.zeros(c.shape) + 0.5 * c,
        carry,
      )
      return found, jnp.ones(())

    return jax.lax.scan(body, x, jnp.arange(3))[0]

  return inner(x).sum(-1)


def mapped(params, x):
  return jax.lax.map(lambda row: jnp.tanh(row @ params["w"]).sum(), x)


def associative(params, x):
  hidden = x @ params["w"]
  return jax.lax.associative_scan(jnp.add, hidden, axis=1)[:, -1]


def remat(params, x):
  layer = jax.checkpoint(lambda h: jnp.tanh(h @ params["w"]))
  return layer(layer(x)).sum(-1)


def remat_scan(params, x):
  @jax.checkpoint
  def body(carry, _):
    return jnp.tanh(carry @ params["w"]), None

  return jax.lax.scan(body, x, None, 2)[0].sum(-1)


SEEN = []


def callback(params, x):
  jax.debug.callback(lambda value: SEEN.append(float(value)), x[0, 0])
  return linear(params, x)


def pure_callback(params, x):
  scale = jax.pure_callback(
    lambda v: np.float32(np.abs(v).max()),
    jax.ShapeDtypeStruct((), jnp.float32),
    jax.lax.stop_gradient(x),
    vmap_method="sequential",
  )
  return linear(params, x) / scale


@jax.custom_vjp
def clipped(x):
  return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


@jax.custom_jvp
def straight(x):
  return jnp.round(x)


straight.defjvp(lambda x, t: (jnp.round(x[0]), t[0]))


def constrained(params, x):
  """A constraint of no axis, which a model of one device may hold."""
  hidden = x @ params["w"]
  mesh = jax.sharding.get_abstract_mesh()
  if not mesh.empty:
    hidden = jax.lax.with_sharding_constraint(hidden, PartitionSpec())
  return hidden.sum(-1)


def key_loss(params, state, batch, key):
  """A loss of its own randomness, from a typed key in the state."""
  del key
  own, use = jax.random.split(state["rng"])
  # What is drawn does not matter: equal keys draw equally.
  noise = jax.random.normal(use, ()) * 0.0
  found = linear(params, batch["x"]) + noise
  return jnp.mean((found - batch["y"]) ** 2), (state | {"rng": own}, {})


@flax.struct.dataclass
class Weights:
  """Parameters with a static field."""

  w: Any
  name: str = flax.struct.field(pytree_node=False, default="layer")


def complex_rows(step):
  random = np.random.default_rng([9, step])
  shape = WORKERS, SAMPLES, WIDTH
  x = random.normal(size=shape) + 1j * random.normal(size=shape)
  return {"x": x.astype(np.complex64), "y": x.sum(-1).astype(np.complex64)}


def complex_loss(params, state, batch, key):
  del key
  error = (batch["x"] @ params["w"]).sum(-1) - batch["y"]
  return jnp.mean(jnp.abs(error) ** 2), (state, {})


def bucketed(step):
  """Batches of two lengths and a shorter last one."""
  return rows(step, samples=(4, 2, 4, 1)[step % 4])


BUFFER = {"x": np.zeros((WORKERS, SAMPLES, WIDTH), np.float32)}
BUFFER["y"] = BUFFER["x"].sum(-1)


def reused(step):
  """One buffer, which the loader refills for every step."""
  for name, value in rows(step).items():
    BUFFER[name][...] = value
  return BUFFER


def deep(tree, x):
  for w in tree["layers"]:
    x = jnp.tanh(x @ w)
  return x.sum(-1)


SHARED = matrix(3)


FORMS = {
  "plain": Form(W, linear),
  "scan": Form(W, scanned),
  "recurrent cell": Form(W, recurrent),
  "fori_loop": Form(W, for_loop),
  "while_loop": Form(W, while_loop),
  "cond": Form(W, branch),
  "switch": Form(W, switch),
  "cond in scan in jit": Form(W, nested),
  "lax.map": Form(W, mapped),
  "associative_scan": Form(W, associative),
  "vmap": Form(W, lambda p, x: jax.vmap(lambda r: (r @ p["w"]).sum())(x)),
  "checkpoint": Form(W, remat),
  "checkpoint of a scan's body": Form(W, remat_scan),
  "debug callback": Form(W, callback),
  "pure_callback": Form(W, pure_callback),
  "custom_vjp": Form(W, lambda p, x: clipped(linear(p, x))),
  "custom_jvp": Form(W, lambda p, x: straight(4 * linear(p, x)) / 4),
  "sharding constraint": Form(W, constrained),
  "named scope": Form(W, lambda p, x: jax.named_call(linear, name="a")(p, x)),
  "closed-over array": Form(
    W, lambda p, x: linear(p, x * jnp.asarray(SHARED[0]))
  ),
  "a typed key in the state": Form(
    W, linear, state={"rng": jax.random.key(1)}, loss=key_loss
  ),
  "rank promotion raises": Form(
    W, linear, around=functools.partial(jax.numpy_rank_promotion, "raise")
  ),
  "debug_nans": Form(W, linear, around=functools.partial(jax.debug_nans, True)),
  "x64": Form(
    {"w": matrix().astype(np.float64)},
    lambda p, x: linear(p, x.astype(np.float64)).astype(np.float32),
    around=functools.partial(jax.enable_x64, True),
  ),
  "x64 with float32": Form(
    W, linear, around=functools.partial(jax.enable_x64, True)
  ),
  "standard promotion": Form(
    W, linear, around=functools.partial(jax.numpy_dtype_promotion, "standard")
  ),
  "buckets of shapes": Form(W, linear, bucketed, num_shapes=3),
  "a reused buffer": Form(W, linear, reused),
  "complex": Form(
    {"w": matrix() + 1j * matrix(1)}, linear, complex_rows, loss=complex_loss
  ),
  "bfloat16": Form(
    {"w": matrix().astype(jnp.bfloat16)},
    lambda p, x: (x @ p["w"].astype(jnp.float32)).sum(-1),
    tolerance=0.03,
  ),
  "a leaf of fp8": Form(
    W | {"scale": np.ones(2, jnp.float8_e4m3fn)},
    lambda p, x: linear(p, x) * p["scale"].astype(jnp.float32).mean(),
    tolerance=0.1,
  ),
  "bool and integer leaves": Form(
    W | {"on": np.array([True, False, True]), "steps": np.int32(3)},
    lambda p, x: (
      (x @ p["w"])[:, p["on"].argmax()] * p["steps"].astype(jnp.float32) / 3
    ),
  ),
  "tied weights": Form(
    {"first": SHARED, "last": SHARED},
    lambda p, x: (jnp.tanh(x @ p["first"]) @ p["last"].T).sum(-1),
  ),
  "a scalar": Form(np.float32(0.5), lambda p, x: p * x.sum(-1)),
  "an empty leaf": Form(
    W | {"none": np.zeros((0, 3), np.float32)},
    lambda p, x: linear(p, x) + p["none"].sum(),
  ),
  "None and empty containers": Form(
    W | {"bias": None, "more": {}, "list": []}, linear
  ),
  "a list": Form(
    [matrix(), matrix(1)], lambda p, x: ((x @ p[0]) @ p[1]).sum(-1)
  ),
  "a dataclass": Form(Weights(matrix()), lambda p, x: (x @ p.w).sum(-1)),
  "fifty leaves": Form(
    {"layers": [matrix(i) for i in range(50)]}, deep, tolerance=1e-4
  ),
  **{
    name: Form(W if params is None else params, model)
    for name, (params, model) in _layers.LAYERS.items()
  },
}  # fmt: skip
