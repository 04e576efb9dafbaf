#!/usr/bin/env bash
# Start it with: bash jdist.sh [HOST]
# HOST is the machine of rank 0 (default: this one). A run that fails resumes
# from its last checkpoint. All processes find its secret in
# ~/.config/jdist/secret, in a home directory that the machines share.
set -u
run=mpi-$(date +%s)-$$
coordinator=${1:-$(hostname)}:29400

wait_s=1
for restart in $(seq 0 5); do
  mpirun -n 16 --map-by ppr:8:node bash -c 'export JDIST_RUN_ID="$0" JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$HOME/.cache/jdist/compiled}"; exec "$@" --process-id "${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-$PMIX_RANK}}"' "$run" \
    python -m jdist train --method diloco --workers 16 --batch-size 1024 --checkpoints checkpoints \
    --coordinator-address "$coordinator" --num-processes 16
  status=$?
  case $status in
    0 | 2 | 3) exit "$status" ;; # Trained, wrong options, diverged.
    143) exit 143 ;; # SIGTERM, and it has saved.
  esac
  echo "jdist: ended with status $status, starting again in $wait_s s" >&2
  sleep "$wait_s"
  wait_s=$((wait_s < 60 ? 2 * wait_s : 60))
done
exit "$status"
