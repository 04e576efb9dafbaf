"""Refusals of stages, tables and runs, when they are built.

An error names the argument or the place, the rule, and the value.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jdist import collectives, models, pipeline
from jdist.pipeline.runtime import _grid
from tests import _refusals
from tests.pipeline.runtime import _small_models as small

_BATCH = {"x": jnp.ones((2, 8)), "y": jnp.ones((2, 8))}
_MODEL = models.Model({"a": jnp.ones(1)}, {}, lambda p, s, x, *, train: (x, s))
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


def _with_layer(apply):
  """Both runtimes with a layer of this function."""
  layer = models.Layer("own", {"own": jnp.eye(8)}, {}, apply)
  stages = pipeline.cut_layers([layer], 1)
  _process(stages=stages)


def _layers_with(*params):
  return [
    models.Layer(f"layer{i}", x, {}, lambda p, s, x, **_: (x, s))
    for i, x in enumerate(params)
  ]


def _batch_of(samples, runtime, dtype=np.float32):
  shape = samples, 8
  batch = {"x": np.ones(shape, dtype), "y": np.ones(shape, np.float32)}
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


def _masked():
  batch = {"x": np.ma.ones((4, 8)), "y": np.ones((4, 8), np.float32)}
  return _run([batch])


def _late_on_one_device():
  late = pipeline.ours(2, 2, window=2)
  return dataclasses.replace(late, devices=(sum(late.devices, ()),))


def _run(batches, state=None, **change):
  process = _process(**change)
  return process.run(state or process.init_state(optax.sgd(0.1)), batches)


def _connect(**change):
  given = {"device": 0, "addresses": [("127.0.0.1", 0)], "token": "x"}
  return pipeline.connect(**(given | change))


def _cut(cuts):
  return pipeline.cut_layers(small.layers(), cuts)


_TWO_STAGES = pipeline.make_table("1f1b", 2, 2)
_TWO_ITERATIONS = pipeline.ours(1, 1, num_iterations=2)


@_refusals.table(
  # Stages and tables.
  ("cuts", lambda: _cut(5), "an int from 1 to 4, got 5"),
  ("cuts", lambda: _cut(0), "an int from 1 to 4"),
  ("cuts", lambda: _cut([2, 2]), "grow"),
  ("cuts", lambda: _cut([0]), "grow"),
  ("cuts", lambda: _cut([4]), "grow"),
  (
    "stages",
    lambda: _one_program(table=_TWO_STAGES),
    "the table's 2, got 4. Cut the layers by `cut_layers(layers, 2)`",
  ),
  (
    "table",
    lambda: _one_program(table=pipeline.make_table("zb_h2", 4, 2)),
    "must not overlap iterations without a delay in one program",
  ),
  ("stages", lambda: _process(table=_TWO_STAGES), "the table's 2, got 1"),
  (
    "stages",
    lambda: _one_program(
      stages=pipeline.cut_layers(_narrow(), [2, 3]),
      table=pipeline.make_table("1f1b", 3, 2),
    ),
    "pass on arrays of one dtype",
  ),
  (
    "table",  # It reads the newest weights in each pass.
    lambda: _one_program(table=pipeline.make_table("paci", 4, 4)),
    "synchronous, or have delayed weights and a stage on each",
  ),
  (
    "table",  # It stashes weights.
    lambda: _one_program(table=pipeline.make_table("pipedream", 4, 1)),
    "synchronous, or have delayed weights and a stage on each",
  ),
  (
    "table",
    lambda: _two(
      table=pipeline.parse_table("device F0/1 B0/1 U/1\ndevice F0/0 B0/0 U/0")
    ),
    "stage s on device s modulo their number in one program",
  ),
  (
    "window",  # A synchronous table has several iterations.
    lambda: _one_program(
      table=pipeline.make_table("1f1b", 4, 2, num_iterations=2)
    ),
    "an int >= 4, got",
  ),
  (
    "window",
    lambda: _one_program(table=pipeline.ours(4, 2, window=2)),
    "an int >= 4, got",
  ),
  # Arguments of both runtimes.
  ("loss", lambda: _one_program(loss=None), "a function"),
  ("loss", lambda: _process(loss=None), "a function"),
  # Functions and trees of another form.
  (
    "loss",
    lambda: _process(loss=lambda y, batch: y.mean()),
    "a loss and metrics",
  ),
  (
    "loss",
    lambda: _one_program(loss=lambda y, batch: (y.mean(-1), {})),
    "one float as its loss, and a dict of metrics, got float32[2]",
  ),
  (
    "apply",
    lambda: _with_layer(lambda p, s, x, **_: x @ p["own"]),
    "its outputs and its new state, got float32[2, 8]",
  ),
  (
    "apply",
    lambda: _with_layer(lambda p, s, x: (x, s)),
    "take `train` and `mask` as keywords",
  ),
  ("inputs", lambda: _process(inputs="z"), "has 'x', 'y', got 'z'"),
  (
    "layers",
    lambda: pipeline.cut_layers(_layers_with([jnp.eye(2)], [jnp.eye(2)]), 1),
    "nested dicts of parameters and state to be put together, got a list",
  ),
  *(
    (
      "layers",
      lambda x=x: pipeline.cut_layers(x, 1),
      f"as `models.Layer` has, got {shown}. Cut a module as a whole: "
      "`pipeline.cut(models.functional(module), ...)`",
    )
    for x, shown in (
      ([jnp.eye(9)], "float32[9, 9]"),
      ([*small.layers(), nnx.Linear(2, 2, rngs=nnx.Rngs(0))], "a Linear"),
      ([_MODEL, _MODEL], "Model(1 parameters)"),
      (_MODEL, "Model(1 parameters)"),
      ("ab", "'ab'"),
    )
  ),
  (
    "stages",
    lambda: _process(stages=[nnx.Linear(2, 2, rngs=nnx.Rngs(0))]),
    "of layers with name, params, state and apply",
  ),
  (
    "layers",
    # Norms begin with equal values, which do not tie them.
    lambda: pipeline.cut_layers(
      _layers_with({"w": jnp.ones(2)}, {"w": jnp.ones(2)}), 2
    ),
    "two under ['w'] in the params of 'layer0' and 'layer1'. Give each layer",
  ),
  (
    "layers",  # Abstract parameters are tied by equal shapes, and no others.
    lambda: pipeline.cut_layers(
      _layers_with(
        *({"w": jax.ShapeDtypeStruct((n,), jnp.float32)} for n in (2, 3))
      ),
      1,
    ),
    "two under ['w'] in the params of 'layer0' and 'layer1'",
  ),
  (
    "layers",
    lambda: pipeline.cut_layers(
      [models.Layer("a", {x: 1.0}, {}, lambda *_, **__: None) for x in "ab"],
      2,
    ),
    "different layers by name",
  ),
  (
    "layers",
    lambda: pipeline.cut_layers(
      [
        models.Layer(x, {x: 1.0}, {"m": jnp.zeros(2)}, lambda *_, **__: None)
        for x in "ab"
      ],
      1,
    ),
    "two under ['m'] in the state of 'a' and 'b'",
  ),
  (
    "layers",  # They have not passed `cut_layers`.
    lambda: _one_program(
      stages=_layers_with({"w": jnp.zeros(2)}, {"w": jnp.ones(2)}),
      table=_TWO_STAGES,
    ),
    "one array under equal keys",
  ),
  (
    "window",
    # Four windows hold what is under way.
    lambda: _grid.make_grid(pipeline.ours(4, 2, window=3), send_ticks=2),
    "be an int >= 4, got",
  ),
  ("clip_norm", lambda: _one_program(clip_norm=0.0), "in (0, inf]"),
  ("clip_norm", lambda: _process(clip_norm=0), "in (0, inf]"),
  ("inputs", lambda: _one_program(inputs=3), "a function"),
  *(
    (
      "loss",
      lambda call=call, metrics=metrics: call(
        loss=lambda y, batch: (small.loss(y, batch)[0], {"each": metrics(y)})
      ),
      "return a number for each metric",
    )
    for call in (_one_program, _process)
    for metrics in (lambda y: y.mean(0), lambda y: {"mean": y.mean()})
  ),
  *(
    (
      "inputs",
      lambda call=call, wrong=wrong: call(inputs=lambda _: wrong),
      said,
    )
    for call in (_one_program, _process)
    for wrong, said in ((None, "must return arrays, got None"), ("x", "'x'"))
  ),
  ("recompute", lambda: _process(recompute="all"), "'none', 'layers' or"),
  (
    "peers",
    lambda: _process(table=_TWO_STAGES, stages=_cut(2)),
    "processes for the table's 2 devices",
  ),
  (
    "team",
    lambda: _one_program().init_state(
      collectives.workers(1, substrate="none"), optax.sgd(0.1)
    ),
    "on a mesh whose axis 'stage' has the table's 4 devices",
  ),
  ("optimizer", lambda: _process().init_state(3), "an Optax"),
  ("inner", lambda: _one_program().make_step(None, axis=None), "an Optax"),
  # Arguments of a run.
  (
    "batch",
    lambda: _batch_of(3, "one program"),
    "divide into the table's 2 micro-batches",
  ),
  (
    "batches",
    lambda: _batch_of(3, "processes"),
    "divide into the table's 2 micro-batches",
  ),
  (
    "batch",
    lambda: _batch_of(8, "one program"),
    "micro-batches of shape [2, 8] and float32, as `microbatch` has, got [4,",
  ),
  (
    "batches",
    lambda: _batch_of(8, "processes"),
    "micro-batches of shape [2, 8] and float32, as `microbatch` has, got [4,",
  ),
  ("batches", _masked, "as `microbatch` has, got [2, 8] and masked"),
  *(
    (
      name,
      lambda runtime=runtime: _batch_of(4, runtime, np.float16),
      "[2, 8] and float32, as `microbatch` has, got [2, 8] and float16",
    )
    for name, runtime in (("batch", "one program"), ("batches", "processes"))
  ),
  (
    "batches",
    lambda: _run([{"x": np.ones((4, 8), np.float32)}]),
    "the leaves of `microbatch`",
  ),
  ("batches", lambda: _run([]), "multiple of the table's 1 iterations"),
  (
    "batches",
    lambda: _run([_BATCH] * 3, table=_TWO_ITERATIONS),
    "multiple of the table's 2 iterations, got 3",
  ),
  (
    "table",  # Two stages of a device, with a window.
    lambda: _grid.make_grid(_late_on_one_device(), send_ticks=1),
    "a stage on each device in one program",
  ),
  (
    "state",
    lambda: _process().run(None, [_BATCH]),
    "`init_state` or `restore`",
  ),
  ("timeline", lambda: _process().trace(), "True"),
  (
    "send_s",
    lambda: _two(table=_TWO_STAGES).times(lambda op, stage: 1.0, -1.0),
    "in [0, inf], got -1",
  ),
  ("seconds", lambda: _one_program().times(None, 0.5), "a function"),
  ("params", lambda: _one_program().join("a"), "an array, got 'a'"),
  ("params", lambda: _one_program().split("a", {}), "an array, got 'a'"),
  (
    "team",
    lambda: _one_program().init_state(None, optax.sgd(0.1)),
    "a `collectives.Workers`",
  ),
  ("apply", lambda: _one_program().apply(None, None, None), "fit each other"),
  ("device", lambda: _connect(device=2), "an int from 0 to 0, got 2"),
  ("token", lambda: _connect(token=""), "empty"),
  ("timeout_s", lambda: _connect(timeout_s=0), "in (0, inf]"),
  ("connect_s", lambda: _connect(connect_s=-1), "in (0, inf]"),
)
def test_invalid_arguments_raise(argument, call, rule):
  _refusals.check(argument, call, rule)


# The fault lies in a table or a stage, which the error shows.
_SHOWN = {
  "a cyclic table": (
    lambda: _two(table=pipeline.parse_table(_CYCLE)),
    r"devices wait for each other: device 0 with B0/0 for B0/1.*\n.*\|F0",
  ),
  "a cyclic table, in a process": (
    lambda: _process(table=pipeline.parse_table("device B0 F0 U")),
    "B0/0 comes before F0/0, which it needs",
  ),
}


@pytest.mark.parametrize("name", _SHOWN)
def test_errors_show_what_cannot_run(name):
  build, words = _SHOWN[name]
  with pytest.raises(ValueError, match=f"(?s){words}"):
    build()
