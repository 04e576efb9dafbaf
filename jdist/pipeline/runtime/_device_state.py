"""A worker's state on the devices of its pipeline."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jdist import states, training, transforms
from jdist.pipeline.runtime import _stages
from jdist.states import PyTree

# The placement of arrays that are the same on all devices of a pipeline.
ALL = PartitionSpec()


@states.declare()
class InFlightState(NamedTuple):
  """An optimizer's state and a pipeline's work in progress.

  Attributes:
    inner: The optimizer's state for each device's own stages: arrays
      `[devices, ...]` and scalars.
    step: The number of iterations that have begun, int32 scalar.
    older: Earlier versions of the parameters, as iterations read them, the
      newest first.
    flight: The micro-batches and gradients in progress, arrays `[devices,
      ...]`; an empty tuple if each step ends with an empty pipeline.
  """

  inner: PyTree
  step: jax.Array
  older: tuple[PyTree, ...]
  flight: Any


def state_specs(
  state: training.TrainState, spec: PartitionSpec
) -> training.TrainState:
  """Returns the placement of one worker's state on its devices."""
  kept = state.opt_state
  inner = jax.tree.map(lambda x: spec if x.ndim else ALL, kept.inner)
  opt_state = InFlightState(inner, ALL, spec, spec)  # type: ignore[arg-type]
  return training.TrainState(ALL, spec, opt_state, spec, ALL)  # type: ignore[arg-type]


def on_device(state: training.TrainState) -> training.TrainState:
  """Removes the axis of devices from the arrays of one worker's state."""
  state = _mapped(state, lambda x: x[0])
  # An argument that passes through untouched keeps its type, which varies over
  # the workers' axis; values computed here do not vary, as the program is not
  # checked.  A conditional refuses branches of unlike types, so scalars are
  # computed again.
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
  opt_state = InFlightState(inner, kept.step, older, flight)
  return training.TrainState(
    state.step, params, opt_state, model_state, state.key
  )


def carried_over(
  fresh: training.TrainState, state: training.TrainState, delay: int
) -> training.TrainState:
  """Returns the state in which a program continues another table's run.

  Its initial state is `fresh`, and it reads `delay` earlier versions.
  """
  kept = state.opt_state
  for what, wanted, given in (
    ("parameters", fresh.params, state.params),
    ("states of the model", fresh.model_state, state.model_state),
    ("optimizer states", fresh.opt_state.inner, kept.inner),
  ):
    one, other = map(_stages.by_path, map(_stages.shapes_of, (wanted, given)))
    if one != other:
      raise ValueError(
        f"`state` must be of the program's stages and optimizer, got {what} of "
        "other shapes. Cut the stages alike, and take the same chain."
      )
  # Each version is a buffer of its own, as a step may donate them.
  newest = transforms.predicted_weights(kept.inner, state.params)
  older = tuple(jax.tree.map(jnp.copy, newest) for _ in range(delay))
  opt_state = fresh.opt_state._replace(inner=kept.inner, older=older)
  return state._replace(opt_state=opt_state)
