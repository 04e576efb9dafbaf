"""Predictors on the disk: they come back, and others are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import models, prediction
from tests import _refusals
from tests.prediction import _tiny
from tests.prediction._fits import (
  assert_same_bits,
  model,
  predictor,
)


def test_saved_predictor_is_restored(tmp_path):
  # Of convolutions, with names of two parts.
  cut = prediction.cut(
    models.build(
      "resnet8",
      input_shape=(8, 8, 1),
      num_classes=10,
      norm="none",
      abstract=True,
    ),
    5,
  )
  ours = prediction.predictor(cut, 2, grid=8)
  params = jax.jit(ours.init)(jax.random.key(0))
  prediction.save_predictor(tmp_path, ours, params, {"accuracy": 0.9})
  for known in (None, cut):
    theirs, read = prediction.load_predictor(tmp_path, known)
    assert theirs == ours
    assert_same_bits(read, params)
    assert jax.tree.structure(read) == jax.tree.structure(params)


def test_predictor_of_another_network_or_cut_is_refused(tmp_path):
  params = predictor().init(jax.random.key(0))
  prediction.save_predictor(tmp_path, predictor(), params)
  with pytest.raises(
    ValueError, match=r"dense1\.kernel float32\[64, 7\].*dense1\.kernel.*6\]"
  ):
    prediction.load_predictor(tmp_path, _tiny.cut(hidden_sizes=(7, 5)))
  with pytest.raises(ValueError, match=r"dense2\.kernel.*behind the cut"):
    prediction.load_predictor(tmp_path, _tiny.cut(2))
  other = prediction.predictor(_tiny.cut(2))
  with _refusals.refused("params", "of Predictor("):
    prediction.save_predictor(tmp_path, other, params)
  for path in tmp_path.glob("*.npy"):
    path.write_bytes(path.read_bytes()[:-1])
  with pytest.raises(ValueError, match="damaged"):
    prediction.load_predictor(tmp_path)
  with _refusals.refused("cut", "got Model("):
    prediction.load_predictor(tmp_path, model())
  with pytest.raises(FileNotFoundError, match="must hold predictor"):
    prediction.load_predictor(tmp_path / "nothing")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda x: x.astype(jnp.bfloat16), "must be float32.*is bfloat16"),
    (lambda x: x.astype(jnp.float16), "must be float32.*is float16"),
    (lambda x: x.at[0].set(jnp.nan), "must be finite"),
  ],
)
def test_unusable_parameters_are_not_saved(change, message, tmp_path):
  params = predictor().init(jax.random.key(0))
  prediction.save_predictor(tmp_path, predictor(), params)
  with pytest.raises(ValueError, match=f"`params` {message}"):
    prediction.save_predictor(
      tmp_path, predictor(), jax.tree.map(change, params)
    )
  _, found = prediction.load_predictor(tmp_path)
  assert_same_bits(found, params)
  with _refusals.refused("about", "a value of JSON"):
    prediction.save_predictor(
      tmp_path / "b", predictor(), params, {"accuracy": np.float32(0.5)}
    )
  assert not (tmp_path / "b").exists()
