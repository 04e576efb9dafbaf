"""Exactly inside a host, by few bytes between hosts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import collectives, profiling, reducers
from jdist.transforms import _shared
from tests.profiling import _reading
from tests.reducers import _reducers
from tests.reducers import _small_codecs as small

AXIS = ("inner", "outer")
OUTER = reducers.compressed(small.Rounded())
TWO = reducers.Hierarchical(reducers.Exact(), OUTER)
HOSTS, INSIDE, ROUNDS = 2, 3, 3


def run(reducer, trees):
  """On vmaps of vmaps: [outer, inner, rounds, ...]."""
  one = lambda x: _reducers.run_rounds(reducer, x, AXIS)  # noqa: E731
  inner = jax.vmap(one, axis_name="inner")
  return jax.tree.map(
    np.asarray, jax.jit(jax.vmap(inner, axis_name="outer"))(trees)
  )


@pytest.mark.parametrize(
  "reducer", [TWO, reducers.PerLeaf((), default=TWO)], ids=["alone", "inside"]
)
def test_num_bits_counts_traffic_between_hosts(reducer):
  """Nothing counts that is sent inside a host."""

  def step(x):
    reducers.note(reducer, x, AXIS)
    return collectives.mean(x, AXIS)

  x = jnp.zeros((HOSTS, INSIDE, 40))
  with reducers.reductions() as found:
    jax.eval_shape(
      jax.vmap(jax.vmap(step, axis_name="inner"), axis_name="outer"), x
    )
  assert found == [TWO.num_bits(x[0, 0], HOSTS)]
  assert found != [TWO.num_bits(x[0, 0], HOSTS * INSIDE)]


def make():
  rng = np.random.default_rng(0)
  shape = (HOSTS, INSIDE, ROUNDS, 37)
  return {"w": jnp.asarray(rng.standard_normal(shape), jnp.float32)}


def test_hosts_match_workers_with_their_means():
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
  found = profiling.read_collectives(program)
  assert sorted(c.kind for c in found) == ["all-gather", "all-to-all"]
  like = jax.ShapeDtypeStruct((64,), "float32")
  bits = TWO.num_bits(like, 2)
  assert sum(c.wire_bytes for c in found) * 8 == bits.sent
  mean, *_ = program(x)
  np.testing.assert_allclose(mean[3], np.asarray(x).mean(0), atol=1.0)


def test_axes_and_states():
  x = jnp.linspace(-1, 1, 20)
  state = TWO.init(x, None)
  assert jax.tree.leaves(_shared.label_fields(state)) == [False]
  reduced = TWO.reduce(x, state, jax.random.key(0), None)
  alone = OUTER.reduce(x, OUTER.init(x, None), jax.random.key(0), None)
  np.testing.assert_array_equal(reduced.mean, alone.mean)
  exact = reducers.Hierarchical(reducers.Exact(), reducers.Exact())
  assert not jax.tree.leaves(exact.init(x, None))


def test_all_hosts_flush_the_same():
  """A flush averages the residuals inside hosts over all hosts."""
  reducer = reducers.Hierarchical(OUTER, OUTER)

  def one(x):
    state = reducer.init(x, AXIS)
    reduced = reducer.reduce(x, state, jax.random.key(0), AXIS)
    left, _ = reducer.flush(reduced.state, x, AXIS)
    return collectives.varying(
      (left, reduced.mean, x - reduced.own_share), AXIS
    )

  trees = jax.random.normal(jax.random.key(1), (HOSTS, INSIDE, 37))
  inner = jax.vmap(one, axis_name="inner")
  found = jax.jit(jax.vmap(inner, axis_name="outer"))(trees)
  left, mean, kept = map(np.asarray, found)
  assert np.ptp(left, (0, 1)).max() == 0
  # All that is sent, flushed and kept is all that there was.
  total = mean[0, 0] + left[0, 0] + kept.mean((0, 1))
  np.testing.assert_allclose(total, trees.mean((0, 1)), atol=1e-5)


PARTS = reducers.Hierarchical(reducers.Exact(), OUTER, parts=INSIDE)


@pytest.mark.parametrize("inside", ["exact", "rounded"])
def test_each_device_reduces_a_part(inside):
  inner = reducers.Exact() if inside == "exact" else OUTER
  reducer = reducers.Hierarchical(inner, OUTER, parts=INSIDE)
  trees = make()
  means, shares, states, _ = run(reducer, trees)
  # By hand: hosts with their means in 3 parts of 13 entries, the last padded.
  if inside == "exact":
    x = np.pad(np.asarray(trees["w"]).mean(1), ((0, 0), (0, 0), (0, 2)))
    for j in range(INSIDE):
      rows = {"w": jnp.asarray(x[..., 13 * j : 13 * j + 13])}
      alone, _, far, _ = _reducers.run(OUTER, rows, HOSTS)
      part = means["w"][0, 0][:, 13 * j : 13 * j + 13]
      wanted = alone["w"][0][:, : part.shape[1]]
      np.testing.assert_allclose(part, wanted, atol=1e-6)
      np.testing.assert_allclose(
        states.inner[1]["float32"].residual[0][:, j], far.residual[0], atol=1e-6
      )
  for host in means["w"]:
    for worker in host:
      assert worker.tobytes() == means["w"][0, 0].tobytes()

  # The law, over all rounds, with what both levels hold back.
  def flushed(state, x):
    return reducer.flush(state, {"w": x}, AXIS)

  last = jax.tree.map(lambda x: jnp.asarray(x[:, :, -1]), states)
  inner_map = jax.vmap(flushed, axis_name="inner")
  held, empty = jax.vmap(inner_map, axis_name="outer")(
    last, trees["w"][:, :, 0]
  )
  n = HOSTS * INSIDE
  x, total = np.asarray(trees["w"]), n * means["w"][0, 0].sum(0)
  total = total + (x - shares["w"]).sum((0, 1, 2)) + n * held["w"][0, 0]
  np.testing.assert_allclose(total, x.sum((0, 1, 2)), atol=1e-4)
  assert np.abs(x - shares["w"]).max() > 0.01
  assert not any(e.any() for e in jax.tree.leaves(empty))


def test_each_device_sends_its_part_between_hosts():
  # Devices 0 and 1 are a host, and 2 and 3.
  mesh = collectives.make_mesh((2, 2), ("outer", "inner"))
  x = np.random.default_rng(0).standard_normal((4, 96)).astype("float32")
  spec = jax.sharding.PartitionSpec(("outer", "inner"))

  def compiled(reducer):
    def step(x):
      state = reducer.init(x[0], AXIS)
      reduced = reducer.reduce(x[0], state, jax.random.key(0), AXIS)
      return collectives.varying(reduced.mean[None], AXIS)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(mapped).lower(x).compile()

  sent = {}
  for parts in (1, 2):
    reducer = reducers.Hierarchical(reducers.Exact(), OUTER, parts=parts)
    program = compiled(reducer)
    groups = _reading.groups(program.as_text())
    found = profiling.read_collectives(program)
    between = [
      c.wire_bytes
      for (_, members), c in zip(groups, found, strict=True)
      if sorted(map(sorted, members)) == [[0, 2], [1, 3]]
    ]
    inside = sorted(
      kind
      for kind, members in groups
      if sorted(map(sorted, members)) == [[0, 1], [2, 3]]
    )
    assert len(between) + len(inside) == len(groups)
    kinds = ["all-reduce"] if parts == 1 else ["all-gather", "reduce-scatter"]
    assert inside == kinds
    sent[parts] = sum(between) * 8
    like = jax.ShapeDtypeStruct((96,), "float32")
    assert sent[parts] == reducer.num_bits(like, 2).sent
    mean = np.asarray(program(x))
    for worker in mean[1:]:
      assert worker.tobytes() == mean[0].tobytes()
    np.testing.assert_allclose(mean[0], x.mean(0), atol=1.0)
  assert sent[2] < 0.6 * sent[1]


def test_hosts_round_with_numbers_of_their_own():
  inside = reducers.compressed(small.Rounded(levels=1, stochastic=True))
  trees = jnp.broadcast_to(make()["w"][:1], (HOSTS, INSIDE, ROUNDS, 37))
  _, shares, *_ = run(reducers.Hierarchical(inside, reducers.Exact()), trees)
  assert (shares[0] != shares[1]).any()


def test_levels_draw_numbers_of_their_own():
  """Equal keys would make the error of both levels the same."""
  keys = []

  class Noting(reducers.Exact):
    def reduce(self, tree, state, key, axis):
      keys.append(jax.random.key_data(key).tolist())
      return super().reduce(tree, state, key, axis)

  both = reducers.Hierarchical(Noting(), Noting())
  x = jnp.ones(2)
  both.reduce(x, both.init(x, None), jax.random.key(0), None)
  first, second = keys
  assert first != second


@pytest.mark.parametrize("check", ["check_chunks", "check_shards"])
@pytest.mark.parametrize("level", ["inner", "outer"])
def test_both_levels_must_suit(level, check):
  """Low ranks need whole matrices."""
  levels = {"inner": reducers.Exact(), "outer": reducers.Exact()}
  getattr(reducers.Hierarchical(**levels), check)()
  levels[level] = reducers.PowerSGD(2)
  with pytest.raises(ValueError, match="PowerSGD"):
    getattr(reducers.Hierarchical(**levels), check)()
