"""One worker's step: micro-batches, precision, statistics, keys."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import collectives, data, methods, models, training, transforms
from jdist.training import _gradient, _step
from tests import _refusals
from tests.training import _tiny


def _dict_loss(params, model_state, batch, key):
  """The same mean, and metrics of two dtypes."""
  loss, (model_state, _) = _tiny.loss_fn(params, model_state, batch, key)
  metrics = {"half": loss.astype(jnp.bfloat16), "count": jnp.ones((), int)}
  return loss, (model_state, metrics)


def _run(team, optimizer, steps, *, loss_fn=_tiny.loss_fn, **options):
  step = training.make_step(loss_fn, optimizer, axis=team.axis, **options)
  program = team.jit(step, donate_argnums=0)
  state = training.init_state(team, optimizer, _tiny.params())
  for number in range(steps):
    batch = team.place(_tiny.batch(number, team.local_workers))
    state, metrics = program(state, batch)
  return state, metrics


@pytest.mark.parametrize(
  "kind",
  [
    pytest.param("none", marks=pytest.mark.slow),
    pytest.param("vmap", marks=pytest.mark.slow),
    "shard_map",
    pytest.param("two_on_each", marks=pytest.mark.slow),
  ],
)
def test_micro_batches_match_one_batch(kind):
  team = _tiny.team(kind)
  rates = []

  def rate(count):  # Counts the optimizer's steps.
    rates.append(count)
    return 0.1 / (1 + count.astype(jnp.float32))

  optimizer = methods.local_sgd(
    optax.sgd(rate, momentum=0.9), 3, axis=team.axis
  )
  whole, metrics = _run(team, optimizer, 4, loss_fn=_dict_loss)
  for parts in (4,):
    cut, cut_metrics = _run(
      team, optimizer, 4, loss_fn=_dict_loss, accumulate=parts
    )
    for x, y in zip(
      jax.tree.leaves((cut, cut_metrics["loss"])),
      jax.tree.leaves((whole, metrics["loss"])),
      strict=True,
    ):
      assert x.dtype == y.dtype
      # bfloat16 leaves, too, because micro-batches are added in float32.
      np.testing.assert_allclose(
        np.asarray(x, np.float64), np.asarray(y, np.float64),
        rtol=1e-6, atol=1e-6,
      )  # fmt: skip
    assert cut.step.tolist() == [4] * team.num_workers
    assert cut.opt_state.clock.round_step.tolist() == [1] * team.num_workers


def test_indivisible_batch_raises():
  team = _tiny.team("vmap")
  with pytest.raises(ValueError, match="`accumulate=3` must divide the batch"):
    _run(team, methods.ssgd(optax.sgd(0.1), axis=team.axis), 1, accumulate=3)


def test_number_in_a_batch_that_is_cut_is_refused():
  gradient = training.make_gradient(_tiny.loss_fn, accumulate=2)
  batch = {"x": jnp.ones((2, 6)), "y": jnp.zeros(2, int), "n": jnp.ones(())}
  with _refusals.refused("accumulate=2", "got an array of shape ()"):
    jax.eval_shape(gradient, _tiny.params(), {}, batch, jax.random.key(0))


def test_bfloat16_computation_keeps_parameters_and_gradients_float32():
  team = _tiny.team("vmap")
  model = models.build("mlp", input_shape=(8, 8, 1), num_classes=10)
  seen = {}

  def spy(updates, state, params=None):
    seen["gradients"] = {x.dtype for x in jax.tree.leaves(updates)}
    return updates, state

  def apply(params, state, images, **options):
    seen["model"] = {x.dtype for x in jax.tree.leaves((params, images))}
    return model.apply(params, state, images, **options)

  optimizer = optax.chain(
    optax.GradientTransformation(lambda params: (), spy),
    methods.local_sgd(optax.sgd(0.1), 2, axis=team.axis),
  )
  loss = training.classification_loss(apply, compute_dtype=jnp.bfloat16)
  step = training.make_step(loss, optimizer, axis=team.axis)
  state = training.init_state(team, optimizer, model.params)
  images = np.random.default_rng(0).normal(size=(4, 16, 8, 8, 1))
  batch = {
    "image": images.astype(np.float32),
    "label": np.zeros((4, 16), np.int32),
  }
  new, metrics = team.jit(step)(state, team.place(batch))
  assert seen == {
    "gradients": {jnp.dtype("float32")},
    "model": {jnp.dtype("bfloat16")},
  }
  assert {x.dtype for x in jax.tree.leaves(new.params)} == {
    jnp.dtype("float32")
  }
  assert metrics["loss"].dtype == jnp.float32
  # Not the bfloat16 path by name only: rounded, and close.
  exact = training.make_step(
    training.classification_loss(model.apply), optimizer, axis=team.axis
  )
  wanted = team.jit(exact)(state, team.place(batch))[1]["loss"]
  assert metrics["loss"].tolist() != wanted.tolist()
  np.testing.assert_allclose(metrics["loss"], wanted, rtol=0.02)


@pytest.mark.parametrize("kind", ["vmap", "shard_map"])
def test_batch_statistics_are_averaged_when_a_round_ends(kind):
  """A model whose statistics are the sum of its inputs so far."""
  team = _tiny.team(kind)

  def loss_fn(params, model_state, batch, key):
    del key
    new = {
      "mean": model_state["mean"] + jnp.sum(batch),
      "count": model_state["count"] + 1 + collectives.index(team.axis),
      "key": model_state["key"],
    }
    return jnp.sum(params) ** 2, (new, {})

  optimizer = methods.local_sgd(optax.sgd(0.0), 2, axis=team.axis)
  start = {
    "mean": np.zeros((), np.float32),
    "count": np.zeros((), np.int32),
    "key": jax.random.key(3),
  }
  program = team.jit(
    training.make_step(loss_fn, optimizer, axis=team.axis), donate_argnums=0
  )
  state = training.init_state(team, optimizer, np.ones(2, np.float32), start)
  batch = team.place(np.arange(4, dtype=np.float32)[:, None])
  state, _ = program(state, batch)
  assert state.model_state["mean"].tolist() == [0.0, 1.0, 2.0, 3.0]
  state, _ = program(state, batch)
  assert state.model_state["mean"].tolist() == [3.0] * 4
  # Counters and keys are no statistics: each worker keeps its own.
  assert state.model_state["count"].tolist() == [2, 4, 6, 8]
  state, _ = program(state, batch)
  assert state.model_state["mean"].tolist() == [3.0, 4.0, 5.0, 6.0]
  synchronous = methods.ssgd(optax.sgd(0.0), axis=team.axis)
  program = team.jit(training.make_step(loss_fn, synchronous, axis=team.axis))
  state = training.init_state(team, synchronous, np.ones(2, np.float32), start)
  state, _ = program(state, batch)
  assert state.model_state["mean"].tolist() == [1.5] * 4


def test_update_first_sends_only_gradients():
  """Compilers join what else is sent with them, and then all wait for it."""
  team = _tiny.team("shard_map")

  def loss_fn(params, model_state, batch, key):
    del key
    return jnp.sum(params) ** 2, (model_state + jnp.sum(batch), {})

  optimizer = transforms.update_first(optax.sgd(0.0), axis=team.axis)
  step = training.make_step(loss_fn, optimizer, axis=team.axis)
  params = np.ones(3, np.float32)
  state = training.init_state(team, optimizer, params, np.zeros(5, np.float32))
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
    (state, team.place(np.zeros((4, 1), np.float32))),
  )
  counted = collectives.traffic(
    step, *shapes, axis=team.axis, num_workers=team.num_workers
  )
  assert [c.payload_bytes for c in counted.collectives] == [params.nbytes]


def test_batch_normalization_is_averaged_once_per_round():
  team = collectives.workers(2, substrate="shard_map")
  model = models.build(
    "resnet8", input_shape=(8, 8, 1), num_classes=10, norm="batch"
  )
  digits = data.load("digits")
  batches = data.Batches(digits, 2, 8, seed=0)
  optimizer = methods.local_sgd(optax.sgd(0.01), 2, axis=team.axis)
  loss = training.classification_loss(model.apply, normalize=digits.normalize)
  program = team.jit(training.make_step(loss, optimizer, axis=team.axis))
  state = training.init_state(team, optimizer, model.params, model.state)
  equal = []
  for number in range(3):
    state, _ = program(state, team.place(batches[number]))
    leaves = jax.tree.leaves(_tiny.host(state.model_state))
    equal.append(all((x[0] == x[1]).all() for x in leaves))
  assert equal == [False, True, False]
  evaluate = training.Evaluator(
    team,
    model.apply,
    data.evaluation_batches(data.load("digits", "test"), 2, 64),
    normalize=digits.normalize,
  )
  assert 0 <= evaluate(state)["accuracy"] <= 1


@pytest.mark.parametrize(
  ("name", "kind"),
  [
    ("local_sgd", "vmap"),
    ("local_sgd", "two_on_each"),
    ("diloco", "shard_map"),
  ],
)
def test_round_ends_exactly_on_the_anchor(name, kind):
  team = _tiny.team(kind)
  with jax.numpy_dtype_promotion("standard"):
    trainer, state = _tiny.trainer(team, name), _tiny.init(team, name)
    for steps, equal in ((3, True), (4, False), (6, True)):
      state, _ = trainer.fit(state, _tiny.batches(team), steps)
      anchor = jdist.anchor(state.opt_state, state.params)
      same = jax.tree.map(
        lambda a, p: np.array_equal(np.asarray(a), np.asarray(p)),
        anchor,
        state.params,
      )
      assert same["kernel"] is same["bias"] is equal, steps


def _keys(team, steps=3):
  """The keys that each worker's loss was given, [steps, workers, 2]."""

  def loss_fn(params, model_state, batch, key):
    del model_state, batch
    words = jax.lax.stop_gradient(jax.random.key_data(key))
    return jnp.sum(params), (words, {})

  optimizer = methods.local_sgd(optax.sgd(0.1), 100, axis=team.axis)
  program = team.jit(training.make_step(loss_fn, optimizer, axis=team.axis))
  state = training.init_state(
    team, optimizer, np.ones(2, np.float32), np.zeros(2, np.uint32), seed=5
  )
  found = []
  for _ in range(steps):
    state, _ = program(state, team.place(np.zeros((4, 1), np.float32)))
    found.append(np.asarray(state.model_state))
  return np.stack(found)


@pytest.mark.smoke
def test_keys_depend_on_worker_and_step_but_not_on_substrate():
  wanted = _keys(_tiny.team("vmap"))
  assert len(np.unique(wanted.reshape(-1, 2), axis=0)) == 3 * 4
  for kind in ("shard_map", "two_on_each"):
    np.testing.assert_array_equal(_keys(_tiny.team(kind)), wanted)


def test_image_loss_matches_hand_computation():
  def apply(params, state, images, train):
    del images, train
    return params, state

  logits = jnp.array([[2.0, 0.0]])
  batch = {"image": jnp.zeros((1, 1)), "label": jnp.array([0])}
  log = -np.log([1 / (1 + np.exp(-2)), 1 / (1 + np.exp(2))])
  loss_fn = training.classification_loss(apply)
  loss, (_, metrics) = loss_fn(logits, {}, batch, jax.random.key(0))
  np.testing.assert_allclose(loss, log[0], rtol=1e-6)
  assert metrics["accuracy"] == 1


@pytest.mark.smoke
@pytest.mark.parametrize("kind", _tiny.TEAMS)
def test_evaluation_uses_the_anchor_and_each_sample_once(kind):
  team = _tiny.team(kind)
  digits = data.load("digits")
  test = data.load("digits", "test")
  model = models.build("mlp", input_shape=(8, 8, 1), num_classes=10)
  optimizer = methods.local_sgd(optax.sgd(0.1), 4, axis=team.axis)
  loss = training.classification_loss(model.apply, normalize=digits.normalize)
  trainer = training.Trainer(
    team, training.make_step(loss, optimizer, axis=team.axis)
  )
  state, _ = trainer.fit(
    training.init_state(team, optimizer, model.params),
    data.Batches(digits, 4, 8, seed=0).iterate,
    6,
  )
  # 355 samples: the last batch is filled up, and one worker has only filling.
  batches = data.evaluation_batches(test, 4, 75)
  assert [int(b["mask"].sum()) for b in batches] == [300, 55]
  found = training.Evaluator(
    team, model.apply, batches, normalize=digits.normalize
  )(state)
  anchor = team.view(jdist.anchor(state.opt_state, state.params))
  logits, _ = model.apply(
    anchor, {}, digits.normalize(test.images), train=False
  )
  logits = np.asarray(logits, np.float64)
  hits = (logits.argmax(-1) == test.labels).mean()
  log = np.log(np.exp(logits).sum(-1)) - logits[np.arange(355), test.labels]
  assert found["accuracy"] == pytest.approx(hits, abs=1e-9)
  assert found["loss"] == pytest.approx(log.mean(), rel=1e-5)


def test_evaluation_with_a_pending_update_raises():
  team = _tiny.team("vmap")
  optimizer = transforms.update_first(optax.sgd(0.1), axis=team.axis)
  state = training.init_state(team, optimizer, _tiny.params())
  batch = {
    "image": np.ones((4, 2, 6), np.float32),
    "label": np.zeros((4, 2), np.int32),
    "mask": np.ones((4, 2), np.float32),
  }

  def apply(params, model_state, images, *, train):
    return images @ params["kernel"], model_state

  with _refusals.refused("optimizer", "given for a state"):
    training.Evaluator(team, apply, [batch])(state)
  told = training.Evaluator(team, apply, [batch], optimizer=optimizer)(state)
  assert np.isfinite(told["loss"])


@pytest.mark.parametrize(
  "around",
  [
    lambda first: optax.chain(optax.identity(), first),
    lambda first: optax.apply_if_finite(first, 3),
    lambda first: transforms.predict_rest(
      first, _Everything, lambda theta, f: {}, {}, axis=None
    ),
  ],
)
def test_update_first_inside_another_transformation_raises(around):
  team = _tiny.team("vmap")
  optimizer = around(transforms.update_first(optax.sgd(0.1), axis=None))
  step = training.make_step(_tiny.loss_fn, optimizer, axis=team.axis)
  state = training.init_state(team, optimizer, _tiny.params())
  with _refusals.refused("optimizer", "what `update_fir"):
    team.jit(step)(state, team.place(_tiny.batch(0, team.local_workers)))


@pytest.mark.parametrize("said", [{"round_ends": True}, {"stream_steps": 2}])
def test_update_first_refuses_a_control(said):
  team = _tiny.team("vmap")
  optimizer = transforms.update_first(optax.sgd(0.1), axis=team.axis)
  step = training.make_step(_tiny.loss_fn, optimizer, axis=team.axis)
  state = training.init_state(team, optimizer, _tiny.params())
  batch = team.place(_tiny.batch(0, team.local_workers))
  control = transforms.Control(**said)
  with _refusals.refused("control", "None for `update_f"):
    team.jit(lambda s, b: step(s, b, control))(state, batch)


class _Everything:
  """A cut that leaves nothing to be predicted."""

  split = staticmethod(lambda tree: (tree, {}))
  join = staticmethod(lambda front, rest: front)


def test_weights_keep_infinities_and_padding_alone_is_no_nan():
  """A mask of infinities has no difference, and no samples have no mean."""
  before = {"mask": jnp.array([0.0, -jnp.inf]), "mean": jnp.array(1.0)}
  after = before | {"mean": jnp.array(3.0)}
  for samples, mean in ((2.0, 3.0), (0.0, 1.0)):
    found = _step._weighted(
      _gradient.Gradient(
        jnp.array(4.0), jnp.array(1.0), jnp.array(samples), after, {}
      ),
      before,
      None,
    )
    assert found.grads.item() == (4.0 if samples else 0.0)
    assert found.model_state["mean"].item() == mean
    np.testing.assert_array_equal(found.model_state["mask"], before["mask"])


def test_counters_are_not_weighted_by_samples():
  def one(samples, count):
    found = _gradient.Gradient(
      jnp.array(1.0), jnp.array(1.0), samples, {"count": count + 1}, {}
    )
    return _step._weighted(found, {"count": count}, "worker")

  found = jax.vmap(one, axis_name="worker")(
    jnp.array([1.0, 3.0]), jnp.array([4, 6])
  )
  assert found.model_state["count"].tolist() == [5, 7]
  assert found.grads.tolist() == [0.5, 1.5]


@pytest.mark.parametrize("make", [training.make_step, training.make_update])
def test_independent_is_true_or_false(make):
  given = (_tiny.loss_fn,) if make is training.make_step else ()
  with _refusals.refused("independent", "must be True or False, got 'all'"):
    make(*given, optax.sgd(0.1), axis=None, independent="all")


def averaged(optimizer, steps, control=None):
  """Means of two workers, 1 and 3, after updates and their average."""

  def one(w, mean):
    state = optimizer.init(w)
    if isinstance(optimizer, transforms.UpdateFirst):
      state = optimizer.hold(w, state)
    for _ in range(steps):
      _, state = optimizer.update(w, state, w)
    return training.synchronize_statistics(
      {"mean": mean}, state, axis="worker", control=control
    )["mean"]

  found = jax.vmap(one, axis_name="worker")(jnp.ones(2), jnp.array([1.0, 3.0]))
  return found.tolist()


def test_control_and_pending_updates_say_when_statistics_are_averaged():
  local = methods.local_sgd(optax.sgd(0.1), 2, axis="worker")
  assert averaged(local, 1) == [1.0, 3.0] and averaged(local, 2) == [2.0, 2.0]
  # The host's word counts, whatever the state says.
  ends = [transforms.Control(round_ends=x) for x in (True, False)]
  assert averaged(local, 1, ends[0]) == [2.0, 2.0]
  assert averaged(local, 2, ends[1]) == [1.0, 3.0]
  first = transforms.update_first(optax.sgd(0.1), axis="worker")
  assert averaged(first, 0) == [1.0, 3.0]


@pytest.mark.parametrize("method", ["ssgd", "local_sgd", "delayed"])
@pytest.mark.parametrize(
  "around",
  [
    lambda x: optax.apply_if_finite(x, 3),
    lambda x: optax.MultiSteps(
      x, 2, should_skip_update_fn=optax.skip_not_finite
    ),
    lambda x: optax.conditionally_transform(x, lambda step: step > 0),
    lambda x: optax.conditionally_mask(x, lambda step: step > 0),
  ],
  ids=[
    "apply_if_finite",
    "MultiSteps",
    "conditionally_transform",
    "conditionally_mask",
  ],
)
def test_wrapper_that_skips_a_worker_alone_is_refused(around, method):
  """On devices the others would wait for it; under vmap they drift apart."""
  team = _tiny.team("vmap")
  make = {
    "ssgd": methods.ssgd,
    "local_sgd": lambda x, axis: methods.local_sgd(x, 2, axis=axis),
    "delayed": lambda x, axis: transforms.delay_gradients(
      methods.ssgd(x, axis=axis), 1
    ),
  }[method]
  outside = around(make(optax.sgd(0.1), axis=team.axis))
  step = training.make_step(_tiny.loss_fn, outside, axis=team.axis)
  state = training.init_state(team, outside, _tiny.params())
  batch = team.place(_tiny.batch(0, team.local_workers))
  with _refusals.refused("optimizer", "not skip a step of one worker alone"):
    team.jit(step)(state, batch)
  # Inside all workers skip alike, or each its own local steps.
  inside = make(around(optax.sgd(0.1)), axis=team.axis)
  step = training.make_step(_tiny.loss_fn, inside, axis=team.axis)
  state = training.init_state(team, inside, _tiny.params())
  with jax.numpy_dtype_promotion("standard"):  # Optax multiplies by bools.
    jax.eval_shape(team.spmd(step), state, batch)


def test_accumulation_around_a_method_steps_once_for_both_batches():
  team = _tiny.team("vmap")
  method = methods.ssgd(optax.sgd(0.1), axis=team.axis)
  outside = optax.MultiSteps(method, 2)
  step = training.make_step(_tiny.loss_fn, outside, axis=team.axis)
  state = training.init_state(team, outside, _tiny.params())
  batch = team.place(_tiny.batch(0, team.local_workers))
  with jax.numpy_dtype_promotion("standard"):  # Optax multiplies by bools.
    first, _ = team.jit(step)(state, batch)
    second, _ = team.jit(step)(first, batch)
  # Both batches are one, whose mean gradient is that of a step of its own.
  step = training.make_step(_tiny.loss_fn, method, axis=team.axis)
  alone, _ = team.jit(step)(
    training.init_state(team, method, _tiny.params()), batch
  )
  begun, first, second, wanted = (
    team.view(x.params) for x in (state, first, second, alone)
  )
  for name, value in wanted.items():
    np.testing.assert_array_equal(first[name], begun[name])
    # MultiSteps rounds the mean to the leaf's own dtype.
    rtol = 2.0**-7 if value.dtype == jnp.bfloat16 else 1e-6
    np.testing.assert_allclose(second[name], value, rtol=rtol)
