"""Comparisons: variants tuned alike, run with the same seeds, resumable rows.

`compare` runs a `Study` by a function that fits one trial. The experiments
share such a function for Optax chains, in `experiments/optax_chains`, and
tables of rows in `experiments/studies`.
"""

from jdist.training.comparison._rows import accuracy as accuracy
from jdist.training.comparison._rows import Difference as Difference
from jdist.training.comparison._rows import mean as mean
from jdist.training.comparison._rows import mean_and_spread as mean_and_spread
from jdist.training.comparison._rows import (
  paired_difference as paired_difference,
)
from jdist.training.comparison._rows import Row as Row
from jdist.training.comparison._rows import Rows as Rows
from jdist.training.comparison._rows import Trial as Trial
from jdist.training.comparison._study import by_loss as by_loss
from jdist.training.comparison._study import compare as compare
from jdist.training.comparison._study import Compared as Compared
from jdist.training.comparison._study import quality as quality
from jdist.training.comparison._study import Study as Study
from jdist.training.comparison._study import tune as tune
from jdist.training.comparison._study import Tuned as Tuned
from jdist.training.comparison._workload import summarize as summarize
from jdist.training.comparison._workload import Workload as Workload
