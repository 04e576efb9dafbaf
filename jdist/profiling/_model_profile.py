"""Costs of a real model: seconds, memory and bytes of a worker's gradient."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jdist import checks, cluster, training

PyTree = Any


def profile_model(
  loss_fn: Callable[..., Any],
  params: PyTree,
  batch: Callable[[int], PyTree],
  samples: Sequence[int],
  *,
  model_state: PyTree | None = None,
  repeats: int = 5,
  name: str = "model",
) -> cluster.Profile:
  """Measures what a worker's gradient costs against its batch size.

  Compiles the gradient for each size.  Seconds are medians over turns in which
  every size has its run; memory is the compiler's count of arguments, results
  and temporaries; both are fitted by lines, `t0 + t1 b` and `m0 + m1 b`.  A
  pull and a push are as large as the parameters.

  Args:
    loss_fn: as of `training.make_step`.
    params: the parameters.
    batch: returns a batch of so many samples.
    samples: batch sizes, two different ones at least.
    model_state: batch statistics, if any.
    repeats: turns, at least 1.
    name: of the model, in reports.

  Returns:
    The profile, of a machine of speed 1: this one.

  Raises:
    ValueError: with fewer than two sizes, or no turn.
  """
  checks.check_int("repeats", repeats, 1)
  model_state = {} if model_state is None else model_state
  gradient = jax.jit(training.make_gradient(loss_fn))
  key = jax.random.key(0)
  programs, memory = {}, {}
  for size in samples:
    arguments = (params, model_state, batch(size), key)
    program = gradient.lower(*arguments).compile()
    programs[size] = program, jax.device_put(arguments)
    found: Any = program.memory_analysis()
    memory[size] = (
      found.argument_size_in_bytes
      + found.output_size_in_bytes
      + found.temp_size_in_bytes
    )
  seconds: dict[int, list[float]] = {size: [] for size in programs}
  for turn in range(repeats + 1):  # The first is to get warm.
    for size, (program, arguments) in programs.items():
      started_s = time.perf_counter()
      jax.block_until_ready(program(*arguments))
      if turn:
        seconds[size].append(time.perf_counter() - started_s)
  sizes = list(programs)
  num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
  fitted = cluster.Profile.fit(sizes, [float(memory[size]) for size in sizes])
  return cluster.Profile.fit(
    sizes,
    [statistics.median(seconds[size]) for size in sizes],
    bytes_per_sample=fitted.seconds_per_sample,
    bytes_of_model=fitted.seconds_per_batch,
    pull_bytes=num_bytes,
    push_bytes=num_bytes,
    name=name,  # type: ignore[arg-type]
  )
