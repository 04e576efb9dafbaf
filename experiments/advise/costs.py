r"""Records what each method costs a worker, for the methods' pages of the site.

    sudo python scripts/slow_network.py --hosts 2 --rate 100mbit \\
      --timeout-s 600 -- python experiments/advise/costs.py

It takes the methods of the registry, with their defaults, that `run.py` does
not have. Some at a time take turns with synchronous SGD, which stands in the
same rows: what a machine computes in a second changes within minutes. A net's
methods that have rows are not measured again. MP²'s predictor is not trained,
because its numbers do not change its time.
"""

import argparse
import dataclasses
import os

import run  # First: it sets XLA's flags.

# isort: split
import jax
import optax

import jdist
from jdist import advice, collectives, methods, prediction, training

ROWS = run.RESULTS / "costs.jsonl"
NETS = (("cnn", 24), ("mlp", 128))
# Nets for a method that predicts layers: it needs some behind its cut.
PREDICTED = (("cnn", 24), ("lenet", 96))
_SENT_LAYERS = 2  # LeNet's published cut.
_TOGETHER = 8
_BASE = "ssgd"
_RUN = methods.Run(
  num_steps=10**6, warmup_steps=0, interval=run.INTERVAL,
  learning_rate=optax.constant_schedule(0.01),
)  # fmt: skip


def names(*net):
  """Returns the methods that are recorded here for a net."""
  known = {x.split()[0] for x in run.CHAINS}
  return [
    name
    for name, method in methods.registry.items()
    if name not in known
    and net in (PREDICTED if "predict" in method.required else NETS)
  ]


def chain(name, params):
  """Returns a function of the axis to a method's chain, and its round."""
  method = methods.registry[name]
  optimizer = optax.sgd(0.01) if method.own_momentum else run.sgd()
  more = {}
  if "switch_step" in method.arguments:
    more["switch_step"] = 0  # Before it there are no rounds.
  if "predict" in method.required:
    cut = prediction.cut(params, _SENT_LAYERS)
    predictor = prediction.predictor(cut)
    more |= {
      "cut": cut, "predict": predictor.apply,
      "predictor_params": predictor.init(jax.random.key(0)),
    }  # fmt: skip

  def make(axis):
    return method.build(optimizer, _RUN, axis=axis, **more)

  return make, run.INTERVAL if method.in_rounds else 1


def left(rows, model, batch_size):
  """Returns lists of methods that a net has no rows of, to be run together."""
  found = {
    x["method"]
    for x in rows
    if (x["config"]["model"], x["config"]["batch_size"]) == (model, batch_size)
  }
  wanted = [x for x in names(model, batch_size) if x not in found]
  return [wanted[i : i + _TOGETHER] for i in range(0, len(wanted), _TOGETHER)]


def record(options, workers, group):
  """Measures some methods' costs beside the base's; returns the rows."""
  model, loss_fn, batch = run.problem(options)
  link = advice.measure_link(workers)
  chains = {x: chain(x, model.params) for x in (_BASE, *group)}
  found = advice.advise(
    loss_fn, model.params, batch, chains, link, num_workers=options.hosts,
    optimizer=run.sgd(), model_state=model.state, limit_s=options.limit_s,
    workers=workers,
  )  # fmt: skip
  config = vars(options) | {"together": group}
  return [
    training.make_row(
      config, 0, method=name, costs=costs._asdict(),
      link=dataclasses.asdict(link),
    )
    for name, costs in found.costs.items()
  ]  # fmt: skip


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--limit-s", type=float, default=30.0,
                      help="after which no block begins")  # fmt: skip
  options = parser.parse_args()
  options.hosts = int(os.environ["JDIST_PROCESSES"])
  options.bits_per_s = float(os.environ["JDIST_BITS_PER_S"])
  collectives.start_processes(
    os.environ["JDIST_COORDINATOR"], options.hosts, run.take_core(),
    cpu_devices_per_process=1,
  )  # fmt: skip
  workers = jdist.workers(options.hosts)
  # All hosts see the same rows before the first one writes more.
  known = training.read_rows(ROWS) if ROWS.exists() else []
  nets = dict.fromkeys((*NETS, *PREDICTED))
  groups = [(net, group) for net in nets for group in left(known, *net)]
  collectives.agree("the methods to be recorded", {"groups": groups})
  for (options.model, options.batch_size), group in groups:
    rows = record(options, workers, group)
    run.keep(ROWS.name, rows)
    run.say(f"{options.model}, {options.batch_size}: {', '.join(group)}")


if __name__ == "__main__":
  main()
