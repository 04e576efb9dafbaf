"""Refusals of protocols and their runs: an argument and its rule."""

import math
import pathlib
import tempfile
import types

import jax.numpy as jnp
import optax

from jdist import cluster, codecs, data, reducers, server
from jdist.server import _allocation
from jdist.server.h_ps import _bit_plans
from jdist.server.runtime import _delivery
from tests import _refusals
from tests.server import test_gradients as gradients
from tests.server import test_h_ps_gradients as h_ps
from tests.server import test_server_run as runs
from tests.server import test_simulation as simulation


def learner(**change):
  given = {
    "loss_fn": gradients.LOSS,
    "optimizer": gradients.SGD,
    "params": gradients.MODEL.params,
    "samples": data.SampleStream(gradients.DIGITS, 2, seed=0),
    "workers": ["a", "b"],
  }
  return server.GradientLearner(**(given | change))


def worker(**options):
  return server.GradientWorker(
    gradients.LOSS,
    gradients.MODEL.params,
    data.SampleStream(gradients.DIGITS, 2, seed=0),
    server.message_plans(),
    **{"number": 0, "num_workers": 1} | options,
  )


def fit(*args, **options):
  return runs.fit(*args, **options)


def batches(**options):
  return server.SpeedBatches(8, **options)


def plans(*bits):
  return server.BitPlans(bits=bits)


def batch_of_32(**options):
  return gradients.learn(server.dbs(64), [1.0, 1.0], 1, **options)


def codec_for_each(leaves):
  two = server.BitPlans(((32, 32),), (4, 4))
  return _bit_plans.plan_codec(two, 0).init(leaves)


def without_learner():
  protocol = server.ASP(batches=server.FixedBatches(1))
  run = server.Simulation(
    cluster.workers([1.0]), protocol, cluster.Profile(1.0)
  )
  return server.ClockSession(run)


def fit_again():
  run = server.ServerRun(server.ClockSession(runs.make()))
  run.fit(1)
  run.fit(2)


def replay_of(*lines):
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "messages"
    path.write_text("".join(f"{x}\n" for x in lines))
    return server.replay(path, server.ASP(), server.EmptyServer())


make = simulation.simulation
shares = _allocation.largest_remainder
LOOKAHEAD = optax.lookahead(optax.sgd(0.1), 2, 0.5)
TREE = {name: {"w": jnp.ones((8, 8))} for name in "abc"}
STATE = server.ASP().init("a")
MESSAGE = reducers.MessageCodec(codecs.Cast("bfloat16"))
BEGIN = '{"kind": "begin", "names": ["a"], "workers": ["a"]}'
PULL = '{"kind": "Pull", "now_s": 0.0, "message": ["a"], "more": null}'
SHARED = codecs.RandomK(0.1, shared=True)
SCALED = codecs.RandomK(0.1, shared=False)


@_refusals.table(
  # Protocols.
  ("backups", lambda: server.BSP(backups=-1), "an int >= 0"),
  ("restart_s", lambda: server.BSP(restart_s=-1.0), "in [0, inf]"),
  ("bound", lambda: server.SSP(bound=-1), "an int >= 0"),
  ("n", lambda: server.NSoftsync(n=0), "an int >= 1"),
  ("max_staleness", lambda: server.Ringmaster(max_staleness=0), "an int >= 1"),
  ("total", lambda: server.dbs(0), "an int >= 1"),
  ("timeout_s", lambda: server.ASP(timeout_s=0.0), "in (0, inf]"),
  ("timeout_s", lambda: server.ASP(timeout_s="3"), "a finite number"),
  ("updates", lambda: make().run(updates=-1), "in [0, inf]"),
  ("seconds", lambda: make().run(seconds="x"), "a number in"),
  ("limits", lambda: server.dbs(8, limits={"a": 0}), "an int >= 1"),
  (
    "limits",
    lambda: server.dbs(12, minimum=5, limits={"a": 3, "b": None}),
    "an int >= 5",
  ),
  ("batches", lambda: server.ASP(batches=32), "an allocation"),
  (
    "weighting",
    lambda: server.ASP(weighting="linear"),
    "a `server.Weighting`",
  ),
  ("samples", lambda: server.Weighting("quadratic"), "'none', 'linear' or"),
  ("parts", lambda: server.Weighting(parts={"a": 0.0}), "positive"),
  (
    "parts",
    lambda: server.Weighting(parts={"a": 1.0}).share(1, 1.0, "b"),
    "name every worker, got none for 'b'",
  ),
  (
    "learner",
    lambda: simulation.simulation(
      (1.0, 1.0),
      learner=server.Pair(
        server.EmptyServer(), {"worker0": server.EmptyWorker()}
      ),
    ),
    "a learner for each machine, got none for ['worker1']",
  ),
  (
    "driver",
    lambda: _delivery.Delivery.load(
      types.SimpleNamespace(_kinds=lambda: {"now_s": float}), {"other": 1}
    ),
    "an object of now_s, and is not",
  ),
  ("parts", lambda: server.Weighting(parts={"a": math.inf}), "finite"),
  ("staleness", lambda: server.Weighting(staleness="inverse"), "a function"),
  ("smoothing", lambda: batches(smoothing=1.0), "in [0, 1)"),
  ("minimum", lambda: batches(minimum=0), "an int >= 1"),
  ("maximum", lambda: batches(minimum=4, maximum=2), "an int >= 4"),
  ("period", lambda: batches(period=0), "an int >= 1"),
  ("workers", lambda: server.ASP().init(["a", "a"]), "differ"),
  (
    "message",
    lambda: server.ASP().receive(STATE, 0.0, "Pull"),
    "a Join, Leave",
  ),
  # Allocations.
  ("shares", lambda: shares([1.0, 0.0], 4), "positive"),
  ("total", lambda: shares([1.0, 1.0], 1, minimum=1), "2 and inf"),
  ("total", lambda: shares([1.0, 1.0], 9, maximum=4), "0 and 8"),
  ("total", lambda: shares([], 1), "0 and 0"),
  # H-PS.
  ("total", lambda: server.h_ps(0), "an int >= 1"),
  ("smoothing", lambda: server.h_ps(8, smoothing=1.0), "in [0, 1)"),
  ("slack", lambda: server.h_ps(8, slack=0.0), "in (0, 1]"),
  ("limits", lambda: server.h_ps(8, limits={"a": -3}), "an int >= 1"),
  ("pipelined", lambda: server.h_ps(8, pipelined="no"), "True or False"),
  ("block", lambda: server.BitPlans(block=0), "an int >= 1"),
  *(
    ("bits", lambda bits=bits: server.BitPlans(bits=((32,), bits)), said)
    for bits, said in (((12,), "of (32, 16, 8, 4)"), ((8, 8), "each of 1 ten"))
  ),
  (
    "parts",
    lambda: server.DecoupledDiLoCo(fragments=2, parts=(0.0, 0.0)),
    "not all of them 0",
  ),
  ("pipelined_from", lambda: server.h_ps(8, pipelined_from=-1), "an int >= 0"),
  (
    "pipelined_from",
    lambda: server.h_ps(8, pipelined=False, pipelined_from=3),
    "0 without `pipelined`",
  ),
  ("minimum", lambda: server.BalancedBatches(8, minimum=0), "an int >= 1"),
  (
    "batches",
    lambda: server.HPS(batches=batches()),
    "`server.BalancedBatches`",
  ),
  ("plans", lambda: server.h_ps(8, plans=(32, 8)), "a `server.BitPlans`"),
  ("bits", lambda: plans((16,), (8,)), "begin with a plan of 32 bits"),
  ("bits", lambda: plans((32,), (8, 8)), "one for each of 1 tensors"),
  ("bits", lambda: plans((32,), (8,), (16,)), "fewer and fewer bytes"),
  (
    "error_limit",
    lambda: server.fit_bit_plans(TREE, error_limit=0.0),
    "in (0, inf]",
  ),
  ("gradient", lambda: server.fit_bit_plans({}), "have a filled array, got {}"),
  (
    "gradient",
    lambda: server.fit_bit_plans({"a": jnp.ones(2, complex)}),
    "real for plans of bits, got complex64 at 'a'",
  ),
  ("codec", lambda: codec_for_each(jnp.ones(4)), "one or one for each"),
  # Messages.
  ("codec", lambda: reducers.MessageCodec(8), "a `codecs.Codec`"),
  ("codec", lambda: reducers.MessageCodec(SHARED), "a seed that all share"),
  (
    "codec",
    lambda: reducers.MessageCodec(SCALED, reducers.ErrorFeedback()),
    "scaled=False",
  ),
  (
    "feedback",
    lambda: reducers.MessageCodec(codecs.Sign(), reducers.EF21()),
    "`reducers.MomentumCorrection()` or None, as the receiver",
  ),
  (
    "seed",
    lambda: reducers.MessageCodec(codecs.Sign(), None, -1),
    "an int from 0",
  ),
  # Gradients.
  ("optimizer", lambda: learner(optimizer=0.1), "an Optax transformation"),
  ("compensation", lambda: learner(compensation=-1.0), "in [0, inf]"),
  ("workers", lambda: learner(workers=["a", "a"]), "different names"),
  ("workers", lambda: server.LivePlan(workers=("a", "a")), "different names"),
  ("workers", lambda: server.LivePlan(workers=()), "one or more"),
  ("optimizer", lambda: learner(optimizer=LOOKAHEAD), "neither pairs"),
  (
    "outer",
    lambda: server.FragmentSyncer(TREE, workers=["a"], outer=LOOKAHEAD),
    "neither pairs",
  ),
  ("seed", lambda: learner(seed=-1), "an int from 0"),
  ("seed", lambda: worker(seed=-1), "an int from 0"),
  ("plans", lambda: learner(plans=server.BitPlans()), "of the parameters' 4"),
  (
    "plans",
    lambda: learner(plans=h_ps._plans(), push_codec=MESSAGE),
    "given without",
  ),
  ("number", lambda: worker(number=1), "an int from 0 to 0"),
  ("number", lambda: worker(number=-1), "an int from 0 to 0"),
  ("num_workers", lambda: worker(num_workers=0), "an int >= 1"),
  ("local_step", lambda: learner(local_step=0.1), "`server.LocalStep`"),
  ("rate", lambda: server.LocalStep(0.0), "in (0, inf]"),
  ("momentum", lambda: server.LocalStep(0.1, 1.5), "in [0, 1"),
  ("nesterov", lambda: server.LocalStep(0.1, 0.9, 1), "True or False"),
  ("sizes", lambda: batch_of_32(sizes=[16]), "reach the largest batch"),
  (
    "samples",
    lambda: server.FragmentRunner(
      gradients.LOSS, gradients.SGD, TREE, None, number=0, num_workers=1
    ),
    "be a source of batches, got None",
  ),
  # Runs.
  ("machines", lambda: make(machines="cluster.toml"), "a `cluster.Cluster`"),
  ("protocol", lambda: make(protocol="asp"), "a `server.Protocol`"),
  ("profile", lambda: make(profile=0.1), "a `cluster.Profile`"),
  ("seed", lambda: make(seed=-1), "an int from 0"),
  ("detection_s", lambda: make(detection_s=-1.0), "in [0, inf]"),
  ("events", lambda: make().run(), "given and finite"),
  ("events", lambda: make().run(seconds=float("inf")), "given and finite"),
  ("total", lambda: fit(0), "in (0, inf]"),
  ("every", lambda: fit(5, every=-1.0), "in [5e-06, inf]"),
  ("every", lambda: fit(1e9, every=1.0), "in [1000, inf]"),
  ("unit", lambda: fit(5, "minutes"), "'updates', 'samples' or"),
  ("simulation", without_learner, "have a learner"),
  ("simulation", fit_again, "at its beginning"),
  ("learner", lambda: server.divide(learner(), 2), "a `server.GradientServer`"),
  ("count", lambda: server.divide(learner().server, 0), "an int >= 1"),
  *(
    ("path", lambda lines=lines: replay_of(*lines), "be a recording")
    for lines in (
      (),
      ('{"a": 1}',),
      ("[1]",),
      ('{"kind": "begin"}',),
      (PULL,),
      (BEGIN, BEGIN),
      (BEGIN, '{"kind": "none"}'),
      (BEGIN, '{"kind": ["Pull"]}'),
      (BEGIN, '{"kind": "sent"}'),
      (BEGIN, '{"kind": "Push", "now_s": 0.0}'),
    )
  ),
  ("session", lambda: server.ServerRun("clock"), "a `server.ClockSession`"),
)
def test_invalid_arguments_raise(argument, call, rule):
  _refusals.check(argument, call, rule)
