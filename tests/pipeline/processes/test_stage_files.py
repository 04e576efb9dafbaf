"""Stages saved and restored: killed at any time and resumed, the same bits."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import channel, pipeline
from tests.pipeline.processes._threads import in_threads
from tests.pipeline.runtime import _small_models as small
from tests.pipeline.runtime import _training

_MICRO = _training.MICRO
_TABLE = pipeline.ours(2, 2, window=2, num_iterations=2)


def _batches(dtype=np.float32):
  found = small.batches(6, 1, _MICRO * 2, small.UNLIKE, dtype)
  return _training.of_first(found)


def _optimizer():
  # Its state has a count besides arrays of the parameters' shapes.
  return optax.sgd(optax.constant_schedule(0.1), momentum=0.9)


def _process(peers, dtype=jnp.float32, cuts=2, table=_TABLE):
  layers = small.layers(small.UNLIKE, statistics=True, dtype=dtype)
  batch = _training.microbatch(small.UNLIKE, dtype=dtype)
  return _training.process(
    layers, table, cuts=cuts, microbatch=batch, peers=peers
  )


def _bits(state):
  leaves = jax.tree.leaves((state.params, state.opt_state, state.model_state))
  return [np.asarray(x).tobytes() for x in leaves]


def _train(folder, dtype=jnp.float32):
  """Saves after each table of two steps; returns each process's end."""

  def work(peers):
    process = _process(peers, dtype)
    state = process.init_state(_optimizer(), seed=3)
    batches = _batches(dtype)
    for i in range(0, 6, 2):
      state, _ = process.run(state, batches[i : i + 2])
      process.save(folder, state)
    return _bits(state)

  return in_threads(2, work)


def _resume(folder, dtype=jnp.float32):
  """Returns the step that was found, and each process's end."""

  def work(peers):
    process = _process(peers, dtype)
    state = process.restore(folder, _optimizer())
    step = state.step
    batches = _batches(dtype)
    for i in range(step, 6, 2):
      state, _ = process.run(state, batches[i : i + 2])
    return step, _bits(state)

  (step, first), (other, second) = in_threads(2, work)
  assert step == other
  return step, [first, second]


def test_resumed_run_has_the_same_bits(tmp_path):
  wanted = _train(tmp_path)
  assert _resume(tmp_path) == (6, wanted)
  # A process was killed before it had saved the last step.
  shutil.rmtree(tmp_path / "step_00000006" / "stage_001")
  assert _resume(tmp_path) == (4, wanted)
  # A file of the step before is damaged as well.
  path = next((tmp_path / "step_00000004" / "stage_000").glob("*.npy"))
  path.write_bytes(path.read_bytes()[:-1])
  with pytest.warns(UserWarning, match="Stage 0 of step 4 is damaged"):
    assert _resume(tmp_path) == (2, wanted)
  # The remaining files are useless, because each process has another step.
  shutil.rmtree(tmp_path / "step_00000002" / "stage_000")
  with (
    pytest.warns(UserWarning, match="is damaged"),
    pytest.raises(ValueError, match=r"all processes have whole, got \[\[6\]"),
  ):
    _resume(tmp_path)


def _alone(dtype=jnp.float32, cuts=1):
  table = pipeline.make_table("interleaved", 1, 2, num_chunks=2)
  if cuts == 1:
    table = pipeline.make_table("1f1b", 1, 2)
  return _process(None, dtype, cuts, table)


def test_old_steps_are_removed_and_narrow_dtypes_kept(tmp_path):
  process = _alone(jnp.bfloat16)
  assert process.restore(tmp_path / "none", _optimizer()) is None
  # The key is the run's, not that of `restore`'s own first state.
  state = process.init_state(_optimizer(), seed=3)
  for batch in _batches(jnp.bfloat16)[:3]:
    state, _ = process.run(state, [batch])
    process.save(tmp_path, state, keep=2)
  assert _saved(tmp_path) == ["step_00000002", "step_00000003"]
  found = process.restore(tmp_path, _optimizer())
  assert found.step == 3 and _bits(found) == _bits(state)
  leaves = jax.tree.leaves(found.params)
  assert {x.dtype for x in leaves} == {jnp.dtype(jnp.bfloat16)}
  np.testing.assert_array_equal(found.key, state.key)


def test_different_cuts_model_or_optimizer_raise(tmp_path):
  process = _alone()
  process.save(tmp_path, process.init_state(_optimizer()))
  with pytest.raises(ValueError, match=r"(?s)the stages .*Cut the layers as"):
    _alone(cuts=2).restore(tmp_path, _optimizer())
  with pytest.raises(ValueError, match="another model or optimizer"):
    process.restore(tmp_path, optax.sgd(0.1))
  with pytest.raises(ValueError, match="another model or optimizer"):
    _alone(jnp.bfloat16).restore(tmp_path, _optimizer())


def _saved(folder):
  return sorted(x.name for x in folder.glob("step_*"))


def test_later_steps_of_another_run_raise(tmp_path):
  process = _alone()
  state = process.init_state(_optimizer())
  for batch in _batches()[:3]:
    state, _ = process.run(state, [batch])
    process.save(tmp_path, state, keep=2)
  anew = _alone()
  state = anew.init_state(_optimizer())
  state, _ = anew.run(state, _batches()[:1])
  before = _saved(tmp_path)
  with pytest.raises(ValueError, match="no step after 1, got 3 of another run"):
    anew.save(tmp_path, state)
  assert _saved(tmp_path) == before


def test_directory_of_another_run_that_is_alive_is_refused(
  tmp_path, monkeypatch
):
  process = _alone()
  state = process.init_state(_optimizer())
  process.save(tmp_path, state)
  monkeypatch.setattr(channel, "run_id", lambda: "another")
  for call in (
    lambda: _alone().restore(tmp_path, _optimizer()),
    lambda: _alone().save(tmp_path, state),
  ):
    with pytest.raises(ValueError, match="is in use by run"):
      call()
  # Should another run have taken the lease, this one saves nothing more.
  entry = json.loads((tmp_path / "lease.json").read_text())
  (tmp_path / "lease.json").write_text(json.dumps(entry | {"run": "other"}))
  with pytest.raises(ValueError, match="is in use by run other"):
    process.save(tmp_path, state)


def test_saving_after_incomplete_later_steps_keeps_the_new_step(
  tmp_path,
):
  process = _alone(cuts=2)
  state = process.init_state(_optimizer())
  batches = _batches()
  for batch in batches[:3]:
    state, _ = process.run(state, [batch])
    process.save(tmp_path, state, keep=2)
  # Step 3 was interrupted: one of its stages is missing.
  shutil.rmtree(tmp_path / "step_00000003" / "stage_001")
  resumed = _alone(cuts=2)
  state = resumed.restore(tmp_path, _optimizer())
  assert state.step == 2
  # The next save is of an earlier step, which is the only one to be kept.
  resumed.save(tmp_path, state, keep=1)
  assert _saved(tmp_path) == ["step_00000002"]
  assert resumed.restore(tmp_path, _optimizer()).step == 2


def test_process_without_files_does_not_begin_anew(tmp_path):
  """Else it would begin with the others at step 0, over their files."""

  def work(peers):
    process = _process(peers)
    process.save(tmp_path, process.init_state(_optimizer()))
    if peers.device:
      shutil.rmtree(tmp_path / "step_00000000" / "stage_001")
    return process.restore(tmp_path, _optimizer())

  with pytest.raises(ValueError, match=r"have whole, got \[\[0\], \[\]\]"):
    in_threads(2, work)


def test_renamed_step_is_no_later_one(tmp_path):
  process = _alone()
  state = process.init_state(_optimizer())
  for step in (1, 2):
    process.save(tmp_path, state._replace(step=step))
  (tmp_path / "step_00000002").rename(tmp_path / "step_00000003")
  with pytest.warns(UserWarning, match="stage_000 is of step 2"):
    assert process.restore(tmp_path, _optimizer()).step == 1


def test_restored_run_replaces_a_later_step_that_is_damaged(tmp_path):
  process = _alone()
  state = process.init_state(_optimizer())
  for step in (1, 2):
    process.save(tmp_path, state._replace(step=step))
  path = next((tmp_path / "step_00000002" / "stage_000").glob("*.npy"))
  path.write_bytes(path.read_bytes()[:-1])
  resumed = _alone()
  with pytest.warns(UserWarning, match="Stage 0 of step 2 is damaged"):
    state = resumed.restore(tmp_path, _optimizer())
  resumed.save(tmp_path, state)
  assert _saved(tmp_path) == ["step_00000001"]
