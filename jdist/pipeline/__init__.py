"""Pipelines: schedules as tables, their checks, plans and runtimes."""

from jdist.pipeline.planning import LayerCost as LayerCost
from jdist.pipeline.planning import stage_cost as stage_cost
