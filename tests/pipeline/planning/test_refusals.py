"""Refusals of costs, partitions, plans and simulations: argument and rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import cluster, models, pipeline
from tests import _refusals

pytest.importorskip("simpy")
_COSTS = [pipeline.LayerCost(x, 1.0, 2.0) for x in "abcdef"]
_TWO, _FOUR = (cluster.workers([1.0] * number) for number in (2, 4))
_NAN = float("nan")
AWAY = cluster.Cluster(
  (
    cluster.Node("a"),
    cluster.Node("b", outages=(cluster.Outage(1.0, 2.0),)),
    cluster.Node("c"),
    cluster.Node("d"),
  )
)


def cost(**change):
  return pipeline.LayerCost(**({"name": "a"} | change))


def measured(**change):
  model = models.build(
    "mlp", input_shape=(8, 8, 1), num_classes=10, hidden_sizes=(4,),
    abstract=True,
  )  # fmt: skip
  batch = {"image": jax.ShapeDtypeStruct((4, 8, 8, 1), jnp.float32)}
  return pipeline.layer_costs(model.layers, batch, **change)


def part(costs=_COSTS, **change):
  return pipeline.partition(costs, _TWO, **change)


def endless(speed=1.0, **change):
  costs = [pipeline.LayerCost(x, **{"forward_s": 1.0, **change}) for x in "ab"]
  nodes = tuple(cluster.Node(x, speed=speed, memory_bytes=1e9) for x in "ab")
  with np.errstate(over="ignore"):
    pipeline.partition(costs, cluster.Cluster(nodes))


def even(number):
  return pipeline.partition(_COSTS, cluster.workers([1.0] * number))


def footprint(**change):
  return part(footprint=pipeline.Footprint(**change))


def place(num_stages):
  return pipeline.place(_COSTS, _TWO, num_stages=num_stages)


def plan(batch_size=8, **options):
  return pipeline.plan(_COSTS, _TWO, batch_size, **options)


def simulate(costs=_COSTS[:4], machines=_FOUR, **change):
  table = pipeline.make_table("1f1b", 4, 4)
  return pipeline.simulate(table, costs, machines, **change)


def windows(number):
  return plan(tables=["2bw"], num_microbatches=[number])


@_refusals.table(
  ("tables", lambda: plan(tables=[]), "one at least"),
  ("num_microbatches", lambda: plan(num_microbatches=[]), "one at least"),
  (
    "num_microbatches",
    lambda: plan(tables=["pipedream"], num_microbatches=[4]),
    "1 for pipedream alone",
  ),
  ("optimizer_copies", lambda: plan(optimizer_copies=-1.0), "in [0, inf]"),
  (
    "costs",
    lambda: endless(parameter_bytes=1e308),
    "finite sums of seconds and bytes, got inf",
  ),
  ("costs", lambda: endless(1e-200, forward_s=1e200), "finite sums of seconds"),
  ("optimizer_copies", lambda: footprint(optimizer_copies=-5), "in [0, inf]"),
  (
    "evaluations",
    lambda: pipeline.place(_COSTS, _TWO, evaluations="x"),
    "an int",
  ),
  ("forward_s", lambda: cost(forward_s=-1.0), "finite and not negative"),
  ("output_bytes", lambda: cost(output_bytes=_NAN), "finite"),
  ("weight_s", lambda: cost(backward_s=1.0, weight_s=2.0), "at most"),
  ("source", lambda: measured(source="guessed"), "'compiled'"),
  ("flops_per_s", lambda: measured(flops_per_s=0.0), "in (0, inf], got 0"),
  ("bytes_per_s", lambda: measured(bytes_per_s=-1.0), "in (0, inf], got -1"),
  ("repeats", lambda: measured(repeats=0), "int >= 1"),
  ("microbatch", lambda: measured(source="timed"), "arrays to be timed"),
  # Partitions.
  ("costs", lambda: part([]), "one layer's at least"),
  ("num_microbatches", lambda: part(num_microbatches=0), "int >= 1"),
  ("cuts", lambda: part(cuts=[2, 4]), "a stage for each of 2 machines"),
  ("cuts", lambda: part(cuts=[0]), "grow"),
  ("costs", lambda: even(7), "each of the 7 stages, got 6"),
  ("costs", lambda: part(_COSTS[:1]), "each of the 2 stages, got 1. Take"),
  ("in_flight", lambda: footprint(in_flight=(1,)), "must be"),
  ("versions", lambda: footprint(versions=0), "must be"),
  (
    "stage",
    lambda: pipeline.Footprint(1.0, (1, 2)).copies(5),
    "an int from 0 to 1",
  ),
  ("layer", lambda: part().stage_of(-1), "an int >= 0, got -1"),
  ("codec", lambda: cost().coded("int4"), "a `codecs.Codec`, got 'int4'"),
  ("num_stages", lambda: place(3), "an int from 1 to 2"),
  ("num_stages", lambda: place(0), "int >= 1"),
  # Plans.
  ("batch_size", lambda: plan(0), "int >= 1"),
  ("num_microbatches", lambda: plan(num_microbatches=[3]), "divide the batch"),
  ("num_microbatches", lambda: windows(0), "int >= 1"),
  ("costs", lambda: pipeline.plan([cost()] * 2, _TWO, 8), "must take time"),
  ("max_delay", lambda: plan(max_delay=-1), "int >= 0"),
  ("num_stages", lambda: plan(num_stages=[]), "one at least"),
  ("windows", lambda: plan(windows=[]), "one at least"),
  ("windows", lambda: plan(windows=[0]), "int >= 1"),
  ("windows", lambda: plan(windows=[2], tables=["1f1b"]), "be left out"),
  ("num_stages", lambda: plan(num_stages=[7]), "an int from 1 to 2"),
  ("tables", lambda: plan(tables=["dapple"]), "'naive'"),
  # Simulations.
  ("costs", lambda: simulate(_COSTS[:3]), "one for each of the table's 4"),
  ("outages", lambda: simulate(machines=AWAY), "be left out in a pipeline"),
  ("outages", lambda: pipeline.plan(_COSTS, AWAY, 8), "got some of 'b'"),
  ("outages", lambda: pipeline.partition(_COSTS, AWAY), "be left out"),
  ("optimizer_copies", lambda: simulate(optimizer_copies=-5.0), "in [0, inf]"),
  ("optimizer_copies", lambda: simulate(optimizer_copies=_NAN), "finite"),
  ("nodes", lambda: simulate(nodes=["worker0"]), "a machine of its own"),
  ("nodes", lambda: simulate(nodes=["worker0"] * 4), "a machine of its own"),
  (
    "nodes",
    lambda: simulate(machines=_TWO),
    "each of the table's 4 devices",
  ),
  # Changes of a plan.
)
def test_invalid_arguments_raise(argument, call, rule):
  _refusals.check(argument, call, rule)


@pytest.mark.parametrize(
  "call",
  [
    lambda: part(nodes=["worker0", "z"]),
    lambda: simulate(nodes=["worker0", "worker1", "worker2", "z"]),
  ],
)
def test_unknown_machine_raises(call):
  with pytest.raises(ValueError, match="got 'z'"):
    call()
