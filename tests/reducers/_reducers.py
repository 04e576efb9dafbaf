"""The table of reducers, the trees they reduce, and how to run them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jdist import codecs, collectives, reducers
from tests.reducers import _small_codecs as small

# Reducers of which the law holds, by name.
LAWFUL = {
  "exact": reducers.Exact(),
  "sum": reducers.compressed(codecs.Dense()),
  "gather": reducers.compressed(small.Largest(3)),
  "sum_random_k": reducers.compressed(codecs.RandomK(0.2)),
  "gather_random_k": reducers.compressed(codecs.RandomK(0.2, shared=False)),
  "gather_top_k": reducers.compressed(
    codecs.TopK(0.2, values=codecs.Quantize(8, 16))
  ),
  "gather_int8": reducers.compressed(codecs.Quantize(8, 16), wire="gather"),
  "all_to_all": reducers.compressed(small.Rounded()),
  "all_to_all_int4": reducers.compressed(codecs.Quantize(4, 16)),
  "all_to_all_stochastic": reducers.compressed(
    codecs.Quantize(2, 16, rounding="stochastic")
  ),
  "all_to_all_one_scale": reducers.compressed(codecs.Quantize(8, None)),
  "all_to_all_sign": reducers.compressed(codecs.Sign()),
  "all_to_all_ternary": reducers.compressed(codecs.Ternary()),
  "all_to_all_cast": reducers.compressed(codecs.Cast(), wire="all_to_all"),
  "all_to_all_top_k": reducers.compressed(
    codecs.TopK(0.25, chunk=16), wire="all_to_all"
  ),
  "all_to_all_blind": reducers.compressed(small.Signs()),
  "all_to_all_own_share": reducers.compressed(
    codecs.Quantize(4, 16), owner_feedback="own_share"
  ),
  "low_rank": reducers.PowerSGD(2),
  "low_rank_int4": reducers.PowerSGD(
    2,
    factors=reducers.compressed(
      codecs.Quantize(4, 16), owner_feedback="own_share"
    ),
  ),
}
# For programs that run once: nothing is won by optimizing them.
QUICKLY = {
  "xla_backend_optimization_level": 0,
  "xla_llvm_disable_expensive_passes": True,
}


def make_tree(num_workers, rounds=None, dtype="float32", seed=0):
  """Odd sizes, a scalar, an empty leaf; [workers, (rounds), ...]."""
  rng = np.random.default_rng(seed)
  lead = (num_workers,) if rounds is None else (num_workers, rounds)

  def leaf(*shape, scale=1.0):
    x = scale * rng.standard_normal((*lead, *shape))
    return jnp.asarray(x, jnp.dtype(dtype))

  return {
    "bias": leaf(5, scale=100.0),
    "empty": leaf(0),
    "kernel": leaf(7, 43),
    "scalar": leaf(),
    "small": [leaf(3, 3, scale=0.01), leaf(16)],
  }


def run_rounds(reducer, trees, axis="worker", key=None):
  """Reduces [rounds, ...] one after the other: what one worker does."""
  if key is None:
    key = jax.random.key(7)
  one = jax.tree.map(lambda x: x[0], trees)
  state = collectives.varying(reducer.init(one, axis), axis)

  def step(carried, tree):
    state, number = carried
    reduced = reducer.reduce(tree, state, jax.random.fold_in(key, number), axis)
    out = collectives.varying(
      (reduced.mean, reduced.own_share, reduced.state), axis
    )
    return (out[2], number + 1), out

  _, out = jax.lax.scan(step, (state, jnp.int32(0)), trees)
  return (*out, state)


@functools.cache
def team_of(num_workers, substrate):
  if num_workers == 1 and substrate == "none":
    return collectives.workers(1, substrate="none")
  if substrate == "two_a_device":
    mesh = collectives.make_mesh(
      (num_workers // 2,), ("worker",), jax.devices()[: num_workers // 2]
    )
    return collectives.workers(num_workers, mesh=mesh)
  return collectives.workers(num_workers, substrate=substrate)


def run(reducer, trees, num_workers, substrate="vmap"):
  """Means, own shares and states, [workers, rounds, ...]; the first state."""
  team = team_of(num_workers, substrate)
  trees = team.place(trees)
  program = team.jit(lambda t: run_rounds(reducer, t, team.axis)).lower(trees)
  out = program.compile(compiler_options=QUICKLY)(trees)
  return jax.tree.map(np.asarray, out)
