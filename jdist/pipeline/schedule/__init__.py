"""Schedules of pipelines as tables: made, read, drawn and checked."""

from jdist.pipeline.schedule._actions import Action as Action
from jdist.pipeline.schedule._actions import Op as Op
from jdist.pipeline.schedule._asynchronous_tables import (
  least_window as least_window,
)
from jdist.pipeline.schedule._asynchronous_tables import ours as ours
from jdist.pipeline.schedule._asynchronous_tables import paci as paci
from jdist.pipeline.schedule._asynchronous_tables import pipedream as pipedream
from jdist.pipeline.schedule._asynchronous_tables import two_bw as two_bw
from jdist.pipeline.schedule._checker import check_table as check_table
from jdist.pipeline.schedule._checker import TableError as TableError
from jdist.pipeline.schedule._checker import TableReport as TableReport
from jdist.pipeline.schedule._flush_tables import gpipe as gpipe
from jdist.pipeline.schedule._flush_tables import interleaved as interleaved
from jdist.pipeline.schedule._flush_tables import naive as naive
from jdist.pipeline.schedule._flush_tables import one_f_one_b as one_f_one_b
from jdist.pipeline.schedule._flush_tables import zb_h1 as zb_h1
from jdist.pipeline.schedule._list_schedule import greedy as greedy
from jdist.pipeline.schedule._list_schedule import StageTimes as StageTimes
from jdist.pipeline.schedule._table import start_times as start_times
from jdist.pipeline.schedule._table import Table as Table
from jdist.pipeline.schedule._table import Weights as Weights
from jdist.pipeline.schedule._table_picture import draw_table as draw_table
from jdist.pipeline.schedule._table_registry import make_table as make_table
from jdist.pipeline.schedule._table_registry import (
  table_options as table_options,
)
from jdist.pipeline.schedule._table_registry import TableEntry as TableEntry
from jdist.pipeline.schedule._table_registry import TABLES as TABLES
from jdist.pipeline.schedule._text_form import format_table as format_table
from jdist.pipeline.schedule._text_form import load_table as load_table
from jdist.pipeline.schedule._text_form import parse_table as parse_table
from jdist.pipeline.schedule._versions import read_versions as read_versions
from jdist.pipeline.schedule._versions import Versions as Versions
