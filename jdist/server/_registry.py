"""Protocols by name, as the command line and experiments ask for them."""

from collections.abc import Callable

from jdist.server import _asynchronous, _bsp, _protocol
from jdist.server.decoupled import _decoupled_diloco
from jdist.server.h_ps import _h_ps

# Every protocol by its name; the first line of a docstring is its help.
PROTOCOLS: dict[str, Callable[..., _protocol.Protocol]] = {
  "bsp": _bsp.BSP,
  "asp": _asynchronous.ASP,
  "ssp": _asynchronous.SSP,
  "n_softsync": _asynchronous.NSoftsync,
  "fedbuff": _asynchronous.fedbuff,
  "dbs": _asynchronous.dbs,
  "ringmaster": _asynchronous.Ringmaster,
  "h_ps": _h_ps.h_ps,
  "decoupled_diloco": _decoupled_diloco.DecoupledDiLoCo,
}
