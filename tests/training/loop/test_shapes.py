"""Batches of several shapes, errors in the loop, and reused buffers."""

import warnings

import chex
import jax
import numpy as np
import pytest

from jdist import training
from tests import _refusals
from tests.training import _tiny

SIZES = (4, 4, 3, 4, 2, 3, 4)


def batches(team, sizes):
  """Batches of the given sizes, one after the other."""

  def iterate(start):
    made = _tiny.batches(team)(start)
    for size, batch in zip(sizes[start:], made, strict=False):
      yield jax.tree.map(lambda x, size=size: x[:, :size], batch)

  return iterate


def own_trainer(team, name, **options):
  step = training.make_step(
    _tiny.loss_fn, _tiny.optimizers(team.axis)[name], axis=team.axis
  )
  return training.Trainer(team, step, **options)


# The rounds of Local SGD end in a program of their own; SSGD has one program.
@pytest.mark.parametrize("name", ["local_sgd", "momentum"])
@pytest.mark.parametrize("kind", ["vmap", "shard_map"])
def test_each_shape_compiles_programs_of_its_own(kind, name):
  team = _tiny.team(kind)
  with pytest.warns(RuntimeWarning, match="shape") as lines:
    found, records = own_trainer(team, name).fit(
      _tiny.init(team, name), batches(team, SIZES), len(SIZES)
    )
  assert [str(line.message)[:22] for line in lines] == [
    "Batch shape 2 of at mo",
    "Batch shape 3 of at mo",
  ]
  step = training.make_step(
    _tiny.loss_fn, _tiny.optimizers(team.axis)[name], axis=team.axis
  )
  own, wanted = team.jit(step), _tiny.init(team, name)
  for batch in batches(team, SIZES)(0):
    wanted, _ = own(wanted, team.place(batch))
  chex.assert_trees_all_close(
    _tiny.host(found), _tiny.host(wanted), rtol=1e-5, atol=1e-6
  )
  # The first step of a call is not timed.
  samples = records[-1].samples_per_s * records[-1].train_s
  assert round(samples) == team.num_workers * sum(SIZES[1:])


def test_known_shapes_are_not_reported_again():
  team = _tiny.team("vmap")
  trainer = own_trainer(team, "momentum")
  with pytest.warns(RuntimeWarning, match="shape [23] of at most 3"):
    trainer = own_trainer(team, "momentum", max_shapes=3)
    trainer.fit(_tiny.init(team, "momentum"), batches(team, SIZES), 7)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    trainer.fit(_tiny.init(team, "momentum"), batches(team, SIZES), 7)


@pytest.mark.parametrize("name", ["local_sgd", "momentum"])
def test_second_call_compiles_no_step_again(name, caplog):
  team = _tiny.team("vmap")
  trainer = own_trainer(team, name)

  def fit(sizes):
    caplog.clear()
    with warnings.catch_warnings(), jax.log_compiles(True):
      warnings.simplefilter("ignore")
      trainer.fit(_tiny.init(team, name), batches(team, sizes), len(sizes))
    return sum(
      "XLA compilation of jit(in_team)" in x.message for x in caplog.records
    )

  # Local SGD has a program for the steps of a round and one for its end.
  assert fit(SIZES) == 3 * (2 if name == "local_sgd" else 1)
  assert fit(SIZES[2:]) == 0


@pytest.mark.parametrize("name", ["local_sgd", "momentum"])
def test_too_many_shapes_are_refused_and_the_state_is_kept(name):
  team = _tiny.team("vmap")
  trainer = own_trainer(team, name, max_shapes=1)
  with _refusals.refused("max_shapes", "1") as info:
    trainer.fit(_tiny.init(team, name), batches(team, SIZES), 7)
  assert "step 2" in info.value.__notes__[0]
  state, records = trainer.interrupted
  assert records == []
  _tiny.assert_same_bits(state, _tiny.trained(team, name, 2))
  # Training continues from it, without the batch that was refused.
  state, _ = trainer.fit(state, _tiny.batches(team), 5)
  _tiny.assert_same_bits(state, _tiny.trained(team, name, 5))
  assert trainer.interrupted is None


def test_error_of_a_loader_or_a_callback_keeps_the_state():
  team = _tiny.team("shard_map")
  trainer = own_trainer(team, "local_sgd")

  def fails(record):
    if record.step == 4:
      raise OSError("the disk is full")

  with pytest.raises(OSError, match="the disk is full"):
    trainer.fit(
      _tiny.init(team, "local_sgd"), _tiny.batches(team), 9,
      evaluate_every=2, on_record=fails,
    )  # fmt: skip
  state, records = trainer.interrupted
  assert [record.step for record in records] == [2, 4]
  _tiny.assert_same_bits(state, _tiny.trained(team, "local_sgd", 4))
  state, records = trainer.fit(
    state, _tiny.batches(team), 6, evaluate_every=2, continues=records
  )
  assert [record.step for record in records] == [2, 4, 6]
  _tiny.assert_same_bits(state, _tiny.trained(team, "local_sgd", 6))


def test_interrupt_keeps_the_state():
  team = _tiny.team("vmap")
  trainer = own_trainer(team, "momentum")

  def interrupted(start):
    yield from batches(team, (4, 4, 4))(start)
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    trainer.fit(_tiny.init(team, "momentum"), interrupted, 9)
  state, _ = trainer.interrupted
  assert int(team.view(state.step)) == 3


@pytest.mark.parametrize("kind", ["none", "vmap", "shard_map"])
def test_buffer_that_a_loader_refills_changes_nothing(kind):
  team = _tiny.team(kind)

  def wide(start):
    for batch in _tiny.batches(team)(start):
      # Arrays of a page and more are the ones that JAX may share.
      yield {k: np.repeat(x, 4096, axis=1) for k, x in batch.items()}

  def refilled(start):
    buffer = None
    for batch in wide(start):
      buffer = batch if buffer is None else buffer
      for name, x in batch.items():
        buffer[name][:] = x
      yield buffer
      for x in buffer.values():
        x[:] = 1  # A loader writes as soon as it is asked for the next batch.

  trainer = own_trainer(team, "momentum")
  found, _ = trainer.fit(_tiny.init(team, "momentum"), refilled, 6)
  wanted, _ = trainer.fit(_tiny.init(team, "momentum"), wide, 6)
  _tiny.assert_same_bits(found, wanted)


def test_placed_array_does_not_share_the_host_buffer():
  team = _tiny.team("vmap")
  whole = np.zeros((team.num_workers, 1 << 16), np.float32)
  placed, split = team.place(whole), team.shard(whole)
  whole[:] = 1
  assert not np.any(placed) and not np.any(split)
