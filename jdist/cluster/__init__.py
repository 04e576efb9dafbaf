"""Machines and links as data, and the time that things take on them."""

from jdist.cluster._device import Device as Device
from jdist.cluster._links import Link as Link
from jdist.cluster._links import ring_messages as ring_messages
