"""Shapes in place of arrays: those of the real ones."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from jdist import collectives, methods, models, profiling, training
from jdist.transforms import intervals


def test_abstract_arrays_have_an_axis_of_workers_and_no_values():
  workers = collectives.workers(8)
  tree = {"w": jnp.zeros((3, 2)), "n": jax.ShapeDtypeStruct((), "int32")}
  found = profiling.abstract(workers, tree)
  assert found["w"].shape == (8, 3, 2) and found["n"].shape == (8,)
  assert found["n"].dtype == jnp.int32
  assert found["w"].sharding == workers.sharding()
  lowered = workers.jit(lambda x: x).lower(found)
  assert lowered.compile() is not None


@pytest.mark.parametrize("substrate", ["vmap", "shard_map"])
def test_abstract_state_matches_init_state(substrate):
  workers = collectives.workers(4, substrate=substrate)
  chosen = {"input_shape": (8, 8, 3), "num_classes": 3, "norm": "batch"}
  optimizer = methods.msdpu(
    optax.sgd(0.1, momentum=0.9),
    intervals.fixed(4),
    0.1,
    axis=workers.axis,
  )

  model = models.build("resnet8", **chosen)
  real = training.init_state(workers, optimizer, model.params, model.state)
  model = models.build("resnet8", **chosen, abstract=True)
  shapes = profiling.abstract_state(
    workers, optimizer, model.params, model.state
  )
  chex.assert_trees_all_equal_shapes_and_dtypes(shapes, real)
  assert all(
    isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes)
  )
