"""Random layers and machines, and bottlenecks by hand."""

import itertools
import math
import random

from jdist import cluster, pipeline


def layers(generator, number):
  return [
    pipeline.LayerCost(
      f"layer {i}",
      forward_s=generator.uniform(0.1, 2.0),
      backward_s=generator.uniform(0.1, 4.0),
      update_s=generator.choice([0.0, 1.0]),
      parameter_bytes=generator.uniform(0.0, 100.0),
      output_bytes=generator.uniform(1.0, 50.0),
      saved_bytes=generator.uniform(0.0, 100.0),
      working_bytes=generator.uniform(0.0, 20.0),
    )
    for i in range(number)
  ]


def star(generator, number, memory=math.inf):
  nodes = tuple(
    cluster.Node(
      f"n{i}",
      speed=generator.choice([0.5, 1.0, 1.0, 3.0]),
      memory_bytes=memory * generator.uniform(0.7, 1.3),
    )
    for i in range(number)
  )
  links = {
    node.name: cluster.Link(
      8 * generator.choice([5.0, 20.0, 100.0]), generator.choice([0.0, 0.1])
    )
    for node in nodes
  }
  return cluster.Cluster(
    nodes,
    cluster.star({**links, "server": cluster.Link(8.0)}, "switch"),
  )


def by_hand(costs, cuts, machines, order, footprint, num_microbatches):
  """Computes bottleneck and trip on a star; infinite if memory is short."""
  edges = [0, *cuts, len(costs)]
  sent = [0.0, *(costs[cut - 1].output_bytes for cut in cuts), 0.0]
  most, trip = 0.0, 0.0
  for s, name in enumerate(order):
    stage = costs[edges[s] : edges[s + 1]]
    node = machines.node(name)
    again = footprint.recompute
    work = sum(
      x.forward_s * (1 + again) + x.backward_s + x.update_s / num_microbatches
      for x in stage
    )
    link = machines.topology.link(name, "switch")
    both = (sent[s] + sent[s + 1]) * 8 / link.bandwidth_bits_per_s
    most = max(most, work / node.speed, both)
    trip += work / node.speed
    saved = sum(x.saved_bytes for x in stage)
    kept = (sent[s] if s else footprint.input_bytes) if again else saved
    needs = (
      sum(x.parameter_bytes for x in stage)
      * (footprint.versions[s] + footprint.optimizer_copies + 1)
      + kept * footprint.in_flight[s]
      + saved * again
      + max(x.working_bytes for x in stage)
    )
    if needs > node.memory_bytes:
      return math.inf, math.inf
  for (one, other), num_bytes in zip(
    itertools.pairwise(order), sent[1:], strict=False
  ):
    links = [machines.topology.link(x, "switch") for x in (one, other)]
    slowest = min(x.bandwidth_bits_per_s for x in links)
    trip += 2 * (num_bytes * 8 / slowest + sum(x.latency_s for x in links))
  return most, trip


def brute_force(costs, machines, order, footprint, num_microbatches):
  """Returns the least (bottleneck, trip) over all cuts."""
  return min(
    by_hand(costs, cuts, machines, order, footprint, num_microbatches)
    for cuts in itertools.combinations(range(1, len(costs)), len(order) - 1)
  )


def case(seed):
  """Makes a small problem, sometimes with little memory."""
  generator = random.Random(seed)
  num_stages = generator.randint(1, 4)
  costs = layers(generator, generator.randint(num_stages, 8))
  footprint = pipeline.Footprint(
    optimizer_copies=generator.choice([0.0, 1.0, 2.0]),
    versions=tuple(generator.randint(1, 3) for _ in range(num_stages)),
    in_flight=tuple(range(num_stages, 0, -1)),
    recompute=generator.random() < 0.3,
    input_bytes=10.0,
  )
  memory = generator.choice([math.inf, 1500.0])
  machines = star(generator, num_stages, memory)
  return costs, machines, footprint, generator.choice([1, 4])
