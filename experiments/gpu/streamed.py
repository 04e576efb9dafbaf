"""Compares a streamed step with the simple one, which it must equal.

    python experiments/gpu/streamed.py

Four logical workers train a small convolutional network by MSDPU, whose mean is
a round late.  Streamed, a part of the message is sent in each step of the
round; simple, all of it in one.  The parameters must be equal after four
rounds, and a streamed step should take no longer.
"""

import argparse
import pathlib
import statistics
import sys
import time

import jax
import numpy as np
import optax

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))

import jdist
from jdist import codecs, models, reducers, training, transforms
from jdist.transforms import intervals

_RESULTS = pathlib.Path(__file__).resolve().parent / "results"

_WORKERS, _INTERVAL, _BATCH = 4, 8, 64
_ROUNDS, _BLOCKS = 4, 9
_CODECS = {"float32": None, "int4": codecs.Quantize(4)}


def _chain(axis, codec, stream):
  return jdist.msdpu(
    optax.sgd(0.01, momentum=0.9, nesterov=True),
    intervals.fixed(_INTERVAL),
    0.01,
    axis=axis,
    overlap=transforms.Delayed(carry=None, stream=stream),
    compression=codec
    and jdist.Compression(
      # The chunks of a stream have scales of their own: so must the simple one.
      reducers.Chunked(reducers.compressed(codec), multiple=_INTERVAL),
      reducers.ErrorFeedback(),
    ),
  )


def _train(codec, stream):
  """Returns the parameters after some rounds, and the seconds of a step."""
  team = jdist.workers(_WORKERS, substrate="vmap")
  shape = (32, 32, 3)
  model = models.build("cnn", input_shape=shape, num_classes=10, seed=0)
  chain = _chain(team.axis, codec, stream)
  loss = training.classification_loss(model.apply)
  state = training.init_state(team, chain, model.params, model.state)
  random = np.random.default_rng(0)
  batches = [
    team.place({
      "image": random.normal(size=(_WORKERS, _BATCH, *shape)).astype("float32"),
      "label": random.integers(0, 10, (_WORKERS, _BATCH)).astype("int32"),
    })
    for _ in range(_INTERVAL)
  ]  # fmt: skip
  step = team.jit(
    training.make_step(loss, chain, axis=team.axis), donate_argnums=0
  )
  step = step.lower(state, batches[0]).compile()
  times, found = [], None
  for block in range(_ROUNDS + _BLOCKS):
    started = time.perf_counter()
    for batch in batches:
      state, _ = step(state, batch)
    jax.block_until_ready(state)
    if block == _ROUNDS - 1:
      found = [np.array(x) for x in jax.tree.leaves(state.params)]
    if block >= _ROUNDS:
      times.append((time.perf_counter() - started) / _INTERVAL)
  first = [np.asarray(x) for x in jax.tree.leaves(model.params)]
  return first, found, statistics.median(times)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--output", default=_RESULTS / "streamed.jsonl")
  options = parser.parse_args()
  for name, codec in _CODECS.items():
    with jax.default_matmul_precision("highest"):
      first, simple, simple_s = _train(codec, None)
      _, streamed, streamed_s = _train(codec, transforms.Stream())
    apart = sum(
      float(np.square(a - b, dtype=np.float64).sum())
      for a, b in zip(simple, streamed, strict=True)
    )
    moved = sum(
      float(np.square(a - b, dtype=np.float64).sum())
      for a, b in zip(simple, first, strict=True)
    )
    row = training.make_row(
      {"model": "cnn", "workers": _WORKERS, "interval": _INTERVAL,
       "batch": _BATCH, "sent": name}, 0,
      part="streamed", relative=(apart / moved) ** 0.5,
      simple_ms=1e3 * simple_s, streamed_ms=1e3 * streamed_s,
      ratio=streamed_s / simple_s,
    )  # fmt: skip
    training.append_rows(options.output, [row])
    print(f"{name}: streamed {1e3 * streamed_s:.2f} ms, simple "
          f"{1e3 * simple_s:.2f} ms, apart {row['relative']:.2g}")  # fmt: skip


if __name__ == "__main__":
  main()
