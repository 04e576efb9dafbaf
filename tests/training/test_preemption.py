"""SIGTERM saves between two steps; batches may end, the state stays."""

import os
import signal
import threading

import chex
import jax
import pytest

from jdist import training
from tests import _processes, _refusals
from tests.training import _tiny


def _fit(method, directory, steps, batches=None, **fit):
  team = _tiny.team("vmap")
  batches = batches or _tiny.batches(team)
  with training.Checkpoints(directory, team) as checkpoints:
    return _tiny.trainer(team, method).fit(
      _tiny.init(team, method), batches, steps, checkpoints=checkpoints, **fit
    )


def _ending(step, then):
  """Batches that do something before they give that of a step."""

  def iterate(start):
    for number, batch in enumerate(_tiny.batches(_tiny.team("vmap"))(start)):
      if start + number == step:
        then()
      yield batch

  return iterate


def test_run_resumes_to_the_same_bits_after_sigterm(tmp_path):
  never, _ = _fit("msdpu", tmp_path / "never", 12)
  before = signal.getsignal(signal.SIGTERM)
  batches = _ending(5, lambda: os.kill(os.getpid(), signal.SIGTERM))
  with pytest.raises(training.PreemptedError) as stop:
    _fit("msdpu", tmp_path / "told", 12, batches, stop_on_sigterm=True)
  # Step 5 runs while batch 5 is made: after it, not at the next checkpoint.
  assert (stop.value.code, stop.value.step, stop.value.saved) == (143, 5, True)
  assert signal.getsignal(signal.SIGTERM) is before
  resumed = []
  found, _ = _fit("msdpu", tmp_path / "told", 12, on_resume=resumed.append)
  assert [x.step for x in resumed] == [5]
  assert _tiny.digest(found) == _tiny.digest(never)


def test_sigterm_in_the_last_step_changes_nothing(tmp_path):
  # The only record is that of the end.
  state, _ = _fit(
    "momentum", tmp_path, 4, stop_on_sigterm=True,
    on_record=lambda record: os.kill(os.getpid(), signal.SIGTERM),
  )  # fmt: skip
  assert int(state.step[0]) == 4


def test_sigterm_without_checkpoints_reports_an_unsaved_state():
  team = _tiny.team("vmap")
  batches = _ending(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
  with pytest.raises(training.PreemptedError) as stop:
    _tiny.trainer(team, "momentum").fit(
      _tiny.init(team, "momentum"), batches, 9, stop_on_sigterm=True
    )
  assert not stop.value.saved


def test_stop_on_sigterm_in_a_thread_raises(tmp_path):
  told = []

  def run():
    try:
      _fit("momentum", tmp_path, 2, stop_on_sigterm=True)
    except ValueError as error:
      told.append(str(error))

  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  assert told[0].startswith("`stop_on_sigterm` must be False in a thread")


def test_run_ends_with_its_batches_and_keeps_the_state(tmp_path):
  def iterate(start):
    team = _tiny.team("vmap")
    for step in range(start, 6):
      yield _tiny.batch(step, team.local_workers)

  never, _ = _fit("msdpu", tmp_path / "never", 6)
  with pytest.warns(RuntimeWarning, match="ended after step 6 of 100"):
    state, records = _fit("msdpu", tmp_path / "short", 100, iterate)
  assert records[-1].step == 6
  assert _tiny.digest(state) == _tiny.digest(never)
  # And it is saved: with no more batches nothing can be done.
  with _refusals.refused("batches", "give a batch from st"):
    _fit("msdpu", tmp_path / "short", 100, iterate)


def test_free_metadata_may_differ(tmp_path):
  _fit("momentum", tmp_path, 2, metadata={"length": 2, "rate": 1})
  seen = []
  _fit(
    "momentum", tmp_path, 4, metadata={"length": 4, "rate": 1}, free=["length"],
    on_resume=seen.append,
  )  # fmt: skip
  assert seen[0].metadata["length"] == 2
  with _refusals.refused("rate", "is 1 there and 2 here"):
    _fit("momentum", tmp_path, 5, metadata={"rate": 2}, free=["length"])
  # It comes before the message of the resume, and before arrays are compared.
  seen.clear()
  with _refusals.refused("rate", "is 1 there and 2 here"):
    _fit(
      "adam", tmp_path, 5, metadata={"length": 2, "rate": 2},
      on_resume=seen.append,
    )  # fmt: skip
  assert not seen
  with _refusals.refused("template", "be a state of the run that was saved"):
    _fit("adam", tmp_path, 5, metadata={"length": 4, "rate": 1})


def test_other_workers_resume_by_resizing(tmp_path):
  team = _tiny.team("vmap")
  with training.Checkpoints(tmp_path, team) as checkpoints:
    state, _ = _tiny.trainer(team, "local_sgd").fit(
      _tiny.init(team, "local_sgd"), _tiny.batches(team), 7,
      checkpoints=checkpoints,
    )  # fmt: skip
  from jdist import collectives

  new = collectives.workers(2, substrate="vmap")
  chain = _tiny.optimizers(team.axis)["local_sgd"]
  wanted = training.resize(state, chain, team, new)
  asked = []

  def other(number):
    asked.append(number)
    return training.OtherWorkers(
      team,
      lambda: _tiny.init(team, "local_sgd"),
      lambda state: training.resize(state, chain, team, new),
    )

  template = training.init_state(new, chain, _tiny.params())
  with training.Checkpoints(tmp_path, new, other_workers=other) as checkpoints:
    found = checkpoints.restore(template)
  assert asked == [team.num_workers] and found.step == 7
  chex.assert_trees_all_equal(found.state, wanted)


def stop_among_processes(folder, told):
  import os
  import signal

  import jax
  import numpy as np
  import optax

  from jdist import collectives, methods, training

  team = collectives.workers(2)
  optimizer = methods.diloco(optax.sgd(0.1), 3, axis=team.axis)

  def loss(params, model_state, batch, key):
    return ((params - batch.mean(0)) ** 2).sum(), (model_state, {})

  def batches(start):
    for step in range(start, 10**6):
      if step == 10 and jax.process_index() == told:
        os.kill(os.getpid(), signal.SIGTERM)
      yield np.full((1, 4, 3), step % 7, np.float32)

  trainer = training.Trainer(
    team, training.make_step(loss, optimizer, axis=team.axis)
  )
  state = training.init_state(team, optimizer, np.zeros(3, np.float32))
  with training.Checkpoints(folder, team) as checkpoints:
    try:
      trainer.fit(
        state, batches, 10**6, checkpoints=checkpoints, stop_on_sigterm=True
      )
    except training.PreemptedError as stop:
      return [stop.code, stop.step, stop.saved]


def test_processes_agree_on_the_step(tmp_path):
  # JAX asks every process after one got the signal, which takes a second.
  told = _processes.run(stop_among_processes, str(tmp_path), 1, num_processes=2)
  assert told[0] == told[1]
  code, step, saved = told[0]
  assert code == 143 and saved and 10 <= step < 10**6
  assert [p.name for p in sorted(tmp_path.glob("*.json"))] == [
    f"step_{step:08d}.json"
  ]


def test_full_disk_raises_one_line_and_keeps_the_last_checkpoint(
  tmp_path, monkeypatch
):
  import orbax.checkpoint as orbax

  _fit("momentum", tmp_path, 2)
  wait, save = (
    orbax.AsyncCheckpointer.wait_until_finished,
    orbax.AsyncCheckpointer.save,
  )
  saving = []

  def begin(self, *arguments, **options):
    saving.append(True)
    return save(self, *arguments, **options)

  def full(self, *arguments, **options):
    wait(self, *arguments, **options)
    if not saving:  # What is restored waits, too.
      return
    (tmp_path / "step_00000004.orbax-checkpoint-tmp").mkdir(exist_ok=True)
    raise ValueError("RESOURCE_EXHAUSTED: Failed: No space left on device [2]")

  monkeypatch.setattr(orbax.AsyncCheckpointer, "save", begin)
  monkeypatch.setattr(orbax.AsyncCheckpointer, "wait_until_finished", full)
  with pytest.raises(OSError, match="step 4 could not be written") as error:
    _fit("momentum", tmp_path, 4)
  told = str(error.value)
  assert "no space left on the disk. The one of step 2 stays" in told
  assert "\n" not in told
  monkeypatch.undo()
  assert sorted(p.name for p in tmp_path.glob("*.json")) == [
    "step_00000002.json"
  ]
  resumed = []
  _fit("momentum", tmp_path, 4, on_resume=resumed.append)
  assert [x.step for x in resumed] == [2]


# JAX raises the second where the program has run before.
@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_lost_peer_while_saving_is_not_reported_as_a_full_disk(
  kind, tmp_path, monkeypatch
):
  import orbax.checkpoint as orbax

  def lost(self, *arguments, **options):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    raise kind("UNKNOWN: Gloo AllGather failed")

  monkeypatch.setattr(orbax.AsyncCheckpointer, "save", lost)
  team = _tiny.team("vmap")
  state = _tiny.init(team, "momentum")
  with (
    training.Checkpoints(tmp_path, team) as checkpoints,
    pytest.raises(kind, match=r"^UNKNOWN: Gloo"),
  ):
    checkpoints.save(3, state)
