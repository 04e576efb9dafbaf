"""Training the predictor: what it learns, and that it resumes."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import prediction
from jdist.prediction import (
  _evaluate,
  _permutation,
  _predictor_fit,
  _saved_predictor,
)
from jdist.storage import array_files, hashes
from tests import _refusals
from tests.prediction import _tiny
from tests.prediction._fits import (
  assert_same_bits,
  completed,
  FIT,
  fit_predictor,
  fronts,
  model,
  normalize,
  predictor,
)


def test_loss_of_an_update_is_mixed_over_all_networks():
  """By hand: both labels' cross-entropies, weighted, of every sample."""
  fit = FIT
  state = _predictor_fit._init(
    predictor(), fit.learning_rate, jax.random.key(0)
  )
  params = jax.tree.map(jnp.copy, state["params"])
  images = np.random.default_rng(0).integers(0, 17, (2, 8, 8, 1))
  labels = np.array([1, 2])
  key = jax.random.key(3)
  order, share = _predictor_fit._mix(fit.mixup, jax.random.fold_in(key, 5), 2)
  share = float(share)
  assert 0 < share < 1 and sorted(order.tolist()) == [0, 1]
  rows = np.array([1, 0], np.int32)
  inputs = images[rows] / 16
  inputs = share * inputs + (1 - share) * inputs[order]
  losses = []
  for vector in fronts(2):
    whole = completed(params, vector)
    logits, _ = model().apply(
      whole, {}, jnp.asarray(inputs, jnp.float32), train=True
    )
    log_p = np.asarray(jax.nn.log_softmax(logits))
    for i in range(2):
      first, second = labels[rows][i], labels[rows][order[i]]
      mixed = share * log_p[i, first] + (1 - share) * log_p[i, second]
      losses.append(-mixed)
  _, loss = _predictor_fit._update(
    predictor(),
    model(),
    normalize,
    fit.learning_rate,
    fit.mixup,
    state,
    fronts(2),
    jnp.asarray(images, jnp.int32),
    jnp.asarray(labels, jnp.int32),
    rows,
    key,
    np.uint32(5),
  )
  np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)


def test_update_is_adams_with_the_moments_of_the_update_before():
  state = _predictor_fit._init(
    predictor(), FIT.learning_rate, jax.random.key(0)
  )
  images, labels = jnp.ones((2, 8, 8, 1), jnp.int32), jnp.array([1, 2])
  adam, found = optax.adam(FIT.learning_rate), []
  for step in range(2):
    found.append(jax.tree.map(jnp.copy, state))
    state, _ = _predictor_fit._update(
      predictor(), model(), normalize, FIT.learning_rate, FIT.mixup, state,
      fronts(2), images, labels, np.arange(2), jax.random.key(3),
      np.uint32(step),
    )  # fmt: skip
  before, after = found[1]["optimizer"], state["optimizer"]
  gradients = jax.tree.map(
    lambda old, new: (new - np.float32(0.9) * old) / np.float32(0.1),
    before[0].mu, after[0].mu,
  )  # fmt: skip
  with jax.numpy_dtype_promotion("standard"):
    updates, wanted = adam.update(gradients, before)
  chex.assert_trees_all_close(after, wanted, rtol=1e-3, atol=1e-9)
  params = optax.apply_updates(found[1]["params"], updates)
  chex.assert_trees_all_close(state["params"], params, rtol=1e-3, atol=1e-6)


def test_mapped_networks_equal_scanned_ones(monkeypatch):
  """On an accelerator they are mapped, on a CPU they are a loop."""
  params = predictor().init(jax.random.key(0))
  images = np.random.default_rng(0).random((4, 8, 8, 1), np.float32)
  found = {}
  for backend in ("cpu", "gpu"):
    monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
    found[backend] = _evaluate.logits_of(
      predictor(), model(), params, 5 * fronts(3), images, train=True
    )
  np.testing.assert_allclose(found["gpu"], found["cpu"], rtol=1e-4, atol=1e-5)
  # Each sample says something else, so that none stands in another's place.
  for one, other in ((0, 1), (0, 2), (1, 2)):
    assert np.abs(found["cpu"][one] - found["cpu"][other]).max() > 1e-2


@pytest.mark.slow
def test_mixup_share_has_beta_distribution():
  for alpha in (1.0, 2.0):
    keys = jax.random.split(jax.random.key(0), 2000)
    shares = jax.vmap(
      lambda key, alpha=alpha: _predictor_fit._mix(alpha, key, 4)[1]
    )(keys)
    # A beta's mean and variance; five deviations of the estimates.
    assert abs(shares.mean() - 0.5) < 5 * 0.29 / 2000**0.5
    assert abs(shares.var() - 0.25 / (2 * alpha + 1)) < 0.01


def test_share_of_a_mix_is_drawn_by_the_parameter(monkeypatch):
  """Without it images are kept; that of 1 is uniform."""
  key = jax.random.key(0)
  one, other = jax.random.split(key)
  monkeypatch.setattr(jax.random, "beta", lambda *given: given)
  shares = 1, jax.random.uniform(other), (other, 2.0, 2.0)
  for alpha, wanted in zip((0.0, 1.0, 2.0), shares, strict=True):
    order, share = _predictor_fit._mix(alpha, key, 4)
    assert order.tolist() == jax.random.permutation(one, 4).tolist()
    assert share == wanted


def test_predictor_learns_to_complete_unseen_networks():
  fit = dataclasses.replace(FIT, num_epochs=3, image_batches=60)
  seen = []
  fitted = fit_predictor(fit, on_epoch=seen.append)
  assert tuple(seen) == fitted.curve
  assert [point.epoch for point in fitted.curve] == [0, 1, 2, 3]
  accuracies = [point.accuracy for point in fitted.curve]
  assert accuracies[0] < 0.25 and fitted.best.accuracy > 0.35
  assert fitted.best.accuracy == max(accuracies)
  test = _tiny.digits("test")
  # In other parts, and each network by itself.
  found = prediction.evaluate_predictor(
    predictor(),
    fitted.params,
    model(),
    fronts(3, seed=1),
    test.images,
    test.labels,
    normalize=normalize,
    samples_per_batch=2,
    images_per_batch=100,
  )
  np.testing.assert_allclose(found.mean(), fitted.best.accuracy, atol=1e-9)
  for share, vector in zip(found, fronts(3, seed=1), strict=True):
    whole = completed(fitted.params, vector)
    logits, _ = model().apply(
      whole, {}, normalize(jnp.asarray(test.images)), train=False
    )
    right = np.argmax(logits, -1) == test.labels
    np.testing.assert_allclose(share, right.mean(), atol=1.5 / len(right))


def test_nan_logits_count_as_wrong():
  params = jax.tree.map(
    lambda x: jnp.full_like(x, jnp.nan),
    predictor().init(jax.random.key(0)),
  )
  test = _tiny.digits("test")
  found = prediction.evaluate_predictor(
    predictor(), params, model(), fronts(2), test.images, test.labels,
    normalize=normalize,
  )  # fmt: skip
  assert found.tolist() == [0, 0]  # And not the share of class 0.


def test_padding_of_the_last_images_counts_as_no_hit():
  images = np.repeat(_tiny.digits("test").images[:1], 3, 0)
  params = predictor().init(jax.random.key(0))
  shares = [
    prediction.evaluate_predictor(
      predictor(), params, model(), fronts(1), images, np.full(3, label),
      normalize=normalize, images_per_batch=2,
    )[0]
    for label in range(10)
  ]  # fmt: skip
  # The three are of one class, whichever that is.
  assert sorted(shares) == [0.0] * 9 + [1.0]


class _Killed(BaseException):
  pass


def test_training_resumes_to_the_bit(tmp_path, monkeypatch):
  whole = _whole()
  save = array_files.save_arrays
  count = []

  def save_and_die(*args):
    if len(count) == 1:
      raise _Killed
    count.append(save(*args))

  with monkeypatch.context() as patch:
    patch.setattr(array_files, "save_arrays", save_and_die)
    with pytest.raises(_Killed):
      fit_predictor(directory=tmp_path)
  # What has been trained, and when nothing is left to train.
  for _ in range(2):
    resumed = fit_predictor(directory=tmp_path)
    assert_same_bits(resumed.params, whole.params)
    assert resumed.curve == whole.curve


def test_training_continues_for_more_epochs_to_the_bit(tmp_path):
  whole = _whole()
  short = dataclasses.replace(FIT, num_epochs=1)
  fit_predictor(short, directory=tmp_path)
  seen = []
  more = fit_predictor(directory=tmp_path, on_epoch=seen.append)
  assert_same_bits(more.params, whole.params)
  assert more.curve == whole.curve
  # The first is not trained again.
  assert [point.epoch for point in seen] == [2]
  with _refusals.refused("num_epochs", "an int >= 2, got 1"):
    fit_predictor(short, directory=tmp_path)


@functools.cache
def _whole():
  return fit_predictor()


def test_best_epoch_is_kept(monkeypatch):
  scores = iter((0.1, 0.5, 0.5, 0.2))
  monkeypatch.setattr(
    _evaluate,
    "evaluate_predictor",
    lambda *args, **options: np.array([next(scores)]),
  )
  fit = dataclasses.replace(FIT, num_epochs=3)
  fitted = fit_predictor(fit)
  assert fitted.best.epoch == 1
  scores = iter((0.1, 0.5))
  first = fit_predictor(dataclasses.replace(FIT, num_epochs=1))
  assert_same_bits(fitted.params, first.params)


def test_state_of_another_training_is_refused(tmp_path):
  fit = dataclasses.replace(FIT, num_epochs=1, image_batches=1)
  fit_predictor(fit, directory=tmp_path)
  for change in ({"image_batches": 2}, {"learning_rate": 1.0}, {"seed": 1}):
    for num_epochs in (1, 2):
      other = dataclasses.replace(fit, num_epochs=num_epochs, **change)
      (name,) = change
      with pytest.raises(ValueError, match=f"other settings: `{name}` is"):
        fit_predictor(other, directory=tmp_path)
  with pytest.raises(ValueError, match="other data: `samples` differ"):
    fit_predictor(fit, directory=tmp_path, samples=fronts(9))
  with pytest.raises(ValueError, match="with rank=2, got one with 1"):
    fit_predictor(fit, of=predictor(rank=2), directory=tmp_path)


def test_resume_with_other_data_is_refused(tmp_path, monkeypatch):
  # In parts, as of what is mapped from a disk.
  monkeypatch.setattr(hashes, "_PART", 1000)
  fit = dataclasses.replace(FIT, num_epochs=1, sample_batches=1)
  first = fit_predictor(fit, directory=tmp_path)
  train, test = _tiny.digits("train"), _tiny.digits("test")
  for name, value in (
    ("samples", fronts(8)),
    ("images", train.images),
    ("labels", train.labels),
    ("held_out", fronts(3, seed=1)),
    ("test_images", test.images),
    ("test_labels", test.labels),
  ):
    other = value.copy()
    # Neither the first nor the last, and no other sum.
    other[1], other[2] = value[2], value[1]
    if name.endswith("labels"):
      other[1:-1] = np.roll(value[1:-1], 1)
    with pytest.raises(
      ValueError, match=f"`directory`.*other data: `{name}` differ"
    ):
      fit_predictor(fit, directory=tmp_path, **{name: other})
  np.save(tmp_path / "mapped.npy", fronts(8))
  mapped = np.load(tmp_path / "mapped.npy", mmap_mode="r")
  again = fit_predictor(fit, directory=tmp_path, samples=mapped)
  assert again.curve == first.curve


def test_nonfinite_loss_ends_training(tmp_path):
  wild = dataclasses.replace(FIT, learning_rate=1e38)
  with pytest.raises(
    FloatingPointError, match=r"epoch 1 .*`learning_rate`.* 1e\+38.*`samples`"
  ):
    fit_predictor(wild, directory=tmp_path)
  assert not array_files.is_there(tmp_path)


def test_no_two_updates_draw_the_same_mixture(monkeypatch):
  """Two batches of samples with as many updates as image batches each."""
  steps = []

  def update(*arguments):
    state, *_, step = arguments[5:]
    steps.append(int(step))
    return state, 0.0

  monkeypatch.setattr(_predictor_fit, "_update", update)
  labels = np.arange(16) % 4
  fit = dataclasses.replace(FIT, image_batches=3, images_per_batch=4)
  take = _predictor_fit._make_updates(
    predictor(), model(), fit, normalize, np.zeros((16, 8, 8, 1)), labels
  )
  for number in range(2):
    take({}, fronts(2), number)
  assert steps == list(range(6))


def test_drawn_images_are_distinct_and_balanced():
  labels = np.repeat(np.arange(4), (40, 20, 20, 80))
  draws = [_permutation.balanced(labels, 40, 0, number) for number in range(3)]
  for drawn in draws:
    assert len(set(drawn.tolist())) == 40
    assert np.bincount(labels[drawn]).tolist() == [10, 5, 5, 20]
    # Not sorted by class.
    assert len(np.unique(labels[drawn[:20]])) == 4
  assert draws[0].tolist() != draws[1].tolist()
  every = _permutation.balanced(labels, 160, 0, 0)
  assert sorted(every.tolist()) == list(range(160))


def test_epoch_has_every_sample_once():
  fit = dataclasses.replace(FIT, samples_per_batch=4)
  epochs = [
    [
      _predictor_fit._sample_rows(fit, 8, epoch, batch).tolist()
      for batch in (0, 1)
    ]
    for epoch in (0, 1)
  ]
  for first, second in epochs:
    assert sorted(first + second) == list(range(8))
    # A file is read from its front to its back.
    assert first == sorted(first) and second == sorted(second)
  assert epochs[0] != epochs[1]
  # More batches begin with the first samples again.
  assert _predictor_fit._sample_rows(fit, 8, 0, 2).tolist() == epochs[0][0]


@pytest.mark.parametrize(("batches", "number"), [(None, 2), (5, 5)])
def test_epoch_has_batches_for_all_samples_unless_they_are_told(
  batches, number
):
  fit = dataclasses.replace(FIT, sample_batches=batches)
  # An update's images are 3 times 20.
  assert _predictor_fit._count_batches(fit, 11, 60) == number
  with _refusals.refused("image_batches", "number of images, 59, got 60"):
    _predictor_fit._count_batches(fit, 11, 59)


@pytest.mark.parametrize(
  "change", ({"rank": 2}, {"grid": 8}, {"dense_from": "flatten"}), ids=str
)
def test_descriptions_of_predictors_differ(change):
  ours = predictor(rank=1, grid=1, dense_from="hidden")
  (name,) = change
  theirs = _saved_predictor.describe(dataclasses.replace(ours, **change))
  _saved_predictor.refuse_other_predictor(_saved_predictor.describe(ours), ours)
  with pytest.raises(
    ValueError,
    match=rf"`directory` must.* {name}={getattr(ours, name)!r}, got one with "
    rf"{change[name]!r}",
  ):
    _saved_predictor.refuse_other_predictor(theirs, ours)


def test_best_epoch_is_kept_over_a_resume(tmp_path):
  """The second epoch is the best one, and is not that of the last update."""
  accuracies = [0.1, 0.5, 0.9, 0.3, 0.2]

  def fit(num_epochs):
    settings = dataclasses.replace(FIT, num_epochs=num_epochs)
    kept = _saved_predictor.FitFolder(
      tmp_path / "fit", predictor(), dataclasses.asdict(settings), {}
    )

    def updated(state, vectors, number):
      del vectors, number
      params = jax.tree.map(lambda x: x + 1, state["params"])
      return state | {"params": params}, 1.0

    def evaluate(epoch, params, loss):
      seen[epoch] = jax.tree.map(np.asarray, params)
      return _predictor_fit.Epoch(epoch, accuracies[epoch], loss)

    return _predictor_fit._train(
      predictor(), settings, fronts(8), 1, updated, evaluate, kept
    )

  seen = {}
  fit(3)
  found = fit(4)
  assert found.best.epoch == 2
  assert_same_bits(found.params, seen[2])


def test_loss_of_an_epoch_is_the_mean_over_its_batches():
  settings = dataclasses.replace(FIT, num_epochs=2)
  losses = iter((1.0, 3.0, 5.0, 11.0))

  def fit(kept):
    return _predictor_fit._train(
      predictor(), settings, fronts(8), 2,
      lambda state, vectors, number: (state, next(losses)),
      lambda epoch, params, loss: _predictor_fit.Epoch(epoch, 0.5, loss), kept,
    )  # fmt: skip

  kept = _saved_predictor.FitFolder(
    None, predictor(), dataclasses.asdict(settings), {}
  )
  assert [point.loss for point in fit(kept).curve] == [None, 2.0, 8.0]


def test_a_single_nan_among_logits_counts_as_wrong(monkeypatch):
  logits = np.array([[[0.0, np.nan], [0.0, 1.0]]], np.float32)
  monkeypatch.setattr(
    _evaluate, "logits_of", lambda *given, **options: jnp.asarray(logits)
  )
  hits = _evaluate._hits.__wrapped__(
    None, None, lambda x: x, None, None, jnp.zeros(2), jnp.array([1, 1]),
    jnp.array([True, True]),
  )  # fmt: skip
  assert hits.tolist() == [1.0]  # NumPy's `argmax` returns the NaN's place.


def test_rows_larger_than_a_part_are_checked_one_by_one(monkeypatch):
  monkeypatch.setattr(_evaluate, "_PART", 1)
  _evaluate._check_finite("samples", np.zeros((3, 2)))
  with pytest.raises(ValueError, match="row 2 holds a NaN"):
    _evaluate._check_finite("samples", np.array([[0.0], [1.0], [np.nan]]))
