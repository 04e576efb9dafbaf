"""Communication between workers: operations, the runner, buckets, traffic.

A step is written for one worker and calls `mean`, `sum`, `gather`, `all_to_all`
and `index` with an axis; `workers` runs it on one device, on many, or in many
processes, unchanged.
"""

from jdist.collectives._axis import agreed as agreed
from jdist.collectives._axis import Axis as Axis
from jdist.collectives._axis import check_alike as check_alike
from jdist.collectives._axis import check_axis as check_axis
from jdist.collectives._axis import check_local as check_local
from jdist.collectives._axis import index as index
from jdist.collectives._axis import mean as mean
from jdist.collectives._axis import model_parts as model_parts
from jdist.collectives._axis import same_form as same_form
from jdist.collectives._axis import size as size
from jdist.collectives._axis import sum as sum
from jdist.collectives._axis import sum_of_parts as sum_of_parts
from jdist.collectives._axis import team_of as team_of
from jdist.collectives._axis import varying as varying
from jdist.collectives._axis import varying_like as varying_like
from jdist.collectives._buckets import Bucket as Bucket
from jdist.collectives._buckets import Buckets as Buckets
from jdist.collectives._buckets import Piece as Piece
from jdist.collectives._exchange import all_to_all as all_to_all
from jdist.collectives._exchange import gather as gather
from jdist.collectives._exchange import pack_bytes as pack_bytes
from jdist.collectives._exchange import reduce_scatter as reduce_scatter
from jdist.collectives._exchange import unpack_bytes as unpack_bytes
from jdist.collectives._leaf_order import check_order as check_order
from jdist.collectives._leaf_order import fingerprint as fingerprint
from jdist.collectives._leaf_order import leaf_order as leaf_order
from jdist.collectives._leaf_order import leaf_paths as leaf_paths
from jdist.collectives._leaf_order import Order as Order
from jdist.collectives._shards import map_shards as map_shards
from jdist.collectives._shards import num_shards as num_shards
from jdist.collectives._shards import shard_shape as shard_shape
from jdist.collectives._shards import spec_axes as spec_axes
from jdist.collectives._shards import spec_leaves as spec_leaves
from jdist.collectives._substrate import make_cpu_devices as make_cpu_devices
from jdist.collectives._substrate import make_mesh as make_mesh
from jdist.collectives._substrate import workers as workers
from jdist.collectives._traffic import Collective as Collective
from jdist.collectives._traffic import communicates as communicates
from jdist.collectives._traffic import Kind as Kind
from jdist.collectives._traffic import Phase as Phase
from jdist.collectives._traffic import phase as phase
from jdist.collectives._traffic import Traffic as Traffic
from jdist.collectives._traffic import traffic as traffic
from jdist.collectives._workers import Workers as Workers
from jdist.collectives.processes._process_group import agree as agree
from jdist.collectives.processes._process_group import lifeline as lifeline
from jdist.collectives.processes._process_group import (
  start_processes as start_processes,
)
