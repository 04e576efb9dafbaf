"""The loop over a grid's ticks: one program for all devices of a pipeline."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist import collectives
from jdist.pipeline.runtime import (
  _grid,
  _stage_arrays,
  _stages,
  _tied_leaves,
)
from jdist.pipeline.schedule import Op

PyTree = Any
# (outputs of the last stage, micro-batch) -> loss, metrics
OutputLoss = Callable[[Any, PyTree], tuple[jax.Array, dict[str, jax.Array]]]


class TicksState(NamedTuple):
  """What is under way between two steps, on one device.

  Attributes:
    batches: of the last iterations, [iterations, micro-batches, ...].
    inputs: of each chunk's micro-batches, [chunks, slots, ...].
    states: the model's state before each micro-batch's forward pass, likewise.
    gradients: of each chunk's outputs, [chunks, slots, ...].
    output: of the last tick, which has not been sent.
    gradient: likewise, of an input.
    grads: sums so far, [iterations, chunks, ...].
    totals: sums of loss and metrics so far, and of how much the micro-batches
      counted that are in them, [iterations, scalars].
  """

  batches: PyTree
  inputs: jax.Array
  states: PyTree
  gradients: jax.Array
  output: jax.Array
  gradient: jax.Array
  grads: PyTree
  totals: jax.Array


class Ticks:
  """A pipeline's program: stages, loss and grid."""

  def __init__(
    self,
    stages: Sequence[_stages.LayerLike],
    loss: OutputLoss,
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
    self._between: list[Any] = []
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
      self._between.append(x)
    self._last_input = x
    self.names = self._metric_names()
    dtypes = {leaf.dtype for x in self._between for leaf in jax.tree.leaves(x)}
    if len(dtypes) > 1:
      raise ValueError(
        "`stages` must pass on arrays of one dtype in one program, got "
        f"{', '.join(sorted(map(str, dtypes)))}. Cast in the layers, or run "
        "each stage in a process of its own."
      )
    self._dtype = next(iter(dtypes), jnp.dtype(jnp.float32))
    self._size = max(
      (sum(leaf.size for leaf in jax.tree.leaves(x)) for x in self._between),
      default=1,
    )

  @property
  def sent_bytes(self) -> int:
    """Bytes that a device sends in a tick, each way."""
    return self._size * self._dtype.itemsize

  def start(self) -> TicksState:
    """Makes an empty pipeline, of one device."""
    grid, chunks = self.grid, self.params.num_chunks
    turns = grid.behind + 1
    one = jax.tree.map(
      lambda x: jnp.zeros((turns, grid.num_microbatches, *x.shape), x.dtype),
      self._microbatch,
    )
    state = self._one_chunk(self.states, self._stages[0].state)
    sums = self._one_chunk(self.params, self._stages[0].params)
    empty = TicksState(
      batches=one,
      inputs=jnp.zeros((chunks, grid.slots, self._size), self._dtype),
      states=jax.tree.map(
        lambda x: jnp.zeros((chunks, grid.slots, *x.shape), x.dtype), state
      ),
      gradients=jnp.zeros(
        (chunks, grid.gradient_slots, self._size), self._dtype
      ),
      output=jnp.zeros(self._size, self._dtype),
      gradient=jnp.zeros(self._size, self._dtype),
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
    flight: TicksState,
    batch: PyTree,
    step: jax.Array,
    rows: jax.Array,
    key_of: Callable[[jax.Array], jax.Array],
    num_fed: jax.Array | int | None = None,
  ) -> tuple[PyTree, PyTree, jax.Array, TicksState]:
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
    actions = self._actions(versions, key_of)

    def tick(
      carry: tuple[PyTree, TicksState], row: jax.Array
    ) -> tuple[tuple[PyTree, TicksState], None]:
      state, flight = carry
      sent = flight.output, flight.gradient
      if self._late:  # Beside this tick's actions, which do not need it.
        came = self._shift(*sent)
      for lane in (_grid.FORWARD, _grid.BACKWARD):
        op, chunk, number, offset = row[lane : lane + 4]
        iteration = step - offset
        there = (iteration >= 0) & (iteration < limit)
        which = jnp.where(there, self._branch(op, chunk, device), 0)
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

  # Below, what one device does in one tick.

  def _actions(
    self,
    versions: Sequence[PyTree],
    key_of: Callable[[jax.Array], jax.Array],
  ) -> dict[int, list[Callable[..., tuple[PyTree, TicksState]]]]:
    """Returns the branches of both lanes, the first of which does nothing."""

    def idle(
      state: PyTree, flight: TicksState, *_: Any
    ) -> tuple[PyTree, TicksState]:
      return state, flight

    forward = [
      self._forward(s, versions, key_of) for s in range(self.grid.num_stages)
    ]
    used = self.grid.backward_actions
    backward = [
      self._backward(s, op, versions, key_of) if (op, s) in used else idle
      for op in self.grid.backward_ops  # No branch that nobody takes.
      for s in range(self.grid.num_stages)
    ]
    return {
      _grid.FORWARD: [idle, *forward],
      _grid.BACKWARD: [idle, *backward],
    }

  def _branch(
    self, op: jax.Array, chunk: jax.Array, device: jax.Array
  ) -> jax.Array:
    """Returns the branch of an op: 1 + stage of the first kind and so on."""
    stage = chunk * self.grid.num_devices + device
    kind = sum(
      i * (op == int(x)).astype(op.dtype)
      for i, x in enumerate(self.grid.backward_ops)
    )
    return jnp.where(op > 0, 1 + kind * self.grid.num_stages + stage, 0)

  def _forward(
    self,
    number: int,
    versions: Sequence[PyTree],
    key_of: Callable[[jax.Array], jax.Array],
  ) -> Callable[..., tuple[PyTree, TicksState]]:
    last = number + 1 == self.grid.num_stages

    def forward(
      state: PyTree,
      flight: TicksState,
      chunk: jax.Array,
      microbatch: jax.Array,
      iteration: jax.Array,
      offset: jax.Array,
    ) -> tuple[PyTree, TicksState]:
      if last:  # Its backward pass runs it.
        return state, flight
      slot = self._slot(microbatch, iteration, self.grid.slots)
      own = jax.tree.map(lambda x: x[chunk], state)
      flight = flight._replace(
        states=jax.tree.map(
          lambda ring, x: ring.at[chunk, slot].set(x), flight.states, own
        )
      )
      batch = self._batch(flight, microbatch, iteration)
      key = self._key(key_of, iteration, microbatch)
      y, new = _stages.apply_layer(
        self._stages[number],
        self._params(versions, number, offset),
        self.states.to_tree(own, number),
        self._input(flight, number, chunk, slot, batch, key),
        batch,
        key,
      )
      state = self._with_state(state, new, number, chunk)
      return state, flight._replace(output=self._flat(y))

    return forward

  def _backward(
    self,
    number: int,
    op: Op,
    versions: Sequence[PyTree],
    key_of: Callable[[jax.Array], jax.Array],
  ) -> Callable[..., tuple[PyTree, TicksState]]:
    last = number + 1 == self.grid.num_stages
    to_input = number > 0 and op != Op.BACKWARD_WEIGHT
    to_params = op != Op.BACKWARD_INPUT

    def backward(
      state: PyTree,
      flight: TicksState,
      chunk: jax.Array,
      microbatch: jax.Array,
      iteration: jax.Array,
      offset: jax.Array,
    ) -> tuple[PyTree, TicksState]:
      slot = self._slot(microbatch, iteration, self.grid.slots)
      turn = iteration % (self.grid.behind + 1)
      batch = self._batch(flight, microbatch, iteration)
      own = jax.tree.map(lambda x: x[chunk, slot], flight.states)
      if last:  # It has not run yet, and its weight part runs it again.
        now = jax.tree.map(lambda x: x[chunk], state)
        own = own if op == Op.BACKWARD_WEIGHT else now
        if op == Op.BACKWARD_INPUT:
          flight = flight._replace(
            states=jax.tree.map(
              lambda ring, x: ring.at[chunk, slot].set(x), flight.states, now
            )
          )
      before = self.states.to_tree(own, number)
      stage = self._stages[number]
      key = self._key(key_of, iteration, microbatch)
      x = self._input(flight, number, chunk, slot, batch, key)
      params = self._params(versions, number, offset)

      def run(params: PyTree, x: Any) -> tuple[Any, tuple[PyTree, PyTree]]:
        y, new = _stages.apply_layer(stage, params, before, x, batch, key)
        if not last:
          return y, (new, {})
        loss, metrics = self._loss(y, batch)
        return loss, (new, {"loss": loss, **metrics})

      def of_params(params: PyTree) -> Any:
        return run(params, x)

      def of_input(x: Any) -> Any:
        return run(params, x)

      if to_params and to_input:
        y, pull, (new, metrics) = jax.vjp(run, params, x, has_aux=True)
      else:
        one, at = (of_params, params) if to_params else (of_input, x)
        if not to_params and not to_input:
          one, at = of_params, params
        y, pull, (new, metrics) = jax.vjp(one, at, has_aux=True)
      if last:
        weight = self._weight(flight, microbatch, turn)
        cotangent = jnp.ones_like(y) * weight.astype(y.dtype)
        if op != Op.BACKWARD_WEIGHT:
          state = self._with_state(state, new, number, chunk)
          found = jnp.stack(
            [
              *(metrics[name].astype(jnp.float32) for name in self.names),
              jnp.ones((), jnp.float32),
            ]
          )
          flight = flight._replace(
            totals=flight.totals.at[turn].add(weight * found)
          )
      else:
        waiting = self._slot(microbatch, iteration, self.grid.gradient_slots)
        cotangent = self._unflat(
          flight.gradients[chunk, waiting], self._between[number]
        )
      pulled = list(pull(cotangent))
      if to_params:
        grads = self.params.to_own(pulled.pop(0), number)
        flight = flight._replace(
          grads=jax.tree.map(
            lambda total, g: total.at[turn, chunk].add(g.astype(total.dtype)),
            flight.grads,
            grads,
          )
        )
      if to_input:
        flight = flight._replace(gradient=self._flat(pulled.pop(0)))
      return state, flight

    return backward

  def _receive(
    self,
    flight: TicksState,
    came: tuple[jax.Array, jax.Array],
    row: jax.Array,
    step: jax.Array,
  ) -> TicksState:
    """Stores what came from both neighbours."""
    for lane, field, slots, value in (
      (_grid.ACTIVATION, "inputs", self.grid.slots, came[0]),
      (_grid.GRADIENT, "gradients", self.grid.gradient_slots, came[1]),
    ):
      flag, chunk, number, offset = row[lane : lane + 4]
      slot = self._slot(number, step - offset, slots)
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

  def _params(
    self,
    versions: Sequence[PyTree],
    number: int,
    offset: jax.Array,
  ) -> PyTree:
    """Returns a stage's parameters, in the version that an iteration reads.

    What began `offset` steps ago reads `delay - behind + offset` versions
    before the newest; at first all of them are the initial one.
    """
    first = self.grid.delay - self.grid.behind

    def own(version: PyTree) -> PyTree:
      return self.params.chunk(version, number)

    read = versions[first : first + self.grid.behind + 1]
    if len(read) == 1:
      found = own(read[0])
    else:
      found = jax.lax.switch(
        offset,
        [lambda x=x: own(x) for x in read],
      )
    return self.params.to_tree(found, number)

  def _with_state(
    self, state: PyTree, new: PyTree, number: int, chunk: jax.Array
  ) -> PyTree:
    own = self.states.to_own(new, number)
    return jax.tree.map(lambda x, y: x.at[chunk].set(y), state, own)

  def _input(
    self,
    flight: TicksState,
    number: int,
    chunk: jax.Array,
    slot: jax.Array,
    batch: PyTree,
    key: jax.Array,
  ) -> Any:
    if not number:
      return self._inputs(batch, key)
    return self._unflat(flight.inputs[chunk, slot], self._between[number - 1])

  def _batch(
    self, flight: TicksState, microbatch: jax.Array, iteration: jax.Array
  ) -> PyTree:
    turn = iteration % (self.grid.behind + 1)
    return jax.tree.map(lambda x: x[turn, microbatch], flight.batches)

  def _key(
    self,
    key_of: Callable[[jax.Array], jax.Array],
    iteration: jax.Array,
    microbatch: jax.Array,
  ) -> jax.Array:
    """Returns a micro-batch's key, as `training.make_gradient` derives it."""
    key = key_of(iteration)
    several = self.grid.num_microbatches > 1
    return jax.random.fold_in(key, microbatch) if several else key

  def _weight(
    self, flight: TicksState, microbatch: jax.Array, turn: jax.Array
  ) -> jax.Array:
    """Returns how much a micro-batch counts: by its samples, if masked."""
    batches = flight.batches
    if not isinstance(batches, dict) or "mask" not in batches:
      return jnp.ones((), jnp.float32)
    counts = (batches["mask"][turn] != 0).sum(-1, dtype=jnp.float32)
    return counts[microbatch] / jnp.maximum(counts.mean(), 1e-9)

  def _slot(
    self, microbatch: jax.Array, iteration: jax.Array, slots: int
  ) -> jax.Array:
    return (iteration * self.grid.num_microbatches + microbatch) % slots

  def _flat(self, x: Any) -> jax.Array:
    parts = [leaf.reshape(-1) for leaf in jax.tree.leaves(x)]
    used = sum(part.size for part in parts)
    if used < self._size:
      parts.append(jnp.zeros(self._size - used, self._dtype))
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]

  def _unflat(self, flat: jax.Array, like: Any) -> Any:
    leaves, structure = jax.tree.flatten(like)
    found, start = [], 0
    for leaf in leaves:
      part = jax.lax.slice(flat, (start,), (start + leaf.size,))
      found.append(part.reshape(leaf.shape))
      start += leaf.size
    return jax.tree.unflatten(structure, found)

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
