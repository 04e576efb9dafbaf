r"""Measures which steps hide their communication, on a real slow link.

    sudo python scripts/slow_network.py --hosts 2 --rate 100mbit -- \\
      python scripts/bench_overlap.py

Real processes over `jax.distributed`, one worker each.  All steps do the same
computation on the same model; blocks of each alternate, so that whatever else
the machine does slows all alike.  Process 0 prints, and appends to a file of
rows: the time of a step's computation alone and of its communication alone,
and of each kind of step, beside what hiding everything and hiding nothing
would give.

For how long a step keeps the machine's cores busy, of each host: sending and
receiving is work of cores, too, the system's most of all.  Where a host has one
core, a step cannot be shorter than its computation and that work together.
"""

import argparse
import itertools
import json
import os
import statistics
import time

# One thread for the computation: another is to be free for the network.
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
)

import jax
import numpy as np
import optax

from jdist import collectives, methods, models, training, transforms

_TOLD = ", told"


def _chains(axis, interval):
  inner = optax.sgd(0.01, momentum=0.9)

  def late(interval, stream):
    return transforms.local_steps(
      inner, interval, axis=axis, overlap=transforms.Delayed(stream=stream)
    )

  parts = transforms.Stream(max_bytes=2**20)
  chains = {
    "computation": inner,
    "ssgd": methods.ssgd(inner, axis=axis),
    "update_first": transforms.update_first(inner, axis=axis, in_flight=4),
  }
  for h in (1, interval):
    chains[f"streamed H={h}"] = late(h, parts)
    # The same, where the host says which step ends a round.
    chains[f"streamed H={h}{_TOLD}"] = late(h, parts)
  return chains


def _programs(name, interval, step, team):
  """A step's programs in their turns: one, or those of a round."""

  def jit(**told):
    return team.jit(
      lambda state, batch: step(state, batch, transforms.Control(**told)),
      donate_argnums=0,
    )

  if not name.endswith(_TOLD):
    return [jit()]
  end, on = jit(round_ends=True), jit(round_ends=False)
  return [end] if "H=1," in name else [on] * (interval - 1) + [end]


def _busy_s() -> float:
  """Returns for how long all cores of the machine have been busy so far."""
  with open("/proc/stat") as file:
    fields = [int(x) for x in file.readline().split()[1:]]
  idle = fields[3] + fields[4]  # Nothing to do, or waiting for a disk.
  return (sum(fields[:8]) - idle) / os.sysconf("SC_CLK_TCK")


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("--width", type=int, default=1024)
  parser.add_argument("--batch-size", type=int, default=2048)
  parser.add_argument("--interval", type=int, default=4)
  parser.add_argument("--blocks", type=int, default=10)
  parser.add_argument(
    "--kinds", nargs="+", default=None, help="of steps; none: all of them"
  )
  parser.add_argument("--steps", type=int, default=4, help="in a block")
  parser.add_argument("--rate", default="100mbit", help="for the row only")
  parser.add_argument("--output", default=None)
  options = parser.parse_args()
  process = int(os.environ["JDIST_PROCESS"])
  num_processes = int(os.environ["JDIST_PROCESSES"])
  collectives.start_processes(
    os.environ["JDIST_COORDINATOR"], num_processes, process
  )
  team = collectives.workers(num_processes, substrate="shard_map")
  model = models.build(
    "mlp",
    input_shape=(8, 8, 1),
    num_classes=10,
    seed=0,
    hidden_sizes=(options.width, options.width),
  )
  random = np.random.default_rng(process)
  batch = team.place(
    {
      "image": random.normal(size=(1, options.batch_size, 8, 8, 1)).astype(
        np.float32
      ),
      "label": random.integers(0, 10, (1, options.batch_size)).astype(np.int32),
    }
  )
  loss = training.classification_loss(model.apply)
  chains = _chains(team.axis, options.interval)
  kinds = list(chains)[1:] if options.kinds is None else options.kinds
  if unknown := set(kinds) - set(list(chains)[1:]):
    parser.error(
      f"--kinds must be of {list(chains)[1:]}, got {sorted(unknown)}"
    )
  # All sent bytes are parts of the synchronous step's.
  built = {"computation", "ssgd", *kinds}
  chains = {name: chain for name, chain in chains.items() if name in built}
  states, programs, sent = {}, {}, {}
  for name, chain in chains.items():
    step = training.make_step(
      loss, chain, axis=team.axis, independent=name == "computation"
    )
    states[name] = training.init_state(team, chain, model.params, model.state)
    programs[name] = itertools.cycle(
      _programs(name, options.interval, step, team)
    )
    shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
      (states[name], batch),
    )
    counted = collectives.traffic(
      step, *shapes, axis=team.axis, num_workers=num_processes
    )
    sent[name] = counted.bytes_per_step
  params = team.replicate(model.params)
  programs["communication"] = team.jit(
    lambda tree: collectives.mean(tree, team.axis)
  )

  def block(name: str) -> tuple[float, float]:
    """Returns the seconds of a step, and those of busy cores of each host."""
    busy_s, started_s = _busy_s(), time.perf_counter()
    for _ in range(options.steps):
      if name == "communication":
        jax.block_until_ready(programs[name](params))
      else:
        states[name], metrics = next(programs[name])(states[name], batch)
        jax.block_until_ready(metrics)
    wall_s, busy_s = time.perf_counter() - started_s, _busy_s() - busy_s
    return wall_s / options.steps, busy_s / options.steps / num_processes

  names = ["computation", "communication", *kinds]
  times: dict[str, list[float]] = {name: [] for name in names}
  busy: dict[str, list[float]] = {name: [] for name in names}
  for turn in range(options.blocks + -(-options.interval // options.steps)):
    for name in names:
      seconds, busy_s = block(name)
      # The first ones compile, a round's programs one after the other.
      if turn * options.steps >= options.interval:
        times[name].append(seconds)
        busy[name].append(busy_s)
  if process:
    return
  median = {name: statistics.median(found) for name, found in times.items()}
  whole = sent["ssgd"]
  report = {}
  for name in names:
    row = {
      "step_ms": 1e3 * median[name],
      "spread_ms": [1e3 * min(times[name]), 1e3 * max(times[name])],
      # A mean, as the system counts in hundredths of a second.
      "busy_ms": 1e3 * statistics.mean(busy[name]),
    }
    if sent.get(name):
      # Communication alone, in proportion to what the step sends.
      sending = median["communication"] * sent[name] / whole
      bounds = [
        (c, s * sent[name] / whole)
        for c, s in zip(
          times["computation"], times["communication"], strict=True
        )
      ]
      row |= {
        "sent_bytes": sent[name],
        "all_hidden_ms": 1e3 * max(median["computation"], sending),
        "none_hidden_ms": 1e3 * (median["computation"] + sending),
      }
      # Ratios of the same block, and the lowest and the highest of all blocks.
      for bound, hides in (("all", max), ("none", sum)):
        of_blocks = zip(times[name], bounds, strict=True)
        ratios = [seconds / hides(both) for seconds, both in of_blocks]
        row[f"over_{bound}_hidden"] = statistics.median(ratios)
        row[f"over_{bound}_hidden_spread"] = [min(ratios), max(ratios)]
    report[name] = row
    line = (
      f"{name:20s} {row['step_ms']:7.0f} ms a step, "
      f"{row['busy_ms']:5.0f} of a core"
    )
    if "sent_bytes" in row:
      line += (
        f"   {row['sent_bytes'] / 1e6:5.2f} MB   "
        f"{row['over_all_hidden']:.2f} of all hidden, "
        f"{row['over_none_hidden']:.2f} of none hidden"
      )
    print(line, flush=True)
  if options.output is not None:
    row = training.make_row(
      vars(options), 0, processes=num_processes, steps=report
    )
    training.append_rows(options.output, [row])
  else:
    print(json.dumps(report))


if __name__ == "__main__":
  main()
