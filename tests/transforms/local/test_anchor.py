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
