"""Fragments: how leaves are dealt, and what their means wait for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import collectives, methods, transforms
from jdist.transforms.local import _fragments
from tests import _refusals
from tests.transforms import _waiting

SGD = optax.sgd(0.1)
PARAMS = {"a": jnp.zeros(4), "b": jnp.zeros(2), "c": jnp.zeros(2)}


@pytest.mark.parametrize(
  ("sizes", "number", "wanted"),
  [
    ((4, 2, 2), 2, (0, 1, 1)),
    ((4, 2, 2), 3, (0, 1, 2)),
    ((1, 1, 100), 3, (0, 1, 2)),
    ((100, 1, 1), 3, (0, 1, 2)),
    ((1, 1, 1, 1, 4, 4), 3, (0, 0, 0, 0, 1, 2)),
    ((5, 5, 5), 1, (0, 0, 0)),
  ],
)
def test_leaves_are_split_in_runs_of_equal_size(sizes, number, wanted):
  tree = [jnp.zeros(size) for size in sizes]
  assert _fragments.fragments_of(tree, number) == wanted


def test_function_assigns_leaves_by_path():
  tree = {"block": {"kernel": jnp.zeros(2), "bias": jnp.zeros(1)}}
  of = {"block/kernel": 0, "block/bias": 1}
  assert _fragments.fragments_of(tree, of.get) == (1, 0)


def test_python_floats_are_split_too():
  optimizer = transforms.fragment_steps(SGD, 2, 2, axis=None)
  state = optimizer.init({"a": 0.0, "b": 1.0})
  assert [x.item() for x in state.anchor.values()] == [0.0, 1.0]


@pytest.mark.parametrize("fragments", [1, lambda path: 0])
@pytest.mark.parametrize("params", [{}, {"steps": jnp.array(3)}])
def test_tree_without_floats_is_refused(params, fragments):
  optimizer = transforms.fragment_steps(SGD, 2, fragments, axis=None)
  with _refusals.refused("fragments", "of floats"):
    optimizer.init(params)


@pytest.mark.parametrize("steps", [None, 2])
def test_fragment_arrives_before_it_is_sent_again(steps):
  late = transforms.Delayed(steps=steps)
  with _refusals.refused("steps", "below `interval`, 2"):
    transforms.fragment_steps(SGD, 2, 2, axis=None, overlap=late)


def test_fragments_with_a_gap_are_refused():
  optimizer = transforms.fragment_steps(
    SGD, 4, lambda path: 2 * int(path == "b"), axis=None
  )
  with pytest.raises(ValueError, match=r"none left out, got \[0, 2\]"):
    optimizer.init(PARAMS)


@pytest.mark.parametrize("label", [None, 1.0, "a"])
def test_a_fragment_that_is_no_int_is_refused(label):
  optimizer = transforms.fragment_steps(SGD, 4, lambda path: label, axis=None)
  with _refusals.refused("fragments('a')", f"an int >= 0, got {label!r}"):
    optimizer.init(PARAMS)


@pytest.mark.parametrize("label", [np.int64(0), jnp.array(0), False])
def test_integer_like_labels_are_accepted(label):
  assert _fragments.fragments_of(PARAMS, lambda path: label) == (0, 0, 0)


def test_outer_schedule_counts_rounds_of_fragment():
  rates = (0.5, 0.25, 1.0)
  optimizer = methods.streaming_diloco(
    optax.sgd(1.0), 2, 2, lambda count: jnp.array(rates)[count], 0.0,
    axis=None, delay_steps=0, mix=0.0,
  )  # fmt: skip
  w = {"a": jnp.array(0.0), "b": jnp.array(0.0)}
  state = optimizer.init(w)
  anchors = []
  for _ in range(6):
    updates, state = optimizer.update(jax.tree.map(jnp.ones_like, w), state, w)
    w = optax.apply_updates(w, updates)
    anchors.append((state.anchor["a"].item(), state.anchor["b"].item()))
  # Progress of one step, then of two: 0.5 * 1, 0.25 * 2 and 1 * 2 for "a".
  assert anchors == [
    (-0.5, 0.0), (-0.5, -1.0), (-1.0, -1.0),
    (-1.0, -1.5), (-3.0, -1.5), (-3.0, -3.5),
  ]  # fmt: skip


def test_each_fragment_has_an_outer_state_of_its_own():
  optimizer = methods.streaming_diloco(SGD, 4, 2, axis=None)
  parts = optimizer.init(PARAMS).fragments
  traces = [part.memory[0].trace for part in parts]
  assert [len(jax.tree.leaves(trace)) for trace in traces] == [1, 2]


def test_mix_of_1_trains_alone():
  optimizer = methods.streaming_diloco(SGD, 2, 1, axis=None, mix=1.0)
  w, state = jnp.array([1.0, 2.0]), optimizer.init(jnp.array([1.0, 2.0]))
  alone, alone_state = w, SGD.init(w)
  for _ in range(5):
    updates, state = optimizer.update(w - 3.0, state, w)
    w = optax.apply_updates(w, updates)
    updates, alone_state = SGD.update(alone - 3.0, alone_state)
    alone = optax.apply_updates(alone, updates)
  np.testing.assert_array_equal(w, alone)
  assert state.clock.round == 2


def test_one_fragment_has_the_rounds_of_local_steps():
  rule = transforms.ControlVariates(0.1)
  team = collectives.workers(2, substrate="vmap")
  start, target = jnp.array([1.0, 2.0]), jnp.array([[3.0, 0.0], [4.0, 1.0]])

  def run(optimizer):
    w = team.replicate(start)
    state = team.jit(optimizer.init)(w)

    @team.jit
    def step(w, state, target):
      updates, state = optimizer.update(w * w - target, state, w)
      return optax.apply_updates(w, updates), state

    for _ in range(7):
      w, state = step(w, state, target)
    return np.asarray(w)

  whole = transforms.local_steps(SGD, 3, axis=team.axis, rule=rule)
  parts = transforms.fragment_steps(SGD, 3, 1, axis=team.axis, rule=rule)
  np.testing.assert_allclose(run(parts), run(whole), rtol=1e-6)


def test_counted_bytes_are_those_of_whole_rounds():
  # Fragments of 4 and 4 elements arrive 1 step after steps 2, 4, 6, 8, ...
  optimizer = methods.streaming_diloco(SGD, 4, 2, axis="worker")
  state = optimizer.init(PARAMS)
  traffic = collectives.traffic(
    lambda w, state: optimizer.update(w, state, w),
    PARAMS,
    state,
    axis="worker",
    num_workers=2,
  )
  assert (traffic.bytes_per_step, traffic.bytes_per_round) == (0, 8 * 4)
  alone = methods.streaming_diloco(SGD, 4, 2, axis=None)
  missing = []
  for step in range(1, 15):
    _, state = alone.update(PARAMS, state, PARAMS)
    sent = 16 * sum(step >= s + 1 for s in (2, 4, 6, 8, 10, 12))
    missing.append(sent - traffic.sent_bytes(step, int(state.clock.round)))
  # From the arrival of a round's first fragment until that of its last.
  assert missing == [0, 0, 16, 16, 0, 0, 16, 16, 0, 0, 16, 16, 0, 0]


MEANS = {
  "streaming_diloco": (
    lambda: methods.streaming_diloco(SGD, 4, 2, axis="worker"),
    False,
  ),
  "fragments at once": (
    lambda: transforms.fragment_steps(SGD, 4, 2, axis="worker"),
    True,
  ),
}


@pytest.mark.parametrize("name", MEANS)
def test_late_means_wait_for_nothing_of_the_step(name):
  build, wanted = MEANS[name]
  optimizer = build()
  state = optimizer.init(PARAMS)
  assert _waiting.waits(optimizer.update, PARAMS, state, PARAMS) == wanted


def test_drain_counts_a_round_that_was_begun_once():
  optimizer = transforms.fragment_steps(SGD, 4, 2, axis=None)
  params, state = transforms.drain(optimizer, optimizer.init(PARAMS), PARAMS)
  assert transforms.rounds(state, 0) == 0
  gradient = jax.tree.map(jnp.ones_like, PARAMS)
  updates, state = optimizer.update(gradient, state, params)
  params = transforms.apply_updates(params, updates, state)
  for _ in range(2):
    params, state = transforms.drain(optimizer, state, params)
    assert transforms.rounds(state, 1) == 1


def test_fragments_keep_their_turns_after_a_drain():
  optimizer = transforms.fragment_steps(optax.sgd(1.0), 4, 2, axis=None)
  params = {"a": jnp.array(0.0), "b": jnp.array(0.0)}
  state, ends = optimizer.init(params), []
  gradient = jax.tree.map(jnp.ones_like, params)
  for step in range(1, 11):
    before = state.anchor
    updates, state = optimizer.update(gradient, state, params)
    params = transforms.apply_updates(params, updates, state)
    ends += [(k, step) for k in "ab" if state.anchor[k] != before[k]]
    if step == 3:
      params, state = transforms.drain(optimizer, state, params)
      assert state.anchor == {"a": -3.0, "b": -3.0}
  assert ends == [("a", 2), ("b", 4), ("a", 6), ("b", 8), ("a", 10)]
