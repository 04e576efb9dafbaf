"""Costs of layers, and where a pipeline is cut and placed."""

from jdist.pipeline.planning._costs import LayerCost as LayerCost
from jdist.pipeline.planning._costs import stage_cost as stage_cost
