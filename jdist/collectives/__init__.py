"""How workers meet: the axis, the runner, plans, and counted bytes.

A step is written for one worker and calls `mean`, `sum`, `gather`, `exchange`
and `index` with an axis; `workers` runs it on one device, on many, or in many
processes, unchanged.
"""

from jdist.collectives._axis import agreed as agreed
from jdist.collectives._axis import Axis as Axis
from jdist.collectives._axis import check_axis as check_axis
from jdist.collectives._axis import check_local as check_local
from jdist.collectives._axis import exchange as exchange
from jdist.collectives._axis import finish_mean as finish_mean
from jdist.collectives._axis import gather as gather
from jdist.collectives._axis import index as index
from jdist.collectives._axis import mean as mean
from jdist.collectives._axis import scatter as scatter
from jdist.collectives._axis import size as size
from jdist.collectives._axis import start_mean as start_mean
from jdist.collectives._axis import sum as sum
from jdist.collectives._axis import varying as varying
from jdist.collectives._carrying import Carry as Carry
from jdist.collectives._carrying import carry as carry
from jdist.collectives._carrying import CarryState as CarryState
from jdist.collectives._choosing import compress_large as compress_large
from jdist.collectives._choosing import PerLeaf as PerLeaf
from jdist.collectives._choosing import Rule as Rule
from jdist.collectives._fingerprints import fingerprint as fingerprint
from jdist.collectives._ledger import note as note
from jdist.collectives._ledger import reductions as reductions
from jdist.collectives._leveling import TwoLevel as TwoLevel
from jdist.collectives._leveling import TwoLevelState as TwoLevelState
from jdist.collectives._low_rank import PowerSGD as PowerSGD
from jdist.collectives._low_rank import PowerSGDState as PowerSGDState
from jdist.collectives._meshes import make_cpu_devices as make_cpu_devices
from jdist.collectives._meshes import make_mesh as make_mesh
from jdist.collectives._meshes import start_processes as start_processes
from jdist.collectives._packing import pack as pack
from jdist.collectives._packing import unpack as unpack
from jdist.collectives._parting import Cut as Cut
from jdist.collectives._parting import InParts as InParts
from jdist.collectives._phasing import Phase as Phase
from jdist.collectives._phasing import phase as phase
from jdist.collectives._plans import check_order as check_order
from jdist.collectives._plans import leaf_order as leaf_order
from jdist.collectives._plans import Message as Message
from jdist.collectives._plans import Order as Order
from jdist.collectives._plans import Piece as Piece
from jdist.collectives._plans import Plan as Plan
from jdist.collectives._plans import plan as plan
from jdist.collectives._programs import read_collectives as read_collectives
from jdist.collectives._reducing import Bits as Bits
from jdist.collectives._reducing import Exact as Exact
from jdist.collectives._reducing import Reduced as Reduced
from jdist.collectives._reducing import Reducer as Reducer
from jdist.collectives._reducing import ring_bits as ring_bits
from jdist.collectives._running import Workers as Workers
from jdist.collectives._schedules import Event as Event
from jdist.collectives._schedules import read_schedule as read_schedule
from jdist.collectives._sharding import OnShards as OnShards
from jdist.collectives._sharding import row_axes as row_axes
from jdist.collectives._spreading import workers as workers
from jdist.collectives._topologies import abstract as abstract
from jdist.collectives._topologies import check_compiler as check_compiler
from jdist.collectives._topologies import describe_gpus as describe_gpus
from jdist.collectives._topologies import GPU_KINDS as GPU_KINDS
from jdist.collectives._topologies import tell_compiler as tell_compiler
from jdist.collectives._topologies import Topology as Topology
from jdist.collectives._traffic import Collective as Collective
from jdist.collectives._traffic import Traffic as Traffic
from jdist.collectives._traffic import traffic as traffic
from jdist.collectives._voting import MajorityVote as MajorityVote
