"""The loop: never more than two steps in flight, and its records add up."""

import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import codecs, collectives, methods, reducers, training, transforms
from jdist.storage import sealed_json
from jdist.training import comparison
from jdist.training.loop import (
  _programs,
  _record,
  _trainer,
  _training_run,
  _watchdog,
)
from tests import _refusals
from tests.training import _tiny


class _Metrics:
  """Stands for a step's metrics on the device; notes when it is read."""

  is_fully_addressable = True

  def __init__(self, log, number):
    self._log, self._number = log, number

  def __array__(self, dtype=None, copy=None):
    self._log.append(f"read {self._number}")
    return np.full((1, 2), self._number, np.float32)


class _Fake:
  """A trainer whose program computes nothing and logs what happens."""

  def __init__(self, monkeypatch):
    self.log = []
    team = _tiny.team("none")
    optimizer = methods.ssgd(optax.sgd(0.1), axis=None)
    step = training.make_step(_tiny.loss_fn, optimizer, axis=None)
    self.trainer = training.Trainer(team, step)
    self.trainer._step.names = ("loss", "rounds")
    self.state = training.init_state(team, optimizer, _tiny.params())

    def program(state, batch):
      del batch
      number = sum(line.startswith("dispatch") for line in self.log) + 1
      self.log.append(f"dispatch {number}")
      return state, _Metrics(self.log, number)

    monkeypatch.setattr(
      self.trainer._step, "program", lambda state, control: program
    )

  def fit(self, num_steps, **options):
    batches = _tiny.batches(self.trainer.workers)
    return self.trainer.fit(self.state, batches, num_steps, **options)


def _most_in_flight(log):
  flying = most = 0
  for line in log:
    flying += {"dispatch": 1, "read": -1}.get(line.split()[0], 0)
    most = max(most, flying)
  return most


@pytest.mark.smoke
def test_step_is_read_after_the_next_was_dispatched(monkeypatch):
  fake = _Fake(monkeypatch)
  fake.fit(4)
  assert fake.log == [
    "dispatch 1",
    "dispatch 2", "read 1",
    "dispatch 3", "read 2",
    "dispatch 4", "read 3",
    "read 4",
  ]  # fmt: skip
  assert _most_in_flight(fake.log) == 2


def test_evaluation_and_saving_wait_for_the_step_in_flight(
  monkeypatch, tmp_path
):
  fake = _Fake(monkeypatch)

  def evaluate(state):
    del state
    fake.log.append("evaluate")
    return {"accuracy": 0.5}

  with training.Checkpoints(tmp_path, fake.trainer.workers) as checkpoints:
    save = checkpoints.save
    monkeypatch.setattr(
      checkpoints, "save", lambda *a: (fake.log.append("save"), save(*a))
    )
    _, records = fake.fit(
      5,
      evaluate=evaluate,
      evaluate_every=2,
      checkpoints=checkpoints,
      checkpoint_every=4,
    )
  assert fake.log == [
    "dispatch 1", "dispatch 2", "read 1", "read 2", "evaluate",
    "dispatch 3", "dispatch 4", "read 3", "read 4", "evaluate", "save",
    "dispatch 5", "read 5", "evaluate", "save",
  ]  # fmt: skip
  assert [r.step for r in records] == [2, 4, 5]
  assert [r.train_loss for r in records] == [1.5, 3.5, 5.0]
  assert [r.metrics for r in records] == [{"accuracy": 0.5}] * 3


def _counting(step):
  traces = []

  def counted(state, batch):
    traces.append(None)
    return step(state, batch)

  return counted, traces


@pytest.mark.parametrize(
  "kind",
  [
    pytest.param("vmap", marks=pytest.mark.slow),
    "shard_map",
    pytest.param("two_on_each", marks=pytest.mark.slow),
    pytest.param("fsdp", marks=pytest.mark.slow),
  ],
)
def test_step_is_traced_once_to_run_and_once_to_count(kind, tmp_path):
  if kind == "fsdp":
    mesh = collectives.make_mesh((2, 2), ("worker", "fsdp"))
    team = collectives.workers(2, mesh=mesh)
    specs = {
      n: jax.sharding.PartitionSpec(*(["fsdp"] * (n == "kernel")))
      for n in _tiny.params()
    }
  else:
    team, specs = _tiny.team(kind), None
  optimizer = _tiny.optimizers(team.axis)["msdpu"]
  step, traces = _counting(
    training.make_step(_tiny.loss_fn, optimizer, axis=team.axis)
  )
  trainer = training.Trainer(team, step)
  evaluated = []
  with training.Checkpoints(tmp_path, team) as checkpoints:
    for stop in (5, 9):  # The second call resumes from the first's end.
      state = training.init_state(team, optimizer, _tiny.params(), specs=specs)
      trainer.fit(
        state,
        _tiny.batches(team),
        stop,
        evaluate=lambda state: evaluated.append(state.step) or {},
        evaluate_every=2,
        checkpoints=checkpoints,
        checkpoint_every=3,
      )
  state = training.init_state(team, optimizer, _tiny.params(), specs=specs)
  trainer.fit(state, _tiny.batches(team, seed=1), 3)  # Another seed.
  assert len(evaluated) == 6
  assert len(traces) == 2


def test_sent_bytes_match_hand_computation():
  team = _tiny.team("shard_map")
  # Without the empty leaf: 3 + 18 + 1 float32, 4 bfloat16.
  payload = 4 * 22 + 2 * 4
  anchor = 4 * 26
  ring = 2 * 3 / 4
  with jax.numpy_dtype_promotion("standard"):
    for name, steps, rounds, sent in (
      ("momentum", 7, 7, 7 * payload * ring),
      ("local_sgd", 7, 2, 2 * anchor * ring),
      ("local_sgd", 9, 3, 3 * anchor * ring),
      ("diloco", 7, 2, 2 * anchor * ring),
    ):
      _, records = _tiny.trainer(team, name).fit(
        _tiny.init(team, name), _tiny.batches(team), steps, evaluate_every=100
      )
      assert [(r.step, r.rounds) for r in records] == [(steps, rounds)], name
      assert records[0].sent_bytes == pytest.approx(sent), name


def _phased(team):
  """Two methods that send less and less, and their bytes a step by hand."""
  like = jax.eval_shape(lambda: _WIDE)
  wide = {name: like[name] for name in ("kernel", "other")}
  narrow = {"bias": like["bias"]}
  n = team.num_workers

  def dgc_bits(ratio):
    sparse = reducers.compressed(codecs.SampledTopK(ratio))
    dense = reducers.Exact()
    return sparse.num_bits(wide, n).sent + dense.num_bits(narrow, n).sent

  exact = reducers.Exact().num_bits(like, n).sent
  sign = reducers.compressed(codecs.Sign(scale="l2")).num_bits(like, n).sent
  ratios = (0.25, 0.0625, 0.015625, 0.004)
  return {
    "dgc": (
      methods.dgc(optax.sgd(0.1), axis=team.axis, steps_per_phase=2),
      [dgc_bits(r) / 8 for r in ratios for _ in range(2)]
      + [dgc_bits(0.001) / 8] * 4,
      # Whole bytes of each payload's two arrays.
      12 * (n - 1) * 2 * 2,
    ),
    # A reducer that changes from round to round.
    "local_steps": (
      transforms.local_steps(
        optax.sgd(0.1),
        3,
        axis=team.axis,
        compression=reducers.Compression(
          reducers.Scheduled(
            (
              (2, reducers.Exact()),
              (None, reducers.compressed(codecs.Sign(scale="l2"))),
            )
          )
        ),
      ),
      [0, 0, exact / 8] * 2 + [0, 0, sign / 8] * 2,
      2 * 2 * n * 3,
    ),
  }


_WIDE = {
  "bias": np.zeros(3, np.float32),
  "kernel": np.ones((6, 3), np.float32),
  "other": np.ones((40, 50), np.float32),
}


def _wide_loss(params, model_state, batch, key):
  del key
  y = batch["x"] @ params["kernel"] + params["bias"]
  return (y**2).mean() + (params["other"] ** 2).mean(), (model_state, {})


@pytest.mark.parametrize("name", ["dgc", "local_steps"])
def test_sent_bytes_of_phases_match_hand_computation(name, monkeypatch):
  team = _tiny.team("vmap")
  optimizer, by_hand, rounding = _phased(team)[name]
  step = training.make_step(_wide_loss, optimizer, axis=team.axis)
  trainer = training.Trainer(team, step, host_rounds=False)
  rounds = np.cumsum(np.array(by_hand) > 0)

  def program(state, batch):  # What is sent is counted without running it.
    del batch
    done = int(state.step[0])
    opt_state = state.opt_state
    if name == "local_steps":
      clock = opt_state.clock._replace(
        round=jnp.full(4, int(rounds[done]), jnp.int32)
      )
      sync = opt_state.sync._replace(clock=clock)
      opt_state = opt_state._replace(sync=sync)
    state = state._replace(step=state.step + 1, opt_state=opt_state)
    return state, jnp.asarray([[0.0, float(rounds[done])]] * 4)

  trainer._step.names = ("loss", "rounds")
  monkeypatch.setattr(trainer._step, "program", lambda state, control: program)
  first = training.init_state(team, optimizer, _WIDE)

  def fit(state, stop):
    return trainer.fit(state, _tiny.batches(team), stop, evaluate_every=1)

  _, through = fit(first, len(by_hand))
  sent = np.cumsum(by_hand)
  found = [record.sent_bytes for record in through]
  assert np.all(found >= sent - 1e-6)
  assert np.all(found <= sent + rounding)
  assert rounding < sent[-1] / 10
  state, _ = fit(first, 3)
  state, _ = fit(state, 7)  # As from a checkpoint.
  _, resumed = fit(state, len(by_hand))
  assert [r.sent_bytes for r in resumed] == found[7:]


def test_rounds_that_the_host_ends_count_their_own_phases():
  team = _tiny.team("vmap")
  optimizer, by_hand, rounding = _phased(team)["local_steps"]
  step = training.make_step(_wide_loss, optimizer, axis=team.axis)
  state = training.init_state(team, optimizer, _WIDE)
  _, records = training.Trainer(team, step, host_rounds=True).fit(
    state, _tiny.batches(team), len(by_hand), evaluate_every=1
  )
  sent = np.cumsum(by_hand)
  found = [record.sent_bytes for record in records]
  assert np.all(found >= sent - 1e-6) and np.all(found <= sent + rounding)


def test_resumed_run_continues_its_counts(tmp_path):
  team = _tiny.team("vmap")

  def fit(folder, steps):
    with training.Checkpoints(folder, team) as checkpoints:
      return _tiny.trainer(team, "local_sgd").fit(
        _tiny.init(team, "local_sgd"),
        _tiny.batches(team),
        steps,
        evaluate=lambda state: {"step": int(state.step[0])},
        checkpoints=checkpoints,
      )[1][-1]

  through = fit(tmp_path / "a", 8)
  fit(tmp_path / "b", 4)
  resumed = fit(tmp_path / "b", 8)
  assert resumed.metrics == through.metrics == {"step": 8}
  assert resumed.rounds == through.rounds == 2
  assert resumed.sent_bytes == through.sent_bytes
  # Killed after the last checkpoint and before the result was noted: the
  # same once more, without a step.
  assert fit(tmp_path / "b", 8) == resumed


def _interrupted(team, at):
  def iterate(start):
    for step, batch in enumerate(_tiny.batches(team)(start), start):
      if step == at:
        raise KeyboardInterrupt
      yield batch

  return iterate


def _without_history(folder):
  """Makes the newest checkpoint one of before there were histories."""
  path = max(folder.glob("step_*.json"))
  body = sealed_json.read(path, form=2)
  del body["metadata"]["jdist.history"]
  sealed_json.write(path, body, form=2)


def test_resumed_run_has_the_records_of_an_uninterrupted_one(tmp_path):
  team, told = _tiny.team("vmap"), []

  def fit(folder, batches):
    with training.Checkpoints(folder, team) as checkpoints:
      return _tiny.trainer(team, "local_sgd").fit(
        _tiny.init(team, "local_sgd"), batches, 9, checkpoints=checkpoints,
        evaluate=lambda state: {"step": np.float32(state.step[0])},
        evaluate_every=2, checkpoint_every=3, on_record=told.append,
      )[1]  # fmt: skip

  def kept(records):
    return [(r.step, r.rounds, r.sent_bytes, r.metrics) for r in records]

  through = fit(tmp_path / "a", _tiny.batches(team))
  for part, stop in (("b", 8), ("c", 8)):
    told.clear()
    with pytest.raises(KeyboardInterrupt):
      fit(tmp_path / part, _interrupted(team, stop))
  assert [r.step for r in told] == [2, 4, 6]
  before = told[:]
  resumed = fit(tmp_path / "c", _tiny.batches(team))
  assert resumed == told and told[:3] == before
  assert kept(resumed) == kept(through)
  losses = [r.train_loss for r in resumed]
  np.testing.assert_allclose(losses, [r.train_loss for r in through], 1e-6)
  assert resumed[3].train_s > before[-1].train_s
  # A checkpoint between two records keeps the losses since the first of them.
  with pytest.raises(KeyboardInterrupt):
    fit(tmp_path / "d", _interrupted(team, 5))
  again = [r.train_loss for r in fit(tmp_path / "d", _tiny.batches(team))]
  np.testing.assert_allclose(again, losses, 1e-6)
  # Of an older checkpoint only what comes after it is known.
  _without_history(tmp_path / "b")
  assert kept(fit(tmp_path / "b", _tiny.batches(team))) == kept(through)[3:]


def test_losses_before_a_resume_count_in_the_next_record_only(monkeypatch):
  fake = _Fake(monkeypatch)  # Whose loss of step n is n.
  trainer, data = fake.trainer, _tiny.batches(fake.trainer.workers)(0)
  run = _training_run.TrainingRun(
    trainer._step, trainer._choices, fake.state, independent=True,
    timeout_s=60, history=_record.History(losses=(6.0, 2)),
    evaluate=None, on_record=None,
  )  # fmt: skip
  for losses in ((7.0, 3), (2.0, 1)):
    run.dispatch(run.place(next(data)))
    run.read()
    assert run.history().losses == losses
    run.record()
  assert [r.train_loss for r in run.records] == [7 / 3, 2]


@pytest.mark.parametrize("loss", [np.nan, 1.0])
def test_evaluation_that_is_not_finite_says_that_a_run_diverged(
  monkeypatch, loss
):
  fake = _Fake(monkeypatch)  # Whose training losses are finite.
  _, records = fake.fit(2, evaluate=lambda state: {"loss": loss})
  assert records[-1].diverged is bool(np.isnan(loss))


@pytest.mark.parametrize(
  "found", [{"confusion": np.zeros((2, 2))}, {"note": "good"}, 0.5, {"a": None}]
)
def test_evaluation_returns_numbers(monkeypatch, found):
  with _refusals.refused("evaluate(state)", "a dict of numbers by name, got"):
    _Fake(monkeypatch).fit(2, evaluate=lambda state: found)


def test_run_is_watched_until_it_ends(monkeypatch):
  seen = []

  def evaluate(state):
    del state
    seen.append("jdist-watchdog" in {x.name for x in threading.enumerate()})
    return {}

  _Fake(monkeypatch).fit(2, evaluate=evaluate)
  assert seen and all(seen)
  assert "jdist-watchdog" not in {x.name for x in threading.enumerate()}


def test_only_work_longer_than_a_step_may_take_four_times_as_long(
  monkeypatch, tmp_path
):
  told = {}

  def beat(self, note="", *, patience=1.0):
    told[note.partition(" step")[0]] = patience

  monkeypatch.setattr(_watchdog.Watchdog, "beat", beat)
  fake = _Fake(monkeypatch)
  with training.Checkpoints(tmp_path, fake.trainer.workers) as checkpoints:
    fake.fit(2, evaluate=lambda state: {}, checkpoints=checkpoints)
  assert told == {
    "": 1.0, "the last was": 1.0, "compiling": 4.0, "evaluating after": 4.0,
    "evaluated after": 1.0, "saving after": 4.0, "saved after": 1.0,
  }  # fmt: skip


def test_second_call_continues_training():
  team = _tiny.team("vmap")
  trainer = _tiny.trainer(team, "local_sgd")
  state, _ = trainer.fit(_tiny.init(team, "local_sgd"), _tiny.batches(team), 4)
  state, records = trainer.fit(state, _tiny.batches(team), 10)
  assert (records[0].step, records[0].rounds) == (10, 3)
  through, (last,) = trainer.fit(
    _tiny.init(team, "local_sgd"), _tiny.batches(team), 10
  )
  _tiny.assert_same_bits(state, through)
  # Without records the first four steps count as if sent when due.
  assert records[0].sent_bytes == last.sent_bytes > 0
  with _refusals.refused("num_steps", ">= 10"):
    trainer.fit(state, _tiny.batches(team), 9)


def test_continued_records_count_from_those_before(monkeypatch):
  """Seconds, samples and bytes of a run go through both calls."""
  team = _tiny.team("vmap")
  trainer = _tiny.trainer(team, "local_sgd")
  state, records = trainer.fit(
    _tiny.init(team, "local_sgd"), _tiny.batches(team), 3
  )
  before = [x._replace(train_s=1000.0, sent_bytes=5e6) for x in records]
  _, found = trainer.fit(state, _tiny.batches(team), 6, continues=before)
  assert found[: len(before)] == before and found[-1].step == 6
  assert 1000.0 < found[-1].train_s < 1500.0
  assert 5e6 < found[-1].sent_bytes < 5.1e6
  # A thousand seconds had as many samples as their rate says.
  assert found[-1].samples_per_s > 0.5 * before[-1].samples_per_s


def test_training_time_counts_all_steps_except_the_first(monkeypatch):
  fake = _Fake(monkeypatch)
  program = fake.trainer._step.program(None, _programs.DEVICE)
  now_s = [0.0]
  clock = types.SimpleNamespace(perf_counter=lambda: now_s[0])
  monkeypatch.setattr(_training_run, "time", clock)

  def step(state, batch):
    now_s[0] += 0.02
    return program(state, batch)

  def evaluate(state):
    del state
    now_s[0] += 0.1
    return {}

  monkeypatch.setattr(
    fake.trainer._step, "program", lambda state, control: step
  )
  _, records = fake.fit(6, evaluate=evaluate, evaluate_every=1)
  # Five steps of 20 ms, and none of the 100 ms of an evaluation.
  assert records[-1].train_s == pytest.approx(0.1)
  assert records[-1].samples_per_s == pytest.approx(4 * 5 / 0.1)
  # After the first there is no rate, and none in its row.
  assert records[0].train_s == 0.0
  assert np.isnan(records[0].samples_per_s)
  rated = [r._replace(metrics={"accuracy": 0.5, "loss": 1.0}) for r in records]
  assert comparison.summarize(rated[:1])["samples_per_s"] is None
  assert comparison.summarize(rated)["samples_per_s"] == pytest.approx(200.0)


class _Closing:
  def __init__(self, team, fail_at=None):
    self.closed = 0
    self._made = _tiny.batches(team)(0)
    self._left = fail_at

  def __iter__(self):
    return self

  def __next__(self):
    if self._left is not None:
      self._left -= 1
      if self._left < 0:
        raise OSError("the disk is gone")
    return next(self._made)

  def close(self):
    self.closed += 1


def test_iterators_are_closed_and_threads_end(tmp_path):
  team = _tiny.team("vmap")
  trainer = _tiny.trainer(team, "local_sgd")
  before = {t.name for t in threading.enumerate()}
  data = _Closing(team)
  with training.Checkpoints(tmp_path, team) as checkpoints:
    trainer.fit(
      _tiny.init(team, "local_sgd"), lambda start: data, 3,
      checkpoints=checkpoints, label="here",
    )  # fmt: skip
  assert data.closed == 1
  broken = _Closing(team, fail_at=2)
  with pytest.raises(OSError, match="the disk is gone"):
    trainer.fit(_tiny.init(team, "local_sgd"), lambda start: broken, 3)
  assert broken.closed == 1
  left = {t.name for t in threading.enumerate()} - before
  assert not {name for name in left if "jdist" in name}


def test_batches_without_arrays_are_batches(monkeypatch):
  """A step may draw its own data; None is then no end of the batches."""
  fake = _Fake(monkeypatch)
  fake.trainer.fit(fake.state, lambda start: iter([None] * 3), 3)
  assert "dispatch 3" in fake.log


def test_on_record_is_called_for_every_record_at_once(monkeypatch):
  fake = _Fake(monkeypatch)
  told = []
  _, records = fake.fit(
    4, evaluate_every=2, on_record=lambda r: told.append((r, len(fake.log)))
  )
  assert [r for r, _ in told] == records
  assert told[0][1] < told[1][1] == len(fake.log)


def test_function_is_called_with_each_step_and_activity(monkeypatch):
  fake, told = _Fake(monkeypatch), []
  fake.fit(3, label=lambda record, doing: told.append((record.step, doing)))
  assert [step for step, doing in told if not doing] == [1, 2, 3]
  assert any("compiling" in doing for _, doing in told)


@pytest.mark.parametrize(
  "options",
  [
    {"num_steps": 0},
    {"num_steps": 3, "evaluate_every": 0},
    {"num_steps": 3, "checkpoint_every": -1},
  ],
)
def test_numbers_below_one_raise(options, monkeypatch):
  name = list(options)[-1]
  with _refusals.refused(name, "an int >= 1"):
    _Fake(monkeypatch).fit(**options)


def test_checkpoints_that_would_not_be_written_are_refused(monkeypatch):
  with _refusals.refused("checkpoint_every", "left out without `checkpoints`"):
    _Fake(monkeypatch).fit(3, checkpoint_every=2)


@pytest.mark.parametrize("step", [None, 2])
def test_diverged_state_is_not_saved(step):
  run = types.SimpleNamespace(
    step=3, read=lambda: None, is_finite=lambda: False
  )
  checkpoints = types.SimpleNamespace(latest_step=lambda: step)
  stays = "there is no" if step is None else "the checkpoint of step 2 stays"
  with pytest.warns(RuntimeWarning, match=f"step 3 is not finite .*: {stays}"):
    assert not _trainer._save(run, checkpoints, None)


def test_continued_run_reads_no_checkpoint(monkeypatch, tmp_path):
  fake = _Fake(monkeypatch)
  first = training.Record(0, 0, 0.0, 1.0, {}, 1.0, 1.0)
  with training.Checkpoints(tmp_path, fake.trainer.workers) as checkpoints:
    monkeypatch.setattr(checkpoints, "restore", pytest.fail)
    _, records = fake.fit(2, continues=[first], checkpoints=checkpoints)
  assert records[0] == first and records[-1].step == 2


def test_records_of_a_later_state_are_refused(monkeypatch):
  # The state of this run is of step 0, as the first record is.
  records = [training.Record(x, x, 0.0, 1.0, {}, 1.0, 1.0) for x in (0, 4)]
  with _refusals.refused("continues[-1].step", "got 4. Give the records that"):
    _Fake(monkeypatch).fit(6, continues=records)


def test_step_without_loss_or_rounds_raises():
  team = _tiny.team("vmap")
  trainer = training.Trainer(
    team, lambda state, batch: (state, {}), independent=True
  )
  with pytest.raises(ValueError, match="metrics `loss` and `rounds`"):
    trainer.fit(_tiny.init(team, "momentum"), _tiny.batches(team), 1)


def test_metric_of_the_loss_may_have_a_similar_name():
  def loss_fn(*given):
    loss, (model_state, _) = _tiny.loss_fn(*given)
    return loss, (model_state, {"ahead_of_time": loss})

  team = _tiny.team("vmap")
  optimizer = _tiny.optimizers(team.axis)["local_sgd"]
  step = training.make_step(loss_fn, optimizer, axis=team.axis)
  state, _ = training.Trainer(team, step).fit(
    _tiny.init(team, "local_sgd"), _tiny.batches(team), 4
  )
  _tiny.assert_same_bits(state, _tiny.trained(team, "local_sgd", 4))


def test_bytes_of_a_run_without_a_history_are_of_both_programs():
  """A step sends its number of samples, and the last of a round parameters."""
  team = _tiny.team("vmap")
  optimizer = methods.local_sgd(optax.sgd(0.1), 2, axis=team.axis)
  step = training.make_step(
    _wide_loss, optimizer, axis=team.axis, weighted=True
  )
  trainer = training.Trainer(team, step, host_rounds=True)

  def fit(state, stop):
    return trainer.fit(state, _tiny.batches(team), stop, evaluate_every=stop)

  _, (through,) = fit(training.init_state(team, optimizer, _WIDE), 7)
  state, (before,) = fit(training.init_state(team, optimizer, _WIDE), 5)
  _, (resumed,) = fit(state, 7)
  assert 0 < before.sent_bytes < through.sent_bytes == resumed.sent_bytes


def test_run_that_goes_on_knows_what_was_skipped_before():
  team = _tiny.team("none")
  optimizer = optax.chain(
    transforms.skip_nonfinite(None), methods.ssgd(optax.sgd(0.1), axis=None)
  )
  step = training.make_step(_tiny.loss_fn, optimizer, axis=None)
  state = training.init_state(team, optimizer, _tiny.params())
  counted = [
    x._replace(skipped=x.skipped + 3) if hasattr(x, "skipped") else x
    for x in state.opt_state
  ]
  state = state._replace(opt_state=tuple(counted))
  trainer = training.Trainer(team, step)
  run = _training_run.TrainingRun(
    trainer._step, trainer._choices, state, independent=True, timeout_s=60.0,
    history=_record.History(), evaluate=None, on_record=None,
  )  # fmt: skip
  run.record()
  assert run.records[-1].skipped == 3
