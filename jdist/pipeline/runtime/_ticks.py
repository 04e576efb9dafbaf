"""The loop over a grid's ticks: one program for all devices of a pipeline."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist import collectives, states
from jdist.pipeline.runtime import (
  _grid,
  _stage_arrays,
  _stages,
  _tick_actions,
  _traced_model,
)
from jdist.pipeline.runtime._tick_actions import Place, TicksState
from jdist.states import PyTree


class _Copies(NamedTuple):
  """The places of a tied leaf's copies in the devices' packed buffers.

  `starts` of copies, 0 without one, whether a copy is `there`, and whether the
  chunk is the `owner`, of the first stage, are arrays [devices, chunks].
  """

  dtype: str
  size: int
  starts: np.ndarray
  there: np.ndarray
  owner: np.ndarray


class TiedLeaves:
  """Sums the gradients of tied leaves, and gives all copies one update.

  Equal gradients are not enough to keep copies equal: a codec may round a leaf
  differently in another place of the buffer.  So all copies take the first
  stage's update.
  """

  def __init__(
    self,
    stages: Sequence[_stages.LayerLike],
    params: _stage_arrays.StageArrays,
    axis: str,
  ):
    """Looks up the copies; parameters are packed if there are any."""
    devices = params.num_devices
    shape = devices, params.num_stages // devices
    self._axis = axis
    self.leaves: list[_Copies] = []
    for path, holders in _stages.shared_paths(stages).items():
      starts, there, owner = (
        np.zeros(shape, kind) for kind in (np.int32, bool, bool)
      )
      for stage in holders:
        place = params.find(stage, path)
        # Stage s is chunk s // D of device s % D.
        at = stage % devices, stage // devices
        starts[at], there[at] = place.start, True
        owner[at] = stage == holders[0]
      self.leaves.append(_Copies(place.dtype, place.size, starts, there, owner))

  def sum(self, grads: PyTree) -> PyTree:
    """Gives each copy the sum over all copies; arrays are [chunks, size]."""
    return self._shared(grads, "there")

  def share(self, updates: PyTree) -> PyTree:
    """Gives each copy the value of the first stage's."""
    return self._shared(updates, "owner")

  def once(self, grads: PyTree) -> PyTree:
    """Sets all copies but the first stage's to zero."""
    if not self.leaves:
      return grads
    again = [leaf.there & ~leaf.owner for leaf in self.leaves]
    return self._changed(grads, again, lambda _, own: jnp.zeros_like(own))

  def _shared(self, arrays: PyTree, source: str) -> PyTree:
    if not self.leaves:
      return arrays
    # Every device sums its own chunks' copies; one collective for all leaves
    # then adds over the devices.
    device = collectives.index(self._axis)
    totals = []
    for leaf in self.leaves:
      starts, counted = (
        jnp.asarray(x)[device] for x in (leaf.starts, getattr(leaf, source))
      )
      total = jnp.zeros(leaf.size, arrays[leaf.dtype].dtype)
      for chunk, row in enumerate(arrays[leaf.dtype]):
        own = jax.lax.dynamic_slice(row, (starts[chunk],), (leaf.size,))
        # Select, as a product would turn an inf of another leaf into NaN.
        total += jnp.where(counted[chunk], own, jnp.zeros_like(own))
      totals.append(total)
    totals = jax.lax.psum(totals, self._axis)
    there = [leaf.there for leaf in self.leaves]
    return self._changed(arrays, there, lambda i, own: totals[i])

  def _changed(
    self,
    arrays: PyTree,
    places: Sequence[np.ndarray],
    change: Callable[[int, jax.Array], jax.Array],
  ) -> PyTree:
    """Replaces the copies at `places` by `change(leaf, copy)`.

    All devices run the same slices, as one program must; where a chunk has no
    copy, the slice at 0 is written back unchanged.
    """
    device, arrays = collectives.index(self._axis), dict(arrays)
    for i, (leaf, of_leaf) in enumerate(zip(self.leaves, places, strict=True)):
      starts, there = (jnp.asarray(x)[device] for x in (leaf.starts, of_leaf))
      for chunk, row in enumerate(arrays[leaf.dtype]):
        start = (starts[chunk],)
        own = jax.lax.dynamic_slice(row, start, (leaf.size,))
        new = jnp.where(there[chunk], change(i, own), own)
        row = jax.lax.dynamic_update_slice(row, new, start)
        arrays[leaf.dtype] = arrays[leaf.dtype].at[chunk].set(row)
    return arrays


class Ticks:
  """The ticks of a step on one device.

  The loop's body is the same for all devices: a conditional for the forward
  lane, one for the backward lane, and two permutes that always run.  The
  permutes stand outside of the conditionals, as a collective in a branch that
  only some devices take would hang; a device that has nothing to send sends
  what it sent before, and the receiver's row says whether to keep it.
  """

  def __init__(
    self,
    model: _traced_model.TracedModel,
    grid: _grid.Grid,
    *,
    late: bool,
    axis: str,
  ):
    """Lays out parameters, state and messages; `late` sends overlap ticks."""
    self.grid, self.axis, self._late, self.model = grid, axis, late, model
    stages = model.stages
    # Stacked leaves lose their stages' names, by which tied ones are found.
    shared = bool(_stages.shared_paths(stages))
    self.params = _stage_arrays.StageArrays(
      [x.params for x in stages],
      grid.num_devices,
      pack=shared or None,
      apart=True,
    )
    self.tied = TiedLeaves(stages, self.params, axis)
    self.states = _stage_arrays.StageArrays(
      [x.state for x in stages], grid.num_devices
    )
    self.message = _stage_arrays.Message(model.between)
    self._actions = _tick_actions.TickActions(
      model, grid, self.params, self.states, self.message
    )
    self.stash = self._actions.stash

  def start(self) -> TicksState:
    """Makes an empty pipeline of one device."""
    grid, chunks = self.grid, self.params.num_chunks
    turns = grid.behind + 1
    size, dtype = self.message.size, self.message.dtype
    first = self.model.stages[0]
    # The shapes of one chunk's arrays.
    state = jax.eval_shape(lambda x: self.states.to_own(x, 0), first.state)
    sums = jax.eval_shape(lambda x: self.params.to_own(x, 0), first.params)
    stashed = {
      kind: jax.ShapeDtypeStruct((length,), kind)
      for kind, length in self.stash.sizes.items()
    }

    def zeros(tree: PyTree, *front: int, wide: bool = False) -> PyTree:
      def zero(x: Any) -> jax.Array:
        dtype = states.wide_dtype(x.dtype) if wide else x.dtype
        return jnp.zeros((*front, *x.shape), dtype)

      return jax.tree.map(zero, tree)

    empty = TicksState(
      batches=zeros(self.model.microbatch, turns, grid.num_microbatches),
      inputs=jnp.zeros((chunks, grid.slots, size), dtype),
      states=zeros(state, chunks, grid.slots),
      gradients=jnp.zeros((chunks, grid.gradient_slots, size), dtype),
      stash=zeros(stashed, chunks, grid.stash_slots),
      stashed=zeros(stashed),
      output=jnp.zeros(size, dtype),
      gradient=jnp.zeros(size, dtype),
      grads=zeros(sums, turns, chunks, wide=True),
      totals=jnp.zeros((turns, len(self.model.metric_names) + 1), jnp.float32),
    )
    return collectives.varying(empty, self.axis)

  def run(
    self,
    versions: Sequence[PyTree],
    state: PyTree,
    flight: TicksState,
    batch: PyTree,
    step: jax.Array,
    rows: jax.Array,
    key_of: _tick_actions.KeyOf,
    num_fed: jax.Array | None = None,
  ) -> tuple[PyTree, PyTree, jax.Array, TicksState]:
    """Runs the ticks of a step on one device.

    `versions` of the parameters begin with the newest one; `state` is [chunks,
    ...], `rows` int32 [ticks, columns].  Iteration `step` begins with `batch`,
    [micro-batches, ...], unless it is beyond the first `num_fed`.

    Returns:
      The mean gradient of iteration `step - behind`, of the parameters' dtypes;
      the model's state; the means of loss and metrics of that iteration; the
      work in progress.  In the first steps, which complete no gradient, the
      means are those of the first iteration so far.
    """
    grid, axis = self.grid, self.axis
    turns = grid.behind + 1
    place = step % turns
    # A loop's carry must have one type throughout, and so must vary over the
    # workers' axis from the start if anything that enters it does.
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
    limit = step + 1 if num_fed is None else num_fed
    actions = self._actions.branches(versions, key_of)

    def tick(
      carry: tuple[PyTree, TicksState], row: jax.Array
    ) -> tuple[tuple[PyTree, TicksState], None]:
      state, flight = carry
      if self._late:
        # Nothing in this tick depends on these sends before `_receive`, so XLA
        # starts them before the conditionals and finishes them after.
        received = self._shift(flight.output, flight.gradient)
      for lane in (_grid.FORWARD, _grid.BACKWARD):
        op, at = self._place(row, lane, step)
        # While the pipeline fills, rows name iterations before the first one.
        there = (at.iteration >= 0) & (at.iteration < limit)
        which = jnp.where(there, self._actions.branch(op, at.chunk, device), 0)
        state, flight = jax.lax.switch(which, actions[lane], state, flight, at)
      flight = flight._replace(stash=self._actions.stored(flight, op, at))
      if not self._late:
        received = self._shift(flight.output, flight.gradient)
      # XLA copies rings that are written before the actions may have read them.
      flight = jax.lax.optimization_barrier(flight)
      flight = self._receive(flight, received, row, step)
      return (state, flight), None

    # With a scan instead of an unrolled loop the program does not grow with the
    # number of micro-batches.
    (state, flight), _ = jax.lax.scan(tick, (state, flight), rows)
    done = (step - grid.behind) % turns
    count = grid.num_microbatches
    grads = jax.tree.map(lambda total: total[done] / count, flight.grads)
    if self.params.apart:
      grads = self.params.take_apart(grads)
    grads = jax.tree.map(lambda g, w: g.astype(w.dtype), grads, versions[0])
    totals = flight.totals[jnp.where(step < grid.behind, 0, done)]
    # Only the last stage's device has added to the totals.
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
    flight: TicksState,
    received: tuple[jax.Array, jax.Array],
    row: jax.Array,
    step: jax.Array,
  ) -> TicksState:
    """Stores the messages from both neighbours."""
    for lane, field, slots, value in (
      (_grid.ACTIVATION, "inputs", self.grid.slots, received[0]),
      (_grid.GRADIENT, "gradients", self.grid.gradient_slots, received[1]),
    ):
      flag, at = self._place(row, lane, step)
      slot = self._actions.slot(at, slots)
      ring = getattr(flight, field)
      # Without a message the old value is written again: this updates the ring
      # in place, where a conditional would copy it.
      value = jnp.where(flag > 0, value, ring[slot])
      flight = flight._replace(**{field: ring.at[slot].set(value)})
    return flight

  def _place(
    self, row: jax.Array, lane: int, step: jax.Array
  ) -> tuple[jax.Array, Place]:
    """Returns a lane's op or flag, and the place that it is for."""
    op, chunk, number, offset = row[lane : lane + 4]
    return op, Place(chunk, number, step - offset, offset)

  def _shift(
    self, output: jax.Array, gradient: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Sends outputs to the next device, and gradients to the previous one."""
    number = self.grid.num_devices
    if number == 1:
      return output, gradient
    # The last device sends to the first only if devices have several stages.
    ring = self.grid.num_stages > number
    steps = [(i, (i + 1) % number) for i in range(number - (not ring))]
    back = [(b, a) for a, b in steps]
    return (
      jax.lax.ppermute(output, self.axis, steps),
      jax.lax.ppermute(gradient, self.axis, back),
    )
