"""`jdist simulate`: protocols of a parameter server on a virtual clock."""

import dataclasses
import datetime
import inspect
import math
import pathlib
import sys
from typing import Any

from jdist import cluster, server, training
from jdist.cli import _experiment, _options

# The rows of a picture: more could not be told apart.
_MAX_ROWS = 40
_DRAWN_TASKS = 20
_LIMITS = ("updates", "samples", "seconds")


def simulate(options: _options.Simulate) -> None:
  """Simulates each protocol and leaves a table, rows, pictures, timelines."""
  machines, profile, limits = _check(options)
  protocols = {
    name: _protocol(name, options, machines) for name in options.protocols
  }
  training.check_plots()
  drawn = _drawn_seconds(options, machines, profile)
  # Refused before a directory is made: a batch that fits no memory.
  runs = {
    name: server.Simulation(
      machines,
      protocol,
      profile,
      seed=options.seed,
      trace=cluster.Trace(until_s=drawn),
    )
    for name, protocol in protocols.items()
  }
  output = _output(options)
  console = _console()
  console.print(_heading(machines, profile))
  for name, run in runs.items():
    run.run(**limits)
    training.append_rows(output / "rows.jsonl", [_row(name, run, options)])
    _draw(name, run, min(drawn, run.now_s), output)
  console.print(_table(runs))
  # Not through the console, which would break a long path into lines.
  print(f"Rows: {output / 'rows.jsonl'}")
  for name in runs:
    print(f"Picture: {output / f'{name}.png'}")
  print(f"Timelines for https://ui.perfetto.dev: {output}/*.json")


def _check(
  options: _options.Simulate,
) -> tuple[cluster.Cluster, cluster.Profile, dict[str, Any]]:
  if not options.cluster:
    raise ValueError(
      "`jdist simulate` needs a file: `jdist simulate CLUSTER.toml`."
    )
  if not pathlib.Path(options.cluster).is_file():
    raise ValueError(f"There is no file {options.cluster!r}.")
  for name in options.protocols:
    if name not in server.PROTOCOLS:
      raise ValueError(
        f"`--protocols` must be of {', '.join(server.PROTOCOLS)}, got {name!r}."
      )
  if len(set(options.protocols)) < max(len(options.protocols), 1):
    raise ValueError(
      "`--protocols` must be one or more different ones, got "
      f"{options.protocols}."
    )
  limits = {name: getattr(options, name) for name in _LIMITS}
  for name, value in {"batch_size": options.batch_size, **limits}.items():
    if value is not None and not 0 < value < math.inf:
      raise ValueError(
        f"`--{name.replace('_', '-')}` must be positive, got {value}."
      )
  if all(value is None for value in limits.values()):
    limits["updates"] = 1000
  machines, profile = cluster.load_cluster(options.cluster)
  if profile is None:
    raise ValueError(
      f"{options.cluster} must have a [profile], the model's costs: "
      "`seconds_per_sample`, `pull_bytes` and `push_bytes` at least."
    )
  return machines, profile, limits


def _protocol(
  name: str, options: _options.Simulate, machines: cluster.Cluster
) -> server.Protocol:
  """Builds a protocol with those of the options that it takes."""
  num = len(machines.nodes)
  most = options.max_staleness
  given = {
    "total": num * options.batch_size,
    "batches": server.FixedBatches(options.batch_size),
    "bound": options.bound,
    "n": options.splits,
    "max_staleness": num if most is None else most,
    "backups": options.backups,
  }
  factory = server.PROTOCOLS[name].factory
  takes = inspect.signature(factory).parameters
  return factory(**{key: x for key, x in given.items() if key in takes})


def _drawn_seconds(
  options: _options.Simulate,
  machines: cluster.Cluster,
  profile: cluster.Profile,
) -> float:
  if options.drawn_seconds is not None:
    if not 0 < options.drawn_seconds < math.inf:
      raise ValueError(
        f"`--drawn-seconds` must be positive, got {options.drawn_seconds}."
      )
    return options.drawn_seconds
  speeds = sorted(node.speed for node in machines.nodes)
  task_s = profile.compute_s(options.batch_size) / speeds[len(speeds) // 2]
  return _DRAWN_TASKS * task_s


def _draw(
  name: str, run: server.Simulation, until_s: float, output: pathlib.Path
) -> None:
  """Draws the run's beginning, machines above links."""
  trace = run.trace
  assert trace is not None
  nodes = [node.name for node in run.machines.nodes]
  rows = nodes + [each for each in trace.resources if each not in nodes]
  cluster.plot_trace(
    trace,
    output / f"{name}.png",
    title=f"{name}: the first {until_s:.3g} s",
    resources=rows[:_MAX_ROWS],
    end_s=until_s,
  )
  trace.save_perfetto(output / f"{name}.json")


def _staleness(run: server.Simulation) -> dict[str, float]:
  """Returns the mean over updates, the mean over machines, and the maximum."""
  total = sum(run.staleness.values())
  means = [
    node.staleness / node.updates for node in run.nodes.values() if node.updates
  ]
  weighted = sum(stale * count for stale, count in run.staleness.items())
  return {
    "mean_over_updates": weighted / total if total else 0.0,
    "mean_over_nodes": sum(means) / len(means) if means else 0.0,
    "maximum": float(max(run.staleness, default=0)),
  }


def _iteration_spread(run: server.Simulation) -> float:
  """Returns the slowest machine's last iteration over the fastest's."""
  seconds = [
    node.iteration_s
    for node in run.nodes.values()
    if not math.isnan(node.iteration_s)
  ]
  return max(seconds) / min(seconds) if seconds else math.nan


def _utilisation(run: server.Simulation) -> float:
  """Returns which part of the time the machines computed, on the average."""
  busy = sum(node.compute_s for node in run.nodes.values())
  return min(1.0, busy / (len(run.nodes) * run.now_s)) if run.now_s else 0.0


def _row(
  name: str, run: server.Simulation, options: _options.Simulate
) -> dict[str, Any]:
  return training.make_row(
    dataclasses.asdict(options),
    options.seed,
    protocol=name,
    virtual_s=run.now_s,
    updates=run.state.version,
    samples=run.applied_samples,
    samples_per_s=run.applied_samples / run.now_s if run.now_s else 0.0,
    utilisation=_utilisation(run),
    staleness=_staleness(run),
    staleness_counts={str(k): v for k, v in sorted(run.staleness.items())},
    iteration_spread=_iteration_spread(run),
    discarded=dict(run.state.discarded),
    pulled_bytes=run.pulled_bytes,
    pushed_bytes=run.pushed_bytes,
    nodes={
      node: dataclasses.asdict(totals) for node, totals in run.nodes.items()
    },
  )


def _table(runs: dict[str, server.Simulation]) -> Any:
  from rich import table

  grid = table.Table(
    title="Protocols on a virtual clock",
    caption=(
      "Staleness: updates since a gradient's parameters were sent, mean over "
      "updates / mean over machines / maximum. Spread: slowest over fastest "
      "machine's last iteration."
    ),
  )
  grid.add_column("protocol", no_wrap=True)
  for title in (
    "time s", "updates", "samples/s", "busy %", "staleness", "spread",
    "unused", "GB sent",
  ):  # fmt: skip
    grid.add_column(title, justify="right")
  for name, run in runs.items():
    stale = _staleness(run)
    grid.add_row(
      name,
      f"{run.now_s:.4g}",
      f"{run.state.version:,}",
      f"{run.applied_samples / run.now_s:.4g}" if run.now_s else "-",
      f"{100 * _utilisation(run):.1f}",
      " / ".join(
        (
          f"{stale['mean_over_updates']:.2f}",
          f"{stale['mean_over_nodes']:.2f}",
          f"{stale['maximum']:.0f}",
        )
      ),
      f"{_iteration_spread(run):.2f}",
      f"{sum(run.state.discarded.values()):,}",
      f"{(run.pulled_bytes + run.pushed_bytes) / 1e9:.3g}",
    )
  return grid


def _heading(machines: cluster.Cluster, profile: cluster.Profile) -> str:
  speeds = [node.speed for node in machines.nodes]
  return (
    f"{len(speeds)} machines of speed {min(speeds):g} to {max(speeds):g}; "
    f"{profile.name}: {1e3 * profile.compute_s(1):.3g} ms for a sample at "
    f"speed 1, {profile.pull_bytes / 1e6:.3g} MB pulled and "
    f"{profile.push_bytes / 1e6:.3g} MB pushed.\n"
  )


def _output(options: _options.Simulate) -> pathlib.Path:
  if options.output is not None:
    path = pathlib.Path(options.output)
  else:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    path = pathlib.Path("runs") / f"simulate-{now}"
  _experiment.make_directory("--output", path)
  return path


def _console() -> Any:
  from rich import console

  return console.Console(
    width=None if sys.stdout.isatty() else 100, highlight=False
  )
