r"""Predicts a server's updates as `jdist advise` does, and measures them.

    sudo python scripts/slow_network.py --hosts 2 --rate 1000mbit -- \\
      python experiments/advise/servers.py --model lenet --rates 30mbit 100mbit
    python experiments/advise/report.py

The server is on one host and its worker on the other one, both as actors of
Ray; each host has one core.  At each rate both hosts measure the link and a
step of synchronous SGD before Ray begins, and the virtual clock predicts by
them what an update takes.
"""

import argparse
import functools
import itertools
import os
import pathlib
import socket
import statistics
import sys
import tempfile

import jax
import optax
import run
import wire

import jdist
from jdist import advice, cluster, collectives, models, server, training

_BLOCKS = 7
_BLOCK_S = 1.0


def predict(options, workers, round_trip_s):
  """Returns the seconds of an update, and the link."""
  model, loss_fn, batch = run.problem(options)
  size = sum(x.nbytes for x in jax.tree.leaves(model.params))
  reached = advice.measure_link(workers, num_bytes=size).bandwidth_bits_per_s
  found = advice.advise(
    loss_fn, model.params, batch, {"ssgd": run.CHAINS["ssgd"]},
    cluster.Link(reached), num_workers=2, optimizer=run.sgd(),
    model_state=model.state, limit_s=5, workers=workers,
  )  # fmt: skip
  # A message takes the links of two machines.
  latency_s = statistics.median(map(round_trip_s, range(20))) / 4
  link = cluster.Link(reached, latency_s)
  profile = cluster.Profile(
    found.step_s / options.batch_size, pull_bytes=size, push_bytes=size
  )
  protocol = server.ASP(batches=server.FixedBatches(options.batch_size))
  clock = server.Simulation(
    cluster.workers([1.0], link=link), protocol, profile
  )
  clock.run(updates=40)
  return clock.now_s / 40, link


def _model(name, shape):
  return models.build(name, input_shape=shape, num_classes=10, seed=0)


def _serve(name, shape, batch_size, plan):
  model = _model(name, shape)
  learner = server.GradientServer(
    optax.sgd(0.01), model.params, server.message_plans(),
    workers=plan.workers, model_state=model.state,
  )  # fmt: skip
  protocol = server.ASP(batches=server.FixedBatches(batch_size))
  return server.LiveServer(protocol, learner, plan)


def _work(name, shape, batch_size, channel):
  model = _model(name, shape)
  worker = server.GradientWorker(
    training.classification_loss(model.apply), model.params,
    wire.Samples(shape), server.message_plans(), number=0, num_workers=1,
    sizes=[batch_size], model_state=model.state,
  )  # fmt: skip
  worker.prepare()
  server.WorkerLoop(channel, "worker", worker, depth=1).run()


def measure(options, engine, said_s):
  """Returns the seconds of an update, one for each block."""
  given = options.model, run.SHAPES[options.model], options.batch_size
  model = _model(*given[:2])
  session = server.LiveSession(
    engine, functools.partial(_serve, *given),
    {"worker": functools.partial(_work, *given)},
    server.LivePlan(workers=("worker",), unit="updates"),
    model=(model.params, model.state),
  )  # fmt: skip
  every = max(3, round(_BLOCK_S / said_s))
  ends = [
    (x.step, x.train_s)
    for x in server.ServerRun(session).fit(
      every * (_BLOCKS + 2), unit="updates", every=every
    )
  ][1:]  # The first block waits for programs.
  return [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(ends)]


def main():
  import pipelines

  sys.path.append(
    str(pathlib.Path(__file__).resolve().parents[1] / "thin_links")
  )
  import nodes

  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", choices=tuple(run.SHAPES), default="lenet")
  parser.add_argument("--batch-size", type=int, default=32)
  parser.add_argument("--rates", nargs="+", default=["100mbit"])
  options = parser.parse_args()
  rates = options.rates
  del options.rates
  options.hosts, number = 2, run.take_core()
  collectives.start_processes(
    os.environ["JDIST_COORDINATOR"], 2, number, cpu_devices_per_process=1
  )
  workers = jdist.workers(2)
  names = [f"{socket.gethostname()[: -len(str(number))]}{i}" for i in range(2)]
  said = {}
  for rate in rates:
    if number == 0:
      run.slow_network.change_rate(names, rate)
    collectives.agree(f"the rate {rate}", {})
    said[rate] = predict(options, workers, pipelines.round_trip_s)
  folder = pathlib.Path(tempfile.gettempdir(), f"jdist-servers-{os.getppid()}")
  folder.mkdir(exist_ok=True)
  if (address := nodes.start(folder, cpus=1)) is None:
    return
  engine = server.RayEngine(1, address=address)
  try:
    for rate, (said_s, link) in said.items():
      run.slow_network.change_rate(names, rate)
      options.bits_per_s = 8 * run.slow_network.bytes_per_s(rate)
      seconds = measure(options, engine, said_s)
      took_s = statistics.median(seconds)
      run.say(f"{rate}: said {1e3 * said_s:.2f} ms, took {1e3 * took_s:.2f}")
      row = training.make_row(
        vars(options), 0, table="server", said_s=said_s, step_s=seconds,
        link=[link.bandwidth_bits_per_s, link.latency_s],
      )  # fmt: skip
      training.append_rows(run.RESULTS / "others.jsonl", [row])
  finally:
    engine.stop()
    (folder / "end").touch()


if __name__ == "__main__":
  main()
