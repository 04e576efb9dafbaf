"""`--method mp2` and `wnn`: with networks that were trained before."""

import chex
import jax
import jax.numpy as jnp
import pytest

from jdist import cli, collectives, models, prediction, transforms
from jdist.cli import _methods, _options


def mlp(**options):
  return models.build("mlp", input_shape=(8, 8, 1), num_classes=10, **options)


@pytest.fixture
def predictor(tmp_path):
  """The directory of one for the digits' default model."""
  found = prediction.predictor(prediction.cut(mlp(), 1, name="mlp"))
  params = found.init(jax.random.key(1))
  prediction.save_predictor(tmp_path / "predictor", found, params)
  return tmp_path / "predictor"


@pytest.fixture
def nowcasters(tmp_path):
  path = tmp_path / "nowcasters"
  prediction.save_nowcasters(
    path, prediction.init_nowcasters(jax.random.key(0))
  )
  return path


def built(method, model, **options):
  options = _options.Train(steps=10, momentum=0.0, **options)
  budget = _methods.make_budget(options, 0.5, steps_per_epoch=2.5)
  return _methods.build_method(method, options, budget, None, model)


def test_the_rest_is_what_the_named_predictor_says(predictor):
  model = mlp(seed=3)
  chain = built("mp2", model, predictor=str(predictor))
  gradients = jax.tree.map(jnp.ones_like, model.params)
  updates, state = chain.update(
    gradients, chain.init(model.params), model.params
  )
  after = transforms.anchor(
    state, transforms.apply_updates(model.params, updates, state)
  )
  loaded, params = prediction.load_predictor(predictor)
  predicted = loaded.apply(params, loaded.cut.split(after)[0])
  chex.assert_trees_all_close(
    loaded.cut.split(after)[1], predicted, rtol=1e-5, atol=1e-6
  )


def test_an_epoch_of_nowcasters_is_a_pass_or_what_is_given(nowcasters):
  model = mlp()
  zeros = jax.tree.map(jnp.zeros_like, model.params)
  for options, jump in (({}, 15), ({"nowcast_steps": 1}, 5)):
    chain = built("wnn", model, nowcasters=str(nowcasters), **options)
    update = jax.jit(chain.update)
    state, params = chain.init(model.params), model.params
    for step in range(1, jump + 1):
      # What does not change is foreseen as it is, but for a rounding.
      gradients = jax.tree.map(lambda x: x + 0.01, zeros)
      updates, state = update(gradients, state, params)
      params = jax.tree.map(jnp.add, params, updates)
      moved = {round(float(x.min()), 6) for x in jax.tree.leaves(updates)}
      assert (len(moved) > 1) == (step == jump), step


@pytest.mark.parametrize("command", ["train --method", "compare --methods"])
def test_a_predictor_of_another_network_is_refused(
  command, predictor, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  words = f"{command} mp2 --predictor {predictor} --model lenet".split()
  assert cli.main(words) == 2
  told = capsys.readouterr().err
  assert f"`--predictor` {predictor} cannot be used" in told
  # The first leaf that differs, and both shapes.
  assert "conv1.kernel float32[5, 5, 1, 6]" in told
  assert "dense1.kernel float32[64, 128]" in told
  assert [path.name for path in tmp_path.iterdir()] == ["predictor"]


def test_what_is_no_predictor_is_refused(nowcasters, capsys):
  words = f"train --method mp2 --predictor {nowcasters}".split()
  assert cli.main(words) == 2
  assert "must hold predictor, got nowcasters" in (capsys.readouterr().err)


@pytest.mark.parametrize(
  "method", [pytest.param(x, marks=pytest.mark.slow) for x in ("mp2", "wnn")]
)
def test_a_run_goes_on_with_the_networks_that_it_began_with(
  method, predictor, nowcasters, tmp_path, capsys
):
  option, path = {
    "mp2": ("--predictor", predictor),
    "wnn": ("--nowcasters", nowcasters),
  }[method]
  words = f"train --method {method} --steps 2 --warmup-epochs 0 --workers 2"
  words += f" --output {tmp_path / 'out'} --checkpoints {tmp_path / 'kept'}"
  assert cli.main([*words.split(), option, str(path)]) == 0
  # The same ones, elsewhere.
  moved = path.rename(tmp_path / "moved")
  assert cli.main([*words.split(), option, str(moved)]) == 0
  capsys.readouterr()
  # Others, where those were.
  if method == "mp2":
    found, params = prediction.load_predictor(moved)
    others = jax.tree.map(lambda x: x + 1, params)
    prediction.save_predictor(path, found, others)
  else:
    others = prediction.init_nowcasters(jax.random.key(1))
    prediction.save_nowcasters(path, others)
  assert cli.main([*words.split(), option, str(path)]) == 2
  told = capsys.readouterr().err
  assert "is of other networks than in the checkpoint" in told


def test_batch_statistics_are_refused(predictor):
  model = models.build("resnet8", input_shape=(8, 8, 1), num_classes=10)
  with pytest.raises(ValueError, match="`--model` must have no batch stat"):
    built("mp2", model, predictor=str(predictor))


def test_published_cuts_are_counted_without_a_predictor():
  sent = {
    name: collectives.traffic(
      *_step(name), axis="worker", num_workers=4
    ).bytes_per_round
    for name in ("lenet",)
  }
  assert sent == {"lenet": 2 * 3 / 4 * 4 * 2572}


def _step(name):
  from jdist.cli import _trained

  options = _options.Common()
  model = prediction.published_model(name)
  chain = _methods.build_method(
    "mp2",
    options,
    _methods.run_of(options, 10, 0, lambda step: 0.1),
    "worker",
    networks=_trained.counted_arguments(None, name, model),
  )

  def step(params, state):
    return chain.update(params, state, params)

  return step, model.params, chain.init(model.params)
