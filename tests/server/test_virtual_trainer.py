"""A server's run on the virtual clock has records as any other."""

import warnings

import chex
import jax.numpy as jnp
import optax
import pytest

from jdist import (
  cluster,
  codecs,
  collectives,
  data,
  reducers,
  server,
  training,
)
from tests.server import test_gradients as gradients

pytest.importorskip("simpy")


def make(optimizer=gradients.SGD, machines=None):
  samples = data.SampleStream(gradients.DIGITS, 2, seed=0)
  machines = cluster.workers([2.0, 1.0]) if machines is None else machines
  learner = server.GradientLearner(
    gradients.LOSS, optimizer, gradients.MODEL.params, samples,
    workers=machines.names,
  )  # fmt: skip
  costs = cluster.Profile(seconds_per_sample=0.01, push_bytes=10.0)
  return server.Simulation(
    machines,
    server.ASP(batches=server.FixedBatches(10)),
    costs,
    learner=learner,
  )


def test_records_are_of_the_virtual_clock():
  seen = []
  records = server.VirtualTrainer(make()).fit(
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


def test_a_run_ends_at_its_updates_or_samples():
  assert server.VirtualTrainer(make()).fit(7)[-1].step == 7
  assert server.VirtualTrainer(make()).fit(95, "samples")[-1].step == 10


def test_a_servers_model_is_evaluated_as_any_state():
  run = make()
  server.VirtualTrainer(run).fit(20)
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


FEW = server.MessageCodec(codecs.Quantize(4, 64), reducers.ErrorFeedback())


class StoppedError(Exception):
  pass


@pytest.mark.parametrize(
  ("name", "compressed"),
  # The feedbacks' states are the learner's, whatever the protocol; DBS waits as
  # BSP does, and has sizes beside.
  [
    *(
      pytest.param(name, False, marks=() if name == "dbs" else pytest.mark.slow)
      for name in PROTOCOLS
    ),
    ("asp", True),
    pytest.param("bsp", True, marks=pytest.mark.slow),
  ],
)
def test_a_resumed_run_ends_with_the_same_bits(name, compressed, tmp_path):
  pytest.importorskip("orbax.checkpoint")

  def start():
    samples = data.SampleStream(gradients.DIGITS, 3, seed=0)
    # One fails in the middle and comes back.
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
      pull_codec=FEW if compressed else None,
    )  # fmt: skip
    return server.Simulation(
      machines,
      PROTOCOLS[name],
      cluster.Profile(seconds_per_sample=0.01, seconds_per_batch=0.02),
      seed=1,
      learner=learner,
      detection_s=0.1,
    )

  def fit(run, checkpoints=None, stop_at=None):
    def evaluate(model):
      if stop_at is not None and run.events > stop_at:
        raise StoppedError
      return {"sum": float(model.params["dense1"]["bias"].sum())}

    return server.VirtualTrainer(run).fit(
      24, every=6, evaluate=evaluate, checkpoints=checkpoints
    )

  whole = start()
  records = fit(whole)
  one = collectives.workers(1)
  with training.Checkpoints(tmp_path, one) as checkpoints:
    for part in (0.4, 0.8):
      with pytest.raises(StoppedError):
        fit(start(), checkpoints, stop_at=part * whole.events)
    resumed = start()
    assert fit(resumed, checkpoints) == records
  assert resumed.events == whole.events
  chex.assert_trees_all_equal(resumed.save(), whole.save())
  assert resumed.learner.position == whole.learner.position


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
  pytest.importorskip("orbax.checkpoint")
  with training.Checkpoints(tmp_path, collectives.workers(1)) as checkpoints:

    def run(**metadata):
      return server.VirtualTrainer(make()).fit(
        4, checkpoints=checkpoints, metadata=metadata
      )

    records = run(seed=0, shape=(2, 3))
    with pytest.raises(ValueError, match="`seed` is 0 there and 1 here"):
      run(seed=1, shape=(2, 3))
    with pytest.raises(ValueError, match="`rate` is None there and "):
      run(seed=0, shape=(2, 3), rate=0.1)
    assert run(seed=0, shape=(2, 3)) == records


def test_a_run_ends_where_all_machines_are_away_for_good(tmp_path):
  pytest.importorskip("orbax.checkpoint")
  # Two and seven tasks of 0.1 s.
  machines = cluster.Cluster(
    tuple(
      cluster.Node(name, outages=(cluster.Outage(after_s),))
      for name, after_s in (("a", 0.25), ("b", 0.75))
    )
  )
  told = "away for good after update 9 at 1.75 s, before 12 updates"
  with training.Checkpoints(tmp_path, collectives.workers(1)) as checkpoints:
    for _ in range(2):  # Nor is there more once it goes on.
      with pytest.warns(RuntimeWarning, match=told):
        records = server.VirtualTrainer(make(machines=machines)).fit(
          12, every=2, checkpoints=checkpoints
        )
      assert [x.step for x in records] == [2, 4, 6, 8, 9]
  # Seconds go by without anybody.
  (record,) = server.VirtualTrainer(make(machines=machines)).fit(9, "seconds")
  assert record.step == 9


def diverging(first_bad):
  """SGD whose updates are infinite from a count on."""
  return optax.chain(
    gradients.SGD,
    optax.scale_by_schedule(lambda n: jnp.where(n < first_bad, 1.0, jnp.inf)),
  )


def test_states_that_are_not_finite_are_not_saved(tmp_path):
  pytest.importorskip("orbax.checkpoint")

  def fit(first_bad):
    run = server.VirtualTrainer(make(diverging(first_bad)))
    with warnings.catch_warnings(record=True) as told:
      warnings.simplefilter("always")
      records = run.fit(12, every=4, checkpoints=checkpoints)
    return records, [str(x.message) for x in told]

  bad = "The state after update {} is not finite and was not saved: {}."
  with training.Checkpoints(tmp_path, collectives.workers(1)) as checkpoints:
    # The server's own updates are infinite: it then refuses what workers push.
    records, told = fit(2)
    assert set(told[:-1]) == {bad.format(4, "there is no checkpoint")}
    assert "were refused again and again after update 4" in told[-1]
    assert records[-1].diverged and checkpoints.latest_step() is None
    records, told = fit(5)
    assert not records[0].diverged and records[-1].diverged
    assert told[0] == bad.format(records[1].step, "the last checkpoint stays")
    kept = checkpoints.latest_step()
    # Once more: from update 4 on.
    again, told = fit(5)
    assert [x.step for x in again] == [x.step for x in records]
    assert again[0] == records[0] and checkpoints.latest_step() == kept
  whole = make()
  whole.run(updates=4)
  assert whole.events == kept


def test_learners_that_are_not_finite_are_not_saved(tmp_path):
  pytest.importorskip("orbax.checkpoint")
  machines = cluster.workers([2.0, 1.0])
  learner = server.FragmentLearner(
    gradients.LOSS,
    optax.sgd(1e30),
    gradients.MODEL.params,
    data.SampleStream(gradients.DIGITS, 2, seed=0),
    workers=machines.names,
  )
  protocol = server.DecoupledDiLoCo(
    batches=server.FixedBatches(10), interval=2, parts=learner.server.parts
  )
  run = server.Simulation(
    machines,
    protocol,
    cluster.Profile(seconds_per_sample=0.01),
    learner=learner,
  )
  with training.Checkpoints(tmp_path, collectives.workers(1)) as checkpoints:
    with warnings.catch_warnings(record=True) as told:
      warnings.simplefilter("always")
      (record,) = server.VirtualTrainer(run).fit(2, checkpoints=checkpoints)
    assert "was not saved: there is no check" in str(told[0].message)
    assert record.diverged and checkpoints.latest_step() is None
    assert run.refused == {"nan": 6}
