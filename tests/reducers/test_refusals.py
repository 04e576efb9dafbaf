"""Refusals of reducers and feedbacks: an argument, or a leaf, and its rule."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jdist import codecs, collectives, reducers, training, transforms
from jdist.reducers import _sharded
from tests import _refusals
from tests.reducers import _small_codecs as small
from tests.transforms import _reducers

LARGEST = _reducers.Largest(2)
PLAIN = _reducers.Plain()
INT4 = reducers.compressed(codecs.Quantize(4, 4))
OWN_SHARE = reducers.compressed(codecs.Quantize(4), owner_feedback="own_share")
EXACT = reducers.Exact()
ROUND = reducers.compressed(small.Rounded())
SGD = optax.sgd(0.1)
INNER = PartitionSpec("inner")
TWO = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
COUNTED = {"w": jnp.zeros(3), "n": [jnp.zeros(3, jnp.int32)]}


def carry(codec, **options):
  return reducers.compressed(codec, **options)


def compress(reducer=LARGEST, feedback=None, **options):
  return reducers.Compression(reducer, feedback, **options)


def reduce_integers(reducer):
  tree = {"w": jnp.zeros(8)}
  state = reducer.init(tree, None)
  return reducer.reduce(COUNTED, state, jax.random.key(0), None)


def scheduled(*phases):
  return reducers.Scheduled(phases)


def warm(steps=1, *ratio):
  return reducers.warm_up(_reducers.Largest, steps, *ratio)


def hosts(inner=EXACT, outer=ROUND, **options):
  return reducers.Hierarchical(inner, outer, **options)


def low_ranks_of_shards():
  mesh = collectives.make_mesh((2, 2), ("worker", "inner"))
  team = collectives.workers(2, mesh=mesh)
  optimizer = transforms.average_gradients(
    team.axis, compress(reducers.PowerSGD(2), specs={"a": INNER})
  )
  params = {"a": np.zeros((4, 6), "float32")}
  return training.init_state(team, optimizer, params, specs={"a": INNER})


def stream(compression):
  overlap = transforms.Delayed(stream=transforms.Stream())
  return transforms.local_steps(
    SGD, 2, axis="worker", compression=compression, overlap=overlap
  )


def local(compression):
  return transforms.local_steps(SGD, 2, axis=None, compression=compression)


def shared_gradients():
  team = collectives.workers(8, substrate="shard_map")
  optimizer = transforms.average_gradients(team.axis, compress())

  # In a `shard_map` of one's own, which checks what varies over the axis;
  # `Workers.jit` does not, because it gives each worker its own gradients.
  @jax.jit
  @functools.partial(
    jax.shard_map,
    mesh=team.mesh,
    in_specs=PartitionSpec("worker"),
    out_specs=PartitionSpec(),
  )
  def step(x):
    return optimizer.update(jnp.zeros(3), optimizer.init(x))[0]

  step(np.ones((8, 3), np.float32))


_STATEFUL = carry(small.Drawn(2), wire="all_to_all")
_FORGETFUL = reducers.PowerSGD(factors=carry(codecs.Quantize(8, 16)))
_POLICY = reducers.PerLeaf((), default=ROUND)
_VOTE = reducers.MajorityVote()
_KEPT = (
  reducers.ErrorFeedback(),
  reducers.ErrorFeedback(0.5),
  reducers.EF21(),
  reducers.MomentumCorrection(0.9),
)
_CODEC = codecs.TopK(k=2)


class _Counted(NamedTuple):
  residual: dict
  times: int


class _Counting:
  """A feedback whose state counts."""

  def init(self, like):
    return _Counted(like, 0)


_SCALED = codecs.RandomK(0.1)


@_refusals.table(
  # One reducer.
  ("wire", lambda: carry(small.Rounded(), wire="sum"), "'gather' for Rounded"),
  ("wire", lambda: carry(small.Rounded(), wire="ring"), "'sum'"),
  ("wire", lambda: _STATEFUL.init(jnp.zeros(200), None), "'sum' for Drawn"),
  *(
    (
      "owner_feedback",
      lambda c=c, x=x: carry(c, owner_feedback=x),
      "left out with wire=",
    )
    for c in (_CODEC, codecs.Cast())
    for x in (False, "own_share")
  ),
  ("codec", lambda: carry(EXACT), "a codec"),
  ("rank", lambda: reducers.PowerSGD(rank=0), "int >= 1"),
  (
    "seed",
    lambda: reducers.PowerSGD(seed=-1),
    "an int from 0 to 9223372036854775807, got -1",
  ),
  ("factors", lambda: reducers.PowerSGD(factors=_CODEC), "a `Reducer`"),
  (
    "factors",
    lambda: _FORGETFUL.init({"w": jnp.zeros((64, 64))}, None),
    "keep no state",
  ),
  ("['n'][0]", lambda: ROUND.init(COUNTED, None), "PerLeaf"),
  ("['n'][0]", lambda: reduce_integers(ROUND), "PerLeaf"),
  (
    "['n'][0]",
    lambda: reduce_integers(carry(small.Rounded(), wire="gather")),
    "PerLeaf",
  ),
  (
    "['n'][0]",
    lambda: carry(small.Rounded(), wire="gather").init(COUNTED, None),
    "PerLeaf",
  ),
  ("['n'][0]", lambda: reducers.PowerSGD().init(COUNTED, None), "PerLeaf"),
  ("like", lambda: _VOTE.init(COUNTED, None), "of a float dtype"),
  ("['n/0']", lambda: _POLICY.init(COUNTED, None), "PerLeaf"),
  ("['a']", lambda: INT4.init({"a": jax.random.key(0)}, None), "float"),
  # Reducers of reducers.
  (
    "tree",
    lambda: reducers.Chunked(INT4, max_bytes=128).buckets(
      {"a": jax.random.key(0)}
    ),
    "plain arrays",
  ),
  ("rules", lambda: reducers.PerLeaf((EXACT,)), "a list of `Rule`s only"),
  ("rules", lambda: reducers.PerLeaf(reducers.Rule(EXACT)), "a list of"),
  ("rules", lambda: reducers.PerLeaf(np.array(1.0)), "a list of"),
  ("path", lambda: reducers.Rule(EXACT, path=3), "a string"),
  ("min_size", lambda: reducers.Rule(EXACT, min_size="a"), "an int >= 0"),
  ("reducer", lambda: reducers.Rule(small.Rounded()), "must be"),
  (
    "reducer",
    lambda: reducers.Chunked(reducers.Chunked(INT4)),
    "it splits the tree itself",
  ),
  ("outer", lambda: hosts(outer=small.Rounded()), "a `Reducer`"),
  ("inner", lambda: hosts(None), "a `Reducer`"),
  ("parts", lambda: hosts(parts=0), "an int >= 1, got 0"),
  (
    "reducer",
    lambda: hosts(outer=reducers.PowerSGD(2), parts=2),
    "one for shards and chunks",
  ),
  *(
    (
      "reducer",
      lambda level=level: reducers.Chunked(
        hosts(**{level: scheduled((None, LARGEST))})
      ),
      "one for chunks of leaves, got Scheduled",
    )
    for level in ("inner", "outer")
  ),
  (
    "parts",
    lambda: hosts(parts=3).init(jnp.zeros(20), None),
    "number of workers in a host, 1, got 3",
  ),
  ("axis", lambda: hosts().init(jnp.zeros(20), "worker"), "two names"),
  ("phases", lambda: scheduled((2, PLAIN)), "end with a phase without an end"),
  ("phases", lambda: scheduled(), "end with a phase without an end"),
  ("phases", lambda: scheduled((None, PLAIN), (None, PLAIN)), "no other"),
  (
    "phases",
    lambda: scheduled((3, PLAIN), (3, PLAIN), (None, PLAIN)),
    "an int >= 4, got 3",
  ),
  ("phases", lambda: scheduled((None, 0.1)), "a `Reducer`"),
  ("steps_per_phase", lambda: warm(0), "an int >= 1, got 0"),
  ("final_ratio", lambda: warm(1, 0.0), "in (0, 1], got 0.0"),
  ("specs", lambda: _sharded.Sharded(EXACT, {"a": "inner"}), "hold one"),
  (
    "specs",
    lambda: _sharded.Sharded(EXACT, [PartitionSpec()]).init(TWO, None),
    "one PartitionSpec for each leaf",
  ),
  (
    "specs",
    lambda: _sharded.Sharded(EXACT, INNER).init(jnp.zeros(2), None),
    "axes of the workers' mesh",
  ),
  ("reducer", low_ranks_of_shards, "one for shards and chunks of leaves"),
  # Feedbacks and compressions.
  ("decay", lambda: reducers.ErrorFeedback(1.5), "[0, 1], got 1.5"),
  ("momentum", lambda: reducers.MomentumCorrection(-0.1), "[0, 1], got -0.1"),
  ("reducer", lambda: compress(None, reducers.EF21()), "a codec"),
  ("reducer", lambda: compress(None, specs=[INNER]), "a codec"),
  ("reducer", lambda: compress("int8"), "a codec"),
  ("reducer", lambda: compress(OWN_SHARE), "needs one"),
  ("feedback", lambda: compress(feedback=True), "a feedback or None"),
  *(
    ("feedback", lambda x=x: compress(_VOTE, x), "`Smoothing()`") for x in _KEPT
  ),
  *(
    ("reducer", lambda x=x, y=y: compress(x, y), "scaled=False")
    for x in (
      _SCALED,
      reducers.Chunked(carry(_SCALED), 1024),
      reducers.PerLeaf((reducers.Rule(carry(_SCALED), "a"),)),
    )
    for y in _KEPT
  ),
  (
    "seed",
    lambda: compress(seed=-1),
    "an int from 0 to 9223372036854775807, got -1",
  ),
  ("specs", lambda: stream(compress(specs=[INNER])), "None where"),
  (
    "feedback",
    lambda: _sharded.ShardedFeedback(_Counting(), None).init(TWO),
    "like the parameters where `specs` are given",
  ),
  ("updates", shared_gradients, "each worker's own"),
  (
    "compression",
    lambda: transforms.average_gradients(None, _CODEC),
    "a `jdist.Compression`",
  ),
  ("compression", lambda: local(_CODEC), "a `jdist.Compression`"),
)
def test_invalid_arguments_raise(argument, call, rule):
  _refusals.check(argument, call, rule)
