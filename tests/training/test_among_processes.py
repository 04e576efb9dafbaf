"""What a process does as one of several, which are not there."""

import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

from jdist import collectives, training
from tests.training import _tiny


def test_process_alone_stops_once_it_was_asked():
  before = signal.getsignal(signal.SIGTERM)
  with training.Preemption() as preemption:
    assert not preemption.asks_at(3)
    signal.raise_signal(signal.SIGTERM)
    assert preemption.asks_at(4)
  assert signal.getsignal(signal.SIGTERM) is before


def test_processes_that_watch_each_other_agree_by_messages(monkeypatch):
  asked = []

  def stops_after(step, own):
    asked.append((step, own))
    return step == 5

  monkeypatch.setattr(jax, "process_count", lambda: 2)
  line = types.SimpleNamespace(stops_after=stops_after)
  monkeypatch.setattr(collectives, "lifeline", lambda: line)
  with training.Preemption() as preemption:
    assert not preemption.asks_at(3)
    signal.raise_signal(signal.SIGTERM)
    # This process was asked, and another one is beyond this step.
    assert not preemption.asks_at(4) and preemption.asks_at(5)
  assert asked == [(3, False), (4, True), (5, True)]


def test_processes_that_jax_has_found_agree_by_its_service(monkeypatch):
  """Which handles the signal itself."""
  asked = []

  def reached(step):
    asked.append(step)
    return np.bool_(step == 4)

  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(collectives, "lifeline", lambda: None)
  monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", reached)
  before = signal.getsignal(signal.SIGTERM)
  with training.Preemption() as preemption:
    assert signal.getsignal(signal.SIGTERM) is before
    assert [preemption.asks_at(step) for step in (3, 4)] == [False, True]
  assert signal.getsignal(signal.SIGTERM) is before and asked == [3, 4]


@pytest.mark.parametrize("linked", [True, False])
def test_first_step_waits_for_processes_with_the_same_state(
  linked, monkeypatch
):
  """Once: a later call of the same process continues."""
  agreed = []
  monkeypatch.setattr(
    collectives, "lifeline", lambda: object() if linked else None
  )
  monkeypatch.setattr(collectives, "agree", lambda *given: agreed.append(given))
  team = _tiny.team("none")
  trainer = _tiny.trainer(team, "momentum")
  state = _tiny.init(team, "momentum")
  prints = trainer._step.fingerprints(state)
  trainer.fit(state, _tiny.batches(team), 3)
  limit_s = trainer._timeout_s
  assert agreed == [
    ("the first step", {}, limit_s), ("the first state", prints, limit_s)
  ] * linked  # fmt: skip
  assert prints


@pytest.mark.parametrize("first", [True, False])
def test_first_process_decides_which_checkpoint_is_restored(
  first, tmp_path, monkeypatch
):
  """Others may see the shared disk a moment later, and do not look."""
  team, state = _tiny.team("none"), {"x": jnp.arange(2.0)[None]}
  with training.Checkpoints(tmp_path, team) as checkpoints:
    checkpoints.save(4, state)
  checkpoints = training.Checkpoints(tmp_path, team)
  checkpoints._is_first = first
  told = []

  def broadcast(step):
    told.append(step)
    return np.int32(-1)

  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(
    collectives, "agree", lambda *given: told.append(given[0])
  )
  monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", broadcast)
  assert checkpoints.restore(state) is None
  monkeypatch.undo()
  checkpoints.close()
  nothing = told[1]
  assert told[0] == "the checkpoint" and (nothing == 4) == first
  assert first or nothing == -1


def test_shared_leaf_on_several_hosts_is_replicated_before_it_is_saved(
  tmp_path,
):
  """No host could write it alone."""
  team = collectives.workers(2, substrate="shard_map")
  leaf = team.place(np.arange(6.0, dtype="float32").reshape(2, 3))
  with training.Checkpoints(tmp_path, team) as checkpoints:
    checkpoints._on_several_hosts = True
    found = checkpoints._to_save(leaf, True)
    whole = checkpoints._to_save(leaf, False)
  assert isinstance(found, np.ndarray) and found.tolist() == [0.0, 1.0, 2.0]
  assert whole.shape == (2, 3)


def test_one_process_completes_a_checkpoint(tmp_path, monkeypatch):
  team, state = _tiny.team("none"), {"x": jnp.zeros((1, 2))}
  with training.Checkpoints(tmp_path, team) as checkpoints:
    checkpoints._is_first = False
    checkpoints.save(4, state)
  assert not (tmp_path / "step_00000004.json").exists()
  assert not (tmp_path / "lease.json").exists()
  with training.Checkpoints(tmp_path, team) as checkpoints:
    checkpoints.save(5, state)
  assert (tmp_path / "step_00000005.json").exists()
