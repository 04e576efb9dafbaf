"""Measures what jdist itself adds to a step: packing, anchors, corrections.

    python scripts/bench_overhead.py [--model resnet18] [--batch-size 32]

One worker that speaks to nobody (`axis=None`) takes the same step with its
optimizer alone, and with each method around that optimizer.  Blocks alternate;
what is reported is the median of paired ratios, beside that of the plain step
to itself, which is the noise of the machine.  A round's end is counted as
often as it happens.  "Told" is a method whose rounds the host ends.  Beside
the times, which are noisy, stand the bytes that the compiled program of a step
within a round copies: those of a conditional's branches count as taken.

With `--in-flight`, as a GPU needs it, a block of steps is waited for at its end
alone.  `--methods` names some of the methods, and "told" those alone whose
rounds the host ends.
"""

import argparse
import functools
import math
import re
import statistics
import time

import jax
import numpy as np
import optax

from jdist import codecs, methods, models, reducers, training, transforms
from jdist.transforms import intervals

_TOLD = "told"


def _chains(interval):
  def inner():
    return optax.sgd(0.01, momentum=0.9, nesterov=True)

  def msdpu(**changes):
    return methods.msdpu(
      inner(),
      intervals.fixed(interval),
      0.01,
      axis=None,
      **{"overlap": transforms.Delayed(carry=None)} | changes,
    )

  int4 = reducers.Compression(codecs.Quantize(4), reducers.ErrorFeedback())
  chains = {
    "plain": inner(),
    "plain again": inner(),
    "local_sgd": methods.local_sgd(inner(), interval, axis=None),
    "diloco": methods.diloco(inner(), interval, axis=None),
    "diloco int4": methods.diloco(
      inner(), interval, axis=None, compression=int4
    ),
    "msdpu": msdpu(),
    "msdpu streamed": msdpu(
      overlap=transforms.Delayed(carry=None, stream=transforms.Stream())
    ),
    "update_first": transforms.update_first(inner(), axis=None),
  }
  rounds = ("local_sgd", "diloco", "diloco int4", "msdpu", "msdpu streamed")
  for name in rounds:
    chains[f"{name} {_TOLD}"] = chains[name]
  return chains


def _chosen(options):
  """The methods that are measured, among them always the plain step twice."""
  chains = _chains(options.interval)
  if not options.methods:
    return chains
  wanted = {"plain", "plain again", *options.methods}
  if _TOLD in wanted:
    wanted |= {name for name in chains if name.endswith(_TOLD)}
  if unknown := wanted - {_TOLD} - set(chains):
    raise SystemExit(f"`--methods` must be of {list(chains)}, got {unknown}.")
  return {name: chain for name, chain in chains.items() if name in wanted}


def _copied_bytes(text: str) -> int:
  """What a program copies from one float32 array to another."""
  shapes = re.findall(r"= f32\[([\d,]*)\]\S* copy\(", text)
  return 4 * sum(
    math.prod(int(n) for n in shape.split(",") if n) for shape in shapes
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("--model", default="resnet18")
  parser.add_argument("--image-size", type=int, default=32)
  parser.add_argument("--batch-size", type=int, default=32)
  parser.add_argument("--interval", type=int, default=8)
  parser.add_argument("--blocks", type=int, default=7)
  parser.add_argument("--dtype", default="float32",
                      help="that models compute in")  # fmt: skip
  parser.add_argument("--in-flight", action="store_true")
  parser.add_argument("--methods", nargs="+",
                      help='such as "diloco int4 told"')  # fmt: skip
  parser.add_argument("--output", default=None)
  options = parser.parse_args()
  shape = (options.image_size, options.image_size, 3)
  model = models.build(options.model, input_shape=shape, num_classes=10, seed=0)
  random = np.random.default_rng(0)
  batch = jax.tree.map(
    jax.device_put,
    {
      "image": random.normal(size=(options.batch_size, *shape)).astype(
        np.float32
      ),
      "label": random.integers(0, 10, options.batch_size).astype(np.int32),
    },
  )
  loss = training.classification_loss(
    model.apply, compute_dtype=np.dtype(options.dtype)
  )
  states, programs, copied = {}, {}, {}
  for name, chain in _chosen(options).items():
    step = training.make_step(loss, chain, axis=None)
    # One continues the round and one ends it.
    steps = [step]
    if name.endswith(_TOLD):
      steps = [
        functools.partial(step, control=transforms.Control(round_ends=ends))
        for ends in (False, True)
      ]
    states[name] = training.TrainState(
      step=np.zeros((), np.int32),
      params=jax.tree.map(
        lambda x: jax.numpy.array(x, copy=True), model.params
      ),
      opt_state=jax.jit(chain.init)(model.params),
      model_state=jax.tree.map(
        lambda x: jax.numpy.array(x, copy=True), model.state
      ),
      key=np.asarray(jax.random.key_data(jax.random.key(0))),
    )
    found = [
      jax.jit(each, donate_argnums=0).lower(states[name], batch).compile()
      for each in steps
    ]
    programs[name] = (found[0], found[-1])
    copied[name] = _copied_bytes(found[0].as_text())
  times: dict[str, list[float]] = {name: [] for name in states}
  for turn in range(options.blocks + 1):
    for name, (on, end) in programs.items():
      started_s = time.perf_counter()
      for i in range(options.interval):  # With one round's end in it.
        program = end if i == options.interval - 1 else on
        states[name], metrics = program(states[name], batch)
        if not options.in_flight:
          jax.block_until_ready(metrics)
      jax.block_until_ready((states[name], metrics))
      if turn:  # The first block compiles.
        times[name].append((time.perf_counter() - started_s) / options.interval)
  print(
    f"{options.model}, {models.num_params(model):,} parameters, "
    f"{options.batch_size} images of {shape}: "
    f"{1e3 * statistics.median(times['plain']):.0f} ms a step, "
    f"{copied['plain'] / 1e6:.0f} MB copied"
  )
  report = {}
  for name, found in times.items():
    if name == "plain":
      continue
    ratios = sorted(t / p for t, p in zip(found, times["plain"], strict=True))
    report[name] = {
      "ratio": statistics.median(ratios),
      "quartiles": statistics.quantiles(ratios, n=4)[::2],
      "copied_bytes": copied[name],
    }
    low, high = report[name]["quartiles"]
    print(
      f"{name:16s} {report[name]['ratio']:.3f} of the plain step "
      f"(quartiles {low:.3f} to {high:.3f}), "
      f"{copied[name] / 1e6:.0f} MB copied"
    )
  if options.output is not None:
    row = training.make_row(
      {k: v for k, v in vars(options).items() if k != "output"},
      0,
      plain_step_s=statistics.median(times["plain"]),
      plain_copied_bytes=copied["plain"],
      ratios=report,
    )
    training.append_rows(options.output, [row])


if __name__ == "__main__":
  main()
