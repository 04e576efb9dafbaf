"""Intervals: the local steps of a round, fixed, scheduled, or adaptive.

An interval policy decides the length of round r+1 when round r begins, from the
losses of rounds up to r-1, averaged over the workers.  All workers compute the
same number to the bit, and the host can read it a whole round in advance.
"""

from jdist.transforms.intervals._adaptive import adacomm as adacomm
from jdist.transforms.intervals._adaptive import msdpu as msdpu
from jdist.transforms.intervals._policy import ending_at as ending_at
from jdist.transforms.intervals._policy import fixed as fixed
from jdist.transforms.intervals._policy import growth as growth
from jdist.transforms.intervals._policy import IntervalPolicy as IntervalPolicy
from jdist.transforms.intervals._policy import post_local as post_local
from jdist.transforms.intervals._policy import qsr as qsr
from jdist.transforms.intervals._policy import scheduled as scheduled
