"""A step's first half: gradients of batches with and without padding."""

import chex
import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import collectives, data, models, training
from jdist.training import _gradient
from tests.models import _variants
from tests.training import _tiny

# The others take minutes to compile.
_QUICK = ("mlp", "lenet", "resnet8")


def test_step_equals_gradient_and_update():
  team = collectives.workers(2, substrate="vmap")
  optimizer = jdist.local_sgd(optax.sgd(0.1, momentum=0.9), 2, axis=team.axis)
  step = training.make_step(_tiny.loss_fn, optimizer, axis=team.axis)
  gradient = training.make_gradient(_tiny.loss_fn)
  update = training.make_update(optimizer, axis=team.axis)

  def in_two(state, batch):
    key = jax.random.wrap_key_data(state.key)
    key = jax.random.fold_in(key, state.step)
    key = jax.random.fold_in(key, collectives.index(team.axis))
    found = gradient(state.params, state.model_state, batch, key)
    return update(state, found)

  whole, halves = team.jit(step), team.jit(in_two)
  one = two = training.init_state(team, optimizer, _tiny.params())
  for number in range(4):
    batch = team.place(_tiny.batch(number, team.local_workers))
    one, metrics = whole(one, batch)
    two, same = halves(two, batch)
    chex.assert_trees_all_equal((one, metrics), (two, same))


def padded(batch, num):
  """The batch, and one with loud padding behind it."""
  rng = np.random.default_rng(1)

  def pad(x):
    noise = rng.integers(0, 2, (num, *x.shape[1:])) * 50
    return np.concatenate([x, noise.astype(x.dtype)])

  whole = {name: pad(x) for name, x in batch.items()}
  size = len(batch["label"])
  mask = np.array([1] * size + [0] * num, np.float32)
  return whole | {"mask": mask}


@pytest.mark.parametrize(
  "name",
  [
    name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in models.MODELS
    if name != "transformer"  # Its loss is the user's.
  ],
)
def test_padding_changes_no_gradient(name):
  model, like = _variants.build(name), _variants.like(name)
  rng = np.random.default_rng(0)
  # Statistics of three samples make of a rounding a thousand in the last stages
  # of deep networks, where an image is a pixel; of 16 they do not.
  batch = {
    "image": rng.normal(size=(16, *like.shape[1:])).astype(like.dtype),
    "label": np.arange(16) % 2,
  }
  gradient = jax.jit(
    training.make_gradient(training.classification_loss(model.apply))
  )
  key = jax.random.key(0)
  plain = gradient(model.params, model.state, batch, key)
  masked = gradient(model.params, model.state, padded(batch, 2), key)
  assert plain.samples == masked.samples == 16
  chex.assert_trees_all_close(
    plain._replace(samples=()),
    masked._replace(samples=()),
    atol=2e-5,
    rtol=2e-4,
  )


def test_micro_batches_are_weighted_by_their_samples():
  def loss_fn(params, model_state, batch, key):
    del key
    losses = (params - batch["x"]) ** 2
    loss = training.masked_mean(losses, batch["mask"])
    return loss, (model_state, {"twice": 2 * loss})

  batch = {
    "x": jnp.array([1.0, 2.0, 4.0, 99.0, 99.0, 99.0]),
    "mask": jnp.array([1, 1, 1, 0, 0, 0]),
  }
  key, one = jax.random.key(0), jnp.array(1.0)
  whole = training.make_gradient(loss_fn)(one, {}, batch, key)
  for accumulate in (2, 3):
    cut = training.make_gradient(loss_fn, accumulate=accumulate)
    found = cut(one, {}, batch, key)
    chex.assert_trees_all_close(found, whole, rtol=1e-6)


def test_batch_of_padding_alone_has_a_gradient_of_zero():
  def loss_fn(params, model_state, batch, key):
    del key
    losses = (params - batch["x"]) ** 2
    return training.masked_mean(losses, batch["mask"]), (model_state, {})

  batch = {"x": jnp.array([1.0, 2.0]), "mask": jnp.zeros(2)}
  gradient = training.make_gradient(loss_fn, accumulate=2)
  found = gradient(jnp.array(1.0), {}, batch, jax.random.key(0))
  assert (found.loss, found.grads, found.samples) == (0, 0, 0)


def mean_of_samples(params, model_state, batch, key):
  """A user's own mean, which is 0 / 0 over padding alone."""
  del key
  count = batch["mask"].sum()
  mean = (batch["x"] * batch["mask"]).sum() / count
  errors = batch["x"] - params.astype(jnp.float32)
  loss = (errors**2 * batch["mask"]).sum() / count
  state = {"mean": mean, "steps": model_state["steps"] + 1}
  return loss, (state, {"loss2": 2 * loss})


@pytest.mark.parametrize("accumulate", [1, 2])
def test_loss_may_use_a_state_up(accumulate):
  """A `State` of Equinox can be read no more once a loss has set it."""
  index = equinox.nn.StateIndex(jnp.array(0))

  def loss_fn(params, model_state, batch, key):
    del key
    loss = training.masked_mean(params * batch["x"], batch["mask"])
    return loss, (model_state.set(index, model_state.get(index) + 1), {})

  team = collectives.workers(2, substrate="vmap")
  optimizer = jdist.ssgd(optax.sgd(0.5), axis=team.axis)
  start = equinox.nn.State([index])
  state = training.init_state(team, optimizer, jnp.array(1.0), start)
  step = training.make_step(
    loss_fn, optimizer, axis=team.axis, accumulate=accumulate, weighted=True
  )
  batch = {"x": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "mask": jnp.ones((2, 2))}
  state, _ = team.jit(step)(state, batch)
  assert state.model_state.get(index).tolist() == [accumulate] * 2
  assert state.params.tolist() == [1.0 - 0.5 * 2.5] * 2


def test_micro_batch_of_padding_leaves_no_nan():
  batch = {"x": jnp.array([1.0, 3.0, 9.0, 9.0])}
  batch["mask"] = jnp.array([1.0, 1.0, 0.0, 0.0])
  start = {"mean": jnp.array(7.0), "steps": jnp.array(0)}
  for accumulate in (1, 2, 4):
    gradient = training.make_gradient(mean_of_samples, accumulate=accumulate)
    found = gradient(jnp.array(0.0), start, batch, jax.random.key(0))
    assert (found.grads, found.loss, found.metrics["loss2"]) == (-4, 5, 10)
    assert found.model_state["mean"] == (2 if accumulate < 4 else 3)
    assert found.model_state["steps"] == accumulate


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_worker_without_samples_changes_nothing(dtype):
  team = collectives.workers(2, substrate="vmap")
  optimizer = jdist.ssgd(optax.sgd(0.5), axis=team.axis)
  step = training.make_step(
    mean_of_samples, optimizer, axis=team.axis, weighted=True
  )
  start = {"mean": jnp.array(1.0), "steps": jnp.array(0)}
  state = training.init_state(team, optimizer, jnp.zeros((), dtype), start)
  batch = {"x": np.array([[1.0, 3.0], [9.0, 9.0]], np.float32)}
  batch["mask"] = np.array([[1.0, 1.0], [0.0, 0.0]], np.float32)
  state, metrics = team.jit(step)(state, team.place(batch))
  assert state.params.tolist() == [2.0, 2.0]
  assert state.model_state["mean"].tolist() == [2.0, 2.0]
  # The mean over the workers is that over the two samples, 1 and 9.
  assert metrics["loss"].tolist() == [10.0, 0.0]


@pytest.mark.parametrize("accumulate", (1, 2))
def test_key_among_the_parameters_has_no_gradient(accumulate):
  def loss_fn(params, model_state, batch, key):
    return mean_of_samples(params["w"], model_state, batch, key)

  team = collectives.workers(2, substrate="vmap")
  optimizer = jdist.ssgd(optax.sgd(0.5), axis=team.axis)
  step = training.make_step(
    loss_fn, optimizer, axis=team.axis, weighted=True, accumulate=accumulate
  )
  params = {"w": jnp.array(0.0), "key": jax.random.key(3)}
  start = {"mean": jnp.array(1.0), "steps": jnp.array(0)}
  state = training.init_state(team, optimizer, params, start)
  x = np.array([[1.0, 3.0], [2.0, 2.0]], np.float32)
  after, _ = team.jit(step)(state, team.place({"x": x, "mask": 0 * x + 1}))
  assert after.params["w"].tolist() == [2.0, 2.0]
  assert (after.params["key"] == state.params["key"]).all()


def complex_loss(params, model_state, batch, key):
  del key
  return jnp.mean(jnp.abs(params - batch["x"]) ** 2), (model_state, {})


@pytest.mark.parametrize("accumulate", (1, 2))
def test_complex_gradient_keeps_its_imaginary_part(accumulate):
  gradient = training.make_gradient(complex_loss, accumulate=accumulate)
  batch = {"x": jnp.array([1 + 1j, 3 + 5j], jnp.complex64)}
  zero = jnp.zeros((), jnp.complex64)
  found = gradient(zero, {}, batch, jax.random.key(0))
  # JAX's gradient of |w - x|^2 is 2 conj(w - x).
  assert found.grads == -2 * np.conj(2 + 3j)


def test_weighted_step_keeps_complex_statistics():
  def loss_fn(params, model_state, batch, key):
    loss, _ = complex_loss(params, model_state, batch, key)
    return loss, ({"mean": batch["x"].mean()}, {})

  team = collectives.workers(2, substrate="vmap")
  optimizer = jdist.ssgd(optax.sgd(0.0), axis=team.axis)
  step = training.make_step(loss_fn, optimizer, axis=team.axis, weighted=True)
  zero = jnp.zeros((), jnp.complex64)
  state = training.init_state(team, optimizer, zero, {"mean": zero})
  batch = {
    "x": jnp.array([[1 + 1j, 0], [3 + 5j, 9 + 1j]], jnp.complex64),
    "mask": jnp.array([[1, 0], [1, 1]]),
  }
  state, _ = team.jit(step)(state, team.place(batch))
  # Weights 2/3 and 4/3 of the means 0.5 + 0.5j and 6 + 3j, averaged.
  found = np.asarray(state.model_state["mean"])
  np.testing.assert_allclose(found, [(25 + 13j) / 6] * 2, rtol=1e-6)


# Labels.


def test_ignored_labels_carry_no_weight():
  logits = jnp.zeros((1, 4, 8)).at[0, 1, 2].set(jnp.log(9.0))
  targets = jnp.array([[1, 2, -100, -100]])
  loss, metrics = training.label_loss(logits, {"tokens": 0, "targets": targets})
  # The first token costs ln 8, the second ln(16 / 9), the others nothing.
  np.testing.assert_allclose(loss, np.log(8 * 16 / 9) / 2, rtol=1e-6)
  assert metrics["accuracy"] == 0.5


@pytest.mark.parametrize("label", [8, -1, -99])
def test_label_out_of_range_gives_nan(label):
  batch = {"label": jnp.array([1, label]), "mask": jnp.array([1, 1])}
  loss = lambda logits: training.label_loss(logits, batch)[0]  # noqa: E731
  found, grads = jax.value_and_grad(loss)(jnp.zeros((2, 8)))
  assert jnp.isnan(found) and jnp.isnan(grads[1]).all()
  assert jnp.isfinite(grads[0]).all()
  # Padding may hold any label.
  batch["mask"] = jnp.array([1, 0])
  found, grads = jax.value_and_grad(loss)(jnp.zeros((2, 8)))
  np.testing.assert_allclose(found, np.log(8), rtol=1e-6)
  assert not grads[1].any()


def test_label_below_zero_is_no_class():
  loss, _ = training.label_loss(jnp.zeros((1, 8)), {"label": jnp.array([-1])})
  assert jnp.isnan(loss)


def test_logits_of_impossible_classes_may_be_infinite():
  logits = jnp.array([[0.0, 0.0, -jnp.inf]])
  loss = lambda x: training.label_loss(x, {"label": jnp.array([1])})[0]  # noqa: E731
  found, grads = jax.value_and_grad(loss)(logits)
  np.testing.assert_allclose(found, np.log(2), rtol=1e-6)
  np.testing.assert_allclose(grads, [[0.5, -0.5, 0.0]], rtol=1e-6)


@pytest.mark.parametrize(
  ("batch", "samples"),
  [
    ({"label": np.array([1, -100, 2], np.int32)}, 2),
    ({"label": np.array([1, 255, 2], np.uint8)}, 3),
    ({"label": np.array([1, -100]), "mask": np.array([1, 1])}, 1),
    ({"label": np.array([1, -100]), "mask": np.array([0, 1])}, 0),
    ({"label": np.array([-100.0, 1.0])}, 2),
    ({"tokens": 0, "targets": np.array([[1, 2], [-100, 2]])}, 1.5),
    (
      {
        "tokens": 0,
        "targets": np.array([[1, 2], [-100, 2]]),
        "mask": np.array([[1, 1], [1, 0]]),
      },
      2,
    ),
    ({"x": np.ones((3, 2))}, 3),
  ],
)
def test_samples_are_counted_by_mask_and_labels(batch, samples):
  assert training.num_samples(batch) == samples


def tokens_loss(params, model_state, batch, key):
  del key
  logits = params[batch["tokens"]]
  loss, metrics = training.label_loss(logits, batch)
  return loss, (model_state, metrics)


# Of 4 texts on 2 workers, unevenly labelled.
TEXTS = {
  "tokens": np.arange(12).reshape(2, 2, 3) % 5,
  "targets": np.array(
    [[[1, 2, 3], [-100, -100, 4]], [[-100, -100, 1], [-100] * 3]]
  ),
}


def test_micro_batches_and_workers_are_weighted_by_their_labels():
  whole = jax.tree.map(lambda x: x.reshape(4, 3), TEXTS)
  params = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
  key = jax.random.key(0)
  plain = training.make_gradient(tokens_loss)(params, {}, whole, key)
  for accumulate in (2, 4):
    cut = training.make_gradient(tokens_loss, accumulate=accumulate)
    found = cut(params, {}, whole, key)
    chex.assert_trees_all_close(found, plain, rtol=1e-5)
  team = collectives.workers(2, substrate="vmap")
  optimizer = jdist.ssgd(optax.sgd(1.0), axis=team.axis)
  step = training.make_step(
    tokens_loss, optimizer, axis=team.axis, weighted=True
  )
  state = training.init_state(team, optimizer, params)
  state, _ = team.jit(step)(state, team.place(TEXTS))
  np.testing.assert_allclose(
    team.view(state.params), params - plain.grads, rtol=1e-5
  )


def test_labels_of_less_than_a_sample_keep_their_weight():
  # One label of four counts, half a sample, and none in the first micro-batch.
  batch = {
    "tokens": np.array([[0, 1], [1, 0]]),
    "targets": np.array([[-100, -100], [-100, 1]]),
  }
  params, key = np.zeros((2, 3), np.float32), jax.random.key(0)
  gradient = training.make_gradient(tokens_loss, accumulate=2)
  found = gradient(params, {}, batch, key)
  assert found.samples == 0.5
  np.testing.assert_allclose(found.loss, np.log(3), rtol=1e-6)
  wanted = np.array([[1, -2, 1], [0, 0, 0]]) / 3
  np.testing.assert_allclose(found.grads, wanted, atol=1e-6)


def test_nonfinite_padding_is_ignored():
  values = jnp.array([1.0, jnp.inf, jnp.nan])
  assert training.masked_mean(values, jnp.array([1, 0, 0])) == 1
  assert training.masked_mean(values, jnp.zeros(3)) == 0
  assert training.masked_mean(jnp.array([1.0, 2.0, 6.0]), None) == 3
  slope = jax.grad(lambda x: training.masked_mean(x**2, jnp.array([1, 0, 1])))
  assert slope(jnp.array([1.0, 5.0, 3.0])).tolist() == [1.0, 0.0, 3.0]


@pytest.mark.parametrize(
  ("dtype", "wanted"),
  [(bool, 0.5), ("int8", 1.5), ("float16", 1.5), ("bfloat16", 1.5)],
)
def test_masked_mean_is_right_in_every_dtype(dtype, wanted):
  """A count of 100,000 is no bool, and fits into neither 8 nor 16 bits."""
  one, two = (0, 1) if dtype is bool else (1, 2)
  values = jnp.array([one, two] * 50_000 + [two] * 9).astype(dtype)
  mask = jnp.arange(values.size) < 100_000
  found = training.masked_mean(values, mask)
  assert found == wanted
  assert found.dtype == values[:1].mean().dtype


def test_logits_of_a_diverged_model_hit_no_class():
  logits = jnp.array([[jnp.nan, 1.0], [0.0, jnp.nan], [0.0, -jnp.inf]])
  loss, metrics = training.label_loss(logits, {"label": jnp.array([0, 1, 0])})
  assert np.isnan(loss)
  np.testing.assert_allclose(metrics["accuracy"], 1 / 3, rtol=1e-6)


@pytest.mark.parametrize(
  ("dtype", "classes"), [("uint8", 256), ("uint8", 1_000), ("int8", 200)]
)
def test_labels_of_a_byte_are_classes_of_larger_models(dtype, classes):
  logits = jnp.zeros((2, classes)).at[:, 100].set(3.0)
  labels = jnp.array([100, 7])
  wanted = training.label_loss(logits, {"label": labels})
  found = training.label_loss(logits, {"label": labels.astype(dtype)})
  chex.assert_trees_all_equal(found, wanted)
  assert np.isfinite(found[0])


@pytest.mark.parametrize("substrate", ("vmap", "shard_map"))
def test_weighted_mean_equals_the_mean_over_all_samples(substrate):
  digits = data.load("digits")
  model = models.build(
    "mlp", input_shape=(8, 8, 1), num_classes=10, hidden_sizes=(4,)
  )
  loss_fn = training.classification_loss(
    model.apply, normalize=digits.normalize
  )
  counts, size = (7, 2, 0, 3), 8
  team = collectives.workers(len(counts), substrate=substrate)
  samples = data.SampleStream(digits, 1, seed=0)
  starts = np.cumsum((0, *counts))
  # A worker without samples: everything that it has is padding.
  parts = [
    samples.batch(0, int(start), max(count, 1), size=size)
    for start, count in zip(starts, counts, strict=False)
  ]
  for part, count in zip(parts, counts, strict=True):
    part["mask"] = (np.arange(size) < count).astype(np.float32)
  batch = jax.tree.map(lambda *x: np.stack(x), *parts)
  optimizer = jdist.methods.ssgd(optax.sgd(0.5), axis=team.axis)

  def train(team, optimizer, batch, **options):
    step = training.make_step(loss_fn, optimizer, axis=team.axis, **options)
    state = training.init_state(team, optimizer, model.params)
    state, _ = team.jit(step)(state, team.place(batch))
    return team.view(state.params)

  found = train(team, optimizer, batch, weighted=True)
  alone = collectives.workers(1)
  whole = samples.batch(0, 0, sum(counts))
  expected = train(
    alone,
    jdist.methods.ssgd(optax.sgd(0.5), axis=alone.axis),
    jax.tree.map(lambda x: x[None], whole),
  )
  chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)
  # Equal weights give something else.
  with pytest.raises(AssertionError):
    chex.assert_trees_all_close(train(team, optimizer, batch), expected)


def test_every_micro_batch_has_a_key_of_its_own():
  def loss_fn(params, model_state, batch, key):
    number, seen = model_state
    seen = seen.at[number].set(jax.random.uniform(key))
    return (params * batch).sum(), ((number + 1, seen), {})

  gradient = training.make_gradient(loss_fn, accumulate=4)
  before = jnp.int32(0), jnp.zeros(4)
  found = [
    gradient(jnp.array(1.0), before, jnp.ones(4), jax.random.key(seed))
    for seed in (0, 1)
  ]
  seen = np.concatenate([x.model_state[1] for x in found])
  assert len(set(seen.tolist())) == 8


def test_weighted_statistics_equal_those_of_all_samples():
  def loss_fn(params, model_state, batch, key):
    del key
    mean = training.masked_mean(batch["x"], batch["mask"])
    state = {
      "mean": 0.9 * model_state["mean"] + 0.1 * mean,
      "steps": model_state["steps"] + 1,
      # A log-probability that a model may set itself.
      "impossible": jnp.where(mean > -9, -jnp.inf, model_state["impossible"]),
    }
    return params * mean, (state, {})

  team = collectives.workers(2, substrate="vmap")
  optimizer = jdist.ssgd(optax.sgd(0.1), axis=team.axis)
  step = training.make_step(loss_fn, optimizer, axis=team.axis, weighted=True)
  state = training.init_state(
    team,
    optimizer,
    jnp.array(0.0),
    {"mean": jnp.array(2.0), "steps": 0, "impossible": jnp.array(-jnp.inf)},
    laws={"impossible": "statistic"},
  )
  batch = {
    "x": jnp.array([[1.0, 3.0, 5.0], [11.0, 99.0, 99.0]]),
    "mask": jnp.array([[1, 1, 1], [1, 0, 0]]),
  }
  state, _ = team.jit(step)(state, team.place(batch))
  mean = (1 + 3 + 5 + 11) / 4
  found = team.view(state.model_state)
  np.testing.assert_allclose(found["mean"], 0.9 * 2 + 0.1 * mean, rtol=1e-6)
  assert found["steps"] == 1 and found["impossible"] == -np.inf
  np.testing.assert_allclose(team.view(state.params), -0.1 * mean, rtol=1e-6)


def test_gradient_times_its_samples_is_rounded_once():
  """In bfloat16, 257 samples would be 256."""
  found = _gradient.times(jnp.bfloat16(1.5), jnp.int32(257))
  assert found.dtype == jnp.bfloat16 and float(found) == 386.0
  assert float(_gradient.times(jnp.bfloat16(jnp.nan), jnp.int32(0))) == 0.0
