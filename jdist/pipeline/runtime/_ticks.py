"""The loop over a grid's ticks: one program for all devices of a pipeline."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist import collectives
from jdist.pipeline.runtime import (
  _grid,
  _message,
  _stage_arrays,
  _stages,
  _tick_actions,
  _tied_leaves,
)

PyTree = Any


class Ticks:
  """A pipeline's program: stages, loss and grid."""

  def __init__(
    self,
    stages: Sequence[_stages.LayerLike],
    loss: _stages.OutputLoss,
    grid: _grid.Grid,
    inputs: Callable[[PyTree, jax.Array], Any],
    microbatch: PyTree,
    *,
    late: bool,
    axis: str | None,
  ):
    """Traces the shapes of everything.

    Args:
      stages: of the model.
      loss: of the last stage's outputs.
      grid: what is done when.
      inputs: gives the first stage's inputs of a micro-batch and its key.
      microbatch: one, or its shapes.
      late: whether sends run beside the next tick.
      axis: of the devices; None for one device.
    """
    self.grid, self.axis, self._late = grid, axis, late
    self._stages, self._loss, self._inputs = tuple(stages), loss, inputs
    shared = bool(_stages.shared_paths(stages))
    self.params = _stage_arrays.StageArrays(
      [x.params for x in stages],
      grid.num_devices,
      pack=shared or None,
      apart=True,
    )
    self.tied = _tied_leaves.TiedLeaves(stages, self.params, axis)
    self.states = _stage_arrays.StageArrays(
      [x.state for x in stages], grid.num_devices
    )
    self._microbatch = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), microbatch
    )
    between: list[Any] = []
    key = jax.eval_shape(lambda: jax.random.key(0))
    x = jax.eval_shape(inputs, self._microbatch, key)
    for stage in stages[:-1]:
      x, _ = jax.eval_shape(
        functools.partial(_stages.apply_layer, stage),
        stage.params,
        stage.state,
        x,
        self._microbatch,
        key,
      )
      between.append(x)
    self._last_input = x
    self.names = self._metric_names()
    self._message = _message.Message(between)
    self._actions = _tick_actions.TickActions(
      stages, loss, grid, inputs, self.params, self.states, self._message,
      self.names,
    )  # fmt: skip

  @property
  def sent_bytes(self) -> int:
    """Bytes that a device sends in a tick, each way."""
    return self._message.sent_bytes

  def start(self) -> _tick_actions.TicksState:
    """Makes an empty pipeline, of one device."""
    grid, chunks = self.grid, self.params.num_chunks
    turns = grid.behind + 1
    one = jax.tree.map(
      lambda x: jnp.zeros((turns, grid.num_microbatches, *x.shape), x.dtype),
      self._microbatch,
    )
    size, dtype = self._message.size, self._message.dtype
    state = self._one_chunk(self.states, self._stages[0].state)
    sums = self._one_chunk(self.params, self._stages[0].params)
    empty = _tick_actions.TicksState(
      batches=one,
      inputs=jnp.zeros((chunks, grid.slots, size), dtype),
      states=jax.tree.map(
        lambda x: jnp.zeros((chunks, grid.slots, *x.shape), x.dtype), state
      ),
      gradients=jnp.zeros((chunks, grid.gradient_slots, size), dtype),
      output=jnp.zeros(size, dtype),
      gradient=jnp.zeros(size, dtype),
      grads=jax.tree.map(
        lambda x: jnp.zeros((turns, chunks, *x.shape), _wide(x.dtype)), sums
      ),
      totals=jnp.zeros((turns, len(self.names) + 1), jnp.float32),
    )
    return collectives.varying(empty, self.axis)

  def run(
    self,
    versions: Sequence[PyTree],
    state: PyTree,
    flight: _tick_actions.TicksState,
    batch: PyTree,
    step: jax.Array,
    rows: jax.Array,
    key_of: Callable[[jax.Array], jax.Array],
    num_fed: jax.Array | int | None = None,
  ) -> tuple[PyTree, PyTree, jax.Array, _tick_actions.TicksState]:
    """Runs the ticks of a step.

    Args:
      versions: of one device's parameters, the newest first.
      state: of the model, [chunks, ...].
      flight: what is under way.
      batch: of the iteration that begins, [micro-batches, ...].
      step: its number.
      rows: of the grid, this device's: int32 [ticks, columns].
      key_of: gives an iteration's random key.
      num_fed: iterations that there are; later ones are not begun.

    Returns:
      The mean gradient of iteration `step - behind`, like the parameters, the
      model's state, the means of loss and metrics of that iteration, and what
      is under way.  Before there is one the means are of the first one, so far.
    """
    grid, axis = self.grid, self.axis
    turns = grid.behind + 1
    place = step % turns
    # All that a loop carries has one type: over the workers' axis, too.
    everything = (versions, state, flight, batch, step, rows)
    everything = collectives.varying(everything, axis)
    versions, state, flight, batch, step, rows = collectives.varying_like(
      everything, everything
    )
    flight = flight._replace(
      batches=jax.tree.map(
        lambda ring, x: ring.at[place].set(x), flight.batches, batch
      )
    )
    device = collectives.index(axis)
    limit = step + 1 if num_fed is None else jnp.asarray(num_fed)
    actions = self._actions.branches(versions, key_of)

    def tick(
      carry: tuple[PyTree, _tick_actions.TicksState], row: jax.Array
    ) -> tuple[tuple[PyTree, _tick_actions.TicksState], None]:
      state, flight = carry
      sent = flight.output, flight.gradient
      if self._late:  # Beside this tick's actions, which do not need it.
        came = self._shift(*sent)
      for lane in (_grid.FORWARD, _grid.BACKWARD):
        op, chunk, number, offset = row[lane : lane + 4]
        iteration = step - offset
        there = (iteration >= 0) & (iteration < limit)
        which = jnp.where(there, self._actions.branch(op, chunk, device), 0)
        if lane == _grid.FORWARD:
          which = jnp.minimum(which, grid.num_stages)
        state, flight = jax.lax.switch(
          which, actions[lane], state, flight, chunk, number, iteration, offset
        )
      if not self._late:
        came = self._shift(flight.output, flight.gradient)
      flight = self._receive(flight, came, row, step)
      return (state, flight), None

    (state, flight), _ = jax.lax.scan(tick, (state, flight), rows)
    done = (step - grid.behind) % turns
    count = grid.num_microbatches
    grads = jax.tree.map(lambda total: total[done] / count, flight.grads)
    if self.params.apart:
      grads = self.params.take_apart(grads)
    grads = jax.tree.map(lambda g, w: g.astype(w.dtype), grads, versions[0])
    totals = flight.totals[jnp.where(step < grid.behind, 0, done)]
    if axis is not None:  # The last stage alone has them.
      totals = jax.lax.psum(totals, axis)
    means = totals[:-1] / jnp.maximum(totals[-1], 1e-9)
    flight = flight._replace(
      grads=jax.tree.map(
        lambda x: x.at[done].set(jnp.zeros_like(x[0])), flight.grads
      ),
      totals=flight.totals.at[done].set(0.0),
    )
    grads = self.tied.sum(grads)
    return grads, state, collectives.varying(means, axis), flight

  def _receive(
    self,
    flight: _tick_actions.TicksState,
    came: tuple[jax.Array, jax.Array],
    row: jax.Array,
    step: jax.Array,
  ) -> _tick_actions.TicksState:
    """Stores what came from both neighbours."""
    for lane, field, slots, value in (
      (_grid.ACTIVATION, "inputs", self.grid.slots, came[0]),
      (_grid.GRADIENT, "gradients", self.grid.gradient_slots, came[1]),
    ):
      flag, chunk, number, offset = row[lane : lane + 4]
      slot = self._actions.slot(number, step - offset, slots)
      ring = getattr(flight, field)
      # An old value is written again where nothing came.
      value = jnp.where(flag > 0, value, ring[chunk, slot])
      flight = flight._replace(**{field: ring.at[chunk, slot].set(value)})
    return flight

  def _shift(
    self, output: jax.Array, gradient: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Sends outputs to the next device, and gradients to the one before."""
    number = self.grid.num_devices
    if number == 1:
      return output, gradient
    # From the last to the first only where devices have several stages.
    ring = self.grid.num_stages > number
    steps = [(i, (i + 1) % number) for i in range(number - (not ring))]
    back = [(b, a) for a, b in steps]
    assert self.axis is not None
    return (
      jax.lax.ppermute(output, self.axis, steps),
      jax.lax.ppermute(gradient, self.axis, back),
    )

  def _one_chunk(
    self, arrays: _stage_arrays.StageArrays, first: PyTree
  ) -> PyTree:
    """Returns shapes of one chunk's arrays."""
    return jax.eval_shape(
      lambda: arrays.to_own(
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first), 0
      )
    )

  def _metric_names(self) -> tuple[str, ...]:
    last = self._stages[-1]

    def run(params: PyTree, state: PyTree, x: Any, batch: PyTree) -> Any:
      key = jax.random.key(0)
      y, _ = _stages.apply_layer(last, params, state, x, batch, key)
      return self._loss(y, batch)

    found = jax.eval_shape(
      run, last.params, last.state, self._last_input, self._microbatch
    )
    return ("loss", *sorted(found[1]))


def _wide(dtype: Any) -> Any:
  small = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
  return jnp.float32 if small else dtype
