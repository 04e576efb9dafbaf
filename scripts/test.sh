#!/usr/bin/env bash
# Installs what the tests need and runs them.
#
#   ./scripts/test.sh                the whole default set
#   ./scripts/test.sh -m slow        what takes long; before a release
#   ./scripts/test.sh tests/data     any argument of pytest
#   ./scripts/test.sh -n 2           in two processes
set -euo pipefail
. "$(dirname "$0")/environment.sh"
environment dev
cd "$root"
# Tests of a file stay in one process: they share what it has run.
exec "$python" -m pytest --dist loadfile "$@"
