"""Methods that need networks trained before: MP² and weight nowcasters."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import collectives, methods, models, prediction
from jdist.cli import _options

Chain: TypeAlias = optax.GradientTransformationExtraArgs
_Loaded = TypeVar("_Loaded")
# The option that names a method's networks, and what writes them.
_WRITERS = {
  "predictor": "jdist.prediction.save_predictor",
  "nowcasters": "jdist.prediction.save_nowcasters",
}
NEEDS = {"mp2": "predictor", "wnn": "nowcasters"}


def check_given(options: _options.Common, methods: Sequence[str]) -> None:
  """Raises a ValueError when a method's trained networks are not named."""
  for method in methods:
    option = NEEDS.get(method)
    if option is not None and getattr(options, option) is None:
      raise ValueError(
        f"`--{option}` must be given for {method}: a directory that "
        f"`{_WRITERS[option]}` has written."
      )
  steps = options.nowcast_steps
  if steps is not None and steps < 1:
    raise ValueError(f"`--nowcast-steps` must be at least 1, got {steps}.")


def fingerprint(options: _options.Common, method: str) -> str | None:
  """A hash of the networks that a method uses; None where it uses none.

  Raises:
    ValueError: when there are no such networks.
  """
  if method not in NEEDS:
    return None
  loads: dict[str, Callable[[str], Any]] = {
    "predictor": lambda path: prediction.load_predictor(path)[1],
    "nowcasters": prediction.load_nowcasters,
  }
  params = _loaded(NEEDS[method], options, loads[NEEDS[method]])
  found = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    found.update(f"{jax.tree_util.keystr(path)} {leaf.shape}".encode())
    found.update(np.asarray(leaf).tobytes())
  return found.hexdigest()[:16]


def mp2(
  inner: optax.GradientTransformation,
  options: _options.Common,
  model: models.Model,
  axis: collectives.Axis,
) -> Chain:
  """MP² with the predictor that the options name.

  Raises:
    ValueError: when there is none, or one of another network or cut.
  """
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
  return methods.mp2(inner, predictor.cut, predictor.apply, params, axis=axis)


def counted_mp2(
  inner: optax.GradientTransformation,
  num_layers: int | None,
  name: str,
  model: models.Model,
  axis: collectives.Axis,
) -> Chain:
  """The same without a predictor, for what does not depend on numbers.

  Args:
    inner: the worker's optimizer.
    num_layers: that are sent; None for as many as published.
    name: of the model.
    model: may be abstract.
    axis: the workers' axis.

  Raises:
    ValueError: when nothing is published for the model, or it has fewer layers.
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

  return methods.mp2(inner, cut, predict, (), axis=axis)


def wnn(
  inner: optax.GradientTransformation,
  options: _options.Common,
  steps_per_epoch: int,
  axis: collectives.Axis,
) -> Chain:
  """Synchronous SGD, and every fifth epoch ends in a jump.

  Raises:
    ValueError: when there are no such nowcasters.
  """
  networks = _loaded("nowcasters", options, prediction.load_nowcasters)
  return optax.chain(
    methods.ssgd(inner, axis=axis),
    prediction.nowcast_weights(
      networks, options.nowcast_steps or steps_per_epoch, axis=axis
    ),
  )


def _loaded(
  option: str, options: _options.Common, load: Callable[[str], _Loaded]
) -> _Loaded:
  path = getattr(options, option)
  assert path is not None  # See `check_given`.
  try:
    return load(path)
  except (ValueError, OSError) as error:
    raise ValueError(f"`--{option}` {path} cannot be used: {error}") from error
