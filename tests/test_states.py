"""The law of each leaf: inferred, declared and overridden."""

import importlib
import pkgutil
import typing

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jdist
from jdist import states, training, transforms

KEY = jax.random.key(0)
W = {"w": jnp.ones((2, 2))}


def laws_of(optimizer):
  """Returns the laws of an optimizer's state by the last parts of names."""
  laws = states.find_laws(optimizer.init(W))
  pairs = jax.tree_util.tree_leaves_with_path(laws)
  return {jax.tree_util.keystr(path): law for path, law in pairs}


C = optax.contrib
# An optimizer, and those of its leaves that are no moments, by a part of their
# names; integers are counters.
OPTIMIZERS = {
  "adam": (optax.adam(0.1), {}),
  "schedule_free": (
    C.schedule_free_sgd(0.1),
    {".z": "iterate", ".b1": "constant", ".max_lr": "counter"},
  ),
  "masked schedule_free": (
    optax.masked(C.schedule_free_sgd(0.1), {"w": True}),
    {".z": "iterate"},
  ),
  "madgrad": (C.madgrad(0.1), {".x0": "iterate", ".s": "statistic"}),
  "cocob": (C.cocob(), {".init_particles": "iterate", ".reward": "statistic"}),
  "sam": (C.sam(optax.sgd(0.1), optax.sgd(0.1)), {".cache": "iterate"}),
  "dog": (C.dog(), {".init_params": "constant", ".max_dist": "moment"}),
  "dowg": (C.dowg(), {".init_params": "constant"}),
  "prodigy": (C.prodigy(), {".params0": "constant", ".grad_sum": "moment"}),
  "mechanize": (C.mechanize(optax.sgd(0.1)), {".x0": "constant"}),
  "noisy": (optax.noisy_sgd(0.1, key=KEY), {"key": "random"}),
  "private": (
    C.differentially_private_aggregate(1.0, 1.0, jax.random.key(0)),
    {"key": "random"},
  ),
  "lbfgs": (optax.scale_by_lbfgs(), {".params": "moment"}),
  "lookahead": (
    optax.lookahead(optax.adam(0.1), 2, 0.5),
    {".mu": "moment", ".steps_since_sync": "counter"},
  ),
  "injected": (
    optax.inject_hyperparams(optax.adam)(0.1),
    {"learning_rate": "constant", ".mu": "moment"},
  ),
  "of several steps": (
    optax.MultiSteps(C.schedule_free_sgd(0.1), 2),
    {".z": "iterate", ".acc_grads": "moment"},
  ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optax_states_have_laws(name):
  optimizer, wanted = OPTIMIZERS[name]
  found = laws_of(optimizer)
  for part, law in wanted.items():
    assert {x for leaf, x in found.items() if part in leaf} == {law}
  # Nothing is left that a round would have to ask for.
  assert not states.unknown_floats(optimizer.init(W))


def test_integers_count_and_keys_are_random():
  tree = {"step": jnp.int32(0), "key": KEY, "rng": jnp.zeros(2, jnp.uint32)}
  tree |= {"mask": jnp.array(True), "words": jnp.zeros(2, jnp.uint32)}
  assert states.find_laws(tree) == {
    "step": "counter", "key": "random", "rng": "random", "mask": "counter",
    "words": "counter",
  }  # fmt: skip


class Network(nnx.Module):
  def __init__(self, rngs):
    self.norm = nnx.BatchNorm(3, rngs=rngs)
    self.drop = nnx.Dropout(0.5, rngs=rngs)


def test_variables_of_nnx_have_laws():
  state = nnx.state(Network(nnx.Rngs(0)), nnx.Not(nnx.Param))
  laws = states.find_laws(state, "statistic")
  found = {
    jax.tree_util.keystr(path, simple=True): law
    for path, law in jax.tree_util.tree_leaves_with_path(laws)
  }
  assert {law for name, law in found.items() if "norm" in name} == {"statistic"}
  assert {law for name, law in found.items() if "key" in name} == {"random"}
  assert {law for name, law in found.items() if "count" in name} == {"counter"}


def test_collections_of_linen_have_laws():
  norm = linen.BatchNorm(use_running_average=False)
  variables = norm.init(KEY, jnp.ones((2, 3)))
  laws = states.find_laws(variables["batch_stats"], "statistic")
  assert set(jax.tree.leaves(laws)) == {"statistic"}


def test_state_of_equinox_has_laws():
  _, state = equinox.nn.make_with_state(equinox.nn.BatchNorm)(
    3, "batch", mode="batch"
  )
  laws = jax.tree.leaves(states.find_laws(state, "statistic"))
  kinds = ["statistic" if x.dtype == jnp.float32 else "counter"
           for x in jax.tree.leaves(state)]  # fmt: skip
  assert laws == kinds and "statistic" in laws


def test_infinities_at_the_beginning_are_constants():
  tree = {"mask": np.array([0.0, -np.inf]), "norm": {"mean": np.zeros(2)}}
  laws = states.exceptions(tree)
  assert states.find_laws(tree, "statistic", laws) == {
    "mask": "constant", "norm": {"mean": "statistic"},
  }  # fmt: skip


def test_user_overrides_what_is_inferred():
  tree = {"norm": {"mean": np.zeros(2), "scale": np.ones(2)}}
  laws = states.exceptions(tree, {"norm.scale": "constant"})
  assert states.find_laws(tree, "statistic", laws) == {
    "norm": {"mean": "statistic", "scale": "constant"}
  }
  whole = states.exceptions(tree, {"norm": "counter"})
  assert set(jax.tree.leaves(states.find_laws(tree, laws=whole))) == {"counter"}


@pytest.mark.parametrize(
  ("declared", "law"), [("moment", "random"), ("constant", "constant")]
)
def test_declared_key_is_random_unless_it_is_constant(declared, law):
  @states.declare(laws={"noise": declared})
  class Held(typing.NamedTuple):
    noise: typing.Any

  found = states.find_laws(Held({"key": KEY}))
  assert found == Held({"key": law})


def test_law_is_that_of_its_leaf_also_behind_equal_names():
  tree = {"a": {"b": np.ones(2)}, "a.b": np.zeros(2), "c": np.ones(2)}
  laws = states.exceptions(tree, {"c": "constant"})
  found = states.find_laws(tree, "statistic", laws)
  assert found["c"] == "constant"
  assert (found["a"]["b"], found["a.b"]) == ("statistic", "statistic")


def test_law_of_floats_is_one_of_the_laws():
  with pytest.raises(ValueError, match=r"`floats` must be .iterate.*.mean"):
    states.find_laws({"norm": np.zeros(2)}, "mean")
  with pytest.raises(
    ValueError, match=r"`laws` must be of `states.exceptions`"
  ):
    states.find_laws({"norm": np.zeros(2)}, "statistic", {"norm": "constant"})


@pytest.mark.parametrize(
  ("laws", "said"),
  [
    ({"nrom": "constant"}, "`laws` must name leaves.*'nrom'.*norm"),
    ({"norm": "fixed"}, "`laws` must be 'iterate'.*'fixed'"),
  ],
)
def test_unknown_names_and_laws_raise(laws, said):
  with pytest.raises(ValueError, match=said):
    states.exceptions({"norm": np.zeros(2)}, laws)


def test_declared_field_must_exist():
  class Own(typing.NamedTuple):
    average: typing.Any

  with pytest.raises(ValueError, match="`laws` must name fields of Own"):
    states.declare(laws={"avg": "iterate"})(Own)


def test_replicated_keys_differ_and_constants_do_not():
  workers = jdist.workers(3, substrate="vmap")
  tree = {"drop": KEY, "rng": jax.random.PRNGKey(1), "seed": KEY}
  found = workers.replicate(tree, laws={"seed": "constant"})
  data = jax.tree.map(lambda x: np.asarray(states.key_words(x)), found)
  assert len(np.unique(data["drop"], axis=0)) == 3
  assert len(np.unique(data["rng"], axis=0)) == 3
  assert len(np.unique(data["seed"], axis=0)) == 1
  assert found["drop"].dtype == KEY.dtype


def test_key_of_one_worker_stays_as_it_is():
  found = jdist.workers(1, substrate="vmap").replicate({"key": KEY})
  assert (found["key"] == KEY).all()


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_raw_keys_of_every_generator_differ_by_worker(kind):
  with jax.default_prng_impl(kind):
    tree = {"key": jax.random.PRNGKey(0), "words": jnp.zeros(3, jnp.uint32)}
    assert states.find_laws(tree) == {"key": "random", "words": "counter"}
    workers = jdist.workers(3, substrate="vmap")
    found = np.asarray(workers.replicate(tree)["key"])
  assert len(np.unique(found, axis=0)) == 3


def test_noise_of_local_steps_differs_by_worker():
  workers = jdist.workers(2, substrate="vmap")
  optimizer = jdist.local_sgd(
    optax.noisy_sgd(0.1, key=KEY), 4, axis=workers.axis
  )
  state = workers.jit(optimizer.init)(workers.replicate(W))
  key = states.key_words(state.inner[0].rng_key)
  assert (key[0] != key[1]).any()


def test_noise_behind_a_mean_is_shared():
  """It may differ in front of the mean only, or workers would drift apart."""
  workers = jdist.workers(2, substrate="vmap")
  mean = transforms.average_gradients("worker")
  noise = optax.add_noise(1.0, 0.0, KEY)
  before = training.init_state(workers, optax.chain(noise, mean), W)
  behind = training.init_state(workers, optax.chain(mean, noise), W)
  key = states.key_words(before.opt_state[0].rng_key)
  assert (key[0] != key[1]).any()
  key = states.key_words(behind.opt_state[1].rng_key)
  assert (key[0] == key[1]).all()


@pytest.mark.parametrize(
  "make",
  [
    lambda noise, axis: jdist.ssgd(noise, axis=axis),
    lambda noise, axis: transforms.update_first(noise, axis=axis),
    lambda noise, axis: jdist.diloco(optax.sgd(0.1), 2, rule=noise, axis=axis),
  ],
  ids=["ssgd", "update_first", "outer"],
)
def test_replicated_state_keeps_the_noise_that_workers_share(make):
  """A state that no worker has made is the same as one of `workers.jit`."""
  workers = jdist.workers(2, substrate="vmap")
  noise = optax.chain(optax.add_noise(1.0, 0.0, KEY), optax.sgd(0.1))
  optimizer = make(noise, workers.axis)
  alone = workers.replicate(optimizer.init(W))
  within = workers.jit(optimizer.init)(workers.replicate(W))
  for x, y in zip(*map(jax.tree.leaves, (alone, within)), strict=True):
    np.testing.assert_array_equal(states.key_words(x), states.key_words(y))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_rounding_is_explicit_where_bits_are_lost(dtype):
  # A compiler may take a cast to fewer bits and back for nothing.
  lowered = jax.jit(lambda x: states.rounded(x, dtype)).lower(jnp.ones(2))
  rounds = "reduce_precision" in lowered.as_text()
  assert rounds == (dtype != jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_rounding_is_that_of_a_cast(dtype):
  random = np.random.default_rng(0)
  x = random.normal(size=4000) * 10.0 ** random.integers(-44, 38, 4000)
  with np.errstate(over="ignore"):
    x = jnp.asarray(x.astype(np.float32))
  x = jnp.concatenate([x, jnp.array([0.0, -0.0, jnp.inf, -jnp.inf, jnp.nan])])
  found, wanted = states.rounded(x, dtype), x.astype(dtype)
  assert found.dtype == dtype
  np.testing.assert_array_equal(
    found.astype(jnp.float32), wanted.astype(jnp.float32)
  )


# Each worker has its own of these; a checkpoint stores other fields once.
OWN = {
  "AllToAllState": ("residual", ""),
  "AverageGradientsState": ("", "averages"),
  "ChunkedStreamState": ("progress loss sent shares", "streams"),
  "CompressionState": ("reducer feedback", "averages"),
  "ControlVariatesState": ("own", ""),
  "DelayGradientsState": ("pending inner", "drains"),
  "EF21State": ("own nonfinite", ""),
  "ErrorFeedbackState": ("residual nonfinite", ""),
  "Flight": ("held", ""),
  "FragmentsState": ("clock inner fragments", "rounds drains"),
  "HierarchicalState": ("inner outer", ""),
  "InFlightState": ("inner step older flight", ""),
  "LocalStepsState": ("inner sync", "rounds drains"),
  "MessageState": ("step feedback", ""),
  "MomentumCorrectionState": ("momentum residual nonfinite", ""),
  "PowerSGDState": ("", ""),
  "PredictRestState": ("clock front rest", "rounds drains"),
  "PullToAnchorState": ("", ""),
  "PulledAnchorState": ("", ""),
  "RoundClock": ("round_loss", ""),
  "ScheduledState": ("phases", ""),
  "ShardedFeedbackState": ("trees nonfinite", ""),
  "SkipNonfiniteState": ("", ""),
  "SlowMomentumState": ("", ""),
  "SmoothingState": ("momentum nonfinite", ""),
  "SyncState": ("clock flight compression", ""),
  "UpdateFirstState": ("pending loss inner", "drains averages update_pending"),
}
FLAGS = ("rounds", "drains", "averages", "update_pending", "streams")


def test_every_state_says_what_each_worker_has_of_its_own():
  found = {}
  for room in ("pipeline", "reducers", "training", "transforms"):
    package = importlib.import_module(f"jdist.{room}")
    for module in pkgutil.walk_packages(package.__path__, f"jdist.{room}."):
      for name, kind in vars(importlib.import_module(module.name)).items():
        if isinstance(getattr(kind, "shared", None), frozenset):
          own = [x for x in kind._fields if x not in kind.shared]
          flags = [x for x in FLAGS if getattr(kind, x) is True]
          found[name] = " ".join(own), " ".join(flags)
  assert found == OWN
