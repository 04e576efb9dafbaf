"""The comparison of MP²: its counts, its targets, and that it runs."""

import dataclasses
import types

import chex
import jax
import numpy as np
import pytest

from jdist import collectives, models, prediction, training
from jdist.storage import array_files
from jdist.training import comparison
from tests.experiments import test_comparisons
from tests.experiments._loading import FOLDER, load


@pytest.fixture(autouse=True)
def _imports(monkeypatch):
  """Lets the experiment's programs import one another."""
  monkeypatch.syspath_prepend(str(FOLDER / "mp2"))


def sent(*collected):
  return collectives.Traffic(
    tuple(
      collectives.Collective(kind, size, num_workers=4)
      for kind, size in collected
    )
  )


@pytest.mark.parametrize(
  ("collected", "up_and_down"),
  (
    # A mean goes up and down once.
    ([("all-reduce", 1000)], (1000, 1000)),
    # Sparse payloads of all four come down.
    ([("all-gather", 10)], (10, 40)),
    # Or the whole network, where that is less.
    ([("all-gather", 600)], (600, 2000)),
    # To the owners of the parts, and their means of a fourth to all.
    ([("all-to-all", 80), ("all-gather", 20)], (80, 80)),
    # A front at once, a rest by exchange.
    ([("all-reduce", 100), ("all-to-all", 8), ("all-gather", 2)], (108, 108)),
  ),
)
def test_server_receives_once_and_sends_back(
  collected, up_and_down, monkeypatch
):
  config = load("mp2_config", "mp2/config.py", monkeypatch)
  assert config.served(sent(*collected), 2000) == up_and_down


def test_bytes_of_a_round_are_shared_by_its_steps(monkeypatch):
  config = load("mp2_config", "mp2/config.py", monkeypatch)
  in_rounds = collectives.Traffic(
    (
      collectives.Collective("all-reduce", 40, num_workers=4),
      collectives.Collective("all-reduce", 800, 4, conditional=True),
    )
  )
  # 40 in every step, 800 in every fourth.
  assert config.served(in_rounds, 2000, 0.25) == (240, 240)


def test_prepared_folder_is_named_by_the_options_it_depends_on(monkeypatch):
  config = load("mp2_config", "mp2/config.py", monkeypatch)
  options = config.Config()
  # A new option is on one of the two sides.
  matters_not = {
    "rank", "rates", "seeds", "variants", "evaluations", "workers", "cache",
    "other_dataset", "other_workers", "start_seed", "extensions",
    "tuning_seeds",
  }  # fmt: skip
  found = set()
  for field in dataclasses.fields(options):
    other = dataclasses.replace(options, **{field.name: "other"})
    if config.folder(other).name == config.folder(options).name:
      found.add(field.name)
  assert found == matters_not


def test_rows_have_the_bytes_of_the_traced_step(monkeypatch, tmp_path):
  pytest.importorskip("sklearn")
  config = load("mp2_config", "mp2/config.py", monkeypatch)
  options = dataclasses.replace(
    config.PRESETS["smoke"][1], cache=str(tmp_path), model="cnn", rich_cut=2
  )
  chains = config.Chains(options, config.VARIANTS)
  model = chains.workload.model(0)
  cuts = {}
  for kind in ("published", "rich"):
    cuts[kind] = config.cut_of(options, model, kind)
    predictor = prediction.predictor(cuts[kind])
    prediction.save_predictor(
      config.folder(options) / f"predictor-{kind}",
      predictor,
      predictor.init(jax.random.key(0)),
    )
  last = training.Record(
    step=10, rounds=10, sent_bytes=0.0, train_loss=0.5, metrics={}, train_s=1.0,
    samples_per_s=1.0,
  )  # fmt: skip
  told, traced = {}, {}
  # Optax's schedules and Adam mix floats with integer counts.
  with jax.numpy_dtype_promotion("standard"):
    for name in (
      "baseline", "mp2 as published", "mp2, nothing predicted",
      "mp2 rank 8, 1 conv", "ours, refreshed",
      "ours, refreshed, nothing predicted",
    ):  # fmt: skip
      run = chains.prepare(name, 0.01, seed=0)
      batch = next(run.batches.iterate(0))
      traced[name] = run.programs.trainer.traffic(run.state, batch)
      told[name] = chains.describe(name, traced[name], last)
  whole = 4 * models.num_params(model)
  assert told["baseline"]["uplink_bytes"] == 10 * whole
  assert told["baseline"]["both_bytes"] == 20 * whole
  # Its one mean is a round's, of one step each; the whole network comes back.
  for name, kind in (
    ("mp2 as published", "published"),
    ("mp2, nothing predicted", "published"),
    ("mp2 rank 8, 1 conv", "rich"),
  ):
    pushed = sum(
      c.count * c.payload_bytes
      for c in traced[name].collectives
      if c.conditional
    )
    assert pushed == 4 * cuts[kind].num_front
    assert told[name]["uplink_bytes"] == 10 * pushed
    assert told[name]["both_bytes"] == 10 * (pushed + whole)
  # In a round each layer goes up and down once.
  for name in ("ours, refreshed", "ours, refreshed, nothing predicted"):
    assert told[name]["uplink_bytes"] == 10 * whole
    assert told[name]["both_bytes"] == 20 * whole


def test_predictor_is_chosen_by_samples_it_was_not_fitted_to(monkeypatch):
  prepare = load("mp2_prepare", "mp2/prepare.py", monkeypatch)
  preparation = object.__new__(prepare.Preparation)
  preparation.options = dataclasses.replace(
    prepare.config.Config(), fit_samples=8
  )
  for number in (64, 6, 2):
    fronts = np.arange(number, dtype=np.float32)[:, None]
    monkeypatch.setattr(
      prepare.Preparation,
      "parameters",
      lambda self, seed, fronts=fronts: _Fronts(fronts),
    )
    learned, held_out = preparation.parted(0, None)
    assert sorted([*learned[:, 0], *held_out[:, 0]]) == list(range(number))
    assert 1 <= len(held_out) <= 8 and held_out.min() >= number // 2


def test_presets_for_gpus_cut_where_the_paper_does(monkeypatch):
  config = load("mp2_config", "mp2/config.py", monkeypatch)
  found = set()
  for name, (_, options) in config.PRESETS.items():
    if not name.endswith("-gpu"):
      continue
    model = prediction.published_model(options.model, abstract=True)
    cut = config.cut_of(options, model, "published")
    assert (
      cut.fingerprint == prediction.published_cut(options.model).fingerprint
    )
    assert options.workers == 8 and options.batch_size == 8 * 125
    assert name == f"{options.model}-{options.dataset}-gpu"
    found.add((options.model, options.dataset))
  networks = set(prediction.PUBLISHED) - {"lenet"}
  datasets = ("cifar10", "cifar100")
  assert found == {(model, each) for model in networks for each in datasets}


def test_test_images_are_not_used(monkeypatch, tmp_path):
  pytest.importorskip("sklearn")
  prepare = load("mp2_prepare", "mp2/prepare.py", monkeypatch)
  options = prepare.config.PRESETS["smoke"][1]
  options = dataclasses.replace(options, cache=str(tmp_path))
  preparation = prepare.Preparation(options, tmp_path / "rows.jsonl")

  def rows(images):
    return {image.tobytes() for image in images}

  used = preparation.images()
  of_training = rows(preparation.whole.workload.train.images)
  of_test = rows(preparation.whole.workload.test.images)
  assert not of_training & of_test
  assert rows(used["test_images"]) <= of_training
  # Nor what predictors and ordinary runs have learned from.
  assert not rows(used["test_images"]) & rows(used["images"])
  assert not rows(used["test_images"]) & rows(
    preparation.ordinary(0).chains.workload.train.images
  )


class _Stopped(BaseException):
  """No handler catches it."""


def test_depths_are_studied_for_epochs_of_their_own(monkeypatch, tmp_path):
  pytest.importorskip("sklearn")
  prepare = load("mp2_prepare", "mp2/prepare.py", monkeypatch)
  options = dataclasses.replace(
    prepare.config.PRESETS["smoke"][1], fit_epochs=3, cache=str(tmp_path)
  )
  preparation = prepare.Preparation(options, tmp_path / "rows.jsonl")
  preparation.parameters = lambda name: _Fronts(np.zeros((4, 1)))

  def stop(*args, fit, **kwargs):
    raise _Stopped(fit.num_epochs)

  monkeypatch.setattr(prepare.cut_choice, "score_cuts", stop)
  with pytest.raises(_Stopped, match="1"):
    preparation.score_cuts()


def test_stop_at_a_runs_end_loses_no_row(monkeypatch, tmp_path):
  pytest.importorskip("sklearn")
  prepare = load("mp2_prepare", "mp2/prepare.py", monkeypatch)
  options = dataclasses.replace(
    prepare.config.PRESETS["smoke"][1], cache=str(tmp_path)
  )
  preparation = prepare.Preparation(options, tmp_path / "rows.jsonl")

  def stop(*args, **kwargs):
    raise _Stopped

  monkeypatch.setattr(prepare.array_files, "save_arrays", stop)
  # Optax's Adam needs the promotion.
  with jax.numpy_dtype_promotion("standard"), pytest.raises(_Stopped):
    preparation.collect(preparation.ordinary(0))
  (row,) = training.read_rows(tmp_path / "rows.jsonl")
  assert row["purpose"] == "samples" and row["samples"] == 6
  assert (row["workers"], row["batch_size"]) == (2, 128)


class _Fronts:
  """A set of parameters, as far as its fronts are asked for."""

  def __init__(self, fronts):
    self.fronts = lambda cut: fronts


def test_rows_hold_under_options_that_their_variant_ignores(
  monkeypatch, tmp_path
):
  config = load("mp2_config", "mp2/config.py", monkeypatch)
  options = config.Config()
  path = tmp_path / "rows.jsonl"
  row = {
    "purpose": "tuning", "learning_rate": 0.1, "seed": 1,
    "config": dataclasses.asdict(options),
  }  # fmt: skip
  training.append_rows(
    path, [row | {"method": name} for name in config.VARIANTS]
  )

  def kept(change):
    other = dataclasses.replace(options, **change)
    rows = other.rows(path)
    return {
      name
      for name in config.VARIANTS
      if rows.find(comparison.Trial("tuning", name, 0.1, 1))
    }

  everything = set(config.VARIANTS)
  predicting = {"ours", "ours, 2 bits", "ours, rank 16", "ours, refreshed"}
  predicting |= {"mp2 as published", "mp2 rank 8, 1 conv"}
  assert kept({"other_workers": 2}) == everything
  assert kept({"fit_epochs": 1}) == everything - predicting
  assert kept({"nowcast_steps": 1}) == everything - {"wnn"}
  borrowing = {x for x in everything if x.endswith("borrowed rear")}
  assert kept({"collect_rate": 1.0}) == (
    everything - predicting - borrowing - {"wnn"}
  )
  assert kept({"epochs": 2.0}) == set()


def test_borrowed_rear_is_the_sources_last(monkeypatch, tmp_path):
  config = load("mp2_config", "mp2/config.py", monkeypatch)
  options = dataclasses.replace(config.PRESETS["smoke"][1], cache=str(tmp_path))
  model = models.build("mlp", input_shape=(8, 8, 1), num_classes=10)
  run = types.SimpleNamespace(options=options, model=model)
  with pytest.raises(SystemExit, match=r"prepare\.py"):
    config._prediction(run, rear="borrowed")
  last = jax.tree.map(lambda x: x + 1, model.params)
  array_files.save_arrays(
    config.source(options), last, {"what": config.PARAMETERS}
  )
  cut, predict, rest = config._prediction(run, rear="borrowed")
  chex.assert_trees_all_equal(rest, cut.split(last)[1])
  # Whatever the front.
  assert predict(rest, cut.split(model.params)[0]) is rest
  _, _, drawn = config._prediction(run, rear="drawn")
  chex.assert_trees_all_equal(drawn, cut.split(model.params)[1])


def test_images_are_brought_to_another_form(monkeypatch):
  load("mp2_config", "mp2/config.py", monkeypatch)
  moving = load("mp2_moving", "mp2/moving.py", monkeypatch)
  rows = np.arange(3, dtype=np.uint8).reshape(1, 3, 1, 1)
  # The middle, or zeros around; the odd one behind.
  assert moving.in_form(rows, (1, 1, 1)).ravel().tolist() == [1]
  assert moving.in_form(rows, (2, 1, 1)).ravel().tolist() == [0, 1]
  assert moving.in_form(rows, (6, 1, 1)).ravel().tolist() == [0, 0, 1, 2, 0, 0]
  color = np.array([255, 255, 253], np.uint8).reshape(1, 1, 1, 3)
  gray = moving.in_form(color, (1, 1, 1))
  assert gray.ravel().tolist() == [254] and gray.dtype == np.uint8
  assert moving.in_form(gray, (1, 1, 3)).ravel().tolist() == [254] * 3
  with pytest.raises(ValueError, match="`images` must have 2 channels"):
    moving.in_form(color, (1, 1, 2))


@pytest.mark.parametrize("seed", (0, 1))
def test_parts_measure_the_same_as_the_whole(monkeypatch, seed):
  moving = load("mp2_moving", "mp2/moving.py", monkeypatch)
  draw = np.random.default_rng(seed)
  images = draw.integers(0, 256, (1500, 2, 3, 2)).astype(np.uint8)
  mean, std = moving.measure(images)
  np.testing.assert_allclose(mean, images.mean((0, 1, 2)), rtol=1e-12)
  np.testing.assert_allclose(std, images.std((0, 1, 2)), rtol=1e-12)


def test_elsewhere_each_worker_has_as_many_images(monkeypatch):
  pytest.importorskip("sklearn")
  config = load("mp2_config", "mp2/config.py", monkeypatch)
  moving = load("mp2_moving", "mp2/moving.py", monkeypatch)
  options = config.PRESETS["smoke"][1]
  chains = config.Chains(options, config.VARIANTS, "a workload")
  assert (options.workers, options.batch_size) == (2, 128)
  # The same images in a step would make it the same run.
  moved = moving.to_workers(chains, 4).options
  assert (moved.workers, moved.batch_size) == (4, 256)


def test_all_runs_may_begin_with_the_same_weights(monkeypatch, tmp_path):
  pytest.importorskip("sklearn")
  prepare = load("mp2_prepare", "mp2/prepare.py", monkeypatch)
  config = prepare.config
  options = dataclasses.replace(
    config.PRESETS["smoke"][1], start_seed=5, cache=str(tmp_path)
  )

  def weights(chains, seed):
    leaves = jax.tree.leaves(chains.workload.model(seed).params)
    return [np.asarray(leaf).tobytes() for leaf in leaves]

  same = config.Chains(options, config.VARIANTS)
  usual = config.Chains(config.PRESETS["smoke"][1], config.VARIANTS)
  assert weights(same, 0) == weights(same, 1) == weights(usual, 5)
  # Not those that predictors learn from.
  preparation = prepare.Preparation(options, tmp_path / "rows.jsonl")
  assert weights(preparation.chains, 0) == weights(usual, 0)


def test_options_of_a_transfer_do_not_change_predictors(monkeypatch):
  config = load("mp2_config", "mp2/config.py", monkeypatch)
  options = config.Config()
  moved = dataclasses.replace(options, other_dataset=None, other_workers=2)
  assert config.folder(moved) == config.folder(options)


@pytest.mark.slow
def test_prepared_predictors_are_compared_and_reported(tmp_path):
  folder = test_comparisons.copied("mp2", tmp_path)
  pytest.importorskip("sklearn")
  pytest.importorskip("matplotlib")
  test_comparisons.run(folder, "prepare.py", "smoke")
  made = training.read_rows(folder / "results" / "smoke-prepare.jsonl")
  purposes = [row["purpose"] for row in made]
  assert purposes == [
    *["samples"] * 2, *["nowcaster"] * 2, *["predictor"] * 2, "cut", "samples",
    "predictor", "samples", *["moved"] * 3,
  ]  # fmt: skip
  assert [row["samples"] for row in made[:2]] == [6, 6]
  # One of each run's six is held out.
  assert made[8]["samples"] == 10 and made[8]["runs"] == 2
  moved = [(row["to"], row["kind"], row["runs"]) for row in made[-3:]]
  assert moved == [
    ("4-workers", *which)
    for which in (("published", 1), ("rich", 1), ("published", 2))
  ]
  # The row has that run's own result, too.
  reached = made[9]["validation_accuracy"]
  assert {row["ordinary_accuracy"] for row in made[-3:]} == {reached}
  # What is there is not made again.
  assert test_comparisons.run(folder, "prepare.py", "smoke") == ""
  names = ("baseline", "ours", "mp2 as published", "wnn")
  test_comparisons.run(folder, "run.py", "smoke", "--variants", *names)
  rows = training.read_rows(folder / "results" / "smoke.jsonl")
  assert tuple(row["method"] for row in rows) == names
  base, ours, published, wnn = rows
  assert base["both_bytes"] == 2 * base["uplink_bytes"] == wnn["both_bytes"]
  assert ours["both_bytes"] < 0.4 * base["both_bytes"]
  # All comes back from the published server.
  assert published["both_bytes"] == (
    published["uplink_bytes"] + base["uplink_bytes"]
  )
  told = test_comparisons.run(folder, "report.py", "smoke")
  assert "| mp2 as published |" in told and "nowcaster of dense" in told
  assert told.count("moved to 4-workers") == 3
  assert (folder / "results" / "smoke.png").stat().st_size > 0


@pytest.mark.slow
def test_family_is_measured(tmp_path):
  folder = test_comparisons.copied("mp2", tmp_path)
  pytest.importorskip("sklearn")
  words = (
    "--dataset digits --front 6 --rears 5 4 3 --runs 2 --batch-size 128 "
    "--samples 4 --updates 2 --new-updates 1 --held-out 60 --seeds 0"
  )
  told = test_comparisons.run(folder, "family.py", *words.split())
  rows = training.read_rows(folder / "results" / "digits-family.jsonl")
  # Six predictors of known members, and six for the new one.
  assert [row["rear"] for row in rows] == [*3 * [5, 4], *6 * [3]]
  assert {row["runs"] for row in rows} == {2}
  assert "| one member's, 2 updates | 2 | " in told
