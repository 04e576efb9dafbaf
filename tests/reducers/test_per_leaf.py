"""Which leaf goes how."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import collectives, reducers
from tests.reducers import _reducers
from tests.reducers import _small_codecs as small

ROUND = reducers.compressed(small.Rounded())
LARGE = reducers.compressed(small.Largest(2))
LIKE = {
  "embed": jax.ShapeDtypeStruct((64, 8), "float32"),
  "layer": [
    {
      "bias": jax.ShapeDtypeStruct((8,), "float32"),
      "kernel": jax.ShapeDtypeStruct((8, 16), "float32"),
    }
  ],
  "step": jax.ShapeDtypeStruct((), "int32"),
}


def chosen(*rules):
  policy = reducers.PerLeaf(rules)
  return {
    name: policy.reducer_of(name, leaf) for name, leaf in policy._named(LIKE)
  }


def test_first_match_wins_and_the_rest_is_exact():
  rules = (
    reducers.Rule(LARGE, "embed"),
    reducers.Rule(ROUND, min_size=100),
  )
  assert chosen(*rules) == {
    "embed": LARGE,
    "layer/0/bias": reducers.Exact(),
    "layer/0/kernel": ROUND,
    "step": reducers.Exact(),
  }


@pytest.mark.parametrize(
  ("rule", "matches"),
  [
    ({"path": "*/kernel"}, ["layer/0/kernel"]),
    ({"path": "kernel"}, []),
    ({"path": re.compile("kernel|embed")}, ["embed", "layer/0/kernel"]),
    (
      {"path": lambda path, x: x.shape[-1:] == (8,)},
      ["embed", "layer/0/bias"],
    ),
    ({"min_ndim": 2}, ["embed", "layer/0/kernel"]),
    ({"min_size": 128}, ["embed", "layer/0/kernel"]),
    ({}, ["embed", "layer/0/bias", "layer/0/kernel", "step"]),
  ],
)
def test_rule_matches_by_path_size_and_rank(rule, matches):
  found = chosen(reducers.Rule(ROUND, **rule))
  assert [
    name for name, reducer in found.items() if reducer == ROUND
  ] == matches


def test_leaves_of_equal_reducers_are_reduced_together():
  policy = reducers.PerLeaf(
    (
      reducers.Rule(LARGE, "*/kernel"),
      reducers.Rule(LARGE, "embed"),
      reducers.Rule(ROUND, "*/bias"),
    )
  )
  traffic = collectives.traffic(
    lambda tree: (
      policy.reduce(
        tree, policy.init(tree, "worker"), jax.random.key(0), "worker"
      ).mean
    ),
    LIKE,
    axis="worker",
    num_workers=4,
  )
  kinds = [c.kind for c in traffic.collectives]
  assert kinds == ["all-gather", "all-to-all", "all-gather", "all-reduce"]
  assert traffic.bytes_per_step * 8 == policy.num_bits(LIKE, 4).sent


def test_each_leaf_is_reduced_by_its_reducer():
  policy = reducers.PerLeaf((reducers.Rule(ROUND, "embed"),))
  tree = jax.tree.map(
    lambda x: jnp.linspace(-1, 1, x.size).reshape(x.shape).astype(x.dtype), LIKE
  )
  state = policy.init(tree, None)
  key = jax.random.key(0)
  reduced = policy.reduce(tree, state, key, None)
  alone = ROUND.reduce([tree["embed"]], state[0], key, None)
  np.testing.assert_array_equal(reduced.mean["embed"], alone.mean[0])
  np.testing.assert_array_equal(
    reduced.mean["layer"][0]["kernel"], tree["layer"][0]["kernel"]
  )
  assert jax.tree.structure(reduced.mean) == jax.tree.structure(tree)


@dataclasses.dataclass(frozen=True)
class Noise(reducers.Exact):
  """Draws by the place of a leaf alone, as a user's own reducer may."""

  scale: float

  def reduce(self, tree, state, key, axis):
    reduced = super().reduce(tree, state, key, axis)
    drawn = {
      name: self.scale * jax.random.normal(jax.random.fold_in(key, i), x.shape)
      for i, (name, x) in enumerate(tree.items())
    }
    return reduced._replace(mean=drawn)


def test_equal_leaves_of_two_reducers_draw_differently():
  policy = reducers.PerLeaf((reducers.Rule(Noise(2.0), "a"),), Noise(1.0))
  tree = {"a": jnp.ones(4), "b": jnp.ones(4)}
  state = policy.init(tree, None)
  mean = policy.reduce(tree, state, jax.random.key(0), None).mean
  assert not np.allclose(mean["a"], 2.0 * mean["b"])


def test_rules_are_printed_one_a_line():
  policy = reducers.PerLeaf((reducers.Rule(LARGE, "embed"),))
  assert str(policy).splitlines() == [
    "PerLeaf:",
    "  embed: gather Largest(k=2)",
    "  else: Exact()",
  ]


def test_leaves_of_one_path_are_refused():
  policy = reducers.PerLeaf((), default=ROUND)
  with pytest.raises(ValueError, match="different paths"):
    policy.init({"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(1)}, None)


def test_default_that_a_rule_names_is_one_reducer():
  policy = reducers.PerLeaf([reducers.Rule(ROUND, "embed")], default=ROUND)
  assert policy.reducers == (ROUND,)


@dataclasses.dataclass(frozen=True)
class Holding(reducers.Exact):
  """Holds a number back, which its flush hands over."""

  number: float = 0.0

  def init(self, like, axis):
    return jnp.asarray(self.number)

  def flush(self, state, like, axis):
    return jax.tree.map(lambda x: jnp.full_like(x, state), like), state * 0


def test_each_reducer_flushes_its_own_state():
  policy = reducers.PerLeaf(
    [reducers.Rule(Holding(1.0), "a"), reducers.Rule(Holding(2.0), "b")]
  )
  like = {"a": jnp.zeros(2), "b": jnp.zeros(1), "c": jnp.zeros(1)}
  found, state = policy.flush(policy.init(like, None), like, None)
  assert found["a"].tolist() == [1.0, 1.0] and found["b"].tolist() == [2.0]
  assert [x.item() for x in state[:2]] == [0.0, 0.0]


def test_rule_without_leaves_changes_no_other_state():
  """Residuals stay with their reducer where a rule before it has no leaves."""
  rules = (
    reducers.Rule(reducers.compressed(small.Rounded(levels=3)), "absent"),
    reducers.Rule(ROUND, "a"),
  )
  rest = reducers.compressed(small.Rounded(levels=1))
  trees = {
    name: jnp.asarray(np.random.default_rng(i).normal(size=(2, 4, 24)))
    for i, name in enumerate("ab")
  }
  trees = jax.tree.map(lambda x: x.astype(jnp.float32), trees)
  means, shares, _, _ = _reducers.run(
    reducers.PerLeaf(rules, default=rest), trees, 2
  )
  for name, reducer in (("a", ROUND), ("b", rest)):
    alone = _reducers.run(reducer, {name: trees[name]}, 2)
    np.testing.assert_array_equal(means[name], alone[0][name])
    np.testing.assert_array_equal(shares[name], alone[1][name])


@pytest.mark.parametrize(
  ("rule", "text"),
  [
    (reducers.Rule(reducers.Exact()), "all: Exact()"),
    (reducers.Rule(reducers.Exact(), re.compile("k$")), "/k$/: Exact()"),
    (
      reducers.Rule(reducers.Exact(), "*/k", min_size=5, min_ndim=2),
      "*/k, 5 entries or more, 2 dimensions or more: Exact()",
    ),
    (reducers.Rule(reducers.Exact(), min_size=1), "1 entries or more: Exact()"),
  ],
)  # fmt: skip
def test_rule_is_printed_with_its_bounds(rule, text):
  assert str(rule) == text
