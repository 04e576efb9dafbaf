"""Measures what encoding and decoding cost beside a copy of the tensor.

    python scripts/bench_codecs.py [--codecs int8 int4] [--size 4194304]
      [--repeats 30] [--sort] [--output row.jsonl]

The unit is a copy of the same float32 tensor, read and written by a compiled
program in the same process: a codec that takes one copy costs a training step
what touching its gradients once more would.  All programs run in turn, in an
order that rotates; each time is divided by the copy's of the same round.
Quartiles of those ratios are told, and the ratio of the fastest times, which
is the one to look at on a busy machine, beside a second copy: the noise.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp

from jdist import codecs, training

CODECS: dict[str, codecs.Codec] = {
  "int8": codecs.Quantize(8),
  "int4": codecs.Quantize(4),
  "int2": codecs.Quantize(2),
  "int3": codecs.Quantize(3),
  "int16": codecs.Quantize(16),
  "int8_stochastic": codecs.Quantize(8, rounding="stochastic"),
  "int4_stochastic": codecs.Quantize(4, rounding="stochastic"),
  "int8_tensor": codecs.Quantize(8, None),
  "int4_tensor": codecs.Quantize(4, None),
  "uint8": codecs.Quantize(8, range="min_max"),
  "uint4": codecs.Quantize(4, range="min_max"),
  "qsgd4": codecs.Quantize(4, 512, "norm", "stochastic"),
  "sign": codecs.Sign(),
  "sign_256": codecs.Sign(256),
  "sign_alone": codecs.Sign(scale="one"),
  "ternary": codecs.Ternary(),
  "bfloat16": codecs.Cast(),
  "bfloat16_stochastic": codecs.Cast(rounding="stochastic"),
  "float16": codecs.Cast("float16"),
  "top": codecs.TopK(0.01),
  "top_0.1": codecs.TopK(0.001),
  "top_bfloat16": codecs.TopK(0.01, values=codecs.Cast()),
  "top_4096": codecs.TopK(0.01, chunk=4096),
  "sampled_top": codecs.SampledTopK(0.01),
  "random": codecs.RandomK(0.01),
  "cosines": codecs.DCTTopK(chunk=64, k=1),
}


def compiled(function, *arguments):
  return jax.jit(function).lower(*arguments).compile()


def make_programs(codec, x, key):
  """Encoding and decoding, each with its arguments."""
  state = jax.jit(codec.init)(x)
  encode = compiled(codec.encode, x, state, key)
  payload, state = encode(x, state, key)
  like = jax.ShapeDtypeStruct(x.shape, x.dtype)
  decode = compiled(
    lambda payload, state: codec.decode(payload, state, like), payload, state
  )
  return {
    "encode": (encode, (x, codec.init(x), key)),
    "decode": (decode, (payload, state)),
  }


def sorted_by_size(x):
  """All entries and their places, the largest first."""
  places = jax.lax.iota(jnp.int32, x.size)
  return jax.lax.sort_key_val(-jnp.abs(x), places)


def measure(programs, repeats):
  """Seconds of each program in each round."""
  seconds = {name: [] for name in programs}
  names = list(programs)
  for turn in range(-2, repeats):  # Two rounds to warm up.
    shift = turn % len(names)
    for name in names[shift:] + names[:shift]:
      run, arguments = programs[name]
      start = time.perf_counter()
      jax.block_until_ready(run(*arguments))
      if turn >= 0:
        seconds[name].append(time.perf_counter() - start)
  return seconds


def summary(seconds, copy):
  """Quartiles of the ratios to a copy, and the ratio of the fastest."""
  ratios = [a / b for a, b in zip(seconds, copy, strict=True)]
  low, middle, high = statistics.quantiles(ratios, n=4)
  return {
    "median": middle,
    "quartiles": [low, high],
    "fastest": min(seconds) / min(copy),
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--codecs", nargs="+", default=["int8", "int4"],
                      choices=[*CODECS, "all"])  # fmt: skip
  parser.add_argument("--size", type=int, default=4 << 20,
                      help="entries of float32; default 16 MiB")  # fmt: skip
  parser.add_argument("--repeats", type=int, default=30)
  parser.add_argument("--sort", action="store_true",
                      help="beside them, a sort of all entries")  # fmt: skip
  parser.add_argument("--output", help="a file of rows to append to")
  options = parser.parse_args()
  names = list(CODECS) if "all" in options.codecs else options.codecs

  key = jax.random.key(0)
  x = jax.random.normal(key, (options.size,), jnp.float32)
  programs = {
    "copy": (compiled(jnp.copy, x), (x,)),
    "copy again": (compiled(jnp.copy, x), (x,)),
  }
  if options.sort:
    programs["sort"] = (compiled(sorted_by_size, x), (x,))
  for name in names:
    for kind, program in make_programs(CODECS[name], x, key).items():
      programs[f"{kind} {name}"] = program
  seconds = measure(programs, options.repeats)
  copy = seconds["copy"]

  results = {
    name: {
      "compression": 32 * x.size / CODECS[name].num_bits(x),
      "encode": summary(seconds[f"encode {name}"], copy),
      "decode": summary(seconds[f"decode {name}"], copy),
    }
    for name in names
  }
  config = {k: v for k, v in vars(options).items() if k != "output"}
  row = training.make_row(
    config,
    seed=0,
    tensor_bytes=4 * x.size,
    copy_s={"median": statistics.median(copy), "fastest": min(copy)},
    copy_again=summary(seconds["copy again"], copy),
    codecs=results,
    **({"sort": summary(seconds["sort"], copy)} if options.sort else {}),
  )
  if options.output:
    training.append_rows(options.output, [row])
  print(json.dumps(row, indent=2))


if __name__ == "__main__":
  main()
