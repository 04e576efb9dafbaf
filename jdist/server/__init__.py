"""Parameter servers: protocols as data, and their drivers."""

from jdist.server._allocation import FixedBatches as FixedBatches
from jdist.server._allocation import SpeedBatches as SpeedBatches
from jdist.server._asynchronous import ASP as ASP
from jdist.server._asynchronous import dbs as dbs
from jdist.server._asynchronous import fedbuff as fedbuff
from jdist.server._asynchronous import NSoftsync as NSoftsync
from jdist.server._asynchronous import Ringmaster as Ringmaster
from jdist.server._asynchronous import SSP as SSP
from jdist.server._bsp import BSP as BSP
from jdist.server._messages import Action as Action
from jdist.server._messages import Apply as Apply
from jdist.server._messages import Discard as Discard
from jdist.server._messages import Join as Join
from jdist.server._messages import Leave as Leave
from jdist.server._messages import Merge as Merge
from jdist.server._messages import Pull as Pull
from jdist.server._messages import Push as Push
from jdist.server._messages import Reply as Reply
from jdist.server._messages import Timer as Timer
from jdist.server._messages import Worker as Worker
from jdist.server._protocol import Protocol as Protocol
from jdist.server._registry import PROTOCOLS as PROTOCOLS
from jdist.server._server_state import Assignment as Assignment
from jdist.server._server_state import ServerState as ServerState
from jdist.server._weights import inverse_staleness as inverse_staleness
from jdist.server._weights import Weighting as Weighting
from jdist.server.clock._clock_session import ClockSession as ClockSession
from jdist.server.clock._simulation import Simulation as Simulation
from jdist.server.decoupled._decoupled_diloco import (
  DecoupledDiLoCo as DecoupledDiLoCo,
)
from jdist.server.decoupled._fragment_runner import (
  FragmentRunner as FragmentRunner,
)
from jdist.server.decoupled._fragment_syncer import (
  FragmentSyncer as FragmentSyncer,
)
from jdist.server.gradients._division import divide as divide
from jdist.server.gradients._gradient_messages import (
  message_plans as message_plans,
)
from jdist.server.gradients._gradient_server import (
  GradientServer as GradientServer,
)
from jdist.server.gradients._gradient_worker import (
  GradientLearner as GradientLearner,
)
from jdist.server.gradients._gradient_worker import (
  GradientWorker as GradientWorker,
)
from jdist.server.gradients._learner import EmptyServer as EmptyServer
from jdist.server.gradients._learner import EmptyWorker as EmptyWorker
from jdist.server.gradients._learner import Pair as Pair
from jdist.server.gradients._learner import RefusedError as RefusedError
from jdist.server.gradients._learner import Samples as Samples
from jdist.server.gradients._learner import ServerLearner as ServerLearner
from jdist.server.gradients._learner import ServerModel as ServerModel
from jdist.server.gradients._learner import WorkerLearner as WorkerLearner
from jdist.server.h_ps._bit_plans import BitPlans as BitPlans
from jdist.server.h_ps._bit_plans import fit_bit_plans as fit_bit_plans
from jdist.server.h_ps._h_ps import BalancedBatches as BalancedBatches
from jdist.server.h_ps._h_ps import h_ps as h_ps
from jdist.server.h_ps._h_ps import HPS as HPS
from jdist.server.h_ps._local_step import LocalStep as LocalStep
from jdist.server.run._run_marks import LivePlan as LivePlan
from jdist.server.run._server_run import ServerRun as ServerRun
from jdist.server.runtime._delivery import replay as replay
from jdist.server.runtime._engine import Channel as Channel
from jdist.server.runtime._engine import LostRunError as LostRunError
from jdist.server.runtime._engine import ThreadEngine as ThreadEngine
from jdist.server.runtime._live_server import LiveServer as LiveServer
from jdist.server.runtime._live_session import LiveSession as LiveSession
from jdist.server.runtime._worker_loop import Pace as Pace
from jdist.server.runtime._worker_loop import versions as versions
from jdist.server.runtime._worker_loop import WorkerLoop as WorkerLoop
from jdist.server.runtime.ray_actors._ray_engine import RayEngine as RayEngine
