"""Stages in operating-system processes, one of which is killed."""

import multiprocessing
import os

import chex
import jax
import numpy as np
import optax

from jdist import channel, pipeline
from tests.pipeline.processes._threads import in_threads
from tests.pipeline.runtime import _small_models as small
from tests.pipeline.runtime import _training

_SAMPLES = 12


def _batches():
  found = small.batches(3, 1, _SAMPLES, small.UNLIKE)
  return _training.of_first(found)


def _process(peers, devices):
  table = pipeline.make_table("1f1b", devices, _SAMPLES // _training.MICRO)
  layers = small.layers(small.UNLIKE)
  return _training.process(layers, table, small.UNLIKE, peers=peers)


def _run(device, addresses, listener, answers, trained, folder):
  with pipeline.connect(
    device, addresses, "a secret", listener=listener, timeout_s=300
  ) as peers:
    process = _process(peers, 2)
    state = process.init_state(optax.sgd(0.1))
    state, metrics = process.run(state, _batches())
    process.save(folder, state)
    if device == 1:
      trained.wait(300)
      os._exit(1)  # Like a kill, it closes nothing in order.
    answers.put([x["loss"] for x in metrics])
    trained.set()
    try:
      process.run(state, _batches())
    except ConnectionError as error:
      answers.put(str(error))


def _resume(peers, folder):
  """Returns parameters after twice the batches: undisturbed, and resumed."""
  process = _process(peers, 2)
  state = process.init_state(optax.sgd(0.1))
  for _ in range(2):
    state, _ = process.run(state, _batches())
  found = process.restore(folder, optax.sgd(0.1))
  assert found.step == 3
  found, _ = process.run(found, _batches())
  return jax.device_get((state.params, found.params))


def test_killed_process_ends_the_other_and_both_resume(tmp_path):
  context = multiprocessing.get_context("spawn")
  answers, trained = context.Queue(), context.Event()
  listeners = [channel.listen() for _ in range(2)]
  addresses = [x.getsockname()[:2] for x in listeners]
  workers = [
    context.Process(
      target=_run, args=(i, addresses, listener, answers, trained, tmp_path)
    )
    for i, listener in enumerate(listeners)
  ]
  for worker, listener in zip(workers, listeners, strict=True):
    worker.start()
    listener.close()
  losses, reason = [answers.get(timeout=300) for _ in range(2)]
  for worker in workers:
    worker.join(60)
  assert "Device 1 of the pipeline is gone" in reason
  one = _process(None, 1)
  _, metrics = one.run(one.init_state(optax.sgd(0.1)), _batches())
  np.testing.assert_allclose(losses, [x["loss"] for x in metrics], rtol=1e-6)
  assert [x.exitcode for x in workers] == [0, 1]
  for wanted, found in in_threads(2, lambda peers: _resume(peers, tmp_path)):
    chex.assert_trees_all_equal(found, wanted)
