"""H-PS with gradients: equations by hand, messages, and resumed runs."""

import itertools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import cluster, codecs, data, server
from jdist.server.gradients import _gradient_messages, _packed
from jdist.server.h_ps import _bit_plans
from tests.server import test_gradients as gradients

pytest.importorskip("simpy")

EXACT = {"plans": None}


@pytest.mark.parametrize(
  ("size", "bits"),
  [
    # 12 bytes are fewer than the 17 or 18 of a code and a scale for each.
    (1, ((32, 32, 32),)),
    # As many bytes in 16 bits as in 32.
    (8, ((32, 32, 32), (16, 8, 16), (16, 4, 16))),
  ],
)
def test_plans_count_the_scales_of_their_blocks(size, bits, monkeypatch):
  monkeypatch.setattr(_bit_plans, "_relative_error", lambda *_: 0.0)
  tree = dict.fromkeys("abc", jnp.ones((size, size)))
  found = server.fit_bit_plans(tree, block=2)
  assert (found.bits, found.block) == (bits, 2)


def test_tensors_are_rounded_by_random_numbers_of_their_own(monkeypatch):
  keys = []
  monkeypatch.setattr(
    _bit_plans,
    "_relative_error",
    lambda codec, leaf, key: keys.append(key) or 1,
  )
  for seed in (0, 1):
    server.fit_bit_plans({"a": jnp.ones(2), "b": jnp.ones(2)}, seed=seed)
  assert len({tuple(jax.random.key_data(x).tolist()) for x in keys}) == 4


def test_zeros_are_exact_in_few_bits():
  codec, key = codecs.Quantize(4, 64), jax.random.key(0)
  assert _bit_plans._relative_error(codec, jnp.zeros(3), key) == 0.0


def test_exact_messages_in_turn_match_synchronous_sgd():
  options = {"tasks": False, "pipelined": False, **EXACT}
  learner, run = gradients.learn(server.h_ps(32, **options), [1.0] * 4, 10)
  assert set(run.staleness) == {0}
  chex.assert_trees_all_close(
    learner.model.params, gradients.synchronous(4, 8, 10), rtol=1e-6, atol=1e-6
  )


def _halved(update):
  return 0.02 / 2**update


@pytest.mark.parametrize(
  "step",
  (
    None, server.LocalStep(0.02), server.LocalStep(0.02, 0.7),
    server.LocalStep(_halved), server.LocalStep(0.02, 0.7, nesterov=True),
  ),
)  # fmt: skip
def test_pipeline_matches_updates_by_hand(step):
  """Gradients are of one update before, and a local step further."""
  rate, workers, each = 0.01, 2, 4
  learner, _ = gradients.learn(
    server.h_ps(workers * each, tasks=False, **EXACT),
    [1.0] * workers, 5, optimizer=optax.sgd(rate),
    loss_fn=gradients.linear, params=jnp.array(0.0), local_step=step,
  )  # fmt: skip
  samples = data.SampleStream(gradients.DIGITS, workers, seed=0)

  def slope(w, start):
    x = samples.batch(0, start, each)["label"]
    return np.mean(2 * x * (w * x - 1.0))

  # Two tasks each in the beginning, then one each after each update.
  starts = {0: (0, 8), 1: (4, 12)}
  starts |= {k: (8 * k, 8 * k + 4) for k in range(2, 5)}
  updated, last, velocity = [0.0], [0.0, 0.0], 0.0
  for k in range(5):
    read = updated[max(k - 1, 0)]
    before = updated[max(k - 2, 0)]
    points = [read] * workers
    if step is not None:
      local = step.rate(max(k - 1, 0)) if callable(step.rate) else step.rate
      mu, moved = step.momentum, read - before
      velocity = (moved + mu * velocity) / (1 + mu)
      ahead = mu * moved, local
      if step.nesterov:
        ahead = mu**2 * velocity, (1 + mu) * local
      points = [read + ahead[0] - ahead[1] * g for g in last]
    last = [slope(w, s) for w, s in zip(points, starts[k], strict=True)]
    updated.append(updated[-1] - rate * np.mean(last))
  np.testing.assert_allclose(learner.model.params, updated[-1], rtol=1e-5)


@pytest.mark.parametrize("nesterov", (False, True))
def test_one_worker_foresees_its_server(nesterov):
  """Its pipeline then makes the updates of a worker that waits."""
  optimizer = optax.sgd(0.05, momentum=0.9, nesterov=nesterov)
  foreseen = server.LocalStep(0.05, 0.9, nesterov)
  ends = {}
  for pipelined, step in ((False, None), (True, foreseen), (True, None)):
    protocol = server.h_ps(8, tasks=False, pipelined=pipelined, **EXACT)
    learner, _ = gradients.learn(
      protocol, [1.0], 12, optimizer=optimizer, local_step=step
    )
    ends[pipelined, step] = learner.model.params
  chex.assert_trees_all_close(
    ends[True, foreseen], ends[False, None], rtol=1e-4, atol=1e-5
  )
  with pytest.raises(AssertionError):
    chex.assert_trees_all_close(
      ends[True, None], ends[False, None], rtol=1e-2, atol=1e-3
    )


def test_messages_have_the_bytes_of_their_plans():
  tree = {
    "a": jnp.ones((10, 13)), "b": jnp.ones(7), "c": jnp.ones((64, 3)),
  }  # fmt: skip
  plans = server.BitPlans(
    ((32, 32, 32), (16, 32, 16), (8, 16, 4), (4, 16, 4)), (130, 7, 192)
  )
  for plan in range(4):
    codec = _bit_plans.plan_codec(plans, plan)
    assert codec.num_bytes(tree) == plans.num_bytes(plan)
  assert server.BitPlans().share(2) == pytest.approx(
    codecs.Quantize(8, 64).num_bits(jnp.zeros(1 << 20)) / (32 << 20), rel=1e-4
  )


def test_parameters_of_a_worker_follow_the_server():
  """The residual of a pull is sent by the next ones."""
  plans = server.message_plans(plans=server.BitPlans(((32,), (4,)), (256,)))
  codec = plans.pull[1]
  params = jax.random.normal(jax.random.key(0), (256,))
  held, state = jnp.zeros(256), codec.init(params)
  encode = _gradient_messages.encode_pull(codec, False)
  receive = _gradient_messages.receive_pull(codec)
  errors = []
  for _ in range(6):
    message, state = encode(params, held, state, {})
    held, _ = receive(message, held)
    errors.append(float(jnp.abs(params - held).max()))
  # Each leaves less than a step, of which there are 7 in the largest entry.
  assert all(b < a / 5 for a, b in itertools.pairwise(errors))


def test_an_error_limit_keeps_bits():
  x = jax.random.normal(jax.random.key(0), (64, 64))
  tree = {name: {"w": x} for name in ("first", "inner", "last")}
  wide = server.fit_bit_plans(tree, error_limit=0.5)
  assert wide.bits == (
    (32, 32, 32), (16, 16, 16), (16, 8, 16), (16, 4, 16),
  )  # fmt: skip
  assert server.fit_bit_plans(tree, error_limit=1e-3).bits[1:] == (
    (16, 16, 16),
  )
  assert server.fit_bit_plans(tree, error_limit=1e-7).bits == ((32, 32, 32),)


def test_plans_of_small_tensors_take_fewer_and_fewer_bytes():
  one, x = jnp.ones(()), jax.random.normal(jax.random.key(0), (64, 64))
  # A number has 4 bytes, and in 16 bits 2 and 4 for its scale.
  assert server.fit_bit_plans({"a": one, "b": one}).bits == ((32, 32),)
  assert server.fit_bit_plans({"a": one, "b": one, "x": x}).bits[:2] == (
    (32, 32, 32), (16, 16, 16),
  )  # fmt: skip


def test_a_tensor_that_is_not_finite_keeps_its_bits():
  x = jax.random.normal(jax.random.key(0), (64, 64))
  for wrong in (jnp.nan, jnp.inf):
    tree = {"first": x, "inner": x.at[3, 4].set(wrong), "last": x}
    assert server.fit_bit_plans(tree, error_limit=0.5).bits == (
      (32, 32, 32), (16, 32, 16),
    )  # fmt: skip


def _plans():
  sizes = tuple(x.size for x in jax.tree.leaves(gradients.MODEL.params))
  return server.BitPlans(((32,) * 4, (16, 4, 16, 4)), sizes, 64)


def start(plans, away=()):
  link = cluster.Link(8 * 4e4)
  machines = cluster.Cluster(
    (
      cluster.Node("a", speed=2.0, jitter=0.3),
      cluster.Node("b", jitter=0.3),
      cluster.Node("c", outages=away),
    ),
    cluster.star(dict.fromkeys("abc", link), "server"),
  )
  learner = server.GradientLearner(
    gradients.LOSS, gradients.SGD, gradients.MODEL.params,
    data.SampleStream(gradients.DIGITS, 3, seed=0),
    workers=machines.names, plans=plans, sizes=[32],
    local_step=server.LocalStep(0.05, 0.5, nesterov=True),
  )  # fmt: skip
  costs = cluster.Profile(
    seconds_per_sample=0.01, push_bytes=4800, pull_bytes=4800
  )
  return server.Simulation(
    machines, server.h_ps(30, plans=plans), costs, seed=1, learner=learner,
    detection_s=0.1,
  )  # fmt: skip


@pytest.mark.slow
def test_few_bits_learn_as_well_as_exact_messages():
  losses = []
  for plans in (None, _plans()):
    run = start(plans)
    run.run(updates=50)
    losses.append(float(np.mean([x for _, x in run.learner.losses][-20:])))
  assert set(run.state.plans.values()) == {1}
  assert run.pushed_bytes < 4800 * 3 * 50 / 4
  assert losses[0] < 1.6 and losses[1] < 1.3 * losses[0]
  # A copy of the parameters for each worker.
  for held in run.learner.server._held.values():
    own = _packed.unpack(held)
    chex.assert_trees_all_equal_shapes(own, run.learner.model.params)


@pytest.mark.slow
def test_resumed_run_ends_with_the_same_bits(tmp_path):

  def begin():
    return start(_plans(), (cluster.Outage(0.7, 1.2),))

  whole = begin()

  def fit(run, total, **options):
    session = server.ClockSession(run)
    return server.ServerRun(session).fit(total, every=6, **options)

  records = fit(whole, 18)
  fit(begin(), 12, checkpoints=tmp_path)
  resumed = begin()
  found = fit(resumed, 18, checkpoints=tmp_path)
  assert found == records and whole.now_s > 1.3
  assert resumed.events == whole.events
  chex.assert_trees_all_equal(resumed.save(), whole.save())


def vector_run(protocol, **options):
  """Returns a run of a vector's regression, on links that take time."""
  link = cluster.Link(8e3)
  nodes = cluster.Node("a", speed=2.0), cluster.Node("b")
  machines = cluster.Cluster(
    nodes, cluster.star(dict.fromkeys("ab", link), "server")
  )
  costs = cluster.Profile(
    seconds_per_sample=0.1, push_bytes=256, pull_bytes=256
  )

  def batch(worker, start, count, *, size=None):
    x = np.random.default_rng(start).normal(size=(size or count, 64))
    mask = np.float32(np.arange(size or count) < count)
    return {"x": np.float32(x), "mask": mask}

  samples = types.SimpleNamespace(shared=True, batch=batch)
  learner = server.GradientLearner(
    vector_loss, optax.sgd(0.02, momentum=0.5), jnp.zeros(64), samples,
    workers=["a", "b"], **options,
  )  # fmt: skip
  return server.Simulation(machines, protocol, costs, learner=learner)


def vector_loss(w, model_state, batch, key):
  del key
  errors = batch["mask"] * jnp.square(batch["x"] @ w - batch["x"].sum(-1))
  return errors.sum() / batch["mask"].sum(), (model_state, {})


PLANS = server.BitPlans(((32,), (4,)), (64,), 64)


@pytest.mark.parametrize(
  ("protocol", "options"),
  [
    (
      server.h_ps(8, plans=PLANS, tasks=False),
      {"plans": PLANS, "local_step": server.LocalStep(0.02, 0.5)},
    ),
    (
      server.ASP(batches=server.FixedBatches(4)),
      {"compensation": 0.5},
    ),
  ],
  ids=["what workers hold", "what tasks were sent"],
)
def test_save_holds_all_that_later_updates_depend_on(protocol, options):
  whole, resumed = (vector_run(protocol, sizes=[4], **options) for _ in "ab")
  whole.run(updates=5)
  saved = whole.save()
  resumed.resume(*saved)
  chex.assert_trees_all_equal(resumed.save(), saved)
  for run in (whole, resumed):
    run.run(updates=9)
  chex.assert_trees_all_equal(resumed.save(), whole.save())
  assert set(whole.state.plans.values()) == {1} if "plans" in options else True
