"""The laws of leaves in steps, evaluation, checkpoints and other teams."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdist
from jdist import models, states, training, transforms
from jdist.training import _train_state
from tests import _refusals

INTERVAL = 10
MASK = np.array([0.0, -np.inf], np.float32)


def loss_fn(params, model_state, batch, key):
  """Uses a mask of infinities, a mean of inputs, and a scale that stays."""
  del key
  seen = jnp.where(jnp.isinf(model_state["mask"]), 0.0, params)
  new = model_state | {"mean": 0.5 * (model_state["mean"] + batch["x"].mean())}
  loss = training.masked_mean(
    (batch["x"][:, None] - seen).sum(-1) ** 2, batch["mask"]
  )
  return loss, (new, {})


def first_state():
  return {"mask": MASK, "mean": np.float32(0.0), "scale": np.float32(0.1)}


def batch_of(workers, masks=None):
  """Inputs of each worker around its number."""
  x = np.arange(workers.num_workers, dtype=np.float32)[:, None]
  x = x + np.array([-0.5, 0.5], np.float32)
  return {"x": x, "mask": np.ones_like(x) if masks is None else masks}


def run(workers, optimizer, steps, masks=None, **options):
  step = training.make_step(loss_fn, optimizer, axis=workers.axis, **options)
  state = training.init_state(
    workers, optimizer, jnp.zeros(2), first_state(), laws={"scale": "constant"}
  )
  program = workers.jit(step)
  for _ in range(steps):
    state, _ = program(state, workers.place(batch_of(workers, masks)))
  return state


@pytest.fixture(params=[{}, {"weighted": True}, {"accumulate": 2}], ids=str)
def options(request):
  return request.param


def test_constants_pass_through_steps_unchanged(options):
  workers = jdist.workers(3, substrate="vmap")
  optimizer = jdist.local_sgd(optax.sgd(0.1), 2, axis=workers.axis)
  state = run(workers, optimizer, 2, **options)
  np.testing.assert_array_equal(state.model_state["mask"], [MASK] * 3)
  # A mean of three equal numbers differs from them by a rounding.
  assert (np.asarray(state.model_state["scale"]) == np.float32(0.1)).all()


def test_run_with_a_mask_of_infinities_is_saved(tmp_path):
  workers = jdist.workers(2, substrate="vmap")
  optimizer = jdist.local_sgd(optax.sgd(0.1), 2, axis=workers.axis)

  def fit(steps):
    step = training.make_step(loss_fn, optimizer, axis=workers.axis)
    state = training.init_state(workers, optimizer, jnp.zeros(2), first_state())
    with training.Checkpoints(tmp_path, workers) as checkpoints:
      state, _ = training.Trainer(workers, step).fit(
        state,
        lambda start: (batch_of(workers) for _ in range(start, steps)),
        steps,
        checkpoints=checkpoints,
        checkpoint_every=2,
      )
      return state, checkpoints.latest_step()

  state, saved = fit(4)
  assert saved == 4
  again, _ = fit(4)
  jax.tree.map(np.testing.assert_array_equal, again, state)


def test_diverged_statistics_are_not_finite():
  laws = states.exceptions(first_state())
  bad = first_state() | {"mean": np.float32(np.inf)}
  assert training.is_finite((), (), first_state(), laws)
  assert not training.is_finite((), (), bad, laws)
  bad = first_state() | {"mask": np.array([np.nan, 0.0])}
  assert not training.is_finite((), (), bad, laws)


def test_evaluation_within_a_round_averages_statistics():
  workers = jdist.workers(4, substrate="vmap")
  optimizer = jdist.local_sgd(optax.sgd(0.1), INTERVAL, axis=workers.axis)
  state = run(workers, optimizer, INTERVAL + 3)
  own = np.asarray(state.model_state["mean"])
  assert np.ptp(own) > 1

  @workers.jit
  def evaluated(state, samples):
    given = state.opt_state, state.params, state.model_state
    even = jdist.evaluation_params(*given, axis=workers.axis, laws=state.laws)
    uneven = jdist.evaluation_params(
      *given, axis=workers.axis, laws=state.laws, samples=samples
    )
    return even, uneven

  samples = np.array([1, 3, 0, 4], np.float32)
  (params, even), (_, uneven) = evaluated(state, workers.place(samples))
  np.testing.assert_array_equal(params, state.opt_state.anchor)
  np.testing.assert_allclose(even["mean"], [own.mean()] * 4, rtol=1e-6)
  weighted = (own * samples).sum() / samples.sum()
  np.testing.assert_allclose(uneven["mean"], [weighted] * 4, rtol=1e-6)
  np.testing.assert_array_equal(even["mask"], state.model_state["mask"])


def test_evaluator_takes_what_evaluation_params_returns():
  """Schedule-free is evaluated at x, and statistics are averaged."""
  workers = jdist.workers(2, substrate="vmap")
  inner = optax.contrib.schedule_free_sgd(0.1)
  optimizer = jdist.local_sgd(inner, INTERVAL, axis=workers.axis)
  state = run(workers, optimizer, INTERVAL + 3)
  batch = {"image": np.ones((2, 1, 2)), "label": np.zeros((2, 1), np.int32)}
  evaluate = training.Evaluator(
    workers,
    lambda params, state, x, train: (x + params + state["mean"], state),
    [batch | {"mask": np.ones((2, 1), np.float32)}],
  )
  params, statistics = evaluate.model(state)
  z = state.opt_state.anchor + state.opt_state.sync.iterates[0]
  x = (np.asarray(state.opt_state.anchor) - 0.1 * np.asarray(z)) / 0.9
  np.testing.assert_allclose(params, x[0], rtol=1e-5)
  mean = np.asarray(state.model_state["mean"]).mean()
  np.testing.assert_allclose(statistics["mean"], mean, rtol=1e-6)


class Network(nnx.Module):
  def __init__(self, rngs):
    self.drop = nnx.Dropout(0.5, rngs=rngs)
    self.norm = nnx.BatchNorm(16, rngs=rngs)

  def __call__(self, x):
    return self.drop(self.norm(x))


def test_dropout_of_nnx_differs_by_worker():
  workers = jdist.workers(4, substrate="vmap")
  model = models.functional(Network(nnx.Rngs(0)))
  state = training.init_state(
    workers, optax.sgd(0.1), model.params, model.state
  )

  @workers.jit
  def masks(state):
    x = jnp.arange(32.0).reshape(2, 16)
    y, _ = model.apply(state.params, state.model_state, x, train=True)
    return y == 0

  found = np.asarray(masks(state)).reshape(4, -1)
  assert len(np.unique(found, axis=0)) == 4


_UNSUITED = {
  "random": [np.ones((2, 2), np.float32), np.ones(3, np.uint32), np.int32(1)],
  "statistic": [np.int32(1), np.ones(2, np.bool_), jax.random.key(0)],
  "moment": [np.ones(2, np.uint32)],
}


@pytest.mark.parametrize("law", _UNSUITED)
def test_law_that_does_not_suit_its_leaf_is_refused(law):
  workers = jdist.workers(2, substrate="vmap")
  for leaf in _UNSUITED[law]:
    for given in ({"a.x": law}, {"a": law}):
      with _refusals.refused("laws", f"suit their leaves, got '{law}' for"):
        workers.replicate({"a": {"x": leaf}}, laws=given)
  # A later entry is that of the leaf.
  mixed = {"x": np.int32(1), "y": np.ones(2, np.float32)}
  laws = {"a": "statistic", "a.x": "counter"}
  workers.replicate({"a": mixed}, laws=laws)
  words = np.ones((3, 2), np.uint32)
  rows = workers.replicate({"k": words}, laws={"k": "random"})["k"]
  assert len(np.unique(rows, axis=0)) == 2


def test_replicated_state_of_a_run_keeps_one_key():
  """A step folds the worker's number into it; workers must agree on it."""
  workers = jdist.workers(2, substrate="vmap")
  state = training.init_state(workers, optax.sgd(0.1), jnp.zeros(2))
  key = workers.replicate(workers.view(state)).key
  np.testing.assert_array_equal(key, state.key)


def test_resized_keys_stand_apart_and_statistics_keep_their_mean():
  old, new = (jdist.workers(n, substrate="vmap") for n in (2, 3))
  optimizer = jdist.local_sgd(
    optax.noisy_sgd(0.1, key=jax.random.key(1)), 2, axis="worker"
  )
  state = training.init_state(
    old,
    optimizer,
    jnp.zeros(2),
    first_state()
    | {"drop": jax.random.key(0), "raw_rng": jax.random.PRNGKey(0)},
  )
  mean = old.place(np.array([1.0, 4.0], np.float32))
  state = state._replace(model_state=state.model_state | {"mean": mean})
  found = training.resize(state, optimizer, old, new)
  for key in (
    found.model_state["drop"],
    found.model_state["raw_rng"],
    found.opt_state.inner[0].rng_key,
  ):
    assert len(np.unique(np.asarray(states.key_words(key)), axis=0)) == 3
  np.testing.assert_array_equal(found.model_state["mean"], [2.5] * 3)
  np.testing.assert_array_equal(found.model_state["mask"], [MASK] * 3)
  assert found.laws == state.laws


def test_model_file_holds_typed_keys(tmp_path):
  pytest.importorskip("safetensors")
  state = {"drop": jax.random.key(3), "mean": np.ones(2, np.float32)}
  training.save_model(tmp_path / "m", {"w": np.ones(2)}, state)
  like = {"drop": jax.random.key(0), "mean": np.zeros(2, np.float32)}
  for one in (like, jax.eval_shape(lambda: like)):
    _, found = training.load_model(tmp_path / "m", {"w": np.ones(2)}, one)
    assert (found["drop"] == state["drop"]).all()


def test_complex_statistics_keep_their_imaginary_part():
  found = jax.vmap(
    lambda x: transforms.mean_statistics({"mean": x}, "worker"),
    axis_name="worker",
  )(jnp.array([1 + 1j, 3 + 5j], jnp.complex64))
  np.testing.assert_allclose(found["mean"], [2 + 3j] * 2)


@pytest.mark.parametrize(
  ("samples", "means", "wanted"),
  [
    ([1.0, 3.0], [1.0, 5.0], 4.0),
    ([4.0, 0.0], [1.0, np.nan], 1.0),  # The mean over no sample.
    ([0.0, 0.0], [1.0, 3.0], 2.0),
  ],
)
def test_worker_without_samples_has_no_part_in_statistics(
  samples, means, wanted
):
  found = jax.vmap(
    lambda x, n: transforms.mean_statistics({"mean": x}, "worker", n),
    axis_name="worker",
  )(jnp.array(means), jnp.array(samples))
  assert found["mean"].tolist() == [wanted] * 2


def test_step_takes_lookahead_and_sam_with_averaged_gradients():
  """Both wrappers of Optax take few arguments, or a pair of parameters."""
  workers = jdist.workers(2, substrate="vmap")
  batch = workers.place(np.array([[-3.0], [5.0]], np.float32))

  def train(inner, start, of):
    def loss_fn(params, model_state, batch, key):
      del key
      return jnp.mean((of(params) - batch) ** 2) / 2, (model_state, {})

    optimizer = jdist.ssgd(inner, axis=workers.axis)
    step = training.make_step(loss_fn, optimizer, axis=workers.axis)
    state = training.init_state(workers, optimizer, start)
    for _ in range(4):
      state, _ = workers.jit(step)(state, batch)
    return state

  with jax.numpy_dtype_promotion("standard"):
    pair = optax.LookaheadParams.init_synced(jnp.zeros(()))
    inner = optax.lookahead(optax.sgd(0.1), 2, 0.5)
    state = train(inner, pair, lambda pair: pair.fast)
    found = jdist.evaluation_params(state.opt_state, state.params)
    np.testing.assert_allclose(found, [1 - (1 - 0.19 / 2) ** 2] * 2, rtol=1e-5)
    # SAM climbs to 0.01 (w - 1) above w, and descends by the gradient there.
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01))
    state = train(sam, jnp.zeros(()), lambda w: w)
    np.testing.assert_allclose(
      state.params, [1 - (1 - 0.101) ** 2] * 2, rtol=1e-5
    )


def test_history_of_a_parameter_is_split_as_it():
  """Shapes have the workers in front, and a history its length behind."""
  params = {"w": np.zeros((2, 6, 4)), "v": np.zeros((2, 4))}
  spec = jax.sharding.PartitionSpec("worker", None, "inner")
  team = types.SimpleNamespace(
    specs=lambda tree: {"w": spec, "v": jax.sharding.PartitionSpec("worker")},
    spmd=lambda init: init,
  )

  def init(params):
    w = params["w"]
    return {
      "moment": {"w": w}, "history": {"w": jnp.zeros((2, 3, 6, 4))},
      "sums": {"w": jnp.zeros((2, 3, 6))}, "count": jnp.zeros(2),
    }  # fmt: skip

  optimizer = optax.GradientTransformation(init, None)
  found = _train_state._split_alike(team, optimizer, params)
  none = jax.sharding.PartitionSpec()
  assert found == {
    "moment": {"w": spec}, "sums": {"w": none}, "count": none,
    "history": {"w": jax.sharding.PartitionSpec(None, *spec)},
  }  # fmt: skip


def test_infinite_parameters_are_refused():
  # Differences to an anchor would be NaN from the first round on.
  workers = jdist.workers(2, substrate="vmap")
  with pytest.raises(ValueError, match="finite, got an infinity in 'mask'"):
    training.init_state(
      workers, optax.sgd(0.1), {"mask": MASK, "w": np.ones(2, np.float32)}
    )


@pytest.mark.parametrize("chain", [optax.chain, optax.named_chain])
def test_noise_behind_a_method_is_equal_on_all_workers(chain):
  # Noise of their own would drive the workers apart.
  workers = jdist.workers(2, substrate="vmap")
  parts = (
    optax.add_noise(0.1, 0.5, 0),
    jdist.ssgd(optax.sgd(0.1), axis=workers.axis),
    optax.add_noise(0.1, 0.5, 0),
  )
  if chain is optax.named_chain:
    parts = [*zip("abc", parts, strict=True)]
  state = training.init_state(workers, chain(*parts), np.zeros(3, np.float32))
  first, _, last = (
    state.opt_state[x] for x in ("abc" if isinstance(parts, list) else range(3))
  )
  assert (first.rng_key[0] != first.rng_key[1]).any()
  assert (last.rng_key[0] == last.rng_key[1]).all()
