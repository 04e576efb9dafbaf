#!/usr/bin/env bash
# The checklist of a release: builds what an index would get in dist/, and tries
# it as a stranger would.  Stops at the first step that fails.
#
#   ./scripts/release.sh             everything, minutes
#   ./scripts/release.sh -m ""       with all quick tests from the archive, in place
#                                    of the small set; any option of pytest
#
# JDIST_URL is the repository's address, https://HOST/OWNER/NAME, for the links
# of the index's page; without it the rest is tried and the end is a refusal.
# JDIST_CHECKED names a Python with jdist's tests' packages (default: .venv's).
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
checked=${JDIST_CHECKED:-$root/.venv/bin/python}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
[ $# -gt 0 ] || set -- -m smoke

step() { echo "== $*"; }

step "Version, changelog and citation agree"
version=$("$checked" -c "exec(open('jdist/_version.py').read()); print(__version__)")
grep -q "^version: ${version%.dev*}$" CITATION.cff
grep -q "^## " CHANGELOG.md

step "constraints.txt names no host, and has a hash for each package"
! grep -nE '://|^-' constraints.txt
"$checked" - <<'PYTHON'
import pathlib, re

text = pathlib.Path("constraints.txt").read_text().replace("\\\n", " ")
lines = [x for x in text.splitlines() if x.strip()]
assert len(lines) > 20, "constraints.txt must list the packages"
wrong = [x for x in lines if not re.search(r"==\S+.*--hash=sha256:", x)]
assert not wrong, wrong[:3]
PYTHON

step "Archive and wheel are built from the commit, and their pages are valid"
python3 -m venv "$scratch/tools"
"$scratch/tools/bin/pip" install --quiet build twine mypy
git archive --format=tar --prefix=source/ HEAD | tar -x -C "$scratch"
if [ -n "${JDIST_URL:-}" ]; then
  "$checked" scripts/addresses.py "$scratch/source" "$JDIST_URL" \
    "$(git rev-parse HEAD)"
fi
rm -rf dist
"$scratch/tools/bin/python" -m build --outdir dist "$scratch/source" \
  >"$scratch/build.log" || { tail -n 20 "$scratch/build.log"; exit 1; }
"$scratch/tools/bin/twine" check --strict dist/*

step "Tests pass from the unpacked archive"
mkdir "$scratch/unpacked"
tar -xf dist/jdist-*.tar.gz -C "$scratch/unpacked" --strip-components=1
(cd "$scratch/unpacked" && PYTHONPATH=$PWD "$checked" -m pytest -q \
  -p no:cacheprovider "$@")

step "The wheel works in an empty environment, offline, with the core alone"
python3 -m venv "$scratch/empty"
"$scratch/tools/bin/pip" wheel --quiet --wheel-dir "$scratch/wheels" dist/*.whl
"$scratch/empty/bin/pip" install --quiet --no-index \
  --find-links "$scratch/wheels" jdist
cd "$scratch"
empty/bin/jdist --version
empty/bin/jdist bytes --methods ssgd topk_sgd --model lenet --workers 2 \
  >bytes.txt
grep -q topk_sgd bytes.txt
empty/bin/jdist train --dataset synthetic --steps 4 --workers 2 \
  --batch-size 16 --warmup-epochs 0 --output run >train.txt
grep -q accuracy train.txt

step "A type checker sees the types of the wheel, and finds a wrong argument"
flags="--python-executable empty/bin/python --ignore-missing-imports" # Optax has no types.
cat >right.py <<'PYTHON'
import optax

import jdist

chain = jdist.local_sgd(optax.sgd(0.1), 8, axis=None)
PYTHON
sed 's/axis=None/axes=None/' right.py >wrong.py
tools/bin/mypy $flags right.py
! tools/bin/mypy $flags wrong.py >mypy.txt
cat mypy.txt
grep -q 'Unexpected keyword argument "axes"' mypy.txt

step "The index's page has links of its own, and its links lead somewhere"
"$scratch/tools/bin/python" - "$root"/dist/*.whl <<'PYTHON'
import re, sys, zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
  (name,) = (x for x in wheel.namelist() if x.endswith(".dist-info/METADATA"))
  text = wheel.read(name).decode()
if "Project-URL: Repository" not in text:
  sys.exit("Not ready: set JDIST_URL to the repository's address.")
dead = [x for x in re.findall(r"\]\(([^)]+)\)", text) if "://" not in x]
assert not dead, dead
PYTHON

step "Ready: $(cd "$root/dist" && ls -x)"
