"""Four stages of a transformer on one GPU, through each runtime.

    python experiments/gpu/stages.py --output results/stages.jsonl
    python experiments/gpu/stages.py --width 64 --depth 4 --length 32  # a CPU

The unsplit model, one program with four stages on its device, one process with
four stages, and four processes that share the GPU train on the same batches.
Each has programs of its own, so that peaks of memory are its own.  A row has
the median step, the peak of the device's memory (of all processes together;
None where the platform counts none), and the last loss.  The orders of
schedules on eight H200 are read from compiled programs by
`experiments/pipeline/late_sends.py`.
"""

import argparse
import json
import os
import pathlib
import secrets
import socket
import statistics
import subprocess
import sys
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))

import jax
import numpy as np
import optax

import jdist
from jdist import collectives, models, pipeline, training

PARTS = ("unsplit", "one program", "one process", "four processes")
_STAGES, _RATE = 4, 0.05


def _given(args):
  """Returns the model, its stages, the batches and a micro-batch."""
  model = models.build(
    "transformer", input_shape=(args.length,), num_classes=256, seed=0,
    width=args.width, num_layers=args.depth,
  )  # fmt: skip
  drawn = np.random.default_rng(0)
  shape = args.steps, args.batch_size, args.length + 1
  tokens = drawn.integers(0, 256, shape).astype(np.int32)
  batches = [{"tokens": x[:, :-1], "targets": x[:, 1:]} for x in tokens]
  size = args.batch_size // args.microbatches
  part = jax.tree.map(lambda x: x[:size], batches[0])
  stages = pipeline.cut_layers(model.layers, _STAGES)
  return model, stages, batches, part


def _timed(step, batches):
  """Returns the median seconds of steps after the first, and the last loss."""
  seconds = []
  for batch in batches:
    start = time.perf_counter()
    loss = step(batch)
    seconds.append(time.perf_counter() - start)
  return statistics.median(seconds[1:]), float(loss)


def _whole(args, split):
  """Trains the unsplit model, or one program with all stages on a device."""
  model, stages, batches, part = _given(args)
  mesh = collectives.make_mesh((1, 1), ("worker", "stage"))
  team = collectives.workers(1, mesh=mesh)
  optimizer = jdist.ssgd(optax.sgd(_RATE), axis=team.axis)
  if split:
    table = pipeline.make_table(
      "interleaved", 1, args.microbatches, num_chunks=_STAGES
    )
    pipe = pipeline.OneProgram(
      stages, training.label_loss, table, part, inputs="tokens"
    )
    state = pipe.init_state(team, optimizer)
    one = pipe.make_step(optimizer, axis=team.axis)
  else:

    def loss(params, state, batch, key):
      del key
      y, state = model.apply(params, state, batch["tokens"], train=True)
      value, metrics = training.label_loss(y, batch)
      return value, (state, metrics)

    state = training.init_state(team, optimizer, model.params, model.state)
    one = training.make_step(
      loss, optimizer, axis=team.axis, accumulate=args.microbatches
    )
  run = team.jit(one, donate_argnums=0, out_specs=(team.specs(state), None))

  def step(batch):
    nonlocal state
    placed = team.place(jax.tree.map(lambda x: x[None], batch))
    state, metrics = run(state, placed)
    return np.asarray(metrics["loss"])[0]

  return _timed(step, batches)


def _staged(args, peers=None):
  """Trains the stages of this process."""
  _, stages, batches, part = _given(args)
  if peers is None:
    table = pipeline.make_table(
      "interleaved", 1, args.microbatches, num_chunks=_STAGES
    )
  else:
    table = pipeline.make_table("1f1b", _STAGES, args.microbatches)
  process = pipeline.StageProcess(
    stages, training.label_loss, table, part, peers=peers, inputs="tokens"
  )
  state = process.init_state(optax.sgd(_RATE))

  def step(batch):
    nonlocal state
    state, metrics = process.run(state, [batch])
    return metrics[0]["loss"]

  return _timed(step, batches)


def _part(args):
  """Runs one part in this process and prints its result."""
  if args.device is None:
    whole = args.part != "one process"
    found = _whole(args, args.part == "one program") if whole else _staged(args)
  else:
    addresses = [("127.0.0.1", args.port), *[("", 0)] * (_STAGES - 1)]
    token = os.environ["STAGES_TOKEN"]
    with pipeline.connect(
      args.device, addresses, token, connect_s=300
    ) as peers:
      found = _staged(args, peers)
  peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
  print("RESULT " + json.dumps([*found, peak]))


def _free_port():
  with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    return listener.getsockname()[1]


def _measure(args, name):
  """Starts a part's processes and returns its row."""
  command = [sys.executable, __file__, *sys.argv[1:], "--part", name]
  # Several processes share the GPU, of which JAX would take most at once.
  given = os.environ | {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "STAGES_TOKEN": secrets.token_hex(),
  }
  extra, port = [[]], str(_free_port())
  if name == "four processes":
    extra = [["--device", str(i), "--port", port] for i in range(_STAGES)]
  started = [
    subprocess.Popen(
      command + more, env=given, stdout=subprocess.PIPE, text=True
    )
    for more in extra
  ]
  found = []
  for process in started:
    text, _ = process.communicate()
    lines = [x for x in text.splitlines() if x.startswith("RESULT ")]
    if process.returncode or not lines:
      raise SystemExit(f"The part {name!r} has failed.")
    found.append(json.loads(lines[-1].removeprefix("RESULT ")))
  peaks = [x[2] for x in found]
  config = {
    x: y for x, y in vars(args).items()
    if x not in ("output", "part", "device", "port")
  }  # fmt: skip
  row = training.make_row(
    config, 0, part=name, step_s=max(x[0] for x in found), loss=found[-1][1],
    peak_bytes=None if None in peaks else sum(peaks),
  )  # fmt: skip
  print(
    f"{name}: {1e3 * row['step_s']:.1f} ms a step, loss {row['loss']:.6f}, "
    f"peak {row['peak_bytes']}",
    flush=True,
  )
  return row


def main():
  """Measures every part, each in processes of its own."""
  parser = argparse.ArgumentParser(description=__doc__)
  for option, default in (
    ("width", 768), ("depth", 12), ("length", 512), ("batch-size", 32),
    ("microbatches", 8), ("steps", 12),
  ):  # fmt: skip
    parser.add_argument(f"--{option}", type=int, default=default)
  parser.add_argument("--output", type=pathlib.Path)
  parser.add_argument("--part", choices=PARTS)
  parser.add_argument("--device", type=int)
  parser.add_argument("--port", type=int)
  args = parser.parse_args()
  if args.part is not None:
    _part(args)
    return
  rows = [_measure(args, name) for name in PARTS]
  if args.output is not None:
    training.append_rows(args.output, rows)


if __name__ == "__main__":
  main()
