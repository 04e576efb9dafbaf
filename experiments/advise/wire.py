r"""Counts the bytes at a host's network interface, and by our own counts.

    sudo python scripts/slow_network.py --hosts 2 --rate none -- \
      python experiments/advise/wire.py methods     # or edges, or server

A row has the bytes and packets that a host sent and received in some steps, as
its interface counts them, and our counts: of a method those of the compiled
programs' collectives, of the traced step and of `num_bits`; of a server the
messages' sizes, and of pipeline stages `StageProcess.edge_bytes`. `server`
needs Ray, and makes a node of it on each host.
"""

import argparse
import functools
import json
import os
import pathlib
import sys
import tempfile

import jax
import numpy as np
import optax
import run

import jdist
from jdist import (
  codecs,
  collectives,
  methods,
  models,
  pipeline,
  profiling,
  reducers,
  server,
  training,
)

_EXPERIMENTS = pathlib.Path(__file__).resolve().parents[1]
ROWS = run.RESULTS / "wire.jsonl"
_SHAPE = (28, 28, 1)
CODECS = {"plain": None, "int8": codecs.Quantize(8), "int4": codecs.Quantize(4)}
REDUCERS = {
  "ssgd": reducers.Exact(),
  "int8": reducers.compressed(codecs.Quantize(8)),
  "int4": reducers.compressed(codecs.Quantize(4)),
  "topk": reducers.compressed(codecs.TopK(0.01)),
  "powersgd": reducers.PowerSGD(2),
}


def make_chain(name, axis):
  """Returns the chain of a method."""
  if name == "msdpu streamed":
    return run.msdpu(axis)
  compression = None
  if name != "ssgd":
    compression = jdist.Compression(REDUCERS[name], reducers.ErrorFeedback())
  return methods.ssgd(run.sgd(), axis=axis, compression=compression)


def interface():
  """Returns the bytes and packets that this host sent, and that it received."""
  for line in pathlib.Path("/proc/net/dev").read_text().splitlines():
    name, _, counts = line.partition(":")
    if name.strip() == "eth0":
      numbers = [*map(int, counts.split())]
      return np.array([numbers[8:10], numbers[:2]])
  raise RuntimeError("This host has no interface eth0.")


def counted_since(before, way=0):
  """Returns the interface's bytes and packets since others, in one way."""
  names, counts = ("bytes", "packets"), (interface() - before)[way]
  return dict(zip(names, counts.tolist(), strict=True))


def build():
  """Returns a network of 1.1 million parameters and its loss."""
  model = models.build(
    "mlp", input_shape=_SHAPE, num_classes=10, hidden_sizes=(1000, 300), seed=0
  )
  return model, training.classification_loss(model.apply)


def of_one(tree):
  """Returns the shapes of one worker's part of a placed tree."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree
  )


def count_methods(options):
  """Counts the bytes of each method on this host."""
  number = run.take_core()
  collectives.start_processes(
    os.environ["JDIST_COORDINATOR"], options.hosts, number,
    cpu_devices_per_process=1,
  )  # fmt: skip
  workers = jdist.workers(options.hosts)
  model, loss_fn = build()
  random = np.random.default_rng(0)
  batch = {
    "image": random.normal(size=(8, *_SHAPE)).astype(np.float32),
    "label": random.integers(0, 10, 8).astype(np.int32),
  }
  rows = []
  for name in (*REDUCERS, "msdpu streamed"):
    reducer, interval = REDUCERS.get(name), 1
    if reducer is None:
      reducer, interval = REDUCERS["ssgd"], run.INTERVAL
    make = functools.partial(make_chain, name)
    turn = run.Turn(workers, make, model, loss_fn, batch)
    for _ in range(2):  # A late method's messages begin in its next round.
      turn.take()
    turn.controls.clear()
    before = interface()
    for _ in range(options.steps // run.INTERVAL):
      turn.take()
    counts = counted_since(before)
    traced = compiled = 0.0
    for control in set(turn.controls):
      times = turn.controls.count(control)
      found = collectives.traffic(
        functools.partial(turn.step, control=control),
        *of_one((turn.state, turn.batch)),
        axis=workers.axis, num_workers=options.hosts,
      ).collectives  # fmt: skip
      traced += times * sum(x.wire_bytes for x in found)
      program = turn.program(control).lower(turn.state, turn.batch).compile()
      found = profiling.read_collectives(program)
      compiled += times * sum(x.wire_bytes for x in found)
    params = of_one(turn.state.params)
    bits = reducer.num_bits(params, options.hosts).sent
    rows.append(
      training.make_row(
        vars(options), 0, name=name, counts=counts,
        said={
          "num_bits": bits / 8 * options.steps / interval, "traced": traced,
          "compiled": compiled,
        },
      )
    )  # fmt: skip
  return rows, number


def count_edges(options):
  """Counts the bytes of messages between two stages of a pipeline."""
  sys.path.append(str(_EXPERIMENTS / "pipeline"))
  import timed_layers

  device = run.take_core()
  host, _, port = os.environ["JDIST_COORDINATOR"].partition(":")
  table = pipeline.make_table("1f1b", 2, 4)
  layers = [timed_layers.dense(f"layer{i}", 256) for i in range(2)]
  shape = timed_layers.make_batches(1, 1024, 256)[0]
  batches = timed_layers.make_batches(options.steps, 4096, 256)
  rows = []
  with pipeline.connect(
    device, [(host, int(port)), ("", 0)], "on one machine", connect_s=100
  ) as peers:
    for name, codec in CODECS.items():
      process = pipeline.StageProcess(
        pipeline.cut_layers(layers, 2), timed_layers.squared_error, table,
        shape, peers=peers, inputs="x",
        edges=codec and reducers.MessageCodec(codec, reducers.ErrorFeedback()),
      )  # fmt: skip
      state = process.init_state(optax.sgd(1e-3))
      state, _ = process.run(state, batches[:1])  # It compiles.
      before = interface()
      process.run(state, batches)
      # One half are outputs and the other half their gradients.
      said = {"edge_bytes": process.edge_bytes * options.steps / 2}
      rows.append(
        training.make_row(
          vars(options), 0, name=f"edge {name}", counts=counted_since(before),
          said=said,
        )
      )  # fmt: skip
  return rows, device


def count_server(options):
  """Counts the bytes between a server and its worker on another host."""
  # Its `run.py` is another one than this folder's.
  sys.path.append(str(_EXPERIMENTS / "thin_links"))
  import nodes

  folder = pathlib.Path(tempfile.gettempdir(), f"jdist-wire-{os.getppid()}")
  folder.mkdir(exist_ok=True)
  address = nodes.start(folder, cpus=1)
  if address is None:
    return [], 1
  model, _ = build()
  rows, engine = [], server.RayEngine(1, address=address)
  try:
    for name in ("plain", "int4"):
      codec = CODECS[name] and reducers.MessageCodec(CODECS[name])
      plans, file = server.message_plans(codec), folder / f"{name}.json"
      session = server.LiveSession(
        engine,
        functools.partial(_serve, model.params, plans),
        {"worker": functools.partial(_work, model.params, plans, file)},
        server.LivePlan(workers=("worker",), unit="updates"),
        model=(model.params, {}),
      )  # fmt: skip
      server.ServerRun(session).fit(options.steps)
      summary = session.summary()
      nodes.wait_for(file)
      counts = json.loads(file.read_text())
      for way in ("pushed", "pulled"):
        rows.append(
          training.make_row(
            vars(options), 0, name=f"server {name} {way}", counts=counts[way],
            said={"messages": summary[f"{way}_bytes"]},
          )
        )  # fmt: skip
  finally:
    engine.stop()
    (folder / "end").touch()
  return rows, 0


class Samples:
  """Equal samples of a shape for every worker and task."""

  shared = True

  def __init__(self, shape):
    self._shape = shape

  def batch(self, worker, start, count, *, size=None):
    """Returns images, labels and the mask of a task."""
    del worker, start
    size = size or count
    return {
      "image": np.ones((size, *self._shape), np.float32),
      "label": np.zeros(size, np.int32),
      "mask": (np.arange(size) < count).astype(np.float32),
    }


def _serve(params, plans, plan):
  learner = server.GradientServer(
    optax.sgd(0.01), params, plans, workers=plan.workers
  )
  protocol = server.ASP(batches=server.FixedBatches(8))
  return server.LiveServer(protocol, learner, plan)


def _work(params, plans, file, channel):
  _, loss_fn = build()
  worker = server.GradientWorker(
    loss_fn, params, Samples(_SHAPE), plans, number=0, num_workers=1, sizes=[8]
  )
  worker.prepare()
  before = interface()
  server.WorkerLoop(channel, "worker", worker, depth=1).run()
  part = file.with_suffix(".part")
  ways = {"pushed": 0, "pulled": 1}
  counts = {name: counted_since(before, way) for name, way in ways.items()}
  part.write_text(json.dumps(counts))
  part.rename(file)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  counts = {
    "methods": count_methods, "edges": count_edges, "server": count_server
  }  # fmt: skip
  parser.add_argument("what", choices=tuple(counts))
  parser.add_argument("--hosts", type=int, default=2)
  parser.add_argument("--steps", type=int, default=32,
                      help="a multiple of 8")  # fmt: skip
  options = parser.parse_args()
  rows, number = counts[options.what](options)
  if number:
    return
  training.append_rows(ROWS, rows)
  for row in rows:
    print(row["name"], row["counts"], row["said"])


if __name__ == "__main__":
  main()
