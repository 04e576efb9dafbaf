"""`jdist launch`: a training run in several processes, here or on a cluster."""

import json
import math
import pathlib
import re
import shlex
import sys

from jdist import checks
from jdist.cli import _commands, _options
from jdist.cli.launch import _local_run
from jdist.cli.servers import _protocols

_PORT = 29400
_MOUNTED = "/etc/jdist/cluster.toml"
# A restarted process finds compiled programs there, as that of a local run.
_CACHE = (
  "JAX_COMPILATION_CACHE_DIR="
  '"${JAX_COMPILATION_CACHE_DIR:-$HOME/.cache/jdist/compiled}"'
)


def launch(options: _commands.Launch) -> int:
  """Starts a run, or prints a file that does; returns its exit status."""
  _check(options)
  train = options.train
  assert train is not None
  if options.print is not None:
    writers = {
      "slurm": _slurm, "mpi": _mpi, "kubernetes": _kubernetes,
      "kuberay": _kuberay,
    }  # fmt: skip
    print(writers[options.print](options), end="")
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
    [sys.executable, "-m", "jdist", *options.command], options.num_processes,
    checkpoints=train.checkpoints, restarts=restarts,
    backoff_s=options.backoff_s,
  )  # fmt: skip
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
  kube = (options.print or "").startswith("kube")
  if kube and not train.checkpoints.startswith("/"):
    raise ValueError(
      "`--checkpoints` must be absolute for Kubernetes, which mounts the claim "
      f"of `--claim` there, got {train.checkpoints}."
    )


def _fill(template: str, options: _commands.Launch, **values: str) -> str:
  """Returns a template with values in the places of their names, as @name@."""
  text = (pathlib.Path(__file__).parent / "templates" / template).read_text()
  # Every string of JSON is also a string of YAML, whatever it contains.
  assert options.train is not None
  values |= {
    "image": json.dumps(options.image), "claim": json.dumps(options.claim),
    "checkpoints": json.dumps(options.train.checkpoints), "name": options.name,
    "n": str(options.num_processes), "restarts": str(options.restarts),
    "port": str(_PORT),
    "cache": json.dumps(f"{options.train.checkpoints}/compiled"),
  }  # fmt: skip
  # One pass over the template: a value may contain such a name itself.
  return re.sub(r"@(\w+)@", lambda found: values[found[1]], text)


def _started(options: _commands.Launch, process_id: str) -> str:
  """Returns the command of a process, for a launcher that sets its number."""
  words = shlex.join(["python", "-m", "jdist", *options.command])
  # The shell of the process itself must expand the number: the script runs once
  # for all of them.  It also sets the run's id, as MPI passes no variables on.
  return (
    f'bash -c \'export JDIST_RUN_ID="$0" {_CACHE}; exec "$@" --process-id '
    f'{process_id}\' "$run" \\\n'
    f"    {words} \\\n"
    f'    --coordinator-address "$coordinator" '
    f"--num-processes {options.num_processes}"
  )


def _slurm(options: _commands.Launch) -> str:
  gpus = options.gpus_per_node
  resources = ""
  if gpus is not None:
    resources = f"#SBATCH --ntasks-per-node={gpus}\n"
    resources += f"#SBATCH --gpus-per-node={gpus}\n"
  # Without these flags srun would kill the others when one process ends,
  # before they have said why.
  start = "srun --kill-on-bad-exit=0 --wait=60 "
  if "image" in _options.given(options):
    start += f"--container-image={shlex.quote(options.image)} "
  start += _started(options, '"$SLURM_PROCID"')
  return _fill("slurm.sbatch", options, resources=resources, start=start)


def _mpi(options: _commands.Launch) -> str:
  # Open MPI, MPICH and Intel MPI have different names for the rank.
  rank = '"${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-$PMIX_RANK}}"'
  nodes = options.gpus_per_node
  spread = "" if nodes is None else f" --map-by ppr:{nodes}:node"
  start = f"mpirun -n {options.num_processes}{spread} {_started(options, rank)}"
  return _fill("mpi.sh", options, start=start)


def _kubernetes(options: _commands.Launch) -> str:
  name = options.name
  # JobSet gives this host name to the first pod.
  command = (
    f"exec {shlex.join(['python', '-m', 'jdist', *options.command])} "
    f"--coordinator-address {name}-run-0-0.{name}:{_PORT} "
    f"--num-processes {options.num_processes} "
    '--process-id "$JOB_COMPLETION_INDEX"'
  )
  resources = (
    ""
    if options.gpus_per_node is None
    else "                  resources:\n                    limits:\n"
    "                      nvidia.com/gpu: 1\n"
  )
  return _fill(
    "kubernetes.yaml", options, command=json.dumps(command), resources=resources
  )


def _kuberay(options: _commands.Launch) -> str:
  train = options.train
  assert train is not None
  if train.driver != "ray" or not train.cluster or train.cpus_per_worker != 1:
    raise ValueError(
      "`--print kuberay` must be given with `train --protocol NAME --driver "
      "ray --cluster CLUSTER.toml`, whose machines become pods of a worker "
      f"each, got {shlex.join(options.command)}."
    )
  _options.check_left_out(train, ("address",), "for KubeRay, which sets it")
  _options.check_left_out(options, ("restarts",), "with `--print kuberay`")
  machines, _ = _protocols.load(train.cluster)
  names = (re.sub("[^a-z0-9]+", "-", x.lower()) for x in machines.names)
  groups = [x.strip("-") for x in names]
  # Names of other scripts may have no letter left, or be alike then.
  if not all(re.match("[a-z]", x) and groups.count(x) == 1 for x in groups):
    groups = [f"machine-{i}" for i in range(len(groups))]
  workers = ""
  for node, group in zip(machines.nodes, groups, strict=True):
    limits = {"cpu": str(max(1, round(node.speed)))}
    if node.memory_bytes < math.inf:
      limits["memory"] = f"{node.memory_bytes:.0f}"
    if train.gpus_per_worker:
      limits["nvidia.com/gpu"] = str(math.ceil(train.gpus_per_worker))
    workers += _fill(
      "kuberay_worker.yaml", options, machine=group, limits=json.dumps(limits)
    )
  # The file is in the pod, and its machines are real: nothing is slept away.
  words = [_MOUNTED if x == train.cluster else x for x in options.command]
  words += ["--no-paced"] if train.paced else []
  command = f"{shlex.join(['python', '-m', 'jdist', *words])} --address"
  return _fill(
    "kuberay.yaml", options,
    cluster=json.dumps(checks.read_text(pathlib.Path(train.cluster))),
    command=json.dumps(f'{command} "$RAY_ADDRESS"'), workers=workers,
  )  # fmt: skip
