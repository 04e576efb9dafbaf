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

# Runs a command, and shows meanwhile for how long: on a terminal in place, in a
# log every half a minute.
_with_clock() {
  local start=$SECONDS status=0 ticker
  (
    every=30
    [ ! -t 2 ] || every=1
    while sleep "$every" && kill -0 $$ 2>/dev/null; do
      if [ -t 2 ]; then
        printf '\r  %d s ' $((SECONDS - start)) >&2
      else
        echo "  ... $((SECONDS - start)) s" >&2
      fi
    done
  ) &
  ticker=$!
  "$@" || status=$?
  kill "$ticker" 2>/dev/null
  wait "$ticker" 2>/dev/null || true
  [ ! -t 2 ] || printf '\r\033[K' >&2
  return "$status"
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
    echo "Installing jdist[$extras] into $venv, minutes the first time ..." >&2
    local packages=(-e "$root[$extras]")
    [ -z "${JDIST_JAX:-}" ] || packages+=("jax==$JDIST_JAX")
    if command -v uv >/dev/null; then
      _with_clock uv pip install --quiet --python "$python" "${packages[@]}" ||
        return
    else
      _with_clock "$python" -m pip install --quiet --disable-pip-version-check \
        "${packages[@]}" || return
    fi
    printf '%s' "$want" >"$stamp"
  fi
}
