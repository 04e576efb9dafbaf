"""Streaming DiLoCo in the training loop, in four bits."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import (
  codecs,
  collectives,
  methods,
  profiling,
  reducers,
  training,
  transforms,
)
from tests.training import _tiny


def in_four_bits(axis, stream):
  """Streaming DiLoCo; as a whole it is quantized in the parts of a stream."""
  int4 = reducers.compressed(codecs.Quantize(4, 4))
  reducer = int4 if stream else reducers.Chunked(int4, multiple=2)
  return methods.streaming_diloco(
    optax.sgd(0.05, momentum=0.9),
    5,
    2,
    axis=axis,
    delay_steps=2,
    stream=stream,
    compression=reducers.Compression(reducer, reducers.ErrorFeedback()),
  )


def train(team, stream, **options):
  """Twenty-one steps of a trainer; its programs' controls."""
  chain = in_four_bits(team.axis, stream)
  plain = training.make_step(_tiny.loss_fn, chain, axis=team.axis)
  controls = set()

  def step(state, batch, control=None):
    controls.add(control)
    return plain(state, batch, control)

  trainer = training.Trainer(team, step, **options)
  params = jax.tree.map(lambda x: np.asarray(x, np.float32), _tiny.params())
  first = state = training.init_state(team, chain, params)
  state = jax.tree.map(jnp.copy, state)
  state, _ = trainer.fit(state, _tiny.batches(team), 21)
  return first, state, plain, controls


@pytest.mark.slow
def test_host_programs_stream_fragments_in_four_bits():
  team = _tiny.team("shard_map")
  _, wanted, *_ = train(team, None, host_rounds=False)
  first, state, step, controls = train(
    team, transforms.Stream(), stream_steps=(1, 2)
  )
  # Other programs: in one LLVM merges a product and a sum, in another not.
  chex.assert_trees_all_close(
    [state.params, transforms.anchor(state.opt_state, state.params)],
    [wanted.params, transforms.anchor(wanted.opt_state, wanted.params)],
    rtol=1e-6,
    atol=1e-6,
  )
  batch = next(_tiny.batches(team)(0))
  # A mean that arrives has been sent before; what would send the rest of it is
  # in a conditional that is not taken.
  streamed = [
    control
    for control in controls
    if control is not None
    and any(each.stream_steps for each in control.fragments)
    and not any(each.arrives for each in control.fragments)
  ]
  assert streamed
  for control in streamed:
    program = team.jit(functools.partial(step, control=control))
    found = profiling.read_collectives(program.lower(first, batch).compile())
    assert found and not any(each.conditional for each in found)


@pytest.mark.parametrize("fragments", [4, 2, 5])
def test_host_ends_rounds_of_many_fragments_where_the_device_does(fragments):
  """From four fragments on, a host reads more than ten numbers of a step."""
  team = collectives.workers(2, substrate="vmap")
  optimizer = transforms.fragment_steps(
    optax.sgd(0.5), 5, fragments, axis=team.axis
  )

  def loss_fn(params, model_state, batch, key):
    del key
    loss = sum(jnp.sum((x - jnp.sum(batch)) ** 2) for x in params)
    return loss, (model_state, {})

  step = training.make_step(loss_fn, optimizer, axis=team.axis)
  state = training.init_state(team, optimizer, [np.zeros(2, np.float32)] * 5)
  batches = [np.array([[t], [2 - t]], np.float32) for t in range(7)]
  by_device, program = state, team.jit(step)
  for batch in batches:
    by_device, _ = program(by_device, team.place(batch))
  trainer = training.Trainer(team, step)
  by_host, _ = trainer.fit(state, lambda start: iter(batches[start:]), 7)
  chex.assert_trees_all_equal(by_host.params, by_device.params)
