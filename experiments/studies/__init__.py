"""Options, problems, tables and labels that the experiments share.

The programs of an experiment put the folder above theirs on the path to import
this package. `jdist.training.comparison` runs the studies.
"""

from studies._commits import check_commit as check_commit
from studies._commits import read as read
from studies._labels import label_points as label_points
from studies._options import Options as Options
from studies._options import Presets as Presets
from studies._options import warn_of_end as warn_of_end
from studies._picture import is_shown as is_shown
from studies._picture import picture as picture
from studies._problem import Problem as Problem
from studies._problem import set_rate as set_rate
from studies._report import accuracy_table as accuracy_table
from studies._report import best_runs as best_runs
from studies._report import by_accuracy as by_accuracy
from studies._report import difference_table as difference_table
from studies._report import mean_accuracy as mean_accuracy
from studies._report import Runs as Runs
from studies._report import runs_at as runs_at
from studies._report import tuned_rates as tuned_rates
from studies._tables import filled as filled
from studies._tables import group as group
from studies._tables import loss as loss
from studies._tables import mean_curve as mean_curve
from studies._tables import publish as publish
from studies._tables import reached_at as reached_at
from studies._tables import table as table
from studies._tables import write as write
