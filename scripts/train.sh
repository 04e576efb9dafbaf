#!/usr/bin/env bash
# Installs what training needs and compares methods on real data.
#
#   ./scripts/train.sh                        the front page's comparison, small
#   ./scripts/train.sh --preset mnist         any option of `jdist compare`
#   ./scripts/train.sh --help
set -euo pipefail
. "$(dirname "$0")/environment.sh"
environment train
# Memory in huge pages: a step on a CPU does not wait until it is cleared.
export GLIBC_TUNABLES=${GLIBC_TUNABLES-glibc.malloc.hugetlb=1}
if [ $# -eq 0 ]; then
  exec "$python" "$root/experiments/first_comparison/run.py" small
fi
exec "$python" -m jdist compare "$@"
