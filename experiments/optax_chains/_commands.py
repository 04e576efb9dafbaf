"""The commands of an experiment: run, measure step times, report."""

import pathlib
import sys
from collections.abc import Mapping, Sequence

import studies

from jdist import training
from jdist.training import comparison
from optax_chains import _bytes_plot, _chains, _step_times


def run_experiment(
  folder: str | pathlib.Path,
  presets: studies.Presets,
  variants: Mapping[str, _chains.Variant],
  chains: type[_chains.Chains] = _chains.Chains,
  *,
  base: str = "ssgd",
) -> None:
  """Runs the preset that the command line names, with changes to it.

  With `--times` the steps of its variants are measured instead.

  Args:
    folder: The experiment's folder, whose `results/` takes the rows.
    presets: The presets by name, each with a line of help.
    variants: The variants by name, in the order in which they run.
    chains: The class that prepares and fits the variants.
    base: The synchronous variant, with which times are compared.
  """
  import tyro

  # The flag is no option of the rows' config, and tyro would refuse it.
  times = "--times" in sys.argv
  if times:
    sys.argv.remove("--times")
  options: _chains.Config = tyro.extras.overridable_config_cli(presets)
  # tyro returns the options of a preset without its name.
  preset = next(word for word in sys.argv[1:] if word in presets)
  results = pathlib.Path(folder) / "results"
  try:
    if not times:
      # Checks the options before any data are loaded.
      options.study(variants)
      path = results / f"{preset}.jsonl"
      _chains.compare_chains(path, chains(options, variants))
      return
    links = _step_times.join_hosts(options.workers)
    rows = chains(options, variants).step_times(base=base, links=links)
  # An error in an option is the user's, for whom a traceback says nothing.
  except ValueError as error:
    raise SystemExit(str(error)) from error
  if rows:
    name = "times" if links is None else links.name
    path = results / f"{preset}-{name}.jsonl"
    # New times replace older ones, since both may be of different machines.
    path.unlink(missing_ok=True)
    training.append_rows(path, rows)


def report_experiment(folder: str | pathlib.Path, *, ours: str) -> None:
  """Prints and draws the results of the preset that the command line names.

  Args:
    folder: The experiment's folder.
    ours: The prefix of the names of variants that are marked.
  """
  preset = sys.argv[1] if len(sys.argv) > 1 else "cifar10"
  results = pathlib.Path(folder) / "results"
  rows = training.read_rows(results / f"{preset}.jsonl")
  runs = studies.best_runs(rows)
  if not runs:
    raise SystemExit(f"There is no compared run of {preset} yet.")
  print(studies.accuracy_table(runs))
  for line in _end_warnings(rows):
    print(f"\n{line}")
  path = results / f"{preset}.png"
  if studies.is_shown(path):
    _bytes_plot.plot_bytes(runs, path, ours=ours)


def _end_warnings(rows: Sequence[comparison.Row]) -> list[str]:
  """Returns a line for each end of the grid where a best rate lies."""
  tuned = studies.tuned_rates(rows).items()
  found = []
  for end in ("lowest", "highest"):
    methods = [method for method, one in tuned if one.end == end]
    if methods:
      found.append(f"Best at the {end} rate tried: {', '.join(methods)}.")
  return found
