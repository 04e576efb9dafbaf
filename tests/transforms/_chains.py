"""Chains around those transformations that are no optimizer by themselves."""

import jax.numpy as jnp
import numpy as np
import optax

from jdist import methods, transforms

MOMENTUM = optax.sgd(0.1, momentum=0.9)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def average(rate, *, axis):
  return optax.chain(
    transforms.average_gradients(axis), optax.sgd(rate, momentum=0.9)
  )


def synchronous(rate, *, axis):
  return methods.ssgd(optax.sgd(rate, momentum=0.9), axis=axis)


def stale(rate, steps, *, axis):
  return transforms.delay_gradients(synchronous(rate, axis=axis), steps)


def guarded(rate, *, axis):
  guard = transforms.skip_nonfinite(axis)
  return optax.chain(
    guard, transforms.average_gradients(axis), optax.sgd(rate, momentum=0.9)
  )


def predicting(rate, *, axis):
  inner = optax.sgd(rate, momentum=0.9)
  chain = optax.chain(
    transforms.average_gradients(axis), transforms.predict_weights(inner, 2)
  )
  return transforms.delay_gradients(chain, 2)


def pulled(strength, learning_rate, interval, *, axis):
  pull = transforms.pull_to_anchor(strength, learning_rate)
  inner = optax.chain(pull, optax.sgd(learning_rate))
  return transforms.local_steps(inner, interval, axis=axis)


def proximal(strength, interval, *, axis):
  inner = optax.chain(transforms.proximal(strength), optax.sgd(0.1))
  return transforms.local_steps(inner, interval, axis=axis)


def late(
  inner, interval, carry, rule=None, compression=None, steps=None,
  after_step=None, stream=None, *, axis,
):  # fmt: skip
  """Local steps whose mean is late, of a part that may be injected."""
  overlap = transforms.Delayed(
    steps=steps, carry=carry, after_step=after_step or 0, stream=stream
  )
  return transforms.local_steps(
    inner,
    interval,
    axis=axis,
    rule=rule,
    overlap=overlap,
    compression=compression,
  )


def chosen(inner, interval, carry, steps, stream, sent_in, *, axis):
  """Local steps for which the host chooses to send in so many steps."""
  local = late(inner, interval, carry, axis=axis, steps=steps, stream=stream)
  control = transforms.Control(stream_steps=sent_in)

  def update(updates, state, params=None, **extra_args):
    given = {"control": control} | extra_args
    return local.update(updates, state, params, **given)

  return optax.GradientTransformationExtraArgs(local.init, update)


def clipped(threshold, deviations, rate, *, axis):
  return optax.chain(
    transforms.clip_deviations(deviations),
    transforms.clip_local(threshold, axis),
    transforms.average_gradients(axis),
    optax.sgd(rate),
  )


def compressed(rate, compression, *, axis):
  average = transforms.average_gradients(axis, compression)
  return optax.chain(average, optax.sgd(rate, momentum=0.9))


class Cut:
  """Leaf "a" is the front, the rest is made from it."""

  def split(self, tree):
    return {"a": tree["a"]}, {"b": tree["b"]}

  def join(self, front, rest):
    return front | rest


def predict(theta, front):
  return {"b": {"c": theta * jnp.sin(front["a"].reshape(2, 2))}}


def predicted(rate, interval, *, axis):
  inner = optax.sgd(rate, momentum=0.9)
  return methods.mp2(
    inner, Cut(), predict, np.float32(0.5), interval, axis=axis
  )


def refreshed(carry, rest_rate, *, axis):
  """A front whose mean is late, and a rest that learns too."""
  front = transforms.local_steps(
    MOMENTUM,
    3,
    axis=axis,
    overlap=transforms.Delayed(carry=carry),
    rule=NESTEROV,
  )
  # The residual is float32 whatever the dtype of an injected rate.
  rate = jnp.asarray(rest_rate).astype(jnp.float32)
  rest = transforms.local_steps(optax.sgd(rate), 3, axis=axis)
  return transforms.predict_rest(
    front, Cut(), predict, np.float32(0.5), axis=axis, rest=rest
  )
