"""Files with which Slurm, Kubernetes and MPI start a run."""

import json
import pathlib
import re
import shlex

from jdist.cli import _commands

_TEMPLATES = pathlib.Path(__file__).parent / "templates"
_PORT = 29400


def write(options: _commands.Launch) -> str:
  """Returns the file that starts a run, with the command to use it on top."""
  writers = {"slurm": _slurm, "mpi": _mpi, "kubernetes": _kubernetes}
  assert options.print is not None
  return writers[options.print](options)


def _fill(template: str, options: _commands.Launch, **values: str) -> str:
  """Returns a template with values in the places of their names, as @name@."""
  text = (_TEMPLATES / template).read_text()
  values |= {
    "name": options.name,
    "n": str(options.num_processes),
    "restarts": str(options.restarts),
    "port": str(_PORT),
  }
  # One pass over the template: a value may contain such a name itself.
  return re.sub(r"@(\w+)@", lambda found: values[found[1]], text)


def _started(options: _commands.Launch, process_id: str) -> str:
  """Returns the command of a process, for a launcher that sets its number."""
  words = shlex.join(["python", "-m", "jdist", *options.command])
  # The shell of the process itself must expand the number: the script runs once
  # for all of them.  It also sets the run's id, as MPI passes no variables on.
  return (
    f'bash -c \'JDIST_RUN_ID="$0" exec "$@" --process-id {process_id}\' '
    '"$run" \\\n'
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
  assert options.train is not None and options.train.checkpoints is not None
  # Every string of JSON is also a string of YAML, whatever it contains.
  return _fill(
    "kubernetes.yaml",
    options,
    image=json.dumps(options.image),
    command=json.dumps(command),
    resources=resources,
    checkpoints=json.dumps(options.train.checkpoints),
    claim=json.dumps(options.claim),
  )
