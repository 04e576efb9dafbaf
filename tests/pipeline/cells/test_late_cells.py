"""Tables without a flush equal delayed gradients on one device, fixed or not.

A loss shows the parameters that its gradient was taken at, and the parameters
at the end, when nothing is under way, all updates.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import collectives, pipeline, training, transforms
from tests._thinned import thinned
from tests.pipeline.processes._threads import in_threads
from tests.pipeline.runtime import _small_models as small

_MICRO, _ITERATIONS = 3, 12
_SGD = optax.sgd(0.1, momentum=0.9)
# Each takes the delay of a leaf, or a tree of them.
_FIXES = {
  "none": lambda delay: _SGD,
  "prediction": lambda delay: transforms.predict_weights(_SGD, delay),
  # Reads the parameters to which a late gradient is applied.
  "decay": lambda delay: optax.chain(optax.add_decayed_weights(0.1), _SGD),
}
# Of three stages: micro-batches and each stage's delay.
_TABLES = {
  "pipedream": (1, (2, 1, 0), {}),
  "2bw": (4, (1, 1, 1), {}),
  "ours": (2, (2, 2, 2), {"window": 3}),
}
_SIZES = small.UNLIKE[:4]


def _layers(table):
  # In one program, alike: stacked and packed ones are both here.
  return small.layers(small.SIZES[:4] if table == "ours" else _SIZES)


def _batches(table):
  sizes = small.SIZES[:4] if table == "ours" else _SIZES
  count = _TABLES[table][0]
  return small.batches(_ITERATIONS, 1, _MICRO * count, sizes)


def _microbatch(table):
  count = _TABLES[table][0]
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((_MICRO, *x.shape[2:]), jnp.float32),
    _batches(table)[0] if count else None,
  )


@functools.cache
def _delayed(table, fix):
  """Parameters at the end and losses, of one device."""
  count, delays, _ = _TABLES[table]
  layers = _layers(table)
  params, state = small.merged(layers)
  by_leaf = {
    layer.name: delay for layer, delay in zip(layers, delays, strict=True)
  }
  steps = delays[0] if len(set(delays)) == 1 else by_leaf
  optimizer = transforms.delay_gradients(_FIXES[fix](steps), steps)
  team = collectives.workers(1, substrate="none")
  whole = training.init_state(team, optimizer, params, state)
  step = team.jit(
    training.make_step(
      small.whole_loss(layers), optimizer, axis=None, accumulate=count
    )
  )
  losses = []
  for batch in _batches(table):
    whole, metrics = step(whole, team.place(batch))
    losses.append(float(metrics["loss"][0]))
  one = jax.tree.map(lambda x: x[0], whole)
  params, _ = transforms.drain(optimizer, one.opt_state, one.params)
  return params, np.asarray(losses)


def _processes(name, fix):
  count, delays, options = _TABLES[name]
  options = options | {"num_iterations": _ITERATIONS}
  table = pipeline.make_table(name, len(delays), count, **options)
  assert pipeline.check_table(table).delays == delays
  stages = pipeline.cut_layers(_layers(name), len(delays))
  batches = [jax.tree.map(lambda x: x[0], x) for x in _batches(name)]

  def work(peers):
    process = pipeline.StageProcess(
      stages, small.loss, table, _microbatch(name), peers=peers, inputs="x"
    )
    # A device has one stage, and its delay.
    state = process.init_state(_FIXES[fix](delays[peers.device]))
    state, metrics = process.run(state, batches)
    return process.gather(state)[0], [x["loss"] for x in metrics]

  return in_threads(len(delays), work)[0]


@pytest.mark.parametrize(
  ("name", "fix"), thinned(tuple(_TABLES), tuple(_FIXES))
)
def test_processes_equal_delayed_gradients(name, fix):
  params, losses = _processes(name, fix)
  wanted, wanted_losses = _delayed(name, fix)
  assert small.error(params, wanted) < 1e-6
  np.testing.assert_allclose(losses, wanted_losses, rtol=1e-6)
  if fix != "none":  # It is another training.
    assert small.error(wanted, _delayed(name, "none")[0]) > 1e-3


def _one_program(name, fix):
  count, delays, options = _TABLES[name]
  table = pipeline.make_table(name, len(delays), count, **options)
  pipe = pipeline.OneProgram(
    pipeline.cut_layers(_layers(name), len(delays)),
    small.loss,
    table,
    _microbatch(name),
    inputs="x",
    late_sends=False,
  )
  assert {pipe.grid.delay} == set(delays)
  kinds = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((1, 3), ("worker", "stage"), axis_types=kinds)
  team = collectives.workers(1, mesh=mesh)
  optimizer = _FIXES[fix](pipe.grid.delay)
  state = pipe.init_state(team, optimizer)
  step = team.jit(
    pipe.make_step(optimizer, axis=team.axis),
    out_specs=(team.specs(state), None),
  )
  losses = []
  for batch in _batches(name):
    state, metrics = step(state, team.place(batch))
    losses.append(float(metrics["loss"][0]))
  state = team.jit(pipe.make_drain(optimizer, axis=team.axis))(state)
  parts = jax.tree.map(lambda x: x[0], (state.params, state.model_state))
  return pipe.split(*parts)[0], np.asarray(losses), pipe.grid.behind


@pytest.mark.parametrize(
  ("name", "fix"),
  [
    pytest.param(name, fix, marks=pytest.mark.slow)
    for name in ("2bw", "ours")
    for fix in _FIXES
  ],
)
def test_one_program_equals_delayed_gradients(name, fix):
  params, losses, behind = _one_program(name, fix)
  wanted, wanted_losses = _delayed(name, fix)
  assert small.error(params, wanted) < 1e-6
  kept = len(losses) - behind
  np.testing.assert_allclose(losses[behind:], wanted_losses[:kept], rtol=1e-6)
