"""Shards of a server as Ray's actors: the same bits, and one that is killed."""

import functools
import os
import signal

import jax
import numpy as np
import pytest

from jdist import server
from tests.server import _live_runs, test_ray_engine
from tests.server import test_live_gradients as live

pytestmark = [test_ray_engine.needs_ray, pytest.mark.slow]
PLANS = server.message_plans()


def make_server(plan):
  return server.LiveServer(live.SSP, live.gradient_server(PLANS), plan)


def work(name, channel):
  learner = live.gradient_worker(PLANS, name)
  learner.prepare()
  server.WorkerLoop(channel, name, learner, depth=live.SSP.depth).run()


def run(engine, updates, record=None, **options):
  """Trains with two shards; returns the result, and the models at marks."""
  models = []
  result = _live_runs.run(
    engine, make_server,
    {name: functools.partial(work, name) for name in live.NAMES}, updates,
    plan=server.LivePlan(workers=live.NAMES, shards=2, record=record),
    model=(live.MODEL.params, {}),
    evaluate=lambda model: models.append(model) or {}, **options,
  )  # fmt: skip
  return result, models


def test_shards_on_ray_are_replayed_killed_and_back(tmp_path):
  before, record = test_ray_engine.left_behind(), str(tmp_path / "record")
  # Bits are those of one compiler's flags.
  flags = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", ""), "JAX_PLATFORMS": "cpu"}
  engine = server.RayEngine(2, cpus_per_worker=0.25, environment=flags)
  killed = []

  def on_status(status):
    if not killed and status["updates"] > 25:
      killed.append(status["updates"])
      os.kill(engine.process_of("server-2"), signal.SIGKILL)

  try:
    _, models = run(engine, 10, record)
    one = live.gradient_server(PLANS)
    assert server.replay(record, live.SSP, one).state.version == 10
    jax.tree.map(
      np.testing.assert_array_equal, models[-1].params, one.model.params
    )
    result, models = run(
      engine, 2000, every=20, checkpoints=str(tmp_path / "kept"),
      on_status=on_status,
    )  # fmt: skip
    kinds = [(x["kind"], x["worker"]) for x in result.events]
    assert kinds == [("lost", "server"), ("back", "server")]
    assert result.summary["updates"] == 2000
    killed.clear()
    with pytest.raises(server.LostRunError, match="there are no checkpoints"):
      run(engine, 2000, on_status=on_status)
  finally:
    engine.stop()
  assert test_ray_engine.left_behind() == before
