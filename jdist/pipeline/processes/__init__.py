"""Pipelines whose devices are processes of their own."""

from jdist.pipeline.processes._adaptive_run import AdaptiveRun as AdaptiveRun
from jdist.pipeline.processes._device_part import ProcessState as ProcessState
from jdist.pipeline.processes._handshake import listen as listen
from jdist.pipeline.processes._layer_moves import move_layers as move_layers
from jdist.pipeline.processes._peers import connect as connect
from jdist.pipeline.processes._peers import Peers as Peers
from jdist.pipeline.processes._stage_process import StageProcess as StageProcess
