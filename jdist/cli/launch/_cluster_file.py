"""Files with which Slurm, Kubernetes and MPI start a run."""

import json
import shlex

from jdist.cli import _commands

_PORT = 29400
# The restarts of `launch` as a shell script, for launchers without any.
_LOOP = """
wait_s=1
for restart in $(seq 0 {restarts}); do
  {start}
  status=$?
  case $status in
    0 | 2 | 3) exit "$status" ;; # Trained, wrong options, diverged.
{sigterm}  esac
  echo "jdist: ended with status $status, starting again in $wait_s s" >&2
  sleep "$wait_s"
  wait_s=$((wait_s < 60 ? 2 * wait_s : 60))
done
exit "$status"
"""

_SLURM = """#!/usr/bin/env bash
# Start it with: sbatch {name}.sbatch
#SBATCH --job-name={name}
#SBATCH --ntasks={n}
{resources}#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# Two minutes before the time is up, and when the job has to give way, SIGTERM
# makes the run save and end with 143; then the job queues again. A run that
# fails resumes from its last checkpoint.
set -u
coordinator=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):{port}
"""

_MPI = """#!/usr/bin/env bash
# Start it with: bash {name}.sh [HOST]
# HOST is the machine of rank 0 (default: this one). A run that fails resumes
# from its last checkpoint.
set -u
coordinator=${{1:-$(hostname)}}:{port}
"""

_KUBERNETES = """# Start it with: kubectl apply -f {name}.yaml
# Needs JobSet (https://jobset.sigs.k8s.io), an image with jdist, and the claim
# of a volume that all pods share. A run that fails resumes from its last
# checkpoint; SIGTERM makes it save first. Wrong options (2) and a run that has
# diverged (3) are not restarted.
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
spec:
  failurePolicy:
    maxRestarts: {restarts}
    rules:
      - name: final
        action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: run
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          completions: {n}
          parallelism: {n}
          backoffLimit: 0
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes:
                  containerName: jdist
                  operator: In
                  values: [2, 3]
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: 120
              containers:
                - name: jdist
                  image: {image}
                  command:
                    - sh
                    - -c
                    - {command}
                  ports:
                    - containerPort: {port}
{resources}                  volumeMounts:
                    - name: checkpoints
                      mountPath: {checkpoints}
              volumes:
                - name: checkpoints
                  persistentVolumeClaim:
                    claimName: {claim}
"""


def write(options: _commands.Launch) -> str:
  """Returns the file that starts a run, with the command to use it on top."""
  writers = {"slurm": _slurm, "mpi": _mpi, "kubernetes": _kubernetes}
  assert options.print is not None
  return writers[options.print](options)


def _started(options: _commands.Launch, process_id: str) -> str:
  """Returns the command of a process, for a launcher that sets its number."""
  # The shell of the process itself must expand the number, not the script's.
  words = shlex.join(["python", "-m", "jdist", *options.command])
  return (
    f"bash -c 'exec \"$@\" --process-id {process_id}' bash \\\n"
    f"    {words} \\\n"
    f'    --coordinator-address "$coordinator" '
    f"--num-processes {options.num_processes}"
  )


def _slurm(options: _commands.Launch) -> str:
  gpus = options.gpus_per_node
  resources = (
    ""
    if gpus is None
    else f"#SBATCH --ntasks-per-node={gpus}\n#SBATCH --gpus-per-node={gpus}\n"
  )
  start = "srun --kill-on-bad-exit=0 --wait=60 "
  start += _started(options, '"$SLURM_PROCID"')
  sigterm = '    143) scontrol requeue "$SLURM_JOB_ID" && exit 143 ;;\n'
  return _SLURM.format(
    name=options.name, n=options.num_processes, resources=resources, port=_PORT
  ) + _LOOP.format(restarts=options.restarts, start=start, sigterm=sigterm)


def _mpi(options: _commands.Launch) -> str:
  # Open MPI, MPICH and Intel MPI name the rank differently.
  rank = '"${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-$PMIX_RANK}}"'
  nodes = options.gpus_per_node
  spread = "" if nodes is None else f" --map-by ppr:{nodes}:node"
  start = f"mpirun -n {options.num_processes}{spread} {_started(options, rank)}"
  sigterm = "    143) exit 143 ;; # SIGTERM, and it has saved.\n"
  return _MPI.format(name=options.name, port=_PORT) + _LOOP.format(
    restarts=options.restarts, start=start, sigterm=sigterm
  )


def _kubernetes(options: _commands.Launch) -> str:
  name = options.name
  # JobSet gives this name to the first pod.
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
  # Every string of JSON is also a string of YAML.
  return _KUBERNETES.format(
    name=name,
    n=options.num_processes,
    restarts=options.restarts,
    image=json.dumps(options.image),
    command=json.dumps(command),
    port=_PORT,
    resources=resources,
    checkpoints=json.dumps(options.train.checkpoints),
    claim=json.dumps(options.claim),
  )
