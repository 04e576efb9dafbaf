"""Protocols by name, as the command line and experiments ask for them."""

import dataclasses
from collections.abc import Callable

from jdist.server import _asynchronous, _bsp, _protocol
from jdist.server.decoupled import _decoupled_diloco
from jdist.server.h_ps import _h_ps


@dataclasses.dataclass(frozen=True)
class ProtocolEntry:
  """A protocol with its name on the command line, description and paper."""

  name: str
  factory: Callable[..., _protocol.Protocol]
  meaning: str
  paper: str


# fmt: off
_ENTRIES = (
  ProtocolEntry("bsp", _bsp.BSP,
    "synchronous SGD, optionally with backup workers",
    "Chen et al., arXiv 1604.00981"),
  ProtocolEntry("asp", _asynchronous.ASP,
    "asynchronous SGD: each gradient is an update",
    "Dean et al., NeurIPS 2012"),
  ProtocolEntry("ssp", _asynchronous.SSP,
    "asynchronous, with a bound on the lead over the slowest",
    "Ho et al., NeurIPS 2013"),
  ProtocolEntry("n_softsync", _asynchronous.NSoftsync,
    "an update of floor(L / n) gradients from any workers",
    "Zhang et al., arXiv 1511.05950"),
  ProtocolEntry("dbs", _asynchronous.dbs,
    "asynchronous, with batches that follow measured speeds",
    "DBS-SGD"),
  ProtocolEntry("ringmaster", _asynchronous.Ringmaster,
    "asynchronous; gradients that are too stale are discarded",
    "Maranjyan et al., arXiv 2501.16168"),
  ProtocolEntry("h_ps", _h_ps.h_ps,
    "rounds; tasks, bits and overlap adapt to each worker",
    "H-PS"),
  ProtocolEntry("decoupled_diloco", _decoupled_diloco.DecoupledDiLoCo,
    "local steps; the fragments of a quorum make an outer step",
    "Douillard et al., arXiv 2604.21428"),
)
# fmt: on

PROTOCOLS = {entry.name: entry for entry in _ENTRIES}  # By their names.
