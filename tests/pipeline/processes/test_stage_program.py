"""A stage's programs: no work done twice, nothing kept without need."""

import jax
import jax.numpy as jnp
import pytest

from jdist import pipeline
from jdist.pipeline.processes import _stage_program
from jdist.pipeline.runtime import _traced_model
from tests.pipeline.runtime import _small_models as small
from tests.pipeline.runtime import _training

_ROWS = 3


def _program(recompute, layers=None):
  """Returns the programs of the second of three stages, and its arguments."""
  (stage,) = pipeline.cut_layers(layers or small.layers(), 1)
  x = jnp.ones((_ROWS, 8))
  model = _traced_model.TracedModel(
    (None, stage, None), None, None, {}, between=(x, x)
  )
  program = _stage_program.StageProgram(model, 1, recompute)
  program.split()
  return program, (stage.params, x, stage.state, {}, jax.random.key(0))


def _products(function, *args):
  return _training.count_primitives(["dot_general"], function, *args)


@pytest.mark.parametrize(
  ("recompute", "again"), [("none", 0), ("layers", 4), ("stage", 4)]
)
def test_only_the_input_part_recomputes(recompute, again):
  program, given = _program(recompute)
  params = given[0]
  found = program.forward(*given)
  cotangent = jnp.ones_like(found.output)
  given = given if recompute == "stage" else None
  gradient, saved = program.input_part(cotangent, found.kept, given)
  total = _stage_program.zero_total(params)
  args = cotangent, found.kept, given
  assert _products(program._input_program, *args) == 4 + again
  assert _products(program.weight_part, total, saved) == 4
  # Each layer keeps an input and a cotangent for the weight part.
  waiting = [x.shape for x in jax.tree.leaves(saved)]
  assert waiting == [(_ROWS, 8)] * 8
  grads = program.weight_part(total, saved)
  total = _stage_program.zero_total(params)
  wanted_gradient, wanted = program.backward(total, *args)
  assert small.error((grads, gradient), (wanted, wanted_gradient)) < 2e-6


@pytest.mark.parametrize("recompute", ["none", "layers"])
def test_parameters_are_not_copied(recompute):
  program, given = _program(recompute)
  params = jax.tree.leaves(given[0])
  own = {x.unsafe_buffer_pointer() for x in params}
  kept = [x for x in program.forward(*given).kept if x.shape == (8, 8)]
  assert kept
  assert {x.unsafe_buffer_pointer() for x in kept} <= own
