"""A tiny classification run: enough to have every kind of state."""

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import collectives, methods, training, transforms
from jdist.transforms import intervals


def params():
  rng = np.random.default_rng(0)
  return {
    "bias": np.zeros(3, np.float32),
    "kernel": rng.normal(size=(6, 3)).astype(np.float32),
    "nothing": np.zeros((0, 3), np.float32),
    "scale": np.asarray(1.0, np.float32),
    "small": rng.normal(size=(4,)).astype(jnp.bfloat16),
  }


def loss_fn(params, model_state, batch, key):
  del key
  logits = batch["x"] @ params["kernel"] * params["scale"] + params["bias"]
  loss = optax.softmax_cross_entropy_with_integer_labels(
    logits, batch["y"]
  ).mean()
  small = params["small"].astype(jnp.float32)
  return loss + jnp.sum(small**2) * 0.1, (model_state, {})


def optimizers(axis):
  """One of every kind of chain, with state of every kind."""
  adaptive = intervals.msdpu(3, 0.05)
  return {
    "momentum": methods.ssgd(optax.sgd(0.05, momentum=0.9), axis=axis),
    "adam": methods.ssgd(optax.adam(0.01), axis=axis),
    "local_sgd": methods.local_sgd(optax.sgd(0.05, momentum=0.9), 3, axis=axis),
    "diloco": methods.diloco(optax.adam(0.01), 3, axis=axis),
    "msdpu": methods.msdpu(
      optax.sgd(0.05, momentum=0.9),
      adaptive,
      0.05,
      axis=axis,
      overlap=transforms.Delayed(carry=None),
    ),
    "delay_gradients": transforms.delay_gradients(
      methods.ssgd(optax.sgd(0.05, momentum=0.9), axis=axis), 2
    ),
    "update_first": transforms.update_first(
      optax.sgd(0.05, momentum=0.9), axis=axis
    ),
    "injected": optax.chain(
      transforms.average_gradients(axis),
      # Without momentum, of which Optax makes float32 out of bfloat16 here.
      optax.inject_hyperparams(optax.sgd)(0.05),
    ),
    "typed_key": optax.chain(
      transforms.average_gradients(axis),
      optax.add_noise(0.01, 0.5, jax.random.key(7)),
      optax.sgd(0.05),
    ),
  }


def batch(step, rows, seed=0):
  """Batch number `step` of the workers `rows`."""

  def one(worker):
    rng = np.random.default_rng([seed, step, worker])
    return {
      "x": rng.normal(size=(4, 6)).astype(np.float32),
      "y": rng.integers(0, 3, size=4).astype(np.int32),
    }

  return jax.tree.map(lambda *xs: np.stack(xs), *map(one, rows))


def batches(team, seed=0):
  """Like `data.Batches.iterate`, for `Trainer.fit`."""

  def iterate(start):
    step = start
    while True:
      yield batch(step, team.local_workers, seed)
      step += 1

  return iterate


def init(team, name):
  # Copies, because the first step takes the memory.
  return jax.tree.map(
    lambda x: jax.device_put(x.copy(), x.sharding), _first(team, name)
  )


@functools.cache
def _first(team, name):
  return training.init_state(team, optimizers(team.axis)[name], params())


@functools.cache
def trainer(team, name):
  """Compiled once for all tests: a trainer keeps nothing of a run."""
  step = training.make_step(
    loss_fn, optimizers(team.axis)[name], axis=team.axis
  )
  return training.Trainer(team, step)


def trained(team, name, steps):
  state, _ = trainer(team, name).fit(init(team, name), batches(team), steps)
  return state


def host(tree):
  """NumPy arrays; typed keys as words."""

  def one(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      x = jax.random.key_data(x)
    return np.asarray(x)

  return jax.tree.map(one, tree)


def assert_same_bits(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for (path, x), y in zip(
    jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
  ):
    name = jax.tree_util.keystr(path)
    assert x.dtype == y.dtype, name
    x, y = host(x), host(y)
    assert x.shape == y.shape, name
    assert x.tobytes() == y.tobytes(), name


def digest(tree):
  """Of all bits of a tree."""
  words = b"".join(x.tobytes() for x in jax.tree.leaves(host(tree)))
  return hashlib.sha256(words).hexdigest()


def team(kind):
  """The workers, on each substrate."""
  if kind == "vmap":
    return collectives.workers(4, substrate="vmap")
  if kind == "shard_map":
    return collectives.workers(4, substrate="shard_map")
  if kind == "two_on_each":
    mesh = collectives.make_mesh((2,), ("worker",))
    return collectives.workers(4, mesh=mesh)
  assert kind == "none", kind
  return collectives.workers(1, substrate="none")


TEAMS = ("vmap", "shard_map", "two_on_each")
