"""Synchronous tables give the gradients of the unsplit model, cell by cell."""

import itertools

import jax
import numpy as np
import pytest

from jdist import collectives, pipeline
from tests.pipeline.cells import _cells
from tests.pipeline.processes._threads import in_threads
from tests.pipeline.runtime import _small_models as small


def _one_program(name, stages, microbatches, cut, dtype):
  table = _cells.make_table(name, stages, microbatches)
  pipe = pipeline.OneProgram(
    _cells.stages(cut, table.num_stages, dtype),
    small.loss,
    table,
    _cells.microbatch(cut, table.num_stages, dtype),
    inputs="x",
  )
  kinds = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((1, stages), ("worker", "stage"), axis_types=kinds)
  team = collectives.workers(1, mesh=mesh)
  state = pipe.init_state(team, _cells.keeper())
  step = team.jit(
    pipe.make_step(_cells.keeper(), axis=team.axis),
    out_specs=(team.specs(state), None),
  )
  given = _cells.batch(cut, table.num_stages, microbatches, dtype)
  batch = jax.tree.map(lambda x: x[None], given)
  state, metrics = step(state, team.place(batch))
  inner = jax.tree.map(lambda x: x[0], state.opt_state.inner)
  states = jax.tree.map(lambda x: x[0], state.model_state)
  return pipe.split(inner, states)[0], float(metrics["loss"][0])


def _processes(name, stages, microbatches, cut, dtype):
  table = _cells.make_table(name, stages, microbatches)
  parts = _cells.stages(cut, table.num_stages, dtype)
  batch = _cells.batch(cut, table.num_stages, microbatches, dtype)

  def work(peers):
    with jax.enable_x64(dtype == "float64"):
      process = pipeline.StageProcess(
        parts,
        small.loss,
        table,
        _cells.microbatch(cut, table.num_stages, dtype),
        peers=peers,
        inputs="x",
      )
      state, metrics = process.run(process.init_state(_cells.keeper()), [batch])
      return process.gather(state._replace(params=state.opt_state)), metrics

  ((grads, _), metrics), *_ = in_threads(stages, work)
  return grads, metrics[0]["loss"]


_RUNTIMES = {"one program": _one_program, "processes": _processes}


def _params():
  few, dtypes = _cells.pairwise(), list(_cells.TOLERANCES)
  found = []
  for cell in _cells.product():
    kept = None
    if cell in few:  # In one dtype; every fourth in one program, which is dear.
      turn = few.index(cell)
      runtime = "processes" if turn % 4 else "one program"
      kept = runtime, dtypes[(turn + turn // 4) % 2]
    for one in itertools.product(_RUNTIMES, dtypes):
      marks = () if one == kept else pytest.mark.slow
      name = "-".join(map(str, (*cell, *one)))
      found.append(pytest.param(*cell, *one, id=name, marks=marks))
  return found


@pytest.mark.parametrize(
  ("name", "stages", "microbatches", "cut", "runtime", "dtype"), _params()
)
def test_a_cell_has_the_gradients_of_the_unsplit_model(
  name, stages, microbatches, cut, runtime, dtype
):
  number = _cells.make_table(name, stages, microbatches).num_stages
  with jax.enable_x64(dtype == "float64"):
    wanted, wanted_loss = _cells.unsplit(cut, number, microbatches, dtype)
    found, loss = _RUNTIMES[runtime](name, stages, microbatches, cut, dtype)
  leaves = jax.tree.leaves(found)
  assert {x.dtype for x in leaves} == {np.dtype(dtype)}
  assert small.error(found, wanted) < _cells.TOLERANCES[dtype]
  np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)


def test_the_few_cells_hold_all_pairs():
  few, cells = _cells.pairwise(), _cells.product()
  for i, j in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)):
    assert {(x[i], x[j]) for x in few} == {(x[i], x[j]) for x in cells}
