"""Pipelines: schedules as tables, their checks, plans and runtimes."""

from jdist.pipeline.planning import LayerCost as LayerCost
from jdist.pipeline.planning import load_costs as load_costs
from jdist.pipeline.planning import PIPELINE_COLOURS as PIPELINE_COLOURS
from jdist.pipeline.planning import PipelineTimes as PipelineTimes
from jdist.pipeline.planning import simulate as simulate
from jdist.pipeline.planning import stage_cost as stage_cost
from jdist.pipeline.runtime import cut_layers as cut_layers
from jdist.pipeline.runtime import OneProgram as OneProgram
from jdist.pipeline.runtime import Stage as Stage
from jdist.pipeline.schedule import Action as Action
from jdist.pipeline.schedule import check_table as check_table
from jdist.pipeline.schedule import draw_table as draw_table
from jdist.pipeline.schedule import format_table as format_table
from jdist.pipeline.schedule import greedy as greedy
from jdist.pipeline.schedule import load_table as load_table
from jdist.pipeline.schedule import make_table as make_table
from jdist.pipeline.schedule import Op as Op
from jdist.pipeline.schedule import ours as ours
from jdist.pipeline.schedule import parse_table as parse_table
from jdist.pipeline.schedule import StageTimes as StageTimes
from jdist.pipeline.schedule import start_times as start_times
from jdist.pipeline.schedule import Table as Table
from jdist.pipeline.schedule import table_options as table_options
from jdist.pipeline.schedule import TableError as TableError
from jdist.pipeline.schedule import TableReport as TableReport
from jdist.pipeline.schedule import TABLES as TABLES
