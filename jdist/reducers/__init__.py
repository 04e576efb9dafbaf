"""Compressed means of the workers' trees, with error feedback.

A reducer takes the mean of one tree over the axis; a feedback keeps the part of
a tree that was not sent.  A `Compression` combines both.
"""

from jdist.reducers._all_to_all import AllToAllState as AllToAllState
from jdist.reducers._chunked import Chunked as Chunked
from jdist.reducers._compressed import compressed as compressed
from jdist.reducers._compression import Compression as Compression
from jdist.reducers._compression import CompressionState as CompressionState
from jdist.reducers._compression import flush_of as flush_of
from jdist.reducers._compression import mean_of as mean_of
from jdist.reducers._compression import note as note
from jdist.reducers._compression import reductions as reductions
from jdist.reducers._feedback import EF21 as EF21
from jdist.reducers._feedback import ErrorFeedback as ErrorFeedback
from jdist.reducers._feedback import Feedback as Feedback
from jdist.reducers._hierarchical import Hierarchical as Hierarchical
from jdist.reducers._majority_vote import MajorityVote as MajorityVote
from jdist.reducers._message_codec import MessageCodec as MessageCodec
from jdist.reducers._momentum_feedback import (
  MomentumCorrection as MomentumCorrection,
)
from jdist.reducers._momentum_feedback import Smoothing as Smoothing
from jdist.reducers._per_leaf import PerLeaf as PerLeaf
from jdist.reducers._per_leaf import Rule as Rule
from jdist.reducers._power_sgd import PowerSGD as PowerSGD
from jdist.reducers._reducer import Bits as Bits
from jdist.reducers._reducer import Exact as Exact
from jdist.reducers._reducer import Reduced as Reduced
from jdist.reducers._reducer import Reducer as Reducer
from jdist.reducers._scheduled import Scheduled as Scheduled
from jdist.reducers._scheduled import warm_up as warm_up
from jdist.reducers._sharded import rows_over as rows_over
from jdist.reducers._sharded import split_axes as split_axes
