"""Pipelines: schedules as tables, their checks, plans and runtimes."""

from jdist.pipeline.planning._bottleneck import partition as partition
from jdist.pipeline.planning._candidate import Candidate as Candidate
from jdist.pipeline.planning._candidate import stage_times as stage_times
from jdist.pipeline.planning._costs import LayerCost as LayerCost
from jdist.pipeline.planning._costs import load_costs as load_costs
from jdist.pipeline.planning._layer_costs import layer_costs as layer_costs
from jdist.pipeline.planning._model_cuts import cut as cut
from jdist.pipeline.planning._placement import place as place
from jdist.pipeline.planning._plan import Footprint as Footprint
from jdist.pipeline.planning._plan import Plan as Plan
from jdist.pipeline.planning._plan_search import plan as plan
from jdist.pipeline.planning._simulator import PipelineTimes as PipelineTimes
from jdist.pipeline.planning._simulator import simulate as simulate
from jdist.pipeline.processes._device_part import ProcessState as ProcessState
from jdist.pipeline.processes._peers import connect as connect
from jdist.pipeline.processes._peers import Peers as Peers
from jdist.pipeline.processes._stage_process import StageProcess as StageProcess
from jdist.pipeline.runtime._device_program import whole_model as whole_model
from jdist.pipeline.runtime._grid import TickTimes as TickTimes
from jdist.pipeline.runtime._one_program import OneProgram as OneProgram
from jdist.pipeline.runtime._stages import cut_layers as cut_layers
from jdist.pipeline.schedule._asynchronous_tables import ours as ours
from jdist.pipeline.schedule._asynchronous_tables import zb_h2 as zb_h2
from jdist.pipeline.schedule._asynchronous_tables import zb_v as zb_v
from jdist.pipeline.schedule._checker import check_table as check_table
from jdist.pipeline.schedule._list_schedule import greedy as greedy
from jdist.pipeline.schedule._list_schedule import StageTimes as StageTimes
from jdist.pipeline.schedule._table import Action as Action
from jdist.pipeline.schedule._table import Op as Op
from jdist.pipeline.schedule._table import Table as Table
from jdist.pipeline.schedule._table_registry import make_table as make_table
from jdist.pipeline.schedule._table_registry import (
  table_options as table_options,
)
from jdist.pipeline.schedule._table_registry import TableEntry as TableEntry
from jdist.pipeline.schedule._table_registry import TABLES as TABLES
from jdist.pipeline.schedule._text_form import draw_table as draw_table
from jdist.pipeline.schedule._text_form import format_table as format_table
from jdist.pipeline.schedule._text_form import load_table as load_table
from jdist.pipeline.schedule._text_form import parse_table as parse_table
