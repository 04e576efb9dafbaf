"""Machines and links as data, and how long things take on them."""

from jdist.cluster._gpus import Gpu as Gpu
from jdist.cluster._gpus import GPUS as GPUS
from jdist.cluster._links import Link as Link
from jdist.cluster._links import ring_messages as ring_messages
from jdist.cluster._overlap import Device as Device
from jdist.cluster._overlap import overlap as overlap
from jdist.cluster._overlap import Span as Span
from jdist.cluster._overlap import Task as Task
from jdist.cluster._overlap import Timeline as Timeline
