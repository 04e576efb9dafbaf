"""Compiled programs read: what they send, when, and what hides it.

Programs for GPUs are compiled without one; collectives, schedules and
forecasts are read off the text of the optimized program.
"""

from jdist.profiling._forecast import abstract_state as abstract_state
from jdist.profiling._forecast import Forecast as Forecast
from jdist.profiling._forecast import forecast as forecast
from jdist.profiling._forecast import Kernel as Kernel
from jdist.profiling._forecast import Message as Message
from jdist.profiling._gpu_target import abstract as abstract
from jdist.profiling._gpu_target import check_compiler as check_compiler
from jdist.profiling._gpu_target import describe_gpus as describe_gpus
from jdist.profiling._gpu_target import GPU_KINDS as GPU_KINDS
from jdist.profiling._gpu_target import tell_compiler as tell_compiler
from jdist.profiling._gpu_target import Topology as Topology
from jdist.profiling._hlo_collectives import (
  read_collectives as read_collectives,
)
from jdist.profiling._timeline import Event as Event
from jdist.profiling._timeline import read_schedule as read_schedule
from jdist.profiling._timeline_plot import plot_forecasts as plot_forecasts
