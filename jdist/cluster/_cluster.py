"""A cluster: machines, and the links between them."""

import dataclasses
from collections.abc import Iterable, Sequence

from jdist import signatures
from jdist.cluster import _links, _node, _profile, _topology


@signatures.checked
@dataclasses.dataclass(frozen=True)
class Cluster:
  """Machines and their links.

  Attributes:
    nodes: The machines that compute.
    topology: Their links, or None if messages take no time.
    server: The name of the machine that runs the parameter server, one of the
      topology's.

  Raises:
    ValueError: when names are not unique, or no route links a machine with the
      server.
  """

  nodes: tuple[_node.Node, ...]
  topology: _topology.Topology | None = None
  server: str = "server"

  def __post_init__(self) -> None:
    if not self.nodes:
      raise ValueError("`nodes` must be one at least, got none.")
    for name in self.names:
      if self.names.count(name) > 1:
        raise ValueError(f"`nodes` must differ in name, got {name!r} twice.")
    if self.topology is not None:
      if self.server not in self.topology.names:
        raise ValueError(
          f"`server` must be named in a link, got {self.server!r}, which has "
          "none."
        )
      # A machine without a route would be noticed in the middle of a run.
      for name in self.names:
        self.topology.route(name, self.server)

  @property
  def names(self) -> tuple[str, ...]:
    """The machines' names, in order."""
    return tuple(node.name for node in self.nodes)

  def node(self, name: str) -> _node.Node:
    """Returns a machine.

    Raises:
      ValueError: when no machine has this name.
    """
    for node in self.nodes:
      if node.name == name:
        return node
    raise ValueError(
      f"There is no machine {name!r}; there are {', '.join(self.names)}."
    )

  def check_batches(
    self, profile: _profile.Profile, samples: int | Sequence[int]
  ) -> None:
    """Raises a ValueError when a machine's memory does not hold its batch.

    Args:
      profile: The model's costs.
      samples: Samples of every batch, or one number for each machine.
    """
    sizes = [samples] * len(self.nodes) if isinstance(samples, int) else samples
    for node, size in zip(self.nodes, sizes, strict=True):
      most = profile.max_samples(node.memory_bytes)
      if most is not None and size > most:
        raise ValueError(
          f"A batch of {size} samples takes "
          f"{profile.memory_bytes(size) / 1e9:.3g} GB, and {node.name!r} has "
          f"{node.memory_bytes / 1e9:.3g} GB: {most} samples fit."
        )


@signatures.checked
def workers(
  speeds: Iterable[float],
  *,
  link: _links.Link | None = None,
  server_link: _links.Link | None = None,
  jitter: float = 0.0,
) -> Cluster:
  """Makes a cluster of workers around a server.

  Args:
    speeds: The workers' speeds; they are named `worker0` and so on.
    link: Each worker's link to the network; messages take no time if None.
    server_link: The server's link to the network; a worker's if None.
    jitter: Every worker's jitter, as in `Node`.

  >>> workers([8, 4, 1]).names
  ('worker0', 'worker1', 'worker2')
  """
  nodes = tuple(
    _node.Node(f"worker{i}", speed=speed, jitter=jitter)
    for i, speed in enumerate(speeds)
  )
  if link is None:
    return Cluster(nodes)
  links = {node.name: link for node in nodes}
  links["server"] = server_link or link
  return Cluster(nodes, _topology.star(links, "switch"))
