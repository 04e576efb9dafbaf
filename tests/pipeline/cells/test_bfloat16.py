"""Layers that compute in bfloat16 on float32 parameters, in both runtimes.

Both runtimes and the unsplit model round the same values in the same layers,
and sums of gradients are float32.  A fused program may keep a value unrounded
between two operations, which differs by half a unit of bfloat16's 8 bits, 2^-9
of the value.  Over a few layers this grows to 2^-6 of a leaf's largest entry.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jdist import training
from tests.pipeline.cells import _cells
from tests.pipeline.cells import test_synchronous_cells as cells
from tests.pipeline.runtime import _small_models as small

_COUNT = 4


def _narrow(layer):
  def apply(params, state, x, **options):
    params = training.cast(params, jnp.bfloat16)
    return layer.apply(params, state, x.astype(jnp.bfloat16), **options)

  return dataclasses.replace(layer, apply=apply)


@pytest.mark.parametrize(
  ("runtime", "name"),
  [
    ("processes", "zb_h1"),
    ("one program", "1f1b"),
    pytest.param("processes", "1f1b", marks=pytest.mark.slow),
    pytest.param("one program", "zb_h1", marks=pytest.mark.slow),
  ],
)
def test_bfloat16_gradients_match_unsplit_model(runtime, name, monkeypatch):
  wide, loss = _cells.layers, small.loss
  exact, _ = _cells.unsplit("unlike", 2, _COUNT, "float32")
  monkeypatch.setattr(
    _cells, "layers", lambda *x: [_narrow(layer) for layer in wide(*x)]
  )
  monkeypatch.setattr(
    small, "loss", lambda y, batch: loss(y.astype(jnp.float32), batch)
  )
  _cells.unsplit.cache_clear()
  _cells._gradient.cache_clear()
  try:
    wanted, _ = _cells.unsplit("unlike", 2, _COUNT, "float32")
  finally:
    _cells.unsplit.cache_clear()
    _cells._gradient.cache_clear()
  found, _ = cells._RUNTIMES[runtime](name, 2, _COUNT, "unlike", "float32")
  assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}
  assert small.error(found, wanted) < 2**-6
  # Gradients in float32 would be closer than this.
  assert small.error(found, exact) > 1e-4
