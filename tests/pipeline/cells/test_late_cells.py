"""Tables without a flush match delayed gradients on one device.

A loss shows the parameters at which its gradient was taken; the parameters
after a drain show all updates.
"""

import functools

import jax
import numpy as np
import optax
import pytest

from jdist import pipeline, transforms
from tests._thinned import thinned
from tests.pipeline.runtime import _small_models as small
from tests.pipeline.runtime import _training

_ITERATIONS = 12
_SGD = optax.sgd(0.1, momentum=0.9)
# Each fix takes the delay of a leaf, or a tree of delays.
_FIXES = {
  "none": lambda delay: _SGD,
  "prediction": lambda delay: transforms.predict_weights(_SGD, delay),
  # Weight decay reads the parameters to which a late gradient is applied.
  "decay": lambda delay: optax.chain(optax.add_decayed_weights(0.1), _SGD),
}
# Tables of three stages: micro-batches, each stage's delay, options.
_TABLES = {
  "pipedream": (1, (2, 1, 0), {}),
  "2bw": (4, (1, 1, 1), {}),
  "ours": (2, (2, 2, 2), {"window": 3}),
}


def _sizes(table):
  # One program stacks equal stages and packs unlike ones: both are tested.
  return small.SIZES[:4] if table == "ours" else small.UNLIKE[:4]


def _layers(table):
  return small.layers(_sizes(table))


def _batches(table):
  samples = _training.MICRO * _TABLES[table][0]
  return small.batches(_ITERATIONS, 1, samples, _sizes(table))


@functools.cache
def _delayed(table, fix):
  """Returns the final parameters and the losses on one device."""
  count, delays, _ = _TABLES[table]
  layers = _layers(table)
  by_leaf = {
    layer.name: delay for layer, delay in zip(layers, delays, strict=True)
  }
  steps = delays[0] if len(set(delays)) == 1 else by_leaf
  optimizer = transforms.delay_gradients(_FIXES[fix](steps), steps)
  whole, losses = _training.unsplit(
    layers, lambda axis: optimizer, _batches(table), count
  )
  one = jax.tree.map(lambda x: x[0], whole)
  params, _ = transforms.drain(optimizer, one.opt_state, one.params)
  return params, losses[:, 0]


def _processes(name, fix):
  count, delays, options = _TABLES[name]
  options = options | {"num_iterations": _ITERATIONS}
  table = pipeline.make_table(name, len(delays), count, **options)
  assert pipeline.check_table(table).delays == delays
  batches = _training.of_first(_batches(name))

  def work(process, peers):
    # A device has one stage, whose delay its optimizer takes.
    state = process.init_state(_FIXES[fix](delays[peers.device]))
    state, metrics = process.run(state, batches)
    return process.gather(state)[0], [x["loss"] for x in metrics]

  return _training.processes(_layers(name), table, work, _sizes(name))[0]


@pytest.mark.parametrize(
  ("name", "fix"), thinned(tuple(_TABLES), tuple(_FIXES))
)
def test_processes_match_delayed_gradients(name, fix):
  params, losses = _processes(name, fix)
  wanted, wanted_losses = _delayed(name, fix)
  assert small.error(params, wanted) < 1e-6
  np.testing.assert_allclose(losses, wanted_losses, rtol=1e-6)
  if fix != "none":  # The fix must change the training.
    assert small.error(wanted, _delayed(name, "none")[0]) > 1e-3
