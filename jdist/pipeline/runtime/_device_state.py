"""A worker's state on the devices of its pipeline."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jdist import states, training, transforms

PyTree = Any
# Of what all devices of a pipeline have alike.
ALL = PartitionSpec()


@states.declare()
class InFlightState(NamedTuple):
  """An optimizer's state, and what a pipeline has under way.

  Attributes:
    inner: the optimizer's, of each device's own stages: arrays `[devices, ...]`
      and scalars.
    step: iterations that have begun, int32 scalar.
    older: earlier versions of the parameters, as they were read, the newer
      first.
    flight: micro-batches and gradients under way, arrays `[devices, ...]`; an
      empty tuple where each step ends with an empty pipeline.
  """

  inner: PyTree
  step: jax.Array
  older: tuple[PyTree, ...]
  flight: Any


def read(state: InFlightState, params: PyTree) -> PyTree:
  """Returns the newest parameters as an iteration reads them: predicted."""
  return transforms.predicted_weights(state.inner, params)


def spec_of(ndim: int, spec: PartitionSpec) -> PartitionSpec:
  """Returns how an array of the optimizer lies: scalars are of all devices."""
  return spec if ndim else ALL


def state_specs(
  state: training.TrainState, spec: PartitionSpec
) -> training.TrainState:
  """Returns how one worker's state lies on its devices."""
  kept = state.opt_state
  inner = jax.tree.map(lambda x: spec_of(x.ndim, spec), kept.inner)
  opt_state = InFlightState(inner, ALL, spec, spec)  # type: ignore[arg-type]
  return training.TrainState(ALL, spec, opt_state, spec, ALL)  # type: ignore[arg-type]


def on_device(state: training.TrainState) -> training.TrainState:
  """Takes the axis of devices from the arrays of one worker's state.

  Scalars are computed anew, as an argument that is passed on untouched is
  still typed as varying over the workers, and what is computed here is not:
  conditionals would refuse both together.
  """
  state = _mapped(state, lambda x: x[0])
  return jax.tree.map(lambda x: x if x.ndim else x.reshape(1)[0], state)


def on_mesh(state: training.TrainState) -> training.TrainState:
  """Undoes `on_device`."""
  return _mapped(state, lambda x: x[None])


def _mapped(
  state: training.TrainState, change: Callable[[jax.Array], jax.Array]
) -> training.TrainState:
  kept = state.opt_state
  inner = jax.tree.map(lambda x: change(x) if x.ndim else x, kept.inner)
  arrays = (state.params, state.model_state, kept.older, kept.flight)
  params, model_state, older, flight = jax.tree.map(change, arrays)
  return state._replace(
    params=params,
    model_state=model_state,
    opt_state=InFlightState(inner, kept.step, older, flight),
  )


def carried_over(
  fresh: training.TrainState, state: training.TrainState, delay: int
) -> training.TrainState:
  """Returns the state in which another table's program goes on.

  Args:
    fresh: of that program at a run's beginning.
    state: that has come, with nothing under way.
    delay: of the other program: how many earlier versions it reads.

  Raises:
    ValueError: when both are of other stages or optimizers.
  """
  kept = state.opt_state
  for what, wanted, given in (
    ("parameters", fresh.params, state.params),
    ("states of the model", fresh.model_state, state.model_state),
    ("optimizer states", fresh.opt_state.inner, kept.inner),
  ):
    if _shapes(wanted) != _shapes(given):
      raise ValueError(
        f"`state` must be of the program's stages and optimizer, got {what} of "
        "other shapes. Cut the stages alike, and take the same chain."
      )
  # Each a buffer of its own, as a step may use them up.
  older = tuple(
    jax.tree.map(jnp.copy, read(kept, state.params)) for _ in range(delay)
  )
  opt_state = fresh.opt_state._replace(inner=kept.inner, older=older)
  return state._replace(opt_state=opt_state)


def _shapes(tree: PyTree) -> list[tuple[str, Any, Any]]:
  return [
    (jax.tree_util.keystr(path), x.shape, x.dtype)
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  ]
