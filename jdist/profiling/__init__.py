"""Compiled programs: their collectives, their order, and forecasts.

Programs for GPUs are compiled without a GPU. Everything is read from the text
of the optimized program.
"""

from jdist.profiling._forecast import Forecast as Forecast
from jdist.profiling._forecast import forecast as forecast
from jdist.profiling._gpu_target import abstract as abstract
from jdist.profiling._gpu_target import abstract_state as abstract_state
from jdist.profiling._gpu_target import check_compiler as check_compiler
from jdist.profiling._gpu_target import gpu_target as gpu_target
from jdist.profiling._gpu_target import GPUS as GPUS
from jdist.profiling._gpu_target import GpuTarget as GpuTarget
from jdist.profiling._gpu_target import set_link_rates as set_link_rates
from jdist.profiling._hlo import read_collectives as read_collectives
from jdist.profiling._timeline import Event as Event
