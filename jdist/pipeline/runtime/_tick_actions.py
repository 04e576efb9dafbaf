"""A tick's actions: the passes of each stage, as branches of a conditional."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist.pipeline.runtime import (
  _grid,
  _message,
  _stage_arrays,
  _stages,
)
from jdist.pipeline.schedule import Op

PyTree = Any


class TicksState(NamedTuple):
  """Messages under way between two steps, on one device.

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


class TickActions:
  """The branches that a device's conditionals choose among in a tick."""

  def __init__(
    self,
    stages: Sequence[_stages.LayerLike],
    loss: _stages.OutputLoss,
    grid: _grid.Grid,
    inputs: Callable[[PyTree, jax.Array], Any],
    params: _stage_arrays.StageArrays,
    states: _stage_arrays.StageArrays,
    message: _message.Message,
    names: Sequence[str],
  ):
    """Takes what the passes need.

    Args:
      stages: of the model.
      loss: of the last stage's outputs.
      grid: what is done when.
      inputs: gives the first stage's inputs of a micro-batch and its key.
      params: the layout of the stages' parameters.
      states: likewise, of the model's state.
      message: the layout of what stages pass on.
      names: of the loss and the metrics.
    """
    self.grid, self.params, self.states = grid, params, states
    self._stages, self._loss, self._inputs = tuple(stages), loss, inputs
    self._message, self._names = message, tuple(names)

  def branches(
    self,
    versions: Sequence[PyTree],
    key_of: Callable[[jax.Array], jax.Array],
  ) -> dict[int, list[Callable[..., tuple[PyTree, TicksState]]]]:
    """Returns those of both lanes, the first of which does nothing.

    Args:
      versions: of one device's parameters, the newest first.
      key_of: gives an iteration's random key.
    """

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

  def branch(
    self, op: jax.Array, chunk: jax.Array, device: jax.Array
  ) -> jax.Array:
    """Returns an op's: 1 + stage of the first kind, and so on."""
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
      slot = self.slot(microbatch, iteration, self.grid.slots)
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
      return state, flight._replace(output=self._message.flat(y))

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
      slot = self.slot(microbatch, iteration, self.grid.slots)
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
              *(metrics[name].astype(jnp.float32) for name in self._names),
              jnp.ones((), jnp.float32),
            ]
          )
          flight = flight._replace(
            totals=flight.totals.at[turn].add(weight * found)
          )
      else:
        waiting = self.slot(microbatch, iteration, self.grid.gradient_slots)
        cotangent = self._message.unflat(
          flight.gradients[chunk, waiting], number
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
        flight = flight._replace(gradient=self._message.flat(pulled.pop(0)))
      return state, flight

    return backward

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
    return self._message.unflat(flight.inputs[chunk, slot], number - 1)

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

  def slot(
    self, microbatch: jax.Array, iteration: jax.Array, slots: int
  ) -> jax.Array:
    """Returns a micro-batch's place in a ring of so many slots."""
    return (iteration * self.grid.num_microbatches + microbatch) % slots
