"""Bytes of the methods, counted by hand and in compiled programs."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jdist import collectives, methods, profiling, transforms
from jdist.transforms import intervals
from tests.transforms import _running

SGD = optax.sgd(0.1, momentum=0.9)

# 6 float32 numbers, 24 bytes; a ring of 8 sends 2 * 7/8 of that: 42.
# A loss is 4 bytes more, of which 7 travel.
RING = {"a": jnp.ones(4), "b": jnp.ones(2)}
SENT = {
  "ssgd": (methods.ssgd, (SGD,), 42, 0),
  "local_sgd": (methods.local_sgd, (SGD, 4), 0, 42),
  "post_local_sgd": (methods.post_local_sgd, (SGD, 4, 2), 0, 42),
  "diloco": (methods.diloco, (SGD, 4), 0, 42),
  "msdpu": (
    methods.msdpu,
    (SGD, intervals.msdpu(4, 0.1), 0.1),
    0,
    49,
  ),
  "msdpu fixed": (methods.msdpu, (SGD, intervals.fixed(4), 0.1), 0, 42),
}


def stepper(optimizer):
  def step(params, state):
    updates, state = optimizer.update(
      params, state, params, loss=jnp.float32(1.0)
    )
    return transforms.apply_updates(params, updates, state), state

  return step


@pytest.mark.smoke
@pytest.mark.parametrize("name", SENT)
def test_bytes_match_counts_by_hand(name):
  make, args, per_step, per_round = SENT[name]
  optimizer = make(*args, axis="worker")
  state = jax.eval_shape(optimizer.init, RING)
  traffic = collectives.traffic(
    stepper(optimizer), RING, state, axis="worker", num_workers=8
  )
  assert traffic.bytes_per_step == per_step
  assert traffic.bytes_per_round == per_round
  assert traffic.sent_bytes(8, 2) == 8 * per_step + 2 * per_round


def test_bfloat16_parameters_are_averaged_in_float32():
  # Gradients travel in their dtype, anchors as float32.
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), RING)
  for make, wanted in (
    (methods.ssgd(SGD, axis="worker"), 21),
    (methods.local_sgd(SGD, 4, axis="worker"), 42),
  ):
    state = jax.eval_shape(make.init, params)
    traffic = collectives.traffic(
      stepper(make), params, state, axis="worker", num_workers=8
    )
    assert traffic.bytes_per_step + traffic.bytes_per_round == wanted


@pytest.mark.parametrize("name", ["ssgd", "local_sgd", "diloco", "msdpu"])
def test_compiled_program_sends_counted_bytes(name):
  make, args, per_step, per_round = SENT[name]
  team = _running.team("shard_map")
  optimizer = make(*args, axis=team.axis)
  params = team.replicate(RING)
  state = team.replicate(optimizer.init(RING))
  compiled = team.jit(stepper(optimizer)).lower(params, state).compile()
  found = collectives.Traffic(profiling.read_collectives(compiled))
  assert found.bytes_per_step == per_step
  assert found.bytes_per_round == per_round
