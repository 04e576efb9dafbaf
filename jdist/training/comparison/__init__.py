"""Comparisons: variants tuned alike, run with the same seeds, resumable rows.

`compare` runs a `Study` by a function that fits one trial. The experiments
share such a function for Optax chains, in `experiments/optax_chains`.
"""

from jdist.training.comparison._differences import Difference as Difference
from jdist.training.comparison._differences import (
  difference_table as difference_table,
)
from jdist.training.comparison._differences import (
  paired_difference as paired_difference,
)
from jdist.training.comparison._pictures import label_points as label_points
from jdist.training.comparison._pictures import picture as picture
from jdist.training.comparison._plot import plot_comparison as plot_comparison
from jdist.training.comparison._report import accuracy_table as accuracy_table
from jdist.training.comparison._report import best_runs as best_runs
from jdist.training.comparison._report import by_accuracy as by_accuracy
from jdist.training.comparison._report import mean_accuracy as mean_accuracy
from jdist.training.comparison._report import Runs as Runs
from jdist.training.comparison._report import runs_at as runs_at
from jdist.training.comparison._report import tuned_rates as tuned_rates
from jdist.training.comparison._rows import Row as Row
from jdist.training.comparison._rows import Rows as Rows
from jdist.training.comparison._rows import Trial as Trial
from jdist.training.comparison._study import by_loss as by_loss
from jdist.training.comparison._study import compare as compare
from jdist.training.comparison._study import Compared as Compared
from jdist.training.comparison._study import Options as Options
from jdist.training.comparison._study import Presets as Presets
from jdist.training.comparison._study import quality as quality
from jdist.training.comparison._study import Study as Study
from jdist.training.comparison._study import Tuned as Tuned
from jdist.training.comparison._study import warn_of_end as warn_of_end
from jdist.training.comparison._tables import accuracy as accuracy
from jdist.training.comparison._tables import group as group
from jdist.training.comparison._tables import loss as loss
from jdist.training.comparison._tables import mean as mean
from jdist.training.comparison._tables import mean_and_spread as mean_and_spread
from jdist.training.comparison._tables import mean_curve as mean_curve
from jdist.training.comparison._tables import reached_at as reached_at
from jdist.training.comparison._tables import table as table
from jdist.training.comparison._workload import summarize as summarize
from jdist.training.comparison._workload import Workload as Workload
