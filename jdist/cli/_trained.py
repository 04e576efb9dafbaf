"""The method that needs a trained network: MP² and its predictor."""

from typing import Any

import jax
import jax.numpy as jnp

from jdist import models, prediction
from jdist.cli import _groups
from jdist.storage import hashes


def fingerprint(options: _groups.NetworkOptions) -> str:
  """Returns a hash of the predictor's parameters."""
  _, params = _load(options, prediction.load_predictor)
  return hashes.fingerprint(*jax.tree.leaves(params))[:16]


def arguments(
  options: _groups.NetworkOptions, model: models.Model | None
) -> dict[str, Any]:
  """Returns the arguments of MP² that come from a trained predictor."""
  # Its predictor knows the parameters of one architecture only.
  assert model is not None
  if jax.tree.leaves(model.state):
    raise ValueError(
      "`--model` must have no batch statistics for mp2, which neither sends "
      f"nor predicts them, got {options.model}. Take `--norm none` or `--norm "
      "group`, where the model has a choice."
    )

  def load(path: str) -> tuple[prediction.Predictor, Any]:
    theirs = prediction.load_predictor(path)[0].cut
    try:  # A network of too few layers cannot be cut there at all.
      cut = prediction.cut(model, len(theirs.front), name=options.model)
    except ValueError as error:
      raise ValueError(f"it was trained for {theirs!r}. {error}") from error
    return prediction.load_predictor(path, cut)

  found, params = _load(options, load)
  cut, predict = found.cut, found.apply
  return {"cut": cut, "predict": predict, "predictor_params": params}


def counted_arguments(
  num_layers: int | None, name: str, model: models.Model
) -> dict[str, Any]:
  """Returns the arguments of MP² with a predictor of zeros, to count bytes.

  If `num_layers` is None, as many layers are sent as published for the name.
  """
  if num_layers is None:
    if name not in prediction.PUBLISHED:
      raise ValueError(
        f"`--cut` must be given for mp2 with {name}: the number of layers that "
        "are sent. Published numbers are known for "
        f"{', '.join(prediction.PUBLISHED)}."
      )
    num_layers = len(prediction.published_cut(name).front)
  try:
    cut = prediction.cut(model, num_layers, name=name)
  except ValueError as error:
    raise ValueError(f"`--cut` cannot be used: {error}") from error
  _, rear = cut.split(cut.abstract())

  # Only the bytes count, so that any numbers will do.
  def predict(first: Any, front: Any) -> Any:
    del first, front
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rear)

  return {"cut": cut, "predict": predict, "predictor_params": ()}


def _load(options: _groups.NetworkOptions, load: Any) -> Any:
  path = options.predictor
  if path is None:
    raise ValueError(
      "`--predictor` must be given for mp2: a directory that "
      "`jdist.prediction.save_predictor` has written."
    )
  # The room of files does not know the option that names one.
  try:
    return load(path)
  except (ValueError, OSError) as error:
    raise ValueError(f"`--predictor` {path} cannot be used: {error}") from error
