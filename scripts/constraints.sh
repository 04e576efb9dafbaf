#!/usr/bin/env bash
# Writes constraints.txt anew: every package of `pip install ".[train]"` for all
# platforms and Pythons, in one version each, with the hashes of its files.
#
#   pip install --require-hashes -r constraints.txt && pip install --no-deps .
#
# Needs uv. No index is written down: the hashes are the same at each of them.
set -euo pipefail
cd "$(dirname "$0")/.."
uv pip compile pyproject.toml --extra train --universal --python-version 3.11 \
  --generate-hashes --no-emit-index-url --no-emit-find-links --no-header \
  --no-annotate --quiet --output-file constraints.txt "$@"
if grep -nE '://|^-' constraints.txt; then
  echo "constraints.txt must name no host." >&2
  exit 1
fi
