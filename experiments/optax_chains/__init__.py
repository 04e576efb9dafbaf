"""Comparisons of Optax chains, which several experiments share.

`Chains` fits variants that are chains, and `run_experiment` makes a command of
them. The programs of an experiment put the folder above theirs on the path to
import this package.
"""

from optax_chains._chains import ChainRun as ChainRun
from optax_chains._chains import Chains as Chains
from optax_chains._chains import Config as Config
from optax_chains._chains import Variant as Variant
from optax_chains._commands import report_experiment as report_experiment
from optax_chains._commands import run_experiment as run_experiment
from optax_chains._one_core import on_one_core as on_one_core
from optax_chains._step_times import HostLinks as HostLinks
from optax_chains._step_times import join_hosts as join_hosts
from optax_chains._step_times import step_times as step_times
