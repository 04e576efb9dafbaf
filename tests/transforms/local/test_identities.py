"""Local steps where they equal something else: Optax, averaging, an alias."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import methods, transforms
from jdist.transforms import intervals
from tests.transforms._rounds import plain_apply, random_targets, train

NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
RATE = 0.1
ADAMS = {
  "adam": optax.adam(1e-2),
  "adamw": optax.adamw(1e-2),
  "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
}
LINEAR = {
  "sgd": optax.sgd(RATE),
  "momentum": optax.sgd(RATE, momentum=0.9),
  "nesterov": optax.sgd(RATE, momentum=0.9, nesterov=True),
}


def apart(optimizer, targets, axis, apply):
  """One worker, with the update and its application as two programs.

  In one program the compiler may contract `w + rate * g` to one rounding
  where nothing stands between, as in plain Optax; the transformations are
  compared and not that.
  """
  mapped = (lambda f: f) if axis is None else (
    lambda f: jax.vmap(f, axis_name=axis)
  )  # fmt: skip
  update, apply = jax.jit(mapped(optimizer.update)), jax.jit(mapped(apply))
  w = jnp.zeros(targets.shape[1:] if axis else targets.shape[2:])
  state = mapped(optimizer.init)(w)
  for x in targets if axis else targets[:, 0]:
    updates, state = update(w - x, state, w)
    w = apply(w, updates, state)
  return np.asarray(w).ravel()


# Not "clipped": a norm may be summed in another order in another program.
@pytest.mark.smoke
@pytest.mark.parametrize("name", [*LINEAR, "adam", "adamw"])
def test_one_worker_is_plain_optax_to_the_bit(name):
  optimizer = (LINEAR | ADAMS)[name]
  targets = random_targets(10, 1, 33)
  # Optax' Adam mixes its int32 counter with floats.
  with jax.numpy_dtype_promotion("standard"):
    wanted = apart(optimizer, targets, None, plain_apply)
    for axis in (None, "worker"):
      local = methods.local_sgd(optimizer, 3, axis=axis)
      for apply in (plain_apply, jdist.apply_updates):
        found = apart(local, targets, axis, apply)
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.smoke
@pytest.mark.parametrize("name", [*LINEAR, *ADAMS])
def test_interval_1_is_synchronous_where_linear(name):
  optimizer = (LINEAR | ADAMS)[name]
  targets = random_targets(20, 4, 33)
  with jax.numpy_dtype_promotion("standard"):
    one = methods.local_sgd(optimizer, 1, axis="worker")
    found, _ = train(one, targets)
    wanted, _ = train(methods.ssgd(optimizer, axis="worker"), targets)
  error = np.abs(found - wanted).max() / np.abs(wanted).max()
  # Adam and clipping are another algorithm on each worker's own gradient.
  assert error < 1e-5 if name in LINEAR else error > 1e-2


def test_outer_sgd_of_1_is_parameter_averaging():
  targets = random_targets(12, 4, 33)
  inner = LINEAR["momentum"]
  averaged, _ = train(methods.local_sgd(inner, 3, axis="worker"), targets)
  outer, _ = train(
    transforms.local_steps(inner, 3, axis="worker", rule=optax.sgd(1.0)),
    targets,
  )
  np.testing.assert_allclose(outer, averaged, rtol=1e-6, atol=1e-6)


def test_aliases_equal_their_definitions():
  targets = random_targets(18)
  inner = LINEAR["momentum"]

  def runs(optimizer):
    return train(optimizer, targets)[0]

  for alias, chain in (
    (
      methods.diloco(inner, 3, axis="worker"),
      transforms.local_steps(inner, 3, axis="worker", rule=NESTEROV),
    ),
    (
      methods.post_local_sgd(inner, 3, 6, axis="worker"),
      transforms.local_steps(inner, intervals.post_local(6, 3), axis="worker"),
    ),
    (
      methods.msdpu(
        inner,
        intervals.fixed(3),
        RATE,
        axis="worker",
        correction=0.0,
        overlap=transforms.Delayed(carry=None),
      ),
      transforms.local_steps(
        inner, 3, axis="worker", overlap=transforms.Delayed(carry=None)
      ),
    ),
  ):
    np.testing.assert_array_equal(runs(alias), runs(chain))
