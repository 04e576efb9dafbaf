# Sourced by the other scripts: makes or reuses a virtual environment.
#
#   environment EXTRAS     installs jdist, editable, with these extras, and
#                          sets `python` to the environment's interpreter
#
# Variables that a caller may set:
#   JDIST_VENV     where the environment is; .venv by default
#   JDIST_PYTHON   the interpreter to make it with; by default the first
#                  python3 on the PATH that is 3.11 or newer
#   JDIST_JAX      a version of JAX to install instead of the newest

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

_is_recent() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

_find_python() {
  local candidate
  for candidate in ${JDIST_PYTHON:-} python3 python3.13 python3.12 python3.11 \
    python3.14; do
    if _is_recent "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

environment() {
  local extras=$1 venv=${JDIST_VENV:-$root/.venv} base stamp want
  python=$venv/bin/python
  if [ ! -x "$python" ]; then
    echo "Making a virtual environment in $venv ..." >&2
    if command -v uv >/dev/null && [ -z "${JDIST_PYTHON:-}" ]; then
      uv venv --quiet --python '>=3.11' "$venv" || return
    else
      base=$(_find_python) || {
        echo "jdist needs Python 3.11 or newer: install it, or set" \
          "JDIST_PYTHON to its path." >&2
        return 1
      }
      "$base" -m venv "$venv" || return
    fi
  fi
  # What was installed stands in a file, so that nothing is done twice.
  stamp=$venv/.jdist-installed
  want="$extras ${JDIST_JAX:-} $(cksum <"$root/pyproject.toml") $root"
  if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
    echo "Installing jdist[$extras] into $venv ..." >&2
    local packages=(-e "$root[$extras]")
    [ -z "${JDIST_JAX:-}" ] || packages+=("jax==$JDIST_JAX")
    if command -v uv >/dev/null; then
      uv pip install --quiet --python "$python" "${packages[@]}" || return
    else
      "$python" -m pip install --quiet --disable-pip-version-check \
        "${packages[@]}" || return
    fi
    printf '%s' "$want" >"$stamp"
  fi
}
