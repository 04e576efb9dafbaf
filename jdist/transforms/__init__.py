"""Optax transformations for workers that meet rarely, late, or in part.

Each is an ordinary `optax.GradientTransformation` that a user composes in
`optax.chain` and unit-tests in isolation with `axis=None`.
"""

from jdist.transforms import intervals as intervals
from jdist.transforms._aliases import diloco as diloco
from jdist.transforms._aliases import local_sgd as local_sgd
from jdist.transforms._aliases import mp2 as mp2
from jdist.transforms._aliases import msdpu as msdpu
from jdist.transforms._aliases import post_local_sgd as post_local_sgd
from jdist.transforms._aliases import ssgd as ssgd
from jdist.transforms._averaging import average_gradients as average_gradients
from jdist.transforms._averaging import (
  AverageGradientsState as AverageGradientsState,
)
from jdist.transforms._clipping import clip_deviations as clip_deviations
from jdist.transforms._clipping import clip_local as clip_local
from jdist.transforms._compressing import demo as demo
from jdist.transforms._compressing import dgc as dgc
from jdist.transforms._compressing import ef_signsgd as ef_signsgd
from jdist.transforms._compressing import one_bit_adam as one_bit_adam
from jdist.transforms._compressing import powersgd as powersgd
from jdist.transforms._compressing import qsgd as qsgd
from jdist.transforms._compressing import signsgd as signsgd
from jdist.transforms._compressing import terngrad as terngrad
from jdist.transforms._compressing import topk_sgd as topk_sgd
from jdist.transforms._controlling import VariatesState as VariatesState
from jdist.transforms._correcting import proximal as proximal
from jdist.transforms._correcting import pull_to_anchor as pull_to_anchor
from jdist.transforms._correcting import PullToAnchorState as PullToAnchorState
from jdist.transforms._delaying import delay_gradients as delay_gradients
from jdist.transforms._delaying import (
  DelayGradientsState as DelayGradientsState,
)
from jdist.transforms._draining import drain as drain
from jdist.transforms._family import easgd as easgd
from jdist.transforms._family import fed_prox as fed_prox
from jdist.transforms._family import scaffold as scaffold
from jdist.transforms._family import slow_mo as slow_mo
from jdist.transforms._feeding import Feedback as Feedback
from jdist.transforms._fragmenting import fragment_steps as fragment_steps
from jdist.transforms._fragmenting import FragmentsState as FragmentsState
from jdist.transforms._freezing import FrozenAdamState as FrozenAdamState
from jdist.transforms._freezing import (
  scale_by_frozen_adam as scale_by_frozen_adam,
)
from jdist.transforms._inspecting import anchor as anchor
from jdist.transforms._inspecting import apply_updates as apply_updates
from jdist.transforms._inspecting import interval as interval
from jdist.transforms._inspecting import nonfinite_rounds as nonfinite_rounds
from jdist.transforms._inspecting import rounds as rounds
from jdist.transforms._inspecting import rounds_ahead as rounds_ahead
from jdist.transforms._inspecting import stream_steps as stream_steps
from jdist.transforms._inspecting import synchronized as synchronized
from jdist.transforms._inspecting import update_pending as update_pending
from jdist.transforms._labelling import register_shared as register_shared
from jdist.transforms._labelling import Sharing as Sharing
from jdist.transforms._labelling import sharing as sharing
from jdist.transforms._leading import lead_step as lead_step
from jdist.transforms._leading import LeadStepState as LeadStepState
from jdist.transforms._localizing import local_steps as local_steps
from jdist.transforms._meeting import RoundsState as RoundsState
from jdist.transforms._messaging import Message as Message
from jdist.transforms._overlapping import cocod as cocod
from jdist.transforms._overlapping import od_sgd as od_sgd
from jdist.transforms._overlapping import overlap_local_sgd as overlap_local_sgd
from jdist.transforms._overlapping import streaming_diloco as streaming_diloco
from jdist.transforms._preceding import update_first as update_first
from jdist.transforms._preceding import UpdateFirst as UpdateFirst
from jdist.transforms._preceding import UpdateFirstState as UpdateFirstState
from jdist.transforms._predicting import predict_rest as predict_rest
from jdist.transforms._predicting import (
  PredictRestState as PredictRestState,
)
from jdist.transforms._pulling import LateAnchorState as LateAnchorState
from jdist.transforms._reducing import Reduction as Reduction
from jdist.transforms._reducing import ReductionState as ReductionState
from jdist.transforms._remembering import EF21 as EF21
from jdist.transforms._remembering import EF21State as EF21State
from jdist.transforms._remembering import ErrorFeedback as ErrorFeedback
from jdist.transforms._remembering import (
  ErrorFeedbackState as ErrorFeedbackState,
)
from jdist.transforms._sending import buffer_axes as buffer_axes
from jdist.transforms._sending import Stream as Stream
from jdist.transforms._sending import StreamState as StreamState
from jdist.transforms._slowing import SlowMomentumState as SlowMomentumState
from jdist.transforms._smoothing import MomentumCorrection as MomentumCorrection
from jdist.transforms._smoothing import (
  MomentumCorrectionState as MomentumCorrectionState,
)
from jdist.transforms._smoothing import Smoothing as Smoothing
from jdist.transforms._smoothing import SmoothingState as SmoothingState
from jdist.transforms._stepping import LocalStepsState as LocalStepsState
from jdist.transforms._streaming import PartsState as PartsState
from jdist.transforms._thinning import muloco as muloco
from jdist.transforms._thinning import sparse_loco as sparse_loco
from jdist.transforms._warming import Scheduled as Scheduled
from jdist.transforms._warming import ScheduledState as ScheduledState
from jdist.transforms._warming import warm_up as warm_up
