"""Overlap, compression and a host that ends rounds, for every method with them.

A message that is sent in parts, with every bit, or in programs of which a host
chooses one, takes the same steps as one that is not.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import methods, reducers, transforms
from tests import _thinned
from tests.transforms import _reducers
from tests.transforms._rounds import random_targets, train

INTERVAL = 3
MOMENTUM = optax.sgd(0.1, momentum=0.9)
PARTS = transforms.Stream(max_bytes=8)
TARGETS = random_targets(12, 4, 5)


def msdpu(interval, **options):
  return methods.msdpu(
    MOMENTUM, transforms.intervals.fixed(interval), 0.1, **options
  )


# Each takes `overlap` and `compression`.
METHODS = {
  "local_sgd": functools.partial(methods.local_sgd, MOMENTUM),
  "fed_prox": functools.partial(methods.fed_prox, MOMENTUM, strength=0.5),
  "easgd": functools.partial(methods.easgd, MOMENTUM),
  "scaffold": functools.partial(
    methods.scaffold, optax.sgd(0.1), learning_rate=0.1
  ),
  "slow_mo": functools.partial(methods.slow_mo, MOMENTUM, learning_rate=0.1),
  "diloco": functools.partial(methods.diloco, MOMENTUM),
  "msdpu": msdpu,
}
# The mean is late by themselves; each takes `stream` and `compression`.
LATE = {
  "cocod": functools.partial(methods.cocod, MOMENTUM),
  "overlap_local_sgd": functools.partial(
    methods.overlap_local_sgd, MOMENTUM, momentum=0.5
  ),
}


def build(name, stream=None, late=True, **options):
  if name in LATE:
    return LATE[name](INTERVAL, axis="worker", stream=stream, **options)
  if late:
    options["overlap"] = transforms.Delayed(stream=stream)
  return METHODS[name](INTERVAL, axis="worker", **options)


# Programs of seconds each; every rule in parts is in the rules' own matrix.
@pytest.mark.parametrize(
  "name",
  _thinned.some(
    [*METHODS, *LATE], ["local_sgd", "scaffold", "msdpu", "overlap_local_sgd"]
  ),
)
def test_streamed_method_equals_whole_to_the_bit(name):
  wanted, whole = train(build(name), TARGETS)
  found, parts = train(build(name, PARTS), TARGETS)
  np.testing.assert_array_equal(found, wanted)
  np.testing.assert_array_equal(parts.anchor, whole.anchor)
  assert transforms.streams(parts) and not transforms.streams(whole)


# Each method late and in parts, and each kind of rule at once.
AT_ONCE = ("easgd", "scaffold", "slow_mo")


@pytest.mark.parametrize(
  ("name", "late"),
  _thinned.some(
    [*((n, True) for n in (*METHODS, *LATE)), *((n, False) for n in AT_ONCE)],
    [("slow_mo", True), ("diloco", True), ("cocod", True), ("easgd", False)],
  ),
)
def test_compression_of_every_bit_changes_nothing(name, late):
  compression = reducers.Compression(
    _reducers.Plain(), reducers.ErrorFeedback()
  )
  stream = PARTS if late else None
  wanted, _ = train(build(name, late=late), TARGETS)
  found, states = train(
    build(name, stream, late, compression=compression), TARGETS
  )
  np.testing.assert_allclose(found, wanted, 1e-5, 1e-6)
  assert states.sync.compression.step[-1].tolist() == [4 - late] * 4


def run_by_host(optimizer):
  """Parameters and anchors after every step, of two programs in turn."""

  def step(w, state, x, *, ends):
    control = transforms.Control(round_ends=ends)
    updates, state = optimizer.update(w - x, state, w, control=control)
    return transforms.apply_updates(w, updates, state), state

  programs = [
    jax.jit(jax.vmap(functools.partial(step, ends=ends), axis_name="worker"))
    for ends in (False, True)
  ]
  w, found = jnp.zeros(TARGETS.shape[1:]), []
  state = jax.vmap(optimizer.init, axis_name="worker")(w)
  for t, x in enumerate(TARGETS):
    ahead = transforms.rounds_ahead(jax.tree.map(lambda s: s[0], state))
    offset = int(ahead[0, 1])
    assert offset == t % INTERVAL
    w, state = programs[offset == INTERVAL - 1](w, state, x)
    found.append((w, state.anchor))
  return zip(*found, strict=True)


@pytest.mark.parametrize(
  ("name", "late"),
  _thinned.some(
    [
      *((n, True) for n in (*AT_ONCE, "diloco", "msdpu", *LATE)),
      *((n, False) for n in AT_ONCE),
    ],
    [
      ("scaffold", True),
      ("msdpu", True),
      ("overlap_local_sgd", True),
      ("easgd", False),
    ],
  ),
)
def test_host_ends_rounds_where_the_device_would(name, late):
  optimizer = build(name, PARTS if late else None, late)
  wanted, states = train(optimizer, TARGETS)
  found, anchors = run_by_host(optimizer)
  # Other programs: the last place of a float may differ.
  np.testing.assert_allclose(np.stack(found), wanted, 1e-5, 1e-6)
  np.testing.assert_allclose(np.stack(anchors), states.anchor, 1e-5, 1e-6)
