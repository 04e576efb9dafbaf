"""`jdist launch`: a training run in several processes, here or on a cluster."""

import re
import shlex
import sys

from jdist.cli import _commands, _options
from jdist.cli.launch import _cluster_file, _local_run


def launch(options: _commands.Launch) -> int:
  """Starts a run, or prints a file that does; returns its exit status."""
  _check(options)
  train = options.train
  assert train is not None
  if options.print is not None:
    print(_cluster_file.write(options), end="")
    return 0
  restarts = options.restarts
  if train.checkpoints is None and restarts:
    restarts = 0  # A restart would begin from step 0, and fail there again.
    print(
      "jdist: launch: without `--checkpoints DIR` a run that fails is not "
      "started again.",
      file=sys.stderr,
    )
  run = _local_run.LocalRun(
    [sys.executable, "-m", "jdist", *options.command],
    options.num_processes,
    checkpoints=train.checkpoints,
    restarts=restarts,
    backoff_s=options.backoff_s,
  )
  return run.run()


def _check(options: _commands.Launch) -> None:
  train, number = options.train, options.num_processes
  if train is None:
    raise ValueError(
      "the command behind `--` must be `train` with its options, got "
      f"{shlex.join(options.command) or 'nothing'}. For instance: jdist launch "
      "-n 4 -- train --method diloco --checkpoints DIR"
    )
  _options.check_left_out(
    train,
    ("coordinator_address", "num_processes", "process_id"),
    "behind `--`, where `launch` gives it to each process",
  )
  # The engine of a server starts the processes of its workers itself.
  if number > 1 and train.driver is not None:
    raise ValueError(
      "`--num-processes` must be 1 with `--protocol`, whose server and workers "
      f"start from one process, got {number}."
    )
  if train.runtime != "processes":
    _options.check_workers(train.workers, number)
  elif number != train.stages:
    raise ValueError(
      f"`--num-processes` must be the {train.stages} stages with `--runtime "
      f"processes`, got {number}."
    )
  if options.print is not None:
    _check_printed(options, train)


def _check_printed(options: _commands.Launch, train: _commands.Train) -> None:
  """Checks the options of a file for a cluster."""
  # Kubernetes makes host names of it.
  if not re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", options.name):
    raise ValueError(
      "`--name` must consist of lower-case letters, digits and hyphens, got "
      f"{options.name!r}."
    )
  if train.checkpoints is None:
    raise ValueError(
      "`--checkpoints` must be given with `--print`: a directory that all "
      "machines share, from which a run resumes."
    )
  # Launchers put equally many processes on each machine.
  gpus = options.gpus_per_node
  if gpus is not None and options.num_processes % gpus:
    raise ValueError(
      f"`--num-processes` must be a multiple of the {gpus} GPUs of a machine, "
      f"one process each, got {options.num_processes}."
    )
  if options.print == "kubernetes" and not train.checkpoints.startswith("/"):
    raise ValueError(
      "`--checkpoints` must be absolute for Kubernetes, which mounts the claim "
      f"of `--claim` there, got {train.checkpoints}."
    )
