"""`--method mp2` with a trained predictor."""

import chex
import jax
import jax.numpy as jnp
import pytest

from jdist import cli, collectives, models, prediction, transforms
from jdist.cli import _commands, _groups, _methods
from jdist.storage import array_files


def mlp(**options):
  return models.build("mlp", input_shape=(8, 8, 1), num_classes=10, **options)


@pytest.fixture
def predictor(tmp_path):
  """The directory of one for the digits' default model."""
  found = prediction.predictor(prediction.cut(mlp(), 1, name="mlp"))
  params = found.init(jax.random.key(1))
  prediction.save_predictor(tmp_path / "predictor", found, params)
  return tmp_path / "predictor"


def built(method, model, **options):
  options = _commands.Train(steps=10, momentum=0.0, **options)
  budget = _methods.make_budget(options, 0.5, steps_per_epoch=2.5)
  return _methods.build_method(method, options, budget, None, model)


def test_mp2_predicts_the_rest(predictor):
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


@pytest.mark.parametrize("command", ["train --method", "compare --methods"])
def test_predictor_of_another_network_is_refused(command, predictor, refusal):
  told = refusal(f"{command} mp2 --predictor {predictor} --model lenet")
  assert f"`--predictor` {predictor} cannot be used" in told
  # The error names the first leaf that differs, with both shapes.
  assert "conv1.kernel float32[5, 5, 1, 6]" in told
  assert "dense1.kernel float32[64, 128]" in told


def test_directory_without_a_predictor_is_refused(tmp_path, refusal):
  array_files.save_arrays(tmp_path, {"w": jnp.ones(2)}, {"what": "tracks"})
  told = refusal(f"train --method mp2 --predictor {tmp_path}")
  assert "must hold predictor, got tracks" in told


@pytest.mark.slow
def test_run_resumes_only_with_its_predictor(predictor, tmp_path, capsys):
  words = "train --method mp2 --steps 2 --warmup-epochs 0 --workers 2"
  words += f" --output {tmp_path / 'out'} --checkpoints {tmp_path / 'kept'}"
  words = [*words.split(), "--predictor"]
  assert cli.main([*words, str(predictor)]) == 0
  # The path may change if the predictor does not.
  moved = predictor.rename(tmp_path / "moved")
  assert cli.main([*words, str(moved)]) == 0
  capsys.readouterr()
  found, params = prediction.load_predictor(moved)
  others = jax.tree.map(lambda x: x + 1, params)
  prediction.save_predictor(predictor, found, others)
  assert cli.main([*words, str(predictor)]) == 2
  assert "is of another network than in the check" in capsys.readouterr().err


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

  options = _groups.Common()
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
