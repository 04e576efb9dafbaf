"""What a loop asks of a state, and the traffic of the aliases."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

from jdist import collectives, methods, profiling, states, transforms
from jdist.transforms import intervals
from tests.transforms import _running, _table

SGD = optax.sgd(0.1, momentum=0.9)


def test_a_method_without_rounds_is_always_synchronized():
  w = jnp.ones(2)
  state = methods.ssgd(SGD, axis=None).init(w)
  assert transforms.synchronized(state) is True
  assert transforms.interval(state) == 1
  assert transforms.rounds(state, 7).item() == 7
  assert transforms.anchor(state, w) is w


def test_local_steps_are_found_deep_in_a_chain():
  w = {"w": jnp.ones(2, jnp.bfloat16)}
  local = optax.inject_hyperparams(methods.diloco, ("interval",))
  optimizer = optax.MultiSteps(
    optax.chain(optax.clip(1.0), local(SGD, 5, axis=None)), 2
  )
  state = optimizer.init(w)
  assert transforms.synchronized(state).item() is True
  assert transforms.interval(state).item() == 5
  assert transforms.rounds(state, 7).item() == 0
  assert transforms.anchor(state, w)["w"].dtype == jnp.bfloat16


class MineState(NamedTuple):
  count: jax.Array
  noise: jax.Array


def test_labels_are_careful():
  w = {"w": jnp.ones(2)}

  def labels(*chain):
    return transforms.sharing(optax.chain(*chain).init(w))

  average = transforms.average_gradients(None)
  adaptive = methods.local_sgd(SGD, intervals.msdpu(2), axis=None)
  # Behind an average all is shared, but not a loss, wherever it stands.
  assert labels(average, SGD).params is True
  assert labels(SGD, average).state[0][0].trace == {"w": False}
  told = labels(average, optax.named_chain(("local", adaptive)))
  assert told.state[1]["local"].clock.round_loss is False
  assert told.state[1]["local"].anchor == {"w": True}
  # In a wrapper whose other leaves pass by, parameters are not.
  masked = optax.masked(optax.chain(average, SGD), {"w": True})
  assert labels(masked).params is False


def test_own_states_are_declared():
  state = MineState(jnp.zeros(()), jnp.zeros(2))
  assert transforms.sharing(state).state == MineState(False, False)
  states.declare(shared=("count",))(MineState)
  assert transforms.sharing(state).state == MineState(True, False)


def test_apply_updates_without_a_state_is_optax():
  params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(3)}
  updates = {"a": jnp.full(3, 0.01), "b": jnp.full(3, 0.01)}
  with jax.numpy_dtype_promotion("standard"):  # Optax adds mixed dtypes.
    wanted = optax.apply_updates(params, updates)
  found = transforms.apply_updates(params, updates)
  assert jax.tree.all(jax.tree.map(jnp.array_equal, found, wanted))
  assert found["a"].dtype == jnp.bfloat16


# 6 float32 numbers, 24 bytes; a ring of 8 sends 2 * 7/8 of that: 42.
# A loss is 4 bytes more, of which 7 travel.
RING = {"a": jnp.ones(4), "b": jnp.ones(2)}
SENT = {
  "ssgd": (methods.ssgd, (SGD,), 42, 0),
  "local_sgd": (methods.local_sgd, (SGD, 4), 0, 42),
  "post_local_sgd": (methods.post_local_sgd, (SGD, 4, 2), 0, 42),
  "diloco": (methods.diloco, (SGD, 4), 0, 42),
  "msdpu": (methods.msdpu, (SGD, 4, 0.1), 0, 49),
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
def test_bytes_are_those_counted_by_hand(name):
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
def test_the_compiled_program_sends_what_was_counted(name):
  make, args, per_step, per_round = SENT[name]
  team = _running.team("shard_map")
  optimizer = make(*args, axis=team.axis)
  params = team.replicate(RING)
  state = team.replicate(optimizer.init(RING))
  compiled = team.jit(stepper(optimizer)).lower(params, state).compile()
  found = collectives.Traffic(profiling.read_collectives(compiled))
  assert found.bytes_per_step == per_step
  assert found.bytes_per_round == per_round


@pytest.mark.parametrize("substrate", ["vmap", "mixed"])
@pytest.mark.parametrize("name", ["local", "late outer", "msdpu"])
def test_a_round_ends_under_a_conditional(name, substrate):
  text = _table.runner(name, substrate).compile().as_text()
  assert " conditional(" in text
  found = profiling.read_collectives(text)
  assert all(c.conditional for c in found)
  assert bool(found) == (substrate == "mixed")
