"""Measures the time of encoding and decoding in copies of the tensor.

    python scripts/bench_codecs.py [--codecs int8 int4] [--size 4194304]
      [--repeats 30] [--in-flight 1] [--sort] [--workers 8]
      [--output row.jsonl]

The unit is a copy of the same float32 tensor, read and written by a compiled
program in the same process: a codec that takes one copy costs a training step
what touching its gradients once more would.  All programs run in turn, in an
order that rotates; each time is divided by the copy's of the same round.
Quartiles of those ratios are told, and the ratio of the fastest times, which
is the one to look at on a busy machine, beside a second copy: the noise.

A GPU runs while Python dispatches: with `--in-flight 20` each time is that of
twenty calls, divided by twenty.  With `--workers 8` means over eight logical
workers are measured as well, each worker with its part of the tensor.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp

import jdist
from jdist import codecs, reducers, training

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
  "cosines_tiles": codecs.DCTTopK(chunk=64, k=1),
  "cosines_32": codecs.DCTTopK(chunk=64, k=32),
}
# Codecs that cut matrices into tiles, which a vector does not have.
_OF_MATRICES = ("cosines_tiles", "cosines_32")
_MEANS = {
  "exact": None,
  "int8": jdist.Compression(codecs.Quantize(8)),
  "int4": jdist.Compression(codecs.Quantize(4)),
  "int8 feedback": jdist.Compression(
    codecs.Quantize(8), reducers.ErrorFeedback()
  ),
  "int4 feedback": jdist.Compression(
    codecs.Quantize(4), reducers.ErrorFeedback()
  ),
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


def like_of(name, x):
  """The tensor, or as a matrix for a codec that cuts tiles."""
  if name not in _OF_MATRICES:
    return x
  width = 1 << (x.size.bit_length() - 1) // 2
  return x[: x.size // width * width].reshape(-1, width)


def make_means(x, workers):
  """Means over logical workers, each with its part of the tensor."""
  team = jdist.workers(workers, substrate="vmap")
  parts = team.place(x[: x.size // workers * workers].reshape(workers, -1))
  programs = {}
  for name, compression in _MEANS.items():
    mean = jdist.average_gradients(team.axis, compression)
    state = team.jit(mean.init)(parts)
    run = team.jit(lambda g, s, mean=mean: mean.update(g, s, g))
    run = run.lower(parts, state).compile()
    programs[f"mean {name}"] = (run, (parts, state))
  return programs


def sorted_by_size(x):
  """All entries and their places, the largest first."""
  places = jax.lax.iota(jnp.int32, x.size)
  return jax.lax.sort_key_val(-jnp.abs(x), places)


def measure(programs, repeats, in_flight=1):
  """Seconds of a call of each program in each round."""
  seconds = {name: [] for name in programs}
  names = list(programs)
  for turn in range(-2, repeats):  # Two rounds to warm up.
    shift = turn % len(names)
    for name in names[shift:] + names[:shift]:
      run, arguments = programs[name]
      start = time.perf_counter()
      # Results of earlier calls are freed at once; the last one is waited for.
      for _ in range(in_flight):
        result = run(*arguments)
      jax.block_until_ready(result)
      if turn >= 0:
        seconds[name].append((time.perf_counter() - start) / in_flight)
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
  parser.add_argument("--in-flight", type=int, default=1,
                      help="calls before one is waited for")  # fmt: skip
  parser.add_argument("--workers", type=int,
                      help="logical workers whose means are taken")  # fmt: skip
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
    like = like_of(name, x)
    for kind, program in make_programs(CODECS[name], like, key).items():
      programs[f"{kind} {name}"] = program
  if options.workers:
    programs |= make_means(x, options.workers)
  seconds = measure(programs, options.repeats, options.in_flight)
  copy = seconds["copy"]

  results = {
    name: {
      "compression": 32 * x.size / CODECS[name].num_bits(like_of(name, x)),
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
    **(
      {
        "means": {
          name: summary(seconds[f"mean {name}"], copy) for name in _MEANS
        }
      }
      if options.workers
      else {}
    ),
    **({"sort": summary(seconds["sort"], copy)} if options.sort else {}),
  )
  if options.output:
    training.append_rows(options.output, [row])
  print(json.dumps(row, indent=2))


if __name__ == "__main__":
  main()
