"""What a pipeline cannot run is refused when it is built: one clear error each.

The argument or the place, the rule, what was given.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import cluster, collectives, models, pipeline
from tests.pipeline.runtime import _small_models as small

_BATCH = {"x": jnp.ones((2, 8)), "y": jnp.ones((2, 8))}
_CYCLE = "device F0 B0 F1 B1 U\ndevice F0 F1 B0 B1 U"


def _one_program(**change):
  given = {
    "stages": pipeline.cut_layers(small.layers(), 4),
    "loss": small.loss,
    "table": pipeline.make_table("1f1b", 4, 2),
    "microbatch": _BATCH,
    "inputs": "x",
  }
  return pipeline.OneProgram(**(given | change))


def _process(**change):
  given = {
    "stages": pipeline.cut_layers(small.layers(), 1),
    "loss": small.loss,
    "table": pipeline.make_table("1f1b", 1, 2),
    "microbatch": _BATCH,
    "inputs": "x",
  }
  return pipeline.StageProcess(**(given | change))


def _two(**change):
  stages = pipeline.cut_layers(small.layers(), 2)
  return _one_program(**({"stages": stages} | change))


def _narrow():
  """Three stages, the first of which passes on fewer bits than the second."""

  def cast(dtype):
    return lambda params, state, x, **_: (x.astype(dtype), state)

  first, last = small.layers((8, 8, 8))
  narrow = models.Layer("narrow", {}, {}, cast(jnp.bfloat16))
  wide = models.Layer("wide", {}, {}, cast(jnp.float32))
  return [first, narrow, wide, last]


def _looped(**_):
  """Two layers, the second a loop, whose backward pass is in two parts."""

  def apply(params, state, x, **_):
    return jax.lax.scan(lambda x, w: (x @ w, None), x, params)[0], state

  loop = models.Layer("loop", jnp.ones((2, 8, 8)), {}, apply)
  return _process(
    stages=[small.layers()[0], loop],
    table=pipeline.parse_table("device F0/0 F0/1 I0/1 W0/1 B0/0 U/0 U/1"),
  )


def _beyond_memory():
  costs = [pipeline.LayerCost(n, 1.0, 2.0, parameter_bytes=1e10) for n in "ab"]
  machines = cluster.workers([1.0, 1.0])
  small_ones = [
    dataclasses.replace(x, memory_bytes=1e9) for x in machines.nodes
  ]
  machines = dataclasses.replace(machines, nodes=tuple(small_ones))
  return pipeline.partition(costs, machines)


def _indivisible(runtime):
  batch = {"x": np.ones((3, 8), np.float32), "y": np.ones((3, 8), np.float32)}
  if runtime == "processes":
    process = _process()
    return process.run(process.init_state(optax.sgd(0.1)), [batch])
  pipe = _one_program(
    stages=pipeline.cut_layers(small.layers(), 1),
    table=pipeline.make_table("1f1b", 1, 2),
  )
  kinds = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((1, 1), ("worker", "stage"), axis_types=kinds)
  team = collectives.workers(1, mesh=mesh)
  state = pipe.init_state(team, optax.sgd(0.1))
  batch = team.place({k: v[None] for k, v in batch.items()})
  return team.jit(pipe.make_step(optax.sgd(0.1), axis=team.axis))(state, batch)


_REFUSED = {
  "a cyclic table": (
    lambda: _two(table=pipeline.parse_table(_CYCLE)),
    r"devices wait for each other: device 0 with B0/0 for B0/1.*\n.*\|F0",
  ),
  "a cyclic table, in a process": (
    lambda: _process(
      table=pipeline.parse_table("device B0 F0 U"),
    ),
    "B0/0 comes before F0/0, which it needs",
  ),
  "too few layers": (
    lambda: pipeline.cut_layers(small.layers(), 5),
    "`cuts` must be at most the model's 4 layers, got 5 stages. Take fewer",
  ),
  "a stage beyond memory": (
    _beyond_memory,
    "No partition fits into memory: layer 'a' alone needs .* GB, and 'worker0'",
  ),
  "indivisible micro-batches": (
    lambda: _indivisible("one program"),
    r"`batch` must divide into the table's 2 micro-batches, got .* \[3, 8\]",
  ),
  "indivisible micro-batches, in a process": (
    lambda: _indivisible("processes"),
    r"`batches` must divide into the table's 2 micro-batches, got .* \[3, 8\]",
  ),
  "a scanned stage under zero bubble": (
    _looped,
    "must compute gradients .* apart, got a 'scan' that computes both. Write",
  ),
  "stages that the table does not have": (
    lambda: _one_program(table=pipeline.make_table("1f1b", 2, 2)),
    "`stages` must be the table's 2, got 4",
  ),
  "the newest weights in each pass": (
    lambda: _one_program(table=pipeline.make_table("paci", 4, 4)),
    "`table` must be synchronous, or have delayed weights and a stage on each",
  ),
  "stashed weights": (
    lambda: _one_program(table=pipeline.make_table("pipedream", 4, 1)),
    "`table` must be synchronous, or have delayed weights and a stage on each",
  ),
  "several iterations of a synchronous table": (
    lambda: _one_program(
      table=pipeline.make_table("1f1b", 4, 2, num_iterations=2)
    ),
    "`window` must be at least 4 for 4 stages",
  ),
  "a window too small for late sends": (
    lambda: _one_program(table=pipeline.ours(4, 2, window=2)),
    "`window` must be at least 4 for 4 stages, 2 micro-batches and sends of 2",
  ),
  "stages in another order on the devices": (
    lambda: _two(
      table=pipeline.parse_table("device F0/1 B0/1 U/1\ndevice F0/0 B0/0 U/0")
    ),
    "`table` must have stage s on device s modulo their number in one program",
  ),
  "a loss that is no function": (
    lambda: _one_program(loss=None),
    "`loss` must be a function",
  ),
  "a norm of nothing": (
    lambda: _one_program(clip_norm=0.0),
    "`clip_norm` must be",
  ),
  "inputs that are no key": (
    lambda: _one_program(inputs=3),
    "`inputs` must be a function",
  ),
  "unlike dtypes between stages": (
    lambda: _one_program(
      stages=pipeline.cut_layers(_narrow(), [2, 3]),
      table=pipeline.make_table("1f1b", 3, 2),
    ),
    "`stages` must pass on arrays of one dtype .* got bfloat16, float32. Cast",
  ),
  "no mesh": (
    lambda: _one_program().init_state(
      collectives.workers(1, substrate="none"), optax.sgd(0.1)
    ),
    "`team` must be on a mesh whose axis 'stage' has the table's 4 devices",
  ),
  "no optimizer": (
    lambda: _one_program().make_step(None, axis=None),
    "`inner` must be",
  ),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_what_cannot_run_is_refused_when_it_is_built(name):
  build, words = _REFUSED[name]
  with pytest.raises(ValueError, match=f"(?s){words}"):
    build()
