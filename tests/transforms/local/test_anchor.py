"""Arithmetic that rounds alike in every program."""

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import states, transforms
from jdist.transforms.local import _anchor
from tests import _refusals

# Those of users' programs; the tests' own are optimized less.
_OPTIMIZED = {"xla_backend_optimization_level": 3}


def test_a_product_is_rounded_before_it_is_subtracted_from():
  random = np.random.default_rng(0)
  a, p = random.standard_normal((2, 1000)).astype(np.float32)
  a[:3], p[1:5] = 0, (np.inf, np.nan, 0, -0.0)
  k = np.float32(0.7)

  def left(a, p, k):
    return a - _anchor.rounded(k * p)

  compiled = jax.jit(left).lower(a, p, k).compile(compiler_options=_OPTIMIZED)
  np.testing.assert_array_equal(compiled(a, p, k), a - k * p)


def test_updates_of_another_form_are_refused():
  params = {"a": jnp.ones(2)}
  for updates in ({"b": jnp.ones(2)}, {"a": jnp.ones(3)}):
    with _refusals.refused("updates", "a"):
      transforms.apply_updates(params, updates)


class _Around(NamedTuple):
  """A wrapper of a user's own."""

  inner: Any


class _Passing(NamedTuple):
  """A wrapper that declares which of its leaves are shared."""

  inner: Any


states.declare()(_Passing)


def _rounds():
  method = transforms.local_steps(optax.sgd(0.1), 2, axis=None)
  return method.init({"w": jnp.ones(2)})


@pytest.mark.parametrize(
  "wrapped",
  [
    lambda x: (optax.EmptyState(), x),
    lambda x: collections.OrderedDict(a=optax.EmptyState(), b=x),
    lambda x: optax.MaskedState(x),
    lambda x: optax.transforms.PartitionState({"a": (), "b": x}),
    lambda x: optax.InjectStatefulHyperparamsState(jnp.int32(0), {}, {}, x),
    lambda x: optax.MultiStepsState(0, 0, x, {}, ()),
    lambda x: {"a": (), "b": x},
    lambda x: optax.MaskedState({"a": (optax.EmptyState(), x)}),
    _Passing,
  ],
)
def test_rounds_are_found_in_what_passes_their_updates_on(wrapped):
  rounds = _rounds()
  assert _anchor.find_rounds(wrapped(rounds)) is rounds.sync


@pytest.mark.parametrize(
  ("wrapped", "said"),
  [
    (lambda x: (x, optax.EmptyState()), r"EmptyState \(`scale`, .* behind it"),
    (
      lambda x: (x, optax.MaskedState(())),
      r"MaskedState \(`optax.masked` or `freeze`\) stands behind it in a",
    ),
    (
      lambda x: (optax.MaskedState(x), optax.TraceState({})),
      "TraceState stands behind it in a chain",
    ),
    (
      lambda x: collections.OrderedDict(a=x, b=optax.TraceState({})),
      "TraceState stands behind it in a chain",
    ),
    (lambda x: optax.MaskedState((x, optax.TraceState({}))), "TraceState"),
    (_Around, "_Around stands around it"),
    (lambda x: (_Around(x),), "_Around stands around it"),
  ],
)
def test_rounds_whose_updates_may_be_changed_are_refused(wrapped, said):
  with pytest.raises(ValueError, match=f"must change nothing.*but {said}"):
    _anchor.find_rounds(wrapped(_rounds()))


def test_rounds_side_by_side_are_refused():
  with pytest.raises(ValueError, match="side by side there are 2"):
    _anchor.find_rounds((_rounds(), _rounds()))
  assert _anchor.find_rounds((optax.EmptyState(), {"a": ()})) is None


def _masked_rounds():
  rounds = transforms.local_steps(optax.sgd(0.5), 2, axis=None)
  optimizer = optax.masked(rounds, {"w": True, "rest": False})
  return optimizer, {"w": jnp.ones(2), "rest": jnp.zeros(3)}


def test_leaves_outside_of_rounds_are_evaluated_as_they_are():
  optimizer, params = _masked_rounds()
  updates, state = optimizer.update(params, optimizer.init(params), params)
  found = transforms.anchor(
    state, optax.apply_updates(params, updates) | {"rest": jnp.full(5, 7.0)}
  )
  np.testing.assert_array_equal(found["w"], params["w"])
  np.testing.assert_array_equal(found["rest"], jnp.full(5, 7.0))


def test_anchor_of_other_parameters_is_refused_beside_leaves_outside():
  optimizer, params = _masked_rounds()
  with _refusals.refused("params", "leaf w"):
    transforms.anchor(optimizer.init(params), params | {"w": jnp.ones(1)})


@pytest.mark.parametrize("wrap", [lambda x: x, jax.jit], ids=["eager", "jit"])
def test_parameters_of_another_form_are_refused_in_a_step(wrap):
  optimizer = transforms.local_steps(optax.sgd(0.5), 2, axis=None)
  other = {"w": jnp.ones(1)}
  with _refusals.refused("params", "leaf w"):
    wrap(optimizer.update)(other, _rounds(), other)


def test_state_of_another_optimizer_is_refused_without_parameters():
  late = transforms.delay_gradients(optax.sgd(0.5), 2)
  with _refusals.refused("state", "leaf pending.w is missing"):
    late.update({"w": jnp.ones(2)}, late.init({"v": jnp.ones(2)}), None)


def test_pull_to_an_anchor_needs_parameters():
  pull, tree = transforms.proximal(0.5), {"w": jnp.ones(2)}
  with _refusals.refused("proximal", "`params`"):
    pull.update(tree, pull.init(tree), None, anchor=tree)


def test_floats_alone_are_trained_without_parameters():
  optimizer = transforms.only_floats(optax.sgd(0.5))
  updates = {"w": jnp.ones(2), "count": jnp.ones(2, jnp.int32)}
  found, _ = optimizer.update(updates, optimizer.init(updates))
  np.testing.assert_array_equal(found["w"], [-0.5, -0.5])
  np.testing.assert_array_equal(found["count"], [0, 0])
