"""SSGD in jdist is the step that one would write by hand, in the program."""

import importlib.util
import pathlib

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jdist import collectives, models, profiling

_SCRIPTS = pathlib.Path(__file__).parent.parent / "scripts"


def _bench():
  spec = importlib.util.spec_from_file_location(
    "bench_step", _SCRIPTS / "bench_step.py"
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture(scope="module")
def programs():
  """The compiled steps: by hand, and with jdist."""
  bench = _bench()
  workers = collectives.workers(8, substrate="shard_map")
  model = models.build("lenet", input_shape=(8, 8, 1), num_classes=10)
  optimizer = optax.sgd(0.01, momentum=0.9, nesterov=True)
  images = np.zeros((8, 32, 8, 8, 1), np.float32)
  labels = np.zeros((8, 32), np.int32)
  hand = bench.by_hand(model, optimizer, workers.mesh)
  everywhere = NamedSharding(workers.mesh, PartitionSpec())
  split = NamedSharding(workers.mesh, PartitionSpec("worker"))
  state = jax.device_put(
    (model.params, optimizer.init(model.params)), everywhere
  )
  batch = jax.device_put(
    (images.reshape(-1, 8, 8, 1), labels.reshape(-1)), split
  )
  chain, ours = bench.with_jdist(model, optimizer, workers)
  params = workers.replicate(model.params)
  our_state = (params, workers.jit(chain.init)(params))
  our_batch = workers.place((images, labels))
  return {
    "hand": hand.lower(*state, *batch).compile(),
    "jdist": ours.lower(*our_state, *our_batch).compile(),
  }


@pytest.mark.smoke
def test_ssgd_has_the_collectives_of_a_step_by_hand(programs):
  sent = {
    name: sorted(
      (c.kind, c.payload_bytes, c.num_workers)
      for c in profiling.read_collectives(program)
    )
    for name, program in programs.items()
  }
  assert sent["jdist"] == sent["hand"]
  # 61,706 parameters in float32, each sent once.
  assert sum(payload for _, payload, _ in sent["jdist"]) == 4 * 61_706


def test_ssgd_needs_the_memory_of_a_step_by_hand(programs):
  peak = {}
  for name, program in programs.items():
    told = program.memory_analysis()
    assert told.alias_size_in_bytes > 0, "donated buffers are not reused"
    peak[name] = (
      told.argument_size_in_bytes
      + told.output_size_in_bytes
      - told.alias_size_in_bytes
      + told.temp_size_in_bytes
    )
  # With activations that outweigh parameters, as in training. XLA's CPU
  # compiler updates the momentum out of place (see `_as_row`), which costs
  # one copy of the parameters; on a GPU the programs need the same.
  assert peak["jdist"] <= 1.05 * peak["hand"]
