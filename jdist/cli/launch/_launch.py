"""`jdist launch`: a training run in several processes, here or on a cluster."""

import re
import shlex
import sys

from jdist.cli import _options
from jdist.cli.launch import _cluster_file, _launch_options, _local_run


def launch(options: _launch_options.Launch) -> int:
  """Starts the processes of a run, or prints what starts them elsewhere.

  Returns:
    The exit status of the run.
  """
  _check(options)
  train = options.train
  assert train is not None
  if options.print is not None:
    print(_cluster_file.write(options), end="")
    return 0
  if train.checkpoints is None and options.restarts:
    print(
      "jdist: launch: without `--checkpoints DIR` a run that fails is not "
      "started again.",
      file=sys.stderr,
    )
  run = _local_run.LocalRun(
    [sys.executable, "-m", "jdist", *options.command],
    options.num_processes,
    checkpoints=train.checkpoints,
    restarts=options.restarts if train.checkpoints is not None else 0,
    backoff_s=options.backoff_s,
  )
  return run.run()


def _check(options: _launch_options.Launch) -> None:
  _options.check_least(options, num_processes=1, restarts=0, backoff_s=0)
  _options.check_least(options, gpus_per_node=1)
  train = options.train
  if train is None:
    raise ValueError(
      "the command behind `--` must be `train` with its options, got "
      f"{shlex.join(options.command) or 'nothing'}. For instance: jdist launch "
      "-n 4 -- train --method diloco --checkpoints DIR"
    )
  for name in ("coordinator_address", "num_processes", "process_id"):
    if getattr(train, name) is not None:
      raise ValueError(
        f"`{_options.word(name)}` must be left out behind `--`, got "
        f"{getattr(train, name)}: `launch` gives it to each process."
      )
  if options.num_processes > 1 and train.protocol is not None:
    raise ValueError(
      "`--num-processes` must be 1 with `--protocol`, whose virtual clock is "
      f"in one process, got {options.num_processes}."
    )
  if train.workers % options.num_processes:
    raise ValueError(
      f"`--workers` must be a multiple of the {options.num_processes} "
      f"processes, got {train.workers}."
    )
  if options.print is None:
    _options.check_left_out(
      options, ("gpus_per_node", "name", "image", "claim"), "without `--print`"
    )
    return
  if not re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", options.name):
    raise ValueError(
      "`--name` must be of small letters, digits and hyphens, got "
      f"{options.name!r}."
    )
  if train.checkpoints is None:
    raise ValueError(
      "`--checkpoints` must be given with `--print`: a directory that all "
      "machines share, from which a run goes on."
    )
  gpus = options.gpus_per_node
  if gpus is not None and options.num_processes % gpus:
    raise ValueError(
      f"`--num-processes` must be a multiple of the {gpus} GPUs of a machine, "
      f"a process each, got {options.num_processes}."
    )
  if options.print == "kubernetes" and not train.checkpoints.startswith("/"):
    raise ValueError(
      "`--checkpoints` must be absolute for Kubernetes, which mounts the claim "
      f"of `--claim` there, got {train.checkpoints}."
    )
