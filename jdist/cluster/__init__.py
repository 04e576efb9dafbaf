"""Machines and links as data, and the time that work and messages take."""

from jdist.cluster._cluster import Cluster as Cluster
from jdist.cluster._cluster import load_cluster as load_cluster
from jdist.cluster._cluster import workers as workers
from jdist.cluster._node import Node as Node
from jdist.cluster._node import Outage as Outage
from jdist.cluster._node import Profile as Profile
from jdist.cluster._node import Slowdown as Slowdown
from jdist.cluster._topology import Device as Device
from jdist.cluster._topology import Link as Link
from jdist.cluster._topology import ring_messages as ring_messages
from jdist.cluster._topology import star as star
from jdist.cluster._topology import Topology as Topology
from jdist.cluster._trace import plot_trace as plot_trace
from jdist.cluster._trace import Span as Span
from jdist.cluster._trace import Trace as Trace
from jdist.cluster._virtual_network import Network as Network
