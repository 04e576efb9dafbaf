"""Synchronous tables have the gradients of the unsplit model, by cell."""

import itertools

import jax
import numpy as np
import pytest

from jdist import pipeline
from tests.pipeline.cells import _cells
from tests.pipeline.runtime import _small_models as small
from tests.pipeline.runtime import _training


def _one_program(name, stages, microbatches, cut, dtype):
  table = _cells.make_table(name, stages, microbatches)
  number = table.num_stages
  pipe = pipeline.OneProgram(
    _cells.stages(cut, number, dtype),
    small.loss,
    table,
    _cells.microbatch(cut, number, dtype),
    inputs="x",
  )
  given = _cells.batch(cut, number, microbatches, dtype)
  batch = jax.tree.map(lambda x: x[None], given)
  state, losses = _training.train(pipe, lambda axis: _cells.keeper(), [batch])
  grads = state._replace(params=state.opt_state.inner)
  return _training.split(pipe, grads)[0], float(losses[0, 0])


def _processes(name, stages, microbatches, cut, dtype):
  table = _cells.make_table(name, stages, microbatches)
  number = table.num_stages
  batch = _cells.batch(cut, number, microbatches, dtype)

  def work(process, _):
    state, metrics = process.run(process.init_state(_cells.keeper()), [batch])
    return process.gather(state._replace(params=state.opt_state)), metrics

  ((grads, _), metrics), *_ = _training.processes(
    _cells.layers(cut, number, dtype),
    table,
    work,
    cuts=_cells.cuts(cut, number),
    microbatch=_cells.microbatch(cut, number, dtype),
    x64=dtype == "float64",
  )
  return grads, metrics[0]["loss"]


_RUNTIMES = {"one program": _one_program, "processes": _processes}


def _params():
  few, dtypes = _cells.pairwise(), list(_cells.TOLERANCES)
  found = []
  for cell in _cells.product():
    kept = None
    # These run in one dtype, and every fourth also in one program, which takes
    # long to compile.
    if cell in few:
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
def test_gradients_match_unsplit_model(
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


def test_pairwise_cells_cover_all_pairs():
  few, cells = _cells.pairwise(), _cells.product()
  for i, j in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)):
    assert {(x[i], x[j]) for x in few} == {(x[i], x[j]) for x in cells}
