"""The training loop: programs, steps in flight, records, progress, watchdog."""

from jdist.training.loop._preemption import PreemptedError as PreemptedError
from jdist.training.loop._preemption import Preemption as Preemption
from jdist.training.loop._programs import RoundHost as RoundHost
from jdist.training.loop._record import format_bytes as format_bytes
from jdist.training.loop._record import format_rate as format_rate
from jdist.training.loop._record import is_diverged as is_diverged
from jdist.training.loop._record import Progress as Progress
from jdist.training.loop._record import Record as Record
from jdist.training.loop._trainer import check_metadata as check_metadata
from jdist.training.loop._trainer import Trainer as Trainer
