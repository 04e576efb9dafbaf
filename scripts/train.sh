#!/usr/bin/env bash
# Installs what training needs and compares methods on real data.
#
#   ./scripts/train.sh                        four methods on digits, minutes
#   ./scripts/train.sh --preset mnist         any option of `jdist compare`
#   ./scripts/train.sh --help
set -euo pipefail
. "$(dirname "$0")/environment.sh"
environment train
exec "$python" -m jdist compare "$@"
