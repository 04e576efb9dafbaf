"""A loop of one's own chooses programs as the trainer's does."""

import functools

import chex
import optax
import pytest

from jdist import collectives, methods, training, transforms
from jdist.transforms import intervals
from tests import _refusals
from tests.training import _tiny

LATE = transforms.Delayed(carry=None, stream=transforms.Stream(max_bytes=64))
OPTIMIZERS = {
  "fixed": lambda axis: methods.local_sgd(optax.sgd(0.1), 3, axis=axis),
  "streamed": lambda axis: methods.msdpu(
    optax.sgd(0.1),
    intervals.msdpu(4, 0.1, max_interval=6),
    0.1,
    axis=axis,
    overlap=LATE,
  ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_round_host_chooses_the_programs_of_the_trainer(name):
  team = collectives.workers(2, substrate="vmap")
  optimizer = OPTIMIZERS[name](team.axis)
  stream_steps = (1, 2, 4) if name == "streamed" else ()
  step = training.make_step(_tiny.loss_fn, optimizer, axis=team.axis)

  def fresh():
    return training.init_state(team, optimizer, _tiny.params())

  trainer = training.Trainer(team, step, stream_steps=stream_steps)
  wanted, _ = trainer.fit(fresh(), _tiny.batches(team), 11)

  @functools.cache
  def program(control):
    return team.jit(functools.partial(step, control=control))

  state = fresh()
  host = training.RoundHost(team, state.opt_state, stream_steps=stream_steps)
  seen = set()
  for _, batch in zip(range(11), _tiny.batches(team)(0), strict=False):
    control = host.control()
    seen.add(control)
    state, _ = program(control)(state, team.place(batch))
    host.follow(state.opt_state)
  chex.assert_trees_all_equal(state, wanted)
  assert len(seen) > 1
  if name == "streamed":
    assert any(isinstance(control.stream_steps, int) for control in seen)


def test_method_without_rounds_has_one_program():
  team = collectives.workers(2, substrate="vmap")
  optimizer = methods.ssgd(optax.sgd(0.1), axis=team.axis)
  state = team.jit(optimizer.init)(team.replicate(_tiny.params()))
  host = training.RoundHost(team, state)
  host.follow(state)
  assert host.control() == transforms.Control()
  with _refusals.refused("stream_steps", "empty"):
    training.RoundHost(team, state, stream_steps=(1,))
