"""The table of reducers, the trees they reduce, and how to run them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jdist import collectives
from tests.collectives import _small_codecs as small

# Reducers of which the law holds, by name.
LAWFUL = {
  "exact": collectives.Exact(),
  "sum": collectives.carry(small.Whole()),
  "sum_drawn": collectives.carry(small.Drawn(3)),
  "gather": collectives.carry(small.Largest(3)),
  "gather_rounded": collectives.carry(small.Rounded(), wire="gather"),
  "exchange": collectives.carry(small.Rounded()),
  "exchange_coarse": collectives.carry(small.Rounded(levels=1)),
  "exchange_stochastic": collectives.carry(small.Rounded(7, stochastic=True)),
  "exchange_one_scale": collectives.carry(small.OneScale()),
  "exchange_largest": collectives.carry(small.Largest(2), wire="exchange"),
  "exchange_whole": collectives.carry(small.Whole(), wire="exchange"),
  "exchange_signs": collectives.carry(small.Signs()),
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
  out = team.jit(lambda t: run_rounds(reducer, t, team.axis))(team.place(trees))
  return jax.tree.map(np.asarray, out)
