#!/usr/bin/env bash
# Builds the site in build/site, with all notebooks run and warnings as errors.
#
#   ./scripts/docs.sh                  the whole site
#   ./scripts/docs.sh -D nb_execution_mode=off   any option of sphinx-build
#
# JDIST_INTERSPHINX=0 builds without a network: names of JAX, Optax and Flax
# have no links then.
set -euo pipefail
. "$(dirname "$0")/environment.sh"
JDIST_VENV=${JDIST_VENV:-$root/.venv-docs} environment docs
cd "$root"
rm -rf build/site
# Compiling is most of the notebooks' time, and nothing is timed there.
export XLA_FLAGS="--xla_backend_optimization_level=0 ${XLA_FLAGS:-}"
"$python" -m sphinx --fail-on-warning --keep-going --nitpicky \
  --conf-dir docs . build/site "$@"
echo "The site is in build/site/index.html." >&2
