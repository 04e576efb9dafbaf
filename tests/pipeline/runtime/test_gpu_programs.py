"""Pipelines compiled for GPUs, without one: the overlap of their sends."""

import importlib.util

import jax
import jax.numpy as jnp
import optax
import pytest

import jdist
from jdist import collectives, models, pipeline, profiling
from jdist.profiling import _hlo
from tests.experiments import _loading
from tests.pipeline.runtime import _small_models as small
from tests.profiling import _reading

needs_compiler = pytest.mark.skipif(
  not any(
    importlib.util.find_spec(f"jax_cuda{number}_plugin") for number in (12, 13)
  ),
  reason="needs the extra `schedules`: JAX's plugin for CUDA",
)

_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
_MICRO = 32

_1F1B = pipeline.make_table("1f1b", 4, 8)
_LONG = pipeline.make_table("1f1b", 16, 16)
_ZERO_BUBBLE = pipeline.make_table("zb_h1", 4, 8)
_INTERLEAVED = pipeline.make_table("interleaved", 2, 4)
_OURS = pipeline.ours(4, 8, window=2)


def _read_loop(program, monkeypatch):
  path = "pipeline/scheduled_loop.py"
  loaded = _loading.load("scheduled_loop", path, monkeypatch)
  return loaded.read_loop(program)


def _layers(sizes):
  """Makes abstract dense layers."""
  return [
    models.Layer(
      layer.name,
      jax.tree.map(
        lambda _, a=a, b=b: jax.ShapeDtypeStruct((a, b), jnp.float32),
        layer.params,
      ),
      {},
      layer.apply,
    )
    for layer, a, b in zip(
      small.layers((1,) * len(sizes)), sizes, sizes[1:], strict=False
    )
  ]


def _compile(table, topology, *, alike=True, in_flight=2, late=True):
  """Compiles the step of workers with a pipeline each, on all GPUs."""
  stages = table.num_stages
  sizes = [256 if alike else 256 + 128 * (i % 2) for i in range(stages + 1)]
  microbatch = {
    "x": jax.ShapeDtypeStruct((_MICRO, sizes[0]), jnp.float32),
    "y": jax.ShapeDtypeStruct((_MICRO, sizes[-1]), jnp.float32),
  }
  pipe = pipeline.OneProgram(
    pipeline.cut_layers(_layers(sizes), stages),
    small.loss,
    table,
    microbatch,
    inputs="x",
    late_sends=late,
  )
  assert pipe._ticks.params.stacked == alike
  gpus = profiling.gpu_target(topology)
  shape = gpus.num_gpus // len(table.devices), len(table.devices)
  mesh = collectives.make_mesh(shape, ("worker", "stage"), gpus.devices())
  team = collectives.workers(shape[0], mesh=mesh)
  optimizer = jdist.ssgd(optax.sgd(0.1, momentum=0.9), axis=team.axis)
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      (table.num_microbatches * _MICRO, *x.shape[1:]), x.dtype
    ),
    microbatch,
  )
  step = team.jit(pipe.make_step(optimizer, axis=team.axis), donate_argnums=0)
  lowered = step.lower(
    pipe.abstract_state(team, optimizer), profiling.abstract(team, batch)
  )
  flags = {} if in_flight is None else {_LIMIT: in_flight}
  return pipe, lowered.compile(compiler_options=flags).as_text()


def _tick(program):
  """Returns the permutes and conditionals of the scheduled loop's body."""
  (body,) = [
    instructions
    for instructions in program.computations.values()
    if any(x.operation == "collective-permute-start" for x in instructions)
  ]
  return [
    x
    for x in body
    if x.operation.startswith("collective-permute")
    or x.operation == "conditional"
  ]


def _words(tick):
  return [x.operation.removeprefix("collective-permute-") for x in tick]


@needs_compiler
@pytest.mark.parametrize(
  ("table", "topology", "alike"),
  [
    (_1F1B, "4xh200", True),
    (_LONG, "2x8xh200", True),
    (_ZERO_BUBBLE, "2x8xh100", False),
    (_INTERLEAVED, "4xh200", True),
    (_OURS, "16xh200", True),
  ],
  ids=["1f1b-4", "1f1b-16", "zb_h1-4x4-unlike", "interleaved-2x2", "ours-4x4"],
)
def test_late_sends_overlap_the_conditionals_of_their_tick(
  table, topology, alike, monkeypatch
):
  pipe, text = _compile(table, topology, alike=alike)
  tick = _tick(_hlo.parse(text))
  assert _words(tick) == [
    "start", "start", "conditional", "conditional", "done", "done",
  ]  # fmt: skip
  assert {x.operands[0] for x in tick[-2:]} == {x.name for x in tick[:2]}
  # Each stage has a forward pass and the table's kinds of backward passes.
  stages = table.num_stages
  kinds = len(pipe.grid.backward_ops)
  branches = sorted(len(x.called) for x in tick if x.called)
  assert branches == [1 + stages, 1 + kinds * stages]
  # All work is in conditionals: a select would run every branch.
  loop = _read_loop(text, monkeypatch)
  assert loop.turns == len(pipe.grid.rows)
  assert loop.around == (2, 2)
  assert not any(event.flops for event in loop.events)
  for lane in loop.branches:
    idle, *passes = lane
    assert not any(event.flops for event in idle)
    assert sum(any(event.flops for event in x) for x in passes) >= stages - 1
  # Each device sends to its neighbours alone. XLA once split permutes of
  # several cycles into parts that lost some (openxla/xla#45222).
  size = len(table.devices)
  permutes = [x for kind, x in _reading.groups(text) if "permute" in kind]
  ring = stages > size
  ahead = {
    (start + i, start + (i + 1) % size)
    for start in range(0, profiling.gpu_target(topology).num_gpus, size)
    for i in range(size if ring else size - 1)
  }
  found = sorted(sorted(map(tuple, pairs)) for pairs in permutes)
  back = {(b, a) for a, b in ahead}
  assert found == sorted([sorted(ahead), sorted(back)])


@needs_compiler
@pytest.mark.parametrize(
  ("table", "topology"), [(_1F1B, "4xh200"), (_LONG, "2x8xh200")], ids=str
)
def test_sends_between_ticks_do_not_overlap_the_conditionals(table, topology):
  _, text = _compile(table, topology, late=False)
  # The result of one pass is sent under the other pass (the compiler chooses
  # which one is first), and nothing hides the send of the second result.
  assert _words(_tick(_hlo.parse(text))) == [
    "conditional", "start", "conditional", "start", "done", "done",
  ]  # fmt: skip


@needs_compiler
def test_default_compiler_options_serialize_the_two_sends():
  _, text = _compile(_1F1B, "4xh200", in_flight=None)
  words = _words(_tick(_hlo.parse(text)))
  assert words == [
    "start", "done", "start", "conditional", "conditional", "done",
  ]  # fmt: skip


def test_abstract_state_matches_initial_state():
  mesh = collectives.make_mesh((2, 4), ("worker", "stage"))
  team = collectives.workers(2, mesh=mesh)
  optimizer = jdist.ssgd(optax.sgd(0.1, momentum=0.9), axis=team.axis)
  for sizes in ((8,) * 5, small.UNLIKE):
    layers = small.layers(sizes, statistics=True)
    microbatch = {
      "x": jnp.zeros((_MICRO, sizes[0])), "y": jnp.zeros((_MICRO, sizes[-1]))
    }  # fmt: skip
    pipe = pipeline.OneProgram(
      pipeline.cut_layers(layers, 4), small.loss, _OURS, microbatch, inputs="x"
    )
    state = pipe.init_state(team, optimizer)
    shapes = pipe.abstract_state(team, optimizer)
    assert jax.tree.structure(state) == jax.tree.structure(shapes)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(shapes), strict=True)
    for x, y in pairs:
      assert (x.shape, x.dtype) == (y.shape, y.dtype)
      assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


_LOOP = """
%idle (a: f32[8]) -> f32[8] {
  ROOT %a = f32[8]{0} parameter(0)
}
%works (b: f32[8]) -> f32[8] {
  %b = f32[8]{0} parameter(0)
  ROOT %c = f32[8]{0} add(%b, %b)
}
%body (s: (f32[8], s32[])) -> (f32[8], s32[]) {
  %s = (f32[8]{0}, s32[]) parameter(0)
  %x = f32[8]{0} get-tuple-element(%s), index=0
  %i = s32[] get-tuple-element(%s), index=1
  %first = f32[8]{0} collective-permute-start(%x), source_target_pairs={{0,1}}
  %y = f32[8]{0} conditional(%i, %x, %x), branch_computations={%idle, %works}
  %second = f32[8]{0} collective-permute-start(%y), source_target_pairs={{1,0}}
  %came = f32[8]{0} collective-permute-done(%first)
  %also = f32[8]{0} collective-permute-done(%second)
  %z = f32[8]{0} add(%came, %also)
  ROOT %t = (f32[8]{0}, s32[]) tuple(%z, %i)
}
ENTRY %main (p: (f32[8], s32[])) -> (f32[8], s32[]) {
  %p = (f32[8]{0}, s32[]) parameter(0)
  ROOT %w = (f32[8]{0}, s32[]) while(%p), condition=%test, body=%body, TURNS
}
""".replace("TURNS", 'backend_config={"known_trip_count":{"n":"7"}}')


def test_loop_is_read_with_conditionals_around_its_sends(monkeypatch):
  loop = _read_loop(_LOOP, monkeypatch)
  assert loop.turns == 7
  assert loop.around == (1, 0)
  ((idle, works),) = loop.branches
  assert idle == () and [(e.kind, e.name) for e in works] == [("compute", "c")]
  kinds = [event.kind for event in loop.events]
  assert kinds == ["start", "start", "done", "done", "compute"]


def test_program_without_a_conditional_loop_raises(monkeypatch):
  text = _LOOP.replace("body=%body", "body=%works")
  with pytest.raises(ValueError, match=r"one loop with conditionals.*got 0"):
    _read_loop(text, monkeypatch)
