"""Workers with a pipeline each, whose codecs see each stage's own leaves."""

import jax
import numpy as np
import optax
import pytest

import jdist
from jdist import (
  codecs,
  collectives,
  methods,
  pipeline,
  reducers,
  training,
  transforms,
)
from jdist.transforms import intervals
from tests import _refusals
from tests.pipeline.runtime import _small_models as small
from tests.pipeline.runtime import _training

_WORKERS, _COUNT, _STEPS = 2, 2, 20
_SIZES = {"equal": small.SIZES, "uneven": (8, 12, 16, 12, 8)}
_CUTS = {"equal": [2], "uneven": [1]}


def _sgd():
  return optax.sgd(0.05, momentum=0.9)


def _feedback(reducer):
  return reducers.Compression(reducer, reducers.ErrorFeedback())


def _int4():
  return _feedback(reducers.compressed(codecs.Quantize(4, 32)))


def _gradients(reducer):
  return lambda axis: jdist.ssgd(
    _sgd(), axis=axis, compression=_feedback(reducer)
  )


_METHODS = {
  "ssgd": lambda axis: jdist.ssgd(_sgd(), axis=axis),
  "powersgd": _gradients(reducers.PowerSGD(2)),
  "int4": lambda axis: jdist.ssgd(_sgd(), axis=axis, compression=_int4()),
  # In an all-to-all small leaves share a bucket, whose rows draw numbers.
  "qsgd": _gradients(
    reducers.compressed(
      codecs.Quantize(4, 32, rounding="stochastic"), wire="gather"
    )
  ),
  "top-k": _gradients(reducers.compressed(codecs.TopK(0.1))),
  "random-k": _gradients(
    reducers.compressed(codecs.RandomK(0.1, scaled=False))
  ),
  "sign": _gradients(reducers.compressed(codecs.Sign())),
  "per leaf": _gradients(
    reducers.PerLeaf(
      [reducers.Rule(reducers.PowerSGD(1), path="*dense1*")],
      # Sums in another order differ by 1e-7. Of 8 bits that flips a rounding
      # in one of a few runs, of 4 bits 18 times as rarely.
      reducers.compressed(codecs.Quantize(4, 32)),
    )
  ),
  "local_sgd": lambda axis: jdist.local_sgd(_sgd(), 4, axis=axis),
  "diloco int4": lambda axis: jdist.diloco(
    _sgd(), interval=4, axis=axis, compression=_int4()
  ),
  "msdpu": lambda axis: methods.msdpu(
    _sgd(),
    intervals.fixed(4),
    0.1,
    axis=axis,
    overlap=transforms.Delayed(carry=None, stream=transforms.Stream()),
  ),
  "muon": lambda axis: jdist.local_sgd(optax.contrib.muon(0.02), 4, axis=axis),
}


def _unsplit(name, shape, batches, team=None):
  layers = small.layers(_SIZES[shape], statistics=True)
  team = team or collectives.workers(_WORKERS, substrate="vmap")
  optimizer = _METHODS[name](team.axis)
  state = training.init_state(team, optimizer, *small.merged(layers))
  step = training.make_step(
    small.whole_loss(layers), optimizer, axis=team.axis, accumulate=_COUNT
  )
  step, losses = team.jit(step), []
  for batch in batches:
    state, metrics = step(state, team.place(batch))
    losses.append(np.mean(metrics["loss"]))
  return (state.params, state.model_state), losses


def _train(name, shape, batches, table, substrate="vmap", **options):
  team = collectives.workers(_WORKERS, substrate=substrate)

  def work(process, _):
    state = process.init_state(_METHODS[name](team.axis))
    state, metrics = process.run(state, batches)
    return process.gather(state), [x["loss"] for x in metrics]

  return _training.processes(
    small.layers(_SIZES[shape], statistics=True), table, work, _SIZES[shape],
    cuts=_CUTS[shape], team=team, **options,
  )[0]  # fmt: skip


@pytest.mark.parametrize(
  ("name", "shape", "table"),
  [
    pytest.param(name, shape, table, marks=pytest.mark.slow)
    if (name, shape, table) != ("ssgd", "uneven", "1f1b")
    else (name, shape, table)
    for name in _METHODS
    for shape in _SIZES
    for table in ("1f1b", "zb_h1")
  ],
)
def test_workers_with_stages_match_those_with_whole_models(name, shape, table):
  batches = small.batches(
    _STEPS, _WORKERS, _training.MICRO * _COUNT, _SIZES[shape]
  )
  made = pipeline.make_table(table, 2, _COUNT)
  promotion = "standard" if name == "muon" else "strict"  # Optax's Muon mixes.
  found, losses = _train(name, shape, batches, made, promotion=promotion)
  with jax.numpy_dtype_promotion(promotion):
    wanted, wanted_losses = _unsplit(name, shape, batches)
  np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
  assert small.error(found, wanted) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("table", ["1f1b", "zb_h1"])
def test_stages_over_several_devices_match_whole_models(workers, table):
  shape = _SIZES["uneven"]
  layers = small.layers(shape, statistics=True)
  mesh = collectives.make_mesh((workers, 2), ("worker", "fsdp"))
  team = collectives.workers(workers, mesh=mesh)
  split = jax.sharding.PartitionSpec(None, "fsdp")
  specs = {x.name: {"w": split} for x in layers}
  batches = small.batches(5, workers, _training.MICRO * _COUNT, shape)

  def work(process, _):
    state = process.init_state(_METHODS["local_sgd"](team.axis), specs=specs)
    state, metrics = process.run(state, batches)
    state, more = process.run(state, batches)
    # Each device still has half of every matrix.  The compiler may split the
    # statistics, too, for which a program compiles once more; and it leaves
    # an axis of one worker out of a sharding, which JAX takes for another.
    for w in jax.tree.leaves(state.params):
      assert w.addressable_shards[0].data.size * 2 * workers == w.size
    for x in process._part.programs.values():
      assert x._forward_program._cache_size() <= 2 + (workers == 1)
    return process.gather(state), [x["loss"] for x in metrics + more]

  found, losses = _training.processes(
    layers, pipeline.make_table(table, 2, _COUNT), work, shape,
    cuts=_CUTS["uneven"], team=team,
  )[0]  # fmt: skip
  whole = collectives.workers(workers, substrate="vmap")
  wanted, wanted_losses = _unsplit("local_sgd", "uneven", batches * 2, whole)
  np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
  assert small.error(found, wanted) < 1e-5


def test_a_team_refuses_what_it_cannot_do():
  made = pipeline.make_table("1f1b", 2, _COUNT)
  batches = small.batches(1, 3, _training.MICRO * _COUNT)
  with _refusals.refused("batches", "for each of 2 workers, got an array"):
    _train("ssgd", "equal", batches, made)


def test_clipping_over_all_stages_of_a_team_is_refused(monkeypatch):
  clipped = lambda axis: optax.chain(  # noqa: E731
    optax.clip_by_global_norm(1.0), jdist.ssgd(_sgd(), axis=axis)
  )
  monkeypatch.setitem(_METHODS, "clipped", clipped)
  made = pipeline.make_table("1f1b", 2, _COUNT)
  batches = small.batches(1, _WORKERS, _training.MICRO * _COUNT)
  with _refusals.refused("optimizer", "see the leaves of one stage only"):
    _train("clipped", "equal", batches, made)
