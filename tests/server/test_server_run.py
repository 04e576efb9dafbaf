"""A server's run has marks, records and checkpoints, whatever its engine."""

import functools
import types
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import (
  cluster,
  codecs,
  collectives,
  data,
  models,
  reducers,
  server,
  states,
  training,
)
from jdist.server import _driver
from jdist.server.run import _run_checkpoints, _run_marks, _server_run
from jdist.server.runtime import _live_marks
from jdist.storage import sealed_json
from tests.server import _live_runs
from tests.server import test_gradients as gradients

pytest.importorskip("simpy")

ASP = server.ASP(batches=server.FixedBatches(10))


def make(
  optimizer=gradients.SGD, machines=None, protocol=ASP, loss=gradients.LOSS,
  model=gradients.MODEL,
):  # fmt: skip
  machines = cluster.workers([2.0, 1.0]) if machines is None else machines
  samples = data.SampleStream(gradients.DIGITS, len(machines.names), seed=0)
  learner = server.GradientLearner(
    loss, optimizer, model.params, samples,
    workers=machines.names, model_state=model.state,
  )  # fmt: skip
  costs = cluster.Profile(seconds_per_sample=0.01, push_bytes=10.0)
  return server.Simulation(machines, protocol, costs, learner=learner)


def fit(total, unit="updates", run=None, **options):
  run = make() if run is None else run
  return server.ServerRun(server.ClockSession(run)).fit(total, unit, **options)


def test_records_are_of_the_virtual_clock():
  seen = []
  records = fit(
    2.02,
    "seconds",
    every=0.82,
    evaluate=lambda model: {"accuracy": 0.5},
    on_record=seen.append,
  )
  assert seen == records
  # Three each 0.1 s; the ends lie between two updates.
  assert [record.step for record in records] == [24, 48, 60]
  assert {record.clock for record in records} == {"virtual"}
  assert records[-1].train_s == pytest.approx(2.0, rel=0.01)
  assert records[-1].samples_per_s == pytest.approx(300.0, rel=0.01)
  assert records[-1].sent_bytes == 10.0 * 60 / 2
  assert records[0].train_loss > records[-1].train_loss
  assert records[0].metrics == {"accuracy": 0.5}


def test_run_ends_at_its_updates_or_samples():
  assert fit(7)[-1].step == 7
  assert fit(95, "samples")[-1].step == 10


def test_server_model_is_evaluated_like_a_training_state():
  run = make()
  fit(20, run=run)
  evaluate = training.Evaluator(
    collectives.workers(2, substrate="vmap"),
    gradients.MODEL.apply,
    data.evaluation_batches(gradients.DIGITS, 2, 512),
    normalize=gradients.DIGITS.normalize,
  )
  params, digits = run.learner.model.params, gradients.DIGITS
  images = digits.normalize(digits.images)
  logits, _ = gradients.MODEL.apply(params, {}, images, train=False)
  accuracy = float((logits.argmax(-1) == digits.labels).mean())
  assert evaluate.measure(params)["accuracy"] == pytest.approx(accuracy)


PROTOCOLS = {
  "asp": server.ASP(batches=server.FixedBatches(10)),
  "bsp": server.BSP(batches=server.FixedBatches(10)),
  "ssp": server.SSP(bound=1, batches=server.FixedBatches(10)),
  "softsync": server.NSoftsync(n=1, batches=server.FixedBatches(10)),
  "dbs": server.dbs(20, smoothing=0.5),
  "ringmaster": server.Ringmaster(
    max_staleness=1, batches=server.FixedBatches(10)
  ),
}


FEW = reducers.MessageCodec(codecs.Quantize(4, 64), reducers.ErrorFeedback())


class StoppedError(Exception):
  pass


@pytest.mark.parametrize(
  ("name", "compressed"),
  # DBS stands for all, as its batches change as well. States of feedback do not
  # depend on the protocol.
  [
    *(
      pytest.param(name, False, marks=() if name == "dbs" else pytest.mark.slow)
      for name in PROTOCOLS
    ),
    ("asp", True),
    pytest.param("bsp", True, marks=pytest.mark.slow),
  ],
)
def test_resumed_run_ends_with_the_same_bits(name, compressed, tmp_path):

  def start():
    samples = data.SampleStream(gradients.DIGITS, 3, seed=0)
    # One machine fails in the middle and returns.
    machines = cluster.Cluster(
      (
        cluster.Node("a", speed=2.0, jitter=0.3),
        cluster.Node("b", jitter=0.3),
        cluster.Node("c", outages=(cluster.Outage(0.7, 1.5),)),
      )
    )
    learner = server.GradientLearner(
      gradients.LOSS, gradients.SGD, gradients.MODEL.params, samples,
      workers=machines.names,
      push_codec=FEW if compressed else None,
    )  # fmt: skip
    return server.Simulation(
      machines,
      PROTOCOLS[name],
      cluster.Profile(seconds_per_sample=0.01, seconds_per_batch=0.02),
      seed=1,
      learner=learner,
      detection_s=0.1,
    )

  def train(run, checkpoints=None, stop_at=None):
    def evaluate(model):
      if stop_at is not None and run.events > stop_at:
        raise StoppedError
      return {"sum": float(model.params["dense1"]["bias"].sum())}

    return fit(24, run=run, every=6, evaluate=evaluate, checkpoints=checkpoints)

  whole = start()
  records = train(whole)
  for part in (0.4, 0.8):
    with pytest.raises(StoppedError):
      train(start(), tmp_path, stop_at=part * whole.events)
  resumed = start()
  assert train(resumed, tmp_path) == records
  for found, wanted in zip(resumed.save(), whole.save(), strict=True):
    chex.assert_trees_all_equal(found, wanted)


def test_checkpoint_of_another_run_is_refused(tmp_path):
  def run(**metadata):
    return fit(4, checkpoints=tmp_path, metadata=metadata)

  records = run(seed=0, shape=(2, 3))
  with pytest.raises(ValueError, match="`seed` is 0 there and 1 here"):
    run(seed=1, shape=(2, 3))
  with pytest.raises(ValueError, match="`rate` is None there and "):
    run(seed=0, shape=(2, 3), rate=0.1)
  assert run(seed=0, shape=(2, 3)) == records
  (tmp_path / "trainer" / "step_0000000004").mkdir(parents=True)
  with pytest.raises(ValueError, match="of trainers or of servers alone, got"):
    fit(4, checkpoints=tmp_path / "trainer")


def test_random_keys_in_a_model_state_are_resumed(tmp_path):
  def loss(params, state, batch, key):
    del key
    mine, following = jax.random.split(state["key"])
    change = jax.random.normal(mine) * batch["mask"].mean()
    return change * params["w"], ({"key": following}, {})

  model = models.Model({"w": jnp.ones(())}, {"key": jax.random.key(3)}, None)
  start = functools.partial(make, loss=loss, model=model)
  whole, resumed = start(), start()
  fit(6, run=whole, every=3)
  fit(3, run=start(), every=3, checkpoints=tmp_path)
  fit(6, run=resumed, every=3, checkpoints=tmp_path)
  for found, wanted in zip(resumed.save(), whole.save(), strict=True):
    chex.assert_trees_all_equal(found, wanted)


@pytest.mark.parametrize(
  "other",
  [
    {"machines": cluster.workers([3.0, 1.0])},
    {"machines": cluster.workers([2.0, 1.0, 1.0])},
    {"protocol": server.BSP(batches=server.FixedBatches(10))},
    {"optimizer": optax.sgd(0.1)},
  ],
)
def test_checkpoint_of_another_simulation_is_refused(other, tmp_path):
  records = fit(4, checkpoints=tmp_path)
  with pytest.raises(ValueError, match="`simulation` must be that of the "):
    fit(4, run=make(**other), checkpoints=tmp_path)
  assert fit(4, checkpoints=tmp_path) == records


def test_metadata_must_be_values_of_json(tmp_path):
  with pytest.raises(ValueError, match="`metadata` must be a value of JSON"):
    fit(4, checkpoints=tmp_path, metadata={"rates": np.ones(2)})


def test_records_of_another_run_are_not_reused(tmp_path):
  records = fit(4, checkpoints=tmp_path / "a")
  (tmp_path / "b").mkdir()
  for folder in ("a", "b"):
    stale = tmp_path / folder / "records.json"
    sealed_json.write(stale, [[0, *records[0]._replace(metrics={})]], form=1)
  again = fit(4, checkpoints=tmp_path / "b", evaluate=lambda model: {"x": 1.0})
  assert [x.metrics for x in again] == [{"x": 1.0}]
  # A file that was damaged, or is of another form, costs an evaluation.
  path = tmp_path / "a" / "records.json"
  for damage in (
    lambda: path.write_text("{"),
    lambda: sealed_json.write(path, [[0, 4]], form=1),
    lambda: sealed_json.write(path, 5, form=1),
  ):
    damage()
    again = fit(
      4, checkpoints=tmp_path / "a", evaluate=lambda model: {"x": 1.0}
    )
    assert again == [records[0]._replace(metrics={"x": 1.0})]


def test_records_that_were_left_are_gone_before_the_first_of_a_run(tmp_path):
  """A run that is killed after its first checkpoint would resume them."""
  left, found = tmp_path / "records.json", []
  left.write_text("[]")
  fit(
    4,
    checkpoints=tmp_path,
    evaluate=lambda _: found.append(left.exists()) or {},
  )
  assert found == [False]


def test_models_of_earlier_marks_are_not_measured_after_a_resume(tmp_path):
  fit(6, every=2, checkpoints=tmp_path)
  (tmp_path / "records.json").unlink()
  with pytest.warns(
    RuntimeWarning, match="after update [24] was lost"
  ) as given:
    records = fit(
      6, every=2, checkpoints=tmp_path, evaluate=lambda model: {"x": 1.0}
    )
  assert [x.step for x in records] == [6] and len(given) == 2


def test_run_ends_when_all_machines_have_left_for_good(tmp_path):
  # Two and seven tasks of 0.1 s.
  machines = cluster.Cluster(
    tuple(
      cluster.Node(name, outages=(cluster.Outage(after_s),))
      for name, after_s in (("a", 0.25), ("b", 0.75))
    )
  )
  why = "after update 9 at 1.75 s, before 12 updates: all machines are away"
  for _ in range(2):  # A resumed run has no machines either.
    with pytest.warns(RuntimeWarning, match=why):
      records = fit(
        12, run=make(machines=machines), every=2, checkpoints=tmp_path
      )
    assert [x.step for x in records] == [2, 4, 6, 8, 9]
  # Seconds pass without any machine.
  (record,) = fit(9, "seconds", run=make(machines=machines))
  assert record.step == 9


def diverging(first_bad):
  """SGD whose updates are infinite from a count on."""
  return optax.chain(
    gradients.SGD,
    optax.scale_by_schedule(lambda n: jnp.where(n < first_bad, 1.0, jnp.inf)),
  )


def test_states_that_are_not_finite_are_not_saved(tmp_path):
  def train(first_bad, folder):
    with warnings.catch_warnings(record=True) as given:
      warnings.simplefilter("always")
      records = fit(
        12, run=make(diverging(first_bad)), every=4, checkpoints=folder
      )
    return records, [str(x.message) for x in given]

  records, given = train(2, tmp_path / "a")
  # The server refuses all later gradients, and expels the workers.
  assert given[0].endswith("not finite, and it was not saved: there is none.")
  assert "had to refuse the pushes of all workers" in given[-1]
  assert records[-1].diverged and not list((tmp_path / "a").glob("update_*"))
  # Nothing would be saved without checkpoints.
  records, given = train(2, None)
  assert records[-1].diverged and not any("saved" in text for text in given)
  for _ in range(2):  # A resumed run continues from update 4.
    records, given = train(5, tmp_path / "b")
    assert [x.diverged for x in records] == [False, True]
    assert given[0].endswith("not saved: the last checkpoint stays.")
    kept = sorted(x.name for x in (tmp_path / "b").glob("update_*"))
    assert kept == ["update_0000000004"]


def test_rounding_adds_no_mark_before_the_end():
  """In floats 2.1 / 0.3 is 7.000000000000001."""
  marks = _server_run._plan(2.1, "seconds", 0.3, None, {}).marks
  assert marks == pytest.approx([0.3, 0.6, 0.9, 1.2, 1.5, 1.8, 2.1])
  assert marks[-1] == 2.1


def test_record_of_the_checkpoint_is_not_measured_again(tmp_path):
  def train(quality, seen):
    return fit(
      4, every=2, checkpoints=tmp_path, on_record=seen.append,
      evaluate=lambda model: {"x": quality},
    )  # fmt: skip

  records, seen = train(1.0, []), []
  assert train(2.0, seen) == records
  assert not seen


class OneMark:
  """Stands for a session that reaches its marks at given seconds."""

  clock, num_workers, updates = "wall", 2, 5

  def __init__(self, resumed, *seconds):
    self.resumed, self.seconds = resumed, seconds

  def begin(self, plan, stops):
    return self.resumed

  def advance(self, number, stops):
    now_s = self.seconds[number]
    mark = _run_marks.Mark(
      5 + number, 50, now_s, 8.0, 0.0, 1.0, 1.0, True, None
    )
    return mark, None

  def save(self):
    return None


def test_mark_that_is_reached_again_is_measured_again(tmp_path):

  def fit(session):
    told = []
    records = server.ServerRun(session).fit(
      10, every=5, checkpoints=tmp_path, on_resume=told.append
    )
    return [record.train_s for record in records], told

  assert fit(OneMark(None, 1.0, 2.0)) == ([1.0, 2.0], [])
  # Its records are there up to update 5, and then by other messages.
  assert fit(OneMark(5, 1.0, 3.0)) == ([1.0, 3.0], [5])
  assert fit(OneMark(6, 1.0, 4.0)) == ([1.0, 4.0], [])


def test_marks_are_the_nearest_whole_numbers():
  plan = _server_run._plan(10, "updates", 3.6, None, {})
  assert plan.marks == (4, 7, 10)


def test_marks_closer_than_an_update_are_one():
  plan = _server_run._plan(3, "updates", 0.4, None, {})
  assert plan.marks == (1, 2, 3)
  assert _server_run._plan(0.4, "samples", None, None, {}).marks == (1,)
  assert _server_run._plan(0.4, "seconds", 0.2, None, {}).marks == (0.2, 0.4)


def checkpoint(run, updates, owing=()):
  header = {"updates": updates, "now_s": 1.0, "state": {}}
  header |= {"marks": [], "limits": []}
  run.begin(header, {"server": np.zeros(1, np.uint8)}, set(owing))


def test_checkpoint_that_waits_is_written_before_the_next_one(tmp_path):
  run = _run_checkpoints.RunCheckpoints(tmp_path, {})
  checkpoint(run, 5, owing="a")
  checkpoint(run, 6)
  assert sorted(x.name[-1] for x in tmp_path.glob("update_*")) == ["5", "6"]
  checkpoint(run, 7)  # The last two are kept.
  assert sorted(x.name[-1] for x in tmp_path.glob("update_*")) == ["6", "7"]


@pytest.mark.parametrize(
  ("loss", "metrics", "usable", "diverged"),
  [
    (0.5, {"loss": 0.5}, True, False),
    (None, {}, True, False),
    (np.nan, {}, True, True),
    (0.5, {"loss": np.inf}, True, True),
    (0.5, {"loss": 0.5}, False, True),
  ],
)
def test_record_says_whether_its_run_has_diverged(
  loss, metrics, usable, diverged
):
  run = server.ServerRun(
    types.SimpleNamespace(advance=print, num_workers=2, clock="wall")
  )
  mark = _run_marks.Mark(4, 8, 2.0, 10.0, 0.0, 0.5, loss, usable, None)
  plan = _server_run._plan(4, "updates", None, None, {})
  record = run._measure(mark, "model", plan, lambda model: metrics)
  assert record.diverged == diverged and record.metrics == metrics
  assert (record.sent_bytes, record.samples_per_s) == (5.0, 4.0)


def test_whole_checkpoint_is_replaced_without_being_removed(
  tmp_path, monkeypatch
):
  """A process that is killed meanwhile would have none."""
  removed = []
  monkeypatch.setattr(_run_checkpoints.array_files, "remove", removed.append)
  for _ in range(2):
    run = _run_checkpoints.RunCheckpoints(tmp_path, {})
    for _ in range(2):
      checkpoint(run, 5)
  # At first nothing says that what may be there is whole.
  assert removed == [tmp_path / "update_0000000005"]


def test_saved_state_of_a_worker_is_that_of_its_message(tmp_path):
  """Whose bytes may be others by the time that the checkpoint is written."""
  run, state = _run_checkpoints.RunCheckpoints(tmp_path, {}), np.uint8([1, 2])
  checkpoint(run, 5, owing="ab")
  run.add_state("a", state)
  state[:] = 9
  run.add_state("b", state)
  found = _run_checkpoints.RunCheckpoints(tmp_path, {}).states
  assert {x: y.tolist() for x, y in found.items()} == {"a": [1, 2], "b": [9, 9]}


def test_records_after_the_update_of_a_resume_are_left_out(tmp_path):
  plan = _server_run._plan(6, "updates", 2, tmp_path, {})
  records = {
    i: training.Record(2 * i + 2, 2 * i + 2, 0.0, 0.5, {}, 1.0, 1.0)
    for i in range(3)
  }
  _server_run._write_records(plan, records)
  assert _server_run._read_records(plan, 4) == {0: records[0], 1: records[1]}


def live_fit(total, **options):
  """Trains a worker on threads, and returns records and last update."""
  rest = data.SampleStream(gradients.DIGITS, 1, seed=0)

  def work(channel):
    learner = server.GradientWorker(
      gradients.LOSS, gradients.MODEL.params, rest, server.message_plans(),
      number=0, num_workers=1,
    )  # fmt: skip
    server.WorkerLoop(channel, "a", learner, depth=1).run()

  def serve(plan):
    learner = server.GradientServer(
      gradients.SGD, gradients.MODEL.params, server.message_plans(),
      workers=("a",),
    )  # fmt: skip
    protocol = server.ASP(batches=server.FixedBatches(10))
    return server.LiveServer(protocol, learner, plan)

  engine = server.ThreadEngine()
  try:
    return _live_runs.run(engine, serve, {"a": work}, total, **options).records
  finally:
    engine.stop()


@pytest.mark.parametrize("train", (fit, live_fit), ids=("clock", "threads"))
def test_longer_run_passes_the_end_of_a_shorter_one(train, tmp_path):
  options, told = {"every": 4, "checkpoints": tmp_path}, []
  assert [x.step for x in train(6, **options)] == [4, 6]
  for total, steps in ((7, [4, 7]), (10, [4, 8, 10])):
    records = train(total, on_resume=told.append, **options)
    assert [x.step for x in records] == steps
  assert told == [6, 7]


def test_checkpoints_of_the_clock_are_none_of_real_workers(tmp_path):
  fit(6, every=4, checkpoints=tmp_path)
  with pytest.raises(training.OtherRunError, match="clock"):
    live_fit(6, every=4, checkpoints=tmp_path)


def test_damaged_checkpoint_is_no_newer_one_after_a_resume(tmp_path):
  run = _run_checkpoints.RunCheckpoints(tmp_path, {})
  for updates in (5, 9):
    checkpoint(run, updates)
  for file in (tmp_path / "update_0000000009").iterdir():
    file.write_bytes(b"")
  with pytest.warns(UserWarning, match="is damaged"):
    run = _run_checkpoints.RunCheckpoints(tmp_path, {})
  assert run.found[0]["updates"] == 5
  checkpoint(run, 6)
  assert sorted(x.name[-1] for x in tmp_path.glob("update_*")) == ["5", "6"]


def driver(state=None, staleness=None, **options):
  """Stands for a driver with two updates of three gradients."""
  given = {"applied_samples": 30, "all_expelled": False} | options
  found = types.SimpleNamespace(
    staleness={0: 1, 3: 2} if staleness is None else staleness,
    state=state or types.SimpleNamespace(version=2),
    save=dict, load=lambda saved: None, **given,
  )  # fmt: skip
  found.mean_staleness = _driver.Driver.mean_staleness.fget(found)
  return found


def model(*, weight=1.0, **model_state):
  return server.ServerModel({"w": jnp.float32(weight)}, (), model_state)


def test_mark_has_the_means_since_the_one_before():
  losses = [(10, 5.0), (20, 3.0), (30, 2.0)]
  learner = types.SimpleNamespace(losses=losses)
  measure = functools.partial(_run_marks.measure, now_s=1.0, pushed_bytes=0.0)
  first = measure(driver(applied_samples=10), learner, None)
  found = measure(driver(), learner, first)
  assert (found.train_loss, found.last_loss) == (2.5, 2.0)
  # The mean is over gradients, and not over updates.
  assert found.staleness == 2.0
  assert found.usable
  assert not measure(driver(all_expelled=True), learner, first).usable


def test_mark_has_the_mean_share_of_merges_since_the_one_before():
  # Each merge has its time, its members, and those that lived.
  shares = [(0.5, 1, 1), (1.0, 1, 1), (1.5, 2, 4), (2.0, 1, 1), (2.5, 0, 0)]
  found = driver()
  found.state.shares = shares
  measure = functools.partial(_run_marks.measure, found, None, pushed_bytes=0.0)
  first = measure(None, now_s=1.0)
  assert first.merged_share == pytest.approx(3.5 / 5)
  assert measure(first, now_s=3.0).merged_share == pytest.approx(1.5 / 3)
  found.state.shares = []
  assert measure(first, now_s=3.0).merged_share is None


def test_state_with_infinite_constants_is_usable():
  mask = jnp.array([0.0, -jnp.inf])
  laws = states.exceptions({"mask": mask})
  learner = types.SimpleNamespace(model=model(mask=mask), laws=laws)
  assert _run_marks.is_finite(learner)
  both = types.SimpleNamespace(model=learner.model, server=learner)
  assert _run_marks.is_finite(both)
  learner.laws = ()
  assert not _run_marks.is_finite(learner)
  # Its server has said so, where the model is on another machine.
  for found in (True, False):
    learner.finite = found
    assert _run_marks.is_finite(learner) is found


class Snapshots:
  """Stands for the learner of a live server."""

  def __init__(self, weight=1.0):
    self.model = model(weight=weight)

  def save(self):
    return {}, np.zeros(1, np.uint8)

  def load(self, notes, payload):
    pass

  def snapshot(self):
    return np.ones(1, np.uint8)


def live_marks(folder, weight=1.0, **options):
  plan = server.LivePlan(workers=("a",), checkpoints=str(folder), **options)
  return _live_marks.LiveMarks(Snapshots(weight), plan)


def test_timers_may_fall_short_of_their_marks_by_rounding(tmp_path):
  marks = live_marks(tmp_path, unit="seconds", marks=(0.3,))
  assert marks.is_due(driver(), 0.3 - 1e-9)
  assert not marks.is_due(driver(), 0.299)


def test_state_that_is_not_finite_is_not_saved_live(tmp_path):
  good, bad = live_marks(tmp_path / "a"), live_marks(tmp_path / "b", np.nan)
  assert good.may_save() and not bad.may_save()
  assert good.add(driver(), 1.0, None) and not bad.add(driver(), 1.0, None)
  assert not good.add(driver(), 1.0, "all machines are away")


def test_live_run_resumes_its_bytes_and_the_snapshots_of_its_update(tmp_path):
  marks = live_marks(tmp_path, unit="updates", marks=(1, 2, 3))
  marks.pulled_bytes, marks.pushed_bytes = 5, 7
  for version in (1, 2, 2):
    state = types.SimpleNamespace(version=version)
    marks.add(driver(state), float(version), None)
  marks.begin_checkpoint(driver(), 2.0, set(), None)
  marks = live_marks(tmp_path, unit="updates", marks=(1, 2, 3))
  marks.load(driver())
  assert (marks.pulled_bytes, marks.pushed_bytes) == (5, 7)
  # The model at the first mark is gone.
  assert list(marks.snapshots) == [1, 2]


def test_first_mark_has_the_changes_of_second_zero():
  state = types.SimpleNamespace(
    version=0, changes=[(0.0, 0, "joined", "a", 1)], shares=[(0.0, 1, 2)]
  )
  measure = functools.partial(
    _run_marks.measure, driver(state), None, now_s=0.0, pushed_bytes=0.0
  )
  first = measure(None)
  assert (first.changes, first.merged_share) == (state.changes, 0.5)
  later = measure(first)
  assert (later.changes, later.merged_share) == ([], None)


def test_snapshots_that_were_fetched_are_dropped():
  marks = types.SimpleNamespace(snapshots={0: np.ones(1)}, records=["first"])
  live = types.SimpleNamespace(_core=types.SimpleNamespace(marks=marks))
  for size in (1, 0):
    record, snapshot = server.LiveServer.record_of(live, 0)
    assert (record, snapshot.size) == ("first", size)


def test_pushes_that_were_refused_are_refused_in_a_resumed_run(tmp_path):
  def loss(params, state, batch, key):
    # A worker whose batch begins with a three has lost its numbers.
    found, rest = gradients.LOSS(params, state, batch, key)
    return jnp.where(batch["label"][0] == 3, jnp.nan, found), rest

  start = functools.partial(make, loss=loss)
  whole, resumed = start(), start()
  records = fit(60, run=whole, every=20)
  fit(40, run=start(), every=20, checkpoints=tmp_path)
  assert fit(60, run=resumed, every=20, checkpoints=tmp_path) == records
  assert whole.state.joined > 2  # Those who were refused join again.
  for found, wanted in zip(resumed.save(), whole.save(), strict=True):
    chex.assert_trees_all_equal(found, wanted)
