#!/usr/bin/env bash
# Start it with: bash @name@.sh [HOST]
# HOST is the machine of rank 0 (default: this one). A run that fails resumes
# from its last checkpoint. All processes find its secret in
# ~/.config/jdist/secret, in a home directory that the machines share.
set -u
run=mpi-$(date +%s)-$$
coordinator=${1:-$(hostname)}:@port@

wait_s=1
for restart in $(seq 0 @restarts@); do
  @start@
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
