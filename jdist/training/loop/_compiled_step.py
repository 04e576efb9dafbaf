"""A worker's step as programs, one for each control, and what each sends."""

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jdist import collectives, transforms
from jdist.training import _step, _train_state

PyTree = Any


class CompiledStep:
  """Compiles a step for each control once, however often it is used."""

  def __init__(self, workers: collectives.Workers, step: _step.Step):
    """Compiles nothing yet."""
    self.workers = workers
    self.takes_control = _takes_control(step)
    # Of the metrics, once the step has been traced.
    self.names: tuple[str, ...] = ()
    self._step = step
    self._programs: dict[Any, Any] = {}
    self._traffic: dict[Any, collectives.Traffic] = {}

    def all_finite(state: _train_state.TrainState) -> jax.Array:
      model = (state.params, state.model_state)
      bad = ~_train_state.is_finite(model, state.opt_state)
      # The workers must decide alike, since all of them write a checkpoint.
      return collectives.sum(bad.astype(jnp.float32), workers.axis) == 0

    self._all_finite = workers.jit(all_finite)

  def _packed(
    self,
    state: _train_state.TrainState,
    batch: PyTree,
    control: transforms.Control,
  ) -> tuple[_train_state.TrainState, jax.Array]:
    """Runs the step; its metrics are one array, as each would be a transfer."""
    state, metrics = self._step(state, batch, **_given(control))
    if missing := {"loss", "rounds"} - metrics.keys():
      raise ValueError(
        f"`step` must return the metrics `loss` and `rounds`, but {missing} "
        f"are missing; got {sorted(metrics)}."
      )
    self.names = tuple(sorted(metrics))
    values = [jnp.asarray(metrics[n], jnp.float32) for n in self.names]
    return state, jnp.stack(values)

  def program(
    self, state: _train_state.TrainState, control: transforms.Control
  ) -> Any:
    """Returns the compiled step for states that live where this one does."""
    specs = self.workers.specs(state)
    leaves, structure = jax.tree.flatten(specs)
    key = (control, structure, tuple(leaves))
    if key not in self._programs:
      # A state comes out as it went in; else the compiler may split it
      # otherwise over the mesh's other axes, and the next call is another.
      self._programs[key] = self.workers.jit(
        functools.partial(self._packed, control=control),
        donate_argnums=0,
        out_specs=(specs, None),
      )
    return self._programs[key]

  def traffic(
    self,
    state: _train_state.TrainState,
    batch: PyTree,
    control: transforms.Control,
  ) -> collectives.Traffic:
    """Returns what one worker sends in a step and in a round."""

    def one(x: Any) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

    args = jax.tree.map(one, (state, batch))
    leaves, structure = jax.tree.flatten(args)
    key = (control, structure, tuple((x.shape, str(x.dtype)) for x in leaves))
    if key not in self._traffic:  # It costs as much as tracing the step.
      self._traffic[key] = collectives.traffic(
        functools.partial(self._step, **_given(control)),
        *args,
        axis=self.workers.axis,
        num_workers=self.workers.num_workers,
        inner_axes=self.workers.inner_axes,
      )
    return self._traffic[key]

  def is_finite(self, state: _train_state.TrainState) -> bool:
    """Returns whether training can go on from a state."""
    return bool(self.workers.view(self._all_finite(state)))

  def check_communicates(
    self,
    state: _train_state.TrainState,
    traffic: Iterable[collectives.Traffic],
  ) -> None:
    """Raises a ValueError for several workers whose programs send nothing."""
    num = self.workers.num_workers
    if num == 1:
      return
    # All that plain Optax lets a step send.
    statistics = sum(
      x.nbytes // x.shape[0]
      for x in jax.tree.leaves(state.model_state)
      if jnp.issubdtype(x.dtype, jnp.floating)
    )
    sent = max(
      sum(c.payload_bytes * c.count for c in x.collectives) for x in traffic
    )
    if sent <= statistics:
      raise ValueError(
        f"`step` must bring the workers together, but of {num} workers "
        f"{_step.SILENT}"
      )


def _takes_control(step: _step.Step) -> bool:
  """Returns whether a user's own step passes a control on."""
  try:
    parameters = inspect.signature(step).parameters
  except (TypeError, ValueError):
    return False
  kinds = {p.kind for p in parameters.values()}
  return "control" in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _given(control: transforms.Control) -> dict[str, Any]:
  """A step of a user's own may know nothing of a control."""
  return {} if control == transforms.Control() else {"control": control}
