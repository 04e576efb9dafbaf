"""Machines and links as data, and how long things take on them."""

from jdist.cluster._links import Link as Link
from jdist.cluster._links import ring_messages as ring_messages
