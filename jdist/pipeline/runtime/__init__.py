"""The programs that run a pipeline's table."""

from jdist.pipeline.runtime._one_program import InFlightState as InFlightState
from jdist.pipeline.runtime._one_program import OneProgram as OneProgram
from jdist.pipeline.runtime._stages import cut_layers as cut_layers
from jdist.pipeline.runtime._stages import LayerLike as LayerLike
from jdist.pipeline.runtime._stages import merge as merge
from jdist.pipeline.runtime._stages import Stage as Stage
