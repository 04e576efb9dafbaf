"""Updates of a device's stages, with numbers for trees."""

import types

import jax
import jax.numpy as jnp
import optax
import pytest

from jdist.pipeline.processes import _peers, _stage_updates


class _Wire:
  """Peers that send whatever is asked for."""

  def __init__(self, answers):
    self.answers, self.sent = answers, []

  def send(self, device, tag, value):
    self.sent.append((device, tag, value))

  def receive(self, device, tag, like):
    return self.answers[device, tag](like)


def _updates(device, wire, params):
  """Two devices have the stages 0 and 2, and 1 and 3."""
  made = object.__new__(_stage_updates.StageUpdates)
  made._part = types.SimpleNamespace(
    device=device, peers=wire, like=lambda params: f"like {params}",
    table=types.SimpleNamespace(num_stages=4, device_of=(0, 1, 0, 1)),
    model=types.SimpleNamespace(
      stages=[types.SimpleNamespace(params=f"p{s}") for s in range(4)]
    ),
  )  # fmt: skip
  made._programs = types.SimpleNamespace(
    clipped_mean=lambda total, params, scale: total * scale,
    update_all=lambda grads, state, params: (
      [p - g for g, p in zip(grads, params, strict=True)], state + len(grads)
    ),
  )  # fmt: skip
  made.params, made.opt_state, made._step = params, {0: 10}, 20
  return made


def _tag(stage, way):
  return _peers.Tag(_peers.Kind.UPDATE, stage, way, 21)


def test_device_sends_the_gradients_of_all_its_stages():
  wire = _Wire({
    (0, _tag(s, 1)): lambda like, s=s: ("new", s, like) for s in (1, 3)
  })  # fmt: skip
  made = _updates(1, wire, {1: 100.0, 3: 300.0})
  made._update_whole({1: 1.0, 3: 3.0}, 2.0, 1)
  assert wire.sent == [
    (0, _tag(1, 0), (2.0, 100.0)), (0, _tag(3, 0), (6.0, 300.0))
  ]  # fmt: skip
  assert made.params == {1: ("new", 1, 100.0), 3: ("new", 3, 300.0)}


def test_first_device_updates_all_stages_and_returns_the_others():
  asked = []

  def answer(like, s):
    asked.append(like)
    return 2.0 * s, 100.0 * s

  wire = _Wire({
    (1, _tag(s, 0)): lambda like, s=s: answer(like, s) for s in (1, 3)
  })  # fmt: skip
  made = _updates(0, wire, {0: 10.0, 2: 200.0})
  made._update_whole({0: 0.5, 2: 2.0}, 2.0, 1)
  assert asked == [("like p1",) * 2, ("like p3",) * 2]
  assert made.params == {0: 10.0 - 1.0, 2: 200.0 - 4.0}
  assert made.opt_state == {0: 14}
  assert wire.sent == [
    (1, _tag(1, 1), 100.0 - 2.0), (1, _tag(3, 1), 300.0 - 6.0)
  ]  # fmt: skip


@pytest.mark.parametrize(
  ("clip_norm", "tied", "whole", "ready"),
  [
    (None, {}, False, [[2], [0], [0], [2]]),
    # A barrier waits until all of the device's stages are done.
    (1.0, {}, False, [[], [0, 2], [], [0, 2]]),
    (None, {"w": (0, 3)}, False, [[], [0, 2], [], [0, 2]]),
    (None, {}, True, [[], [0, 2], [], [0, 2]]),
  ],
)
def test_last_update_of_a_device_makes_all_behind_a_barrier(
  clip_norm, tied, whole, ready
):
  made = object.__new__(_stage_updates.StageUpdates)
  made._part = types.SimpleNamespace(
    model=types.SimpleNamespace(clip_norm=clip_norm), tied=tied, own=(0, 2)
  )
  made._programs, made._waiting = types.SimpleNamespace(whole=whole), {}
  updates = [(2, 5), (0, 5), (0, 6), (2, 6)]
  assert [made.ready(*update) for update in updates] == ready
  assert not made._waiting


def test_tied_gradients_are_added_in_the_order_of_their_stages():
  made, asked = _updates(0, None, {}), []

  def collect(kind, own, step, stages, number):
    asked.append((kind, own, step, stages, number))
    others = {s: 10.0**s for s in stages if s not in own}
    return others | own

  # The second pair has no stage here.
  made._part.tied = {"['w']": (2, 1, 0), "['x']": (1, 3), "['v']": (0, 3)}
  made._part.collect = collect
  totals = {
    0: {"v": 1.0, "w": 2.0, "y": 3.0}, 2: {"w": 4.0, "z": 5.0},
  }  # fmt: skip
  found = made._tied(totals, 3)
  assert asked == [
    (_peers.Kind.TIED, {2: 4.0, 0: 2.0}, 23, (2, 1, 0), 0),
    (_peers.Kind.TIED, {0: 1.0}, 23, (0, 3), 2),
  ]
  found = jax.tree.map(float, found)
  assert found == {
    0: {"v": 1001.0, "w": 16.0, "y": 3.0}, 2: {"w": 16.0, "z": 5.0},
  }  # fmt: skip


def test_version_that_passes_may_still_read_is_kept():
  """The gradients and the optimizer's state give their memory away."""
  stage = types.SimpleNamespace(params={"w": jnp.ones(4)}, state={})
  program = _stage_updates.UpdateProgram(
    optax.sgd(0.5, momentum=0.5), [stage], 2
  )
  params, total = {"w": jnp.ones(4)}, {"w": jnp.full(4, 4.0)}
  state = program.init(params)
  new, _, _ = program.update(total, state, params, {}, jnp.float32(1.0))
  assert new["w"].tolist() == [0.0] * 4 and params["w"].tolist() == [1.0] * 4
  assert total["w"].is_deleted()
  assert all(x.is_deleted() for x in jax.tree.leaves(state))
