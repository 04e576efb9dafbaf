"""The programs that run a pipeline's table."""

from jdist.pipeline.runtime._chain_check import needs_all as needs_all
from jdist.pipeline.runtime._device_state import InFlightState as InFlightState
from jdist.pipeline.runtime._one_program import OneProgram as OneProgram
from jdist.pipeline.runtime._split_backward import (
  split_backward as split_backward,
)
from jdist.pipeline.runtime._split_backward import (
  SplitBackward as SplitBackward,
)
from jdist.pipeline.runtime._stages import apply_layer as apply_layer
from jdist.pipeline.runtime._stages import cut_layers as cut_layers
from jdist.pipeline.runtime._stages import LayerLike as LayerLike
from jdist.pipeline.runtime._stages import make_inputs as make_inputs
from jdist.pipeline.runtime._stages import merge as merge
from jdist.pipeline.runtime._stages import OutputLoss as OutputLoss
from jdist.pipeline.runtime._stages import pick as pick
from jdist.pipeline.runtime._stages import recompute_layers as recompute_layers
from jdist.pipeline.runtime._stages import shared_paths as shared_paths
from jdist.pipeline.runtime._stages import Stage as Stage
from jdist.pipeline.runtime._tick_times import TickTimes as TickTimes
from jdist.pipeline.runtime._whole_model import check_state as check_state
from jdist.pipeline.runtime._whole_model import whole_model as whole_model
