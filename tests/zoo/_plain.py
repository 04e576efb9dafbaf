"""The same training in plain JAX: a Python loop over the workers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.zoo import _forms

INTERVAL, STEPS = 2, 4


def optimizer():
  return optax.sgd(0.05, momentum=0.9)


def train(form, method):
  """Returns the parameters of all workers after four steps."""
  with form.around():
    plain = optimizer()
    # Integers and bools are no numbers that a user trains.
    gradient = jax.jit(
      jax.grad(
        lambda *given: form.loss_fn(*given), has_aux=True, allow_int=True
      )
    )
    params = [form.params] * _forms.WORKERS
    states = [form.state] * _forms.WORKERS
    moments = [None] * _forms.WORKERS
    for step in range(STEPS):
      batch = jax.tree.map(np.array, form.batch(step))
      found = []
      for i in range(_forms.WORKERS):
        own = jax.tree.map(lambda x, i=i: x[i], batch)
        grads, (states[i], _) = gradient(
          params[i], states[i], own, jax.random.key(0)
        )
        found.append(grads)
      if method == "ssgd":
        found = [mean(found)] * _forms.WORKERS
      for i in range(_forms.WORKERS):
        params[i], moments[i] = update(plain, params[i], moments[i], found[i])
      if method == "local_sgd" and (step + 1) % INTERVAL == 0:
        params = [mean(params)] * _forms.WORKERS
    return params


def is_number(x):
  return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def mean(trees):
  def one(*leaves):
    if leaves[0].dtype == jax.dtypes.float0 or not is_number(leaves[0]):
      return leaves[0]
    # Half precision is averaged in float32.
    narrow = leaves[0].dtype.itemsize < 4
    kind = np.float32 if narrow else leaves[0].dtype
    wide = [np.asarray(x).astype(kind) for x in leaves]
    return jnp.asarray(np.mean(wide, 0).astype(leaves[0].dtype))

  return jax.tree.map(one, *trees)


def update(plain, params, moments, grads):
  leaves, form = jax.tree.flatten(params)
  numbers = [i for i, x in enumerate(leaves) if is_number(x)]
  own = [leaves[i] for i in numbers]
  found = [jax.tree.leaves(grads)[i] for i in numbers]
  if moments is None:
    moments = plain.init(own)
  updates, moments = plain.update(found, moments, own)
  for i, x in zip(numbers, optax.apply_updates(own, updates), strict=True):
    leaves[i] = x
  return jax.tree.unflatten(form, leaves), moments
