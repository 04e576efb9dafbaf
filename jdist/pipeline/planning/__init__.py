"""Costs of layers, and where a pipeline is cut and placed."""

from jdist.pipeline.planning._baseline_plans import (
  even_partition as even_partition,
)
from jdist.pipeline.planning._baseline_plans import Level as Level
from jdist.pipeline.planning._baseline_plans import (
  merge_replicas as merge_replicas,
)
from jdist.pipeline.planning._baseline_plans import (
  pipedream_partition as pipedream_partition,
)
from jdist.pipeline.planning._bottleneck import partition as partition
from jdist.pipeline.planning._candidate import Candidate as Candidate
from jdist.pipeline.planning._candidate import stage_times as stage_times
from jdist.pipeline.planning._costs import LayerCost as LayerCost
from jdist.pipeline.planning._costs import load_costs as load_costs
from jdist.pipeline.planning._costs import stage_cost as stage_cost
from jdist.pipeline.planning._layer_costs import layer_costs as layer_costs
from jdist.pipeline.planning._placement import place as place
from jdist.pipeline.planning._plan import Footprint as Footprint
from jdist.pipeline.planning._plan import Plan as Plan
from jdist.pipeline.planning._plan_search import plan as plan
from jdist.pipeline.planning._replanner import LayerMove as LayerMove
from jdist.pipeline.planning._replanner import Proposal as Proposal
from jdist.pipeline.planning._replanner import Replanner as Replanner
from jdist.pipeline.planning._simulator import action_s as action_s
from jdist.pipeline.planning._simulator import (
  PIPELINE_COLOURS as PIPELINE_COLOURS,
)
from jdist.pipeline.planning._simulator import PipelineTimes as PipelineTimes
from jdist.pipeline.planning._simulator import simulate as simulate
