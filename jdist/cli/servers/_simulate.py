"""`jdist simulate`: parameter-server protocols on a virtual clock."""

import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

from jdist import checks, cluster, server, training
from jdist.cli import _commands, _options, _output
from jdist.cli.report import _status
from jdist.cli.servers import _protocols

# Enough tasks of a worker to see how the protocol makes it wait.
_DRAWN_TASKS = 20
_LIMITS = ("updates", "samples", "seconds")


def simulate(options: _commands.Simulate) -> None:
  """Simulates each protocol; writes a table, rows, pictures and timelines."""
  machines, profile, limits = _check(options)
  # `--pipeline-from` is a share of the updates, which a limit of samples gives
  # for a protocol that makes one update of a round.
  updates = limits.get("updates")
  if updates is None and limits.get("samples") is not None:
    updates = limits["samples"] / (options.batch_size * len(machines.nodes))
  # The median machine's task stands for all of them.
  speed = statistics.median_high(node.speed for node in machines.nodes)
  task_s = profile.compute_s(options.batch_size) / speed
  drawn = options.drawn_seconds or _DRAWN_TASKS * task_s
  # All protocols are built before a directory is made, because one may refuse a
  # batch that does not fit into memory.
  runs = {
    name: server.Simulation(
      machines,
      _protocols.build(
        name, options, options.batch_size, machines, profile, updates=updates
      ),
      profile,
      seed=options.seed,
      trace=cluster.Trace(until_s=drawn),
    )
    for name in options.protocols
  }
  console = _output.console()
  done: dict[str, server.Simulation] = {}
  heading = _heading(machines, profile)
  command = functools.partial(_options.command_line, options)
  with _status.Status(
    vars(options), command, "simulate", heading, len(runs)
  ) as status:
    output = status.output
    try:
      for name, run in runs.items():
        status.note(doing=name)
        status.bar.update(len(done), name)
        run.run(**limits)
        row = training.make_row(
          dataclasses.asdict(options),
          options.seed,
          protocol=name,
          **run.summary(),
          nodes={node: dataclasses.asdict(x) for node, x in run.nodes.items()},
        )
        training.append_rows(output / "rows.jsonl", [row])
        assert run.trace is not None
        run.trace.save_perfetto(output / f"{name}.json")
        done[name] = run
        status.note(step=len(done))
    except KeyboardInterrupt:
      console.print(_table(done) if done else "No protocol has ended.")
      raise KeyboardInterrupt(
        f"the rows of {', '.join(done) or 'no protocol'} are saved in {output}."
        f" This starts again: {status.command}"
      ) from None
  console.print(_table(runs))
  for name, run in runs.items():
    if run.ended:
      print(
        f"{name} has ended after update {run.state.version} at "
        f"{run.now_s:.4g} s: all machines are away for good from then on."
      )
  _output.finish(output, options, timelines=True)


def _check(
  options: _commands.Simulate,
) -> tuple[cluster.Cluster, cluster.Profile, dict[str, Any]]:
  if not options.cluster:
    raise ValueError(
      "`jdist simulate` needs a file: `jdist simulate CLUSTER.toml`."
    )
  _protocols.check_used("--protocols", options.protocols, options)
  limits = {name: getattr(options, name) for name in _LIMITS}
  if all(value is None for value in limits.values()):
    limits["updates"] = 1000
  machines, profile = _protocols.load(options.cluster)
  speed = sum(node.speed for node in machines.nodes)
  most = 1e9 * profile.compute_s(options.batch_size) / speed
  # These machines would compute more than 10**9 tasks.
  checks.check_number("--seconds", options.seconds or 0, high=most)
  return machines, profile, limits


def _table(runs: dict[str, server.Simulation]) -> Any:
  columns: dict[str, Callable[[str, server.Simulation, Any], str]] = {
    "protocol": lambda name, run, found: name,
    "time s": lambda name, run, found: f"{run.now_s:.4g}",
    "updates": lambda name, run, found: f"{found['updates']:,}",
    "samples/s": lambda name, run, found: f"{found['samples_per_s']:.4g}",
    "busy %": lambda name, run, found: f"{100 * found['utilisation']:.1f}",
    "staleness": lambda name, run, found: (
      "{mean_over_updates:.2f} / {mean_over_nodes:.2f} / {maximum:.0f}".format(
        **found["staleness"]
      )
    ),
    "spread": lambda name, run, found: f"{found['iteration_spread']:.2f}",
    "unused": lambda name, run, found: f"{sum(run.state.discarded.values()):,}",
    "GB sent": lambda name, run, found: (
      f"{(run.pulled_bytes + run.pushed_bytes) / 1e9:.3g}"
    ),
  }
  return _output.table(
    "Protocols on a virtual clock",
    "Staleness: updates since a gradient's parameters were sent, mean over "
    "updates / mean over machines / maximum. Spread: slowest over fastest "
    "machine's last iteration.",
    columns,
    [(name, run, run.summary()) for name, run in runs.items()],
  )


def _heading(machines: cluster.Cluster, profile: cluster.Profile) -> str:
  speeds = [node.speed for node in machines.nodes]
  slowest, fastest = min(speeds), max(speeds)
  each = f"{slowest:g} to {fastest:g}" if slowest < fastest else f"{slowest:g}"
  return (
    f"{checks.counted(len(speeds), 'machine')} of speed {each}; "
    f"{profile.name}: {1e3 * profile.compute_s(1):.3g} ms for a sample at "
    f"speed 1, {profile.pull_bytes / 1e6:.3g} MB pulled and "
    f"{profile.push_bytes / 1e6:.3g} MB pushed.\n"
  )
