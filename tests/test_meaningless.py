"""Values that fit their types, but leave nothing or overflow, are refused."""

import functools
import math
import types

import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist import advice, cluster, data, models
from jdist.cli import _options
from jdist.training import comparison
from tests import _refusals

_LINK = cluster.Link(1e9)


@functools.cache
def workload():
  return comparison.Workload(
    jdist.workers(2, substrate="vmap"),
    data.load("synthetic"),
    data.load("synthetic", "test"),
    lambda seed: models.build("mlp", input_shape=(8, 8, 1), num_classes=10),
    8,
  )


def costs(interval=1, **change):
  found = advice.MethodCosts(interval, (1.0,), (0.0,), 8.0, 1, 0)
  return found._replace(**change)


@_refusals.table(
  ("fraction", lambda: workload().hold_out(1.0), "leave samples"),
  ("fraction", lambda: workload().hold_out(np.float32(1)), "leave samples"),
  ("epochs", lambda: workload().steps(1e308), "in [0, 2.1"),
  ("until_s", lambda: cluster.Trace(until_s=math.nan), "in [0, inf]"),
  ("until_s", lambda: cluster.Trace(until_s=-1.0), "in [0, inf]"),
  ("costs", lambda: advice.Advice({"a": 3}, _LINK), "a dict"),
  ("link", lambda: advice.Advice({"a": costs(1)}, 1e9), "Link"),
  ("interval", lambda: advice.Advice({"a": costs(0)}, _LINK), "in [1, inf]"),
  *(
    (
      name,
      lambda name=name, x=x: advice.Advice({"a": costs(**{name: x})}, _LINK),
      rule,
    )
    for name, x, rule in (
      ("step_s", 1.0, "a list of seconds, got 1.0"),
      ("step_s", (1.0, 0.0), "in (0, inf], got 0"),
      ("extra_s", 1.0, "a list of seconds, got 1.0"),
      ("extra_s", (math.nan,), "a finite number, got nan"),
      ("interval", True, "a number in [1, inf], got True"),
      ("round_bytes", math.inf, "a finite number, got inf"),
      ("hidden_steps", -1, "in [0, inf], got -1"),
    )
  ),
  *(
    (
      "costs",
      lambda x=x: advice.Advice({"a": costs(1)} | x, _LINK),
      f"`step_s` and `extra_s`, got {found}",
    )
    for x, found in (
      ({"a": costs(1, step_s=(1.0, 1.0))}, [1, 2]),
      ({"b": costs(1, step_s=(1.0, 1.0), extra_s=(0.0, 0.0))}, [1, 2]),
      ({"a": costs(1, step_s=(), extra_s=())}, [0]),
    )
  ),
  (
    "name",
    lambda: advice.Advice({"a": costs(1)}, _LINK).seconds("b"),
    "'b'",
  ),
  (
    "slowdowns",
    lambda: advice.Advice({"a": costs(1)}, _LINK, (1.0, math.nan)),
    "a finite number, got nan",
  ),
  ("--steps", lambda: within("steps", 2**31, "[1, inf)"), "at least 1 and bel"),
  ("--epochs", lambda: within("epochs", math.inf, "(0, inf)"), "and finite"),
  ("--pending", lambda: within("pending", 1.1, "[0, 1]"), "in [0, 1]"),
  ("--momentum", lambda: within("momentum", 1.0, "[0, 1)"), "in [0, 1)"),
  ("--seed", lambda: within("seed", 2**32, "[0, 4294967296)"), "2**32 - 1"),
)
def test_values_without_meaning_raise(argument, call, rule):
  _refusals.check(argument, call, rule)


def within(name, value, range_):
  _options._check_within(name, value, range_)


@pytest.mark.parametrize(
  "fraction", [0, 0.1, 0.9995, np.float32(0.5), jnp.array(0.2)]
)
def test_any_fraction_that_leaves_a_sample_is_held_out(fraction):
  held = workload().hold_out(fraction)
  assert len(held.train) + len(held.test) == len(workload().train)
  assert len(held.train) > 0 < len(held.test)


@pytest.mark.parametrize("epochs", [1, 1e-9, 1e6, np.float64(2.5), np.int32(3)])
def test_any_finite_number_of_epochs_is_at_least_a_step(epochs):
  wanted = max(1, round(float(epochs) * workload().steps_per_epoch))
  assert workload().steps(epochs) == wanted


@pytest.mark.parametrize(
  "until_s", [0, 0.0, 5, math.inf, np.float32(3), np.inf, jnp.array(2.0)]
)
def test_traces_end_at_any_time_or_never(until_s):
  trace = cluster.Trace(until_s=until_s)
  trace.add("gpu", "matmul", 1.0, 2.0)
  assert len(trace.spans) == bool(until_s > 1)


@pytest.mark.parametrize("interval", [1, 8, np.int64(4), 2.5])
def test_advice_takes_any_interval_from_one(interval):
  known = types.MappingProxyType({"a": costs(interval)})
  for slowdowns in ((), [2], np.ones(2), jnp.ones(2)):
    found = advice.Advice(known, _LINK, slowdowns)
    assert found.exposed_s("a") >= 0
    # A report may ask for a rate at which nothing was measured.
    assert advice.Advice({}, _LINK, slowdowns).slowdown >= 1


@pytest.mark.parametrize(
  ("value", "range_"),
  [
    (1e-30, "(0, inf)"), (2**31 - 1, "[1, inf)"), (0, "[0, inf)"),
    # Eight billion bytes, and a rate at which a test diverges.
    (8e9, "[0, inf)"), (1e30, "(0, inf)"),
    (1e9, "(0, 1e9]"), (1, "[0, 1]"), (0.999, "[0, 1)"),
    (2**32 - 1, "[0, 4294967296)"), (np.float32(2), "[1, inf)"),
  ],
)  # fmt: skip
def test_ranges_include_their_ends(value, range_):
  within("option", value, range_)
