"""Optax transformations for workers that communicate rarely, late, or in part.

Each is an ordinary `optax.GradientTransformation` that a user composes in
`optax.chain` and unit-tests in isolation with `axis=None`.
"""

from jdist.transforms import intervals as intervals
from jdist.transforms._averaging import average_gradients as average_gradients
from jdist.transforms._averaging import with_mean_loss as with_mean_loss
from jdist.transforms._control import Control as Control
from jdist.transforms._delays import compensated as compensated
from jdist.transforms._delays import delay_gradients as delay_gradients
from jdist.transforms._delays import predict_weights as predict_weights
from jdist.transforms._delays import predicted_weights as predicted_weights
from jdist.transforms._delays import PredictWeightsState as PredictWeightsState
from jdist.transforms._drain import drain as drain
from jdist.transforms._own_gradients import clip_deviations as clip_deviations
from jdist.transforms._own_gradients import clip_local as clip_local
from jdist.transforms._own_gradients import proximal as proximal
from jdist.transforms._own_gradients import skip_nonfinite as skip_nonfinite
from jdist.transforms._own_gradients import skipped as skipped
from jdist.transforms._predicted import Predict as Predict
from jdist.transforms._predicted import predict_rest as predict_rest
from jdist.transforms._predicted import Splitter as Splitter
from jdist.transforms._shared import sharing as sharing
from jdist.transforms._state import anchor as anchor
from jdist.transforms._state import arrives_after as arrives_after
from jdist.transforms._state import averages as averages
from jdist.transforms._state import evaluation_params as evaluation_params
from jdist.transforms._state import interval as interval
from jdist.transforms._state import mean_statistics as mean_statistics
from jdist.transforms._state import nonfinite_rounds as nonfinite_rounds
from jdist.transforms._state import rounds as rounds
from jdist.transforms._state import rounds_ahead as rounds_ahead
from jdist.transforms._state import streams as streams
from jdist.transforms._state import synchronized as synchronized
from jdist.transforms._state import update_pending as update_pending
from jdist.transforms._update_first import update_first as update_first
from jdist.transforms._update_first import UpdateFirst as UpdateFirst
from jdist.transforms.local._anchor import apply_updates as apply_updates
from jdist.transforms.local._anchor import lenient as lenient
from jdist.transforms.local._anchor import only_floats as only_floats
from jdist.transforms.local._anchor import pull_to_anchor as pull_to_anchor
from jdist.transforms.local._anchor import (
  PullToAnchorState as PullToAnchorState,
)
from jdist.transforms.local._control_variates import (
  ControlVariates as ControlVariates,
)
from jdist.transforms.local._delayed import Delayed as Delayed
from jdist.transforms.local._delayed import Stream as Stream
from jdist.transforms.local._elastic import Elastic as Elastic
from jdist.transforms.local._elastic import PulledAnchor as PulledAnchor
from jdist.transforms.local._fragments import fragment_steps as fragment_steps
from jdist.transforms.local._fragments import Fragments as Fragments
from jdist.transforms.local._fragments import fragments_of as fragments_of
from jdist.transforms.local._iterates import own_keys as own_keys
from jdist.transforms.local._iterates import refuse_iterates as refuse_iterates
from jdist.transforms.local._local_steps import local_steps as local_steps
from jdist.transforms.local._local_steps import outer_sgd as outer_sgd
from jdist.transforms.local._round import OuterStep as OuterStep
from jdist.transforms.local._round import SyncRule as SyncRule
from jdist.transforms.local._slow_momentum import Buffers as Buffers
from jdist.transforms.local._slow_momentum import SlowMomentum as SlowMomentum
from jdist.transforms.local._synchronizer import (
  RoundTransformation as RoundTransformation,
)
