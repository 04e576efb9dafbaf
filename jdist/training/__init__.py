"""Training: state, step, loop, evaluation, checkpoints and rows.

The model, the data and the optimizer's chain are arguments.
"""

from jdist.training._checkpoint_directory import (
  check_same_run as check_same_run,
)
from jdist.training._checkpoint_directory import OtherRunError as OtherRunError
from jdist.training._checkpoints import Checkpoints as Checkpoints
from jdist.training._checkpoints import OtherWorkers as OtherWorkers
from jdist.training._checkpoints import Restored as Restored
from jdist.training._evaluation import Evaluator as Evaluator
from jdist.training._gradient import check_loss as check_loss
from jdist.training._gradient import Gradient as Gradient
from jdist.training._gradient import make_gradient as make_gradient
from jdist.training._gradient import num_samples as num_samples
from jdist.training._gradient import sample_counts as sample_counts
from jdist.training._losses import cast as cast
from jdist.training._losses import classification_loss as classification_loss
from jdist.training._losses import label_loss as label_loss
from jdist.training._losses import masked_mean as masked_mean
from jdist.training._model_file import load_metadata as load_metadata
from jdist.training._model_file import load_model as load_model
from jdist.training._model_file import save_model as save_model
from jdist.training._results import append_rows as append_rows
from jdist.training._results import make_row as make_row
from jdist.training._results import MetricsWriter as MetricsWriter
from jdist.training._results import read_rows as read_rows
from jdist.training._step import make_step as make_step
from jdist.training._step import make_update as make_update
from jdist.training._step import Step as Step
from jdist.training._step import (
  synchronize_statistics as synchronize_statistics,
)
from jdist.training._train_state import init_state as init_state
from jdist.training._train_state import is_finite as is_finite
from jdist.training._train_state import resize as resize
from jdist.training._train_state import TrainState as TrainState
from jdist.training.loop import format_bytes as format_bytes
from jdist.training.loop import format_rate as format_rate
from jdist.training.loop import is_diverged as is_diverged
from jdist.training.loop import PreemptedError as PreemptedError
from jdist.training.loop import Preemption as Preemption
from jdist.training.loop import Progress as Progress
from jdist.training.loop import Record as Record
from jdist.training.loop import RoundHost as RoundHost
from jdist.training.loop import Trainer as Trainer
