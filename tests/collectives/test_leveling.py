"""Exactly inside a host, by few bytes between hosts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import collectives
from tests.collectives import _reducers
from tests.collectives import _small_codecs as small

AXIS = ("inner", "outer")
OUTER = collectives.carry(small.Rounded())
TWO = collectives.TwoLevel(collectives.Exact(), OUTER)
HOSTS, INSIDE, ROUNDS = 2, 3, 3


def run(reducer, trees):
  """On vmaps of vmaps: [outer, inner, rounds, ...]."""
  one = lambda x: _reducers.run_rounds(reducer, x, AXIS)  # noqa: E731
  inner = jax.vmap(one, axis_name="inner")
  return jax.tree.map(
    np.asarray, jax.jit(jax.vmap(inner, axis_name="outer"))(trees)
  )


def make():
  rng = np.random.default_rng(0)
  shape = (HOSTS, INSIDE, ROUNDS, 37)
  return {"w": jnp.asarray(rng.standard_normal(shape), jnp.float32)}


def test_hosts_do_what_workers_with_their_means_would_do():
  trees = make()
  means, shares, states, _ = run(TWO, trees)
  alone, far, _, _ = _reducers.run(
    OUTER, jax.tree.map(lambda x: x.mean(1), trees), HOSTS
  )
  np.testing.assert_allclose(means["w"][0, 0], alone["w"][0], atol=1e-6)
  for host in means["w"]:
    for worker in host:
      assert worker.tobytes() == means["w"][0, 0].tobytes()
  # The law: what outer has left out is everyone's of the host.
  x, own = np.asarray(trees["w"]), shares["w"]
  np.testing.assert_allclose((x - own).mean(1), x.mean(1) - far["w"], atol=1e-6)
  (residual,) = states.outer.residual  # [outer, inner, rounds, row]
  for r in range(ROUNDS):
    e = residual[:, 0, r] - (residual[:, 0, r - 1] if r else 0)
    e = e.reshape(-1)[:37]
    n = HOSTS * INSIDE
    total = n * means["w"][0, 0, r] + (x - own)[:, :, r].sum((0, 1)) + n * e
    np.testing.assert_allclose(total, x[:, :, r].sum((0, 1)), atol=3e-5)


def test_only_the_outer_reduction_crosses_hosts():
  team = collectives.workers(
    4, mesh=collectives.make_mesh((2,), ("worker",), jax.devices()[:2])
  )
  assert isinstance(team.axis, tuple)
  x = team.place(np.arange(4 * 64, dtype="float32").reshape(4, 64))

  def step(x):
    state = TWO.init(x, team.axis)
    reduced = TWO.reduce(x, state, jax.random.key(0), team.axis)
    return collectives.varying(tuple(reduced), team.axis)

  program = team.jit(step).lower(x).compile()
  found = collectives.read_collectives(program)
  assert sorted(c.kind for c in found) == ["all-gather", "all-to-all"]
  like = jax.ShapeDtypeStruct((64,), "float32")
  bits = TWO.num_bits(like, 2)
  assert sum(c.wire_bytes for c in found) * 8 == bits.sent
  mean, *_ = program(x)
  np.testing.assert_allclose(mean[3], np.asarray(x).mean(0), atol=1.0)


def test_axes_and_states():
  x = jnp.linspace(-1, 1, 20)
  with pytest.raises(ValueError, match="must be two names"):
    TWO.init(x, "worker")
  state = TWO.init(x, None)
  assert jax.tree.leaves(TWO.shared(state)) == [False]
  reduced = TWO.reduce(x, state, jax.random.key(0), None)
  alone = OUTER.reduce(x, OUTER.init(x, None), jax.random.key(0), None)
  np.testing.assert_array_equal(reduced.mean, alone.mean)
  exact = collectives.TwoLevel(collectives.Exact(), collectives.Exact())
  assert exact.init(x, None) == ()
  assert exact.shared(()) == ()
