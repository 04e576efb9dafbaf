#!/usr/bin/env bash
# Measures jdist on one GPU, in under nine minutes, and writes rows.
#
#   ./scripts/gpu.sh                    all parts, rows in experiments/gpu/results
#   ./scripts/gpu.sh codecs tax         some of them
#   JDIST_ROWS=/tmp ./scripts/gpu.sh    rows elsewhere
#
# | part | measures |
# |---|---|
# | agreement | methods, transformations, codecs, reducers against the CPU |
# | codecs | encoding, decoding and means, in copies of the tensor |
# | tax | what a method adds to a step of ResNet-18 |
# | logical | logical workers by every way of running their gradients |
# | streamed | a streamed step against the simple one |
# | stages | four stages of a transformer by each runtime; only if named |
#
# It installs nothing: `python` (JDIST_PYTHON) must have jax for the GPU, flax,
# optax and numpy, and for the tables of the tests chex and pytest. A copy of
# the tree without its repository is told its commit by JDIST_COMMIT.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${JDIST_PYTHON:-python3}
rows=${JDIST_ROWS:-experiments/gpu/results}
export PYTHONPATH=$PWD TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-3}
mkdir -p "$rows"

# A part replaces its own rows, and one that fails stops no other.
failed=()
part() {
  local name=$1 start=$SECONDS
  shift
  rm -f "$rows/$name.jsonl"
  "$@" --output "$rows/$name.jsonl" || failed+=("$name")
  echo "$name: $((SECONDS - start)) s"
}

[ $# -gt 0 ] || set -- codecs tax streamed agreement logical
for name in "$@"; do
  case $name in
    agreement | logical | stages | streamed)
      part "$name" "$python" "experiments/gpu/$name.py"
      ;;
    codecs)
      part codecs "$python" scripts/bench_codecs.py --size $((1 << 26)) \
        --repeats 7 --in-flight 10 --workers 8 --codecs int8 int4 \
        int4_stochastic sign ternary bfloat16 random top sampled_top top_4096 \
        cosines cosines_tiles cosines_32
      ;;
    tax)
      part tax "$python" scripts/bench_overhead.py --batch-size 512 \
        --dtype bfloat16 --in-flight --blocks 12 --methods "local_sgd told" \
        "diloco int4 told"
      ;;
    *)
      echo "gpu.sh: no part is called $name." >&2
      exit 2
      ;;
  esac
done
[ ${#failed[@]} -eq 0 ] || {
  echo "gpu.sh: failed: ${failed[*]}" >&2
  exit 1
}
