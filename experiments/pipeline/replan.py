"""A device that becomes three times slower in a run, and what is done about it.

    python experiments/pipeline/replan.py hosts

On the virtual clock: the throughput before, while the old plan continues, and
under the plan that `Replanner` proposes, once the pipeline has been drained and
the moved layers have gone over the links with their momentum.  The measure is a
plan made afresh for the changed machines.
"""

import dataclasses
import random
import sys
from typing import Any

import config
import methods
import replanning
import run
import simpy
import tyro

from jdist import cluster, pipeline, training

_SLOWED = 1 / 3
_NOISE = 0.03  # Standard deviation of measured seconds, relative.
_MOST = 200


def _simulated(
  cell: methods.Cell,
  chosen: pipeline.Candidate,
  plan: pipeline.Plan,
  machines: cluster.Cluster,
) -> float:
  """Returns samples a second in the steady state."""
  assert chosen.made is not None
  number = chosen.made.num_iterations
  if chosen.table in ("ours", "greedy"):
    table = pipeline.ours(
      pipeline.stage_times(plan, machines, chosen.send_factor),
      cell.number,
      window=chosen.window or 1,
      num_iterations=number,
    )
  else:
    known = pipeline.table_options(chosen.table)
    options = {"num_iterations": number} if "num_iterations" in known else {}
    table = pipeline.make_table(
      chosen.table, plan.num_stages, cell.number, **options
    )
  times = pipeline.simulate(
    table, plan.stages, machines, nodes=plan.nodes[: plan.num_stages]
  )
  least = plan.bottleneck_s * cell.number
  return cell.batch_size / max(times.iteration_s, least)


def _moved(
  cell: methods.Cell, proposal: replanning.Proposal
) -> tuple[float, float]:
  """Returns the bytes that move, and the seconds that they take together."""
  environment = simpy.Environment()
  network = cluster.Network(
    environment, cell.machines.topology, cluster.Trace()
  )
  total = 0.0
  for move in proposal.moves:
    # Parameters and momentum; gradients are none at a drained step.
    num_bytes = 2 * cell.costs[move.layer].parameter_bytes
    total += num_bytes
    network.send(move.source, move.target, num_bytes, name="move", kind="move")
  environment.run()
  return total, float(environment.now)


def result(cell: methods.Cell, slowed: int) -> dict[str, Any]:
  """Returns what a cell's run comes to when a machine becomes slow."""
  chosen = cell.planned(None)
  assert chosen.plan is not None and chosen.made is not None
  plan = chosen.plan
  before = _simulated(cell, chosen, plan, cell.machines)
  name = plan.nodes[slowed]
  machines = dataclasses.replace(
    cell.machines,
    nodes=tuple(
      dataclasses.replace(x, speed=x.speed * (_SLOWED if x.name == name else 1))
      for x in cell.machines.nodes
    ),
  )
  during = _simulated(cell, chosen, plan, machines)
  report = pipeline.check_table(chosen.made)
  replanner = replanning.Replanner(
    plan,
    cell.costs,
    cell.machines,
    footprint=pipeline.Footprint(1.0, report.versions, report.live),
    num_microbatches=cell.number,
  )
  generator = random.Random(0)

  def measured(plan: pipeline.Plan, there: cluster.Cluster) -> list[float]:
    return [
      stage.compute_s / there.node(x).speed * generator.gauss(1.0, _NOISE)
      for stage, x in zip(plan.stages, plan.nodes, strict=True)
    ]

  early = 0
  for _ in range(50):  # Noise alone moves nothing.
    early += bool(replanner.observe(measured(plan, cell.machines), before))
  noticed, proposal = 0, None
  while proposal is None and noticed < _MOST:
    noticed += 1
    proposal = replanner.observe(measured(plan, machines), during)
  assert proposal is not None
  moved_bytes, move_s = _moved(cell, proposal)
  after = _simulated(cell, chosen, proposal.plan, machines)
  returns = 0
  for _ in range(50):  # It stays.
    again = replanner.observe(measured(proposal.plan, machines), after)
    returns += bool(again and again.returns)
  fresh = dataclasses.replace(cell, machines=machines).planned(None)
  # A micro-batch's way through all stages and back, with the slow one.
  late = plan.stages[slowed].compute_s * (1 / _SLOWED - 1)
  drained = plan.trip_s + late
  pause = drained + move_s + proposal.plan.trip_s
  return {
    "table": chosen.table,
    "slowed": name,
    "before_samples_per_s": before,
    "during_samples_per_s": during,
    "after_samples_per_s": after,
    "fresh_samples_per_s": fresh.samples_per_s,
    "fresh_table": fresh.table,
    "recovered": after / fresh.samples_per_s,
    "iterations_until_noticed": noticed,
    "proposals_before": early,
    "taken_back": returns,
    "moved_layers": len(proposal.moves),
    "moved_bytes": moved_bytes,
    "drain_s": drained,
    "move_s": move_s,
    "refill_s": proposal.plan.trip_s,
    # The samples of the pause, made up for by the faster plan.
    "paid_back_s": pause * during / (after - during),
    "cuts": (plan.cuts, proposal.plan.cuts),
    "nodes": (plan.nodes, proposal.plan.nodes),
  }


def main(name: str, options: config.Config) -> None:
  """Runs each network on equal machines, a row each."""
  path = run.FOLDER / f"{name}-slowed.jsonl"
  path.unlink(missing_ok=True)
  for network in options.networks:
    for stages in options.stages:
      cell = run.cell(options, network, "equal", stages)
      found = result(cell, stages // 2)
      row = training.make_row(
        dataclasses.asdict(options),
        0,
        purpose="slowed",
        network=network,
        stages=stages,
        **found,
      )
      training.append_rows(path, [row])
      print(
        f"{network}, {stages}: {found['before_samples_per_s']:.1f} -> "
        f"{found['during_samples_per_s']:.1f} -> "
        f"{found['after_samples_per_s']:.1f} of "
        f"{found['fresh_samples_per_s']:.1f} samples/s, noticed after "
        f"{found['iterations_until_noticed']}",
        flush=True,
      )


if __name__ == "__main__":
  chosen_config = tyro.extras.overridable_config_cli(config.PRESETS)
  main(next(x for x in sys.argv[1:] if x in config.PRESETS), chosen_config)
