"""The method that needs a network trained before: MP²."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jdist import models, prediction
from jdist.cli import _groups
from jdist.storage import hashes

_Loaded = TypeVar("_Loaded")
# The option that names a method's networks, which `save_OPTION` writes.
NEEDS = {"mp2": "predictor"}
# All options that only these methods use.
OPTIONS = {"mp2": ("predictor",)}


def check_given(options: _groups.NetworkOptions, names: Sequence[str]) -> None:
  """Raises a ValueError when a method's trained networks are not named."""
  for method in names:
    option = NEEDS.get(method)
    if option is not None and getattr(options, option) is None:
      raise ValueError(
        f"`--{option}` must be given for {method}: a directory that "
        f"`jdist.prediction.save_{option}` has written."
      )


def fingerprint(options: _groups.NetworkOptions, method: str) -> str | None:
  """Returns a hash of the networks that a method uses, None without any."""
  if method not in NEEDS:
    return None
  option = NEEDS[method]
  params = _loaded(option, options, getattr(prediction, f"load_{option}"))
  if option == "predictor":
    _, params = params
  return hashes.fingerprint(*jax.tree.leaves(params))[:16]


def arguments(
  name: str, options: _groups.NetworkOptions, model: models.Model | None
) -> dict[str, Any]:
  """Returns the arguments of a method that are in trained networks."""
  assert model is not None
  if jax.tree.leaves(model.state):
    raise ValueError(
      "`--model` must have no batch statistics for mp2, as they are neither "
      f"sent nor predicted, got {options.model}. Take `--norm none` or "
      "`--norm group`, where the model has a choice."
    )

  def load(path: str) -> tuple[prediction.Predictor, Any]:
    theirs = prediction.load_predictor(path)[0].cut
    try:  # A network of too few layers is another one, too.
      cut = prediction.cut(model, len(theirs.front), name=options.model)
    except ValueError as error:
      raise ValueError(f"it is of {theirs!r}. {error}") from error
    return prediction.load_predictor(path, cut)

  predictor, params = _loaded("predictor", options, load)
  return _predicted(predictor.cut, predictor.apply, params)


def counted_arguments(
  num_layers: int | None, name: str, model: models.Model
) -> dict[str, Any]:
  """Returns those of MP² without a predictor, for what needs no numbers.

  `num_layers` are sent; None for as many as published for the model.
  """
  if num_layers is None:
    if name not in prediction.PUBLISHED:
      raise ValueError(
        "`--cut` must be given for mp2, as none is published for "
        f"{name}: how many layers are sent. For "
        f"{', '.join(prediction.PUBLISHED)} it is known."
      )
    num_layers = len(prediction.published_cut(name).front)
  try:
    cut = prediction.cut(model, num_layers, name=name)
  except ValueError as error:
    raise ValueError(f"`--cut` cannot be used: {error}") from error
  _, rear = cut.split(cut.abstract())

  def predict(first: Any, front: Any) -> Any:
    del first, front
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rear)

  return _predicted(cut, predict, ())


def _predicted(cut: Any, predict: Any, params: Any) -> dict[str, Any]:
  return {"cut": cut, "predict": predict, "predictor_params": params}


def _loaded(
  option: str, options: _groups.NetworkOptions, load: Callable[[str], _Loaded]
) -> _Loaded:
  path = getattr(options, option)
  assert path is not None  # See `check_given`.
  try:
    return load(path)
  except (ValueError, OSError) as error:
    raise ValueError(f"`--{option}` {path} cannot be used: {error}") from error
