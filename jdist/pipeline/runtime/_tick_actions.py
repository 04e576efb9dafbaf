"""A tick's actions: the passes of each stage, as branches of a conditional."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist.pipeline.runtime import (
  _grid,
  _message,
  _stage_arrays,
  _traced_model,
)
from jdist.pipeline.schedule._table import Op

PyTree = Any
# (iteration, micro-batch) -> random key
KeyOf = Callable[[jax.Array, jax.Array], jax.Array]


class TicksState(NamedTuple):
  """What one device of a pipeline keeps between two ticks.

  Attributes:
    batches: The batches of the iterations in progress, [iterations,
      micro-batches, ...].
    inputs: The inputs of each chunk's micro-batches, [chunks, slots, ...].
    states: The model's state before each micro-batch's forward pass, likewise.
    gradients: The gradients of each chunk's outputs, [chunks, slots, ...].
    output: The output of the last forward pass, to be sent.
    gradient: The gradient of an input from the last backward pass, likewise.
    grads: The sums of gradients so far, [iterations, chunks, ...].
    totals: The sums of loss, metrics and weights of the micro-batches so far,
      [iterations, scalars].
  """

  batches: PyTree
  inputs: jax.Array
  states: PyTree
  gradients: jax.Array
  output: jax.Array
  gradient: jax.Array
  grads: PyTree
  totals: jax.Array


# (state, flight, chunk, micro-batch, iteration, offset) -> (state, flight)
Branch = Callable[..., tuple[PyTree, TicksState]]


class TickActions:
  """The branches that a device's conditionals choose among in a tick.

  A branch holds no collective: devices take different branches in one tick, and
  a permute inside would wait for devices that never reach it.
  """

  def __init__(
    self,
    model: _traced_model.TracedModel,
    grid: _grid.Grid,
    params: _stage_arrays.StageArrays,
    states: _stage_arrays.StageArrays,
    message: _message.Message,
  ):
    self.grid, self.params, self.states = grid, params, states
    self._model, self._message = model, message

  def branches(
    self, versions: Sequence[PyTree], key_of: KeyOf
  ) -> dict[int, list[Branch]]:
    """Returns the branches of both lanes, the first of which is idle."""

    def idle(
      state: PyTree, flight: TicksState, *_: Any
    ) -> tuple[PyTree, TicksState]:
      return state, flight

    stages = range(self.grid.num_stages)
    forward = [self._forward(s, versions, key_of) for s in stages]
    used = self.grid.backward_actions
    backward = [
      # XLA compiles every branch, so one that no row takes is left empty.
      self._backward(s, op, versions, key_of) if (op, s) in used else idle
      for op in self.grid.backward_ops
      for s in stages
    ]
    return {
      _grid.FORWARD: [idle, *forward],
      _grid.BACKWARD: [idle, *backward],
    }

  def branch(
    self, op: jax.Array, chunk: jax.Array, device: jax.Array
  ) -> jax.Array:
    """Returns the number of an op's branch, in the order of `branches`."""
    stage = chunk * self.grid.num_devices + device
    kind = sum(
      i * (op == int(x)).astype(op.dtype)
      for i, x in enumerate(self.grid.backward_ops)
    )
    return jnp.where(op > 0, 1 + kind * self.grid.num_stages + stage, 0)

  def slot(
    self, microbatch: jax.Array, iteration: jax.Array, slots: int
  ) -> jax.Array:
    """Returns a micro-batch's place in a ring."""
    return (iteration * self.grid.num_microbatches + microbatch) % slots

  def _forward(
    self, number: int, versions: Sequence[PyTree], key_of: KeyOf
  ) -> Branch:
    last = number + 1 == self.grid.num_stages

    def forward(
      state: PyTree,
      flight: TicksState,
      chunk: jax.Array,
      microbatch: jax.Array,
      iteration: jax.Array,
      offset: jax.Array,
    ) -> tuple[PyTree, TicksState]:
      # The last stage's backward pass follows at once and runs it anyway.
      if last:
        return state, flight
      slot = self.slot(microbatch, iteration, self.grid.slots)
      own = jax.tree.map(lambda x: x[chunk], state)
      flight = self._keep_state(flight, own, chunk, slot)
      batch = self._batch(flight, microbatch, iteration)
      y, (new, _) = self._model.run(
        number,
        self._params(versions, number, offset),
        self._input(flight, number, chunk, slot),
        self.states.to_tree(own, number),
        batch,
        key_of(iteration, microbatch),
      )
      state = self._with_state(state, new, number, chunk)
      return state, flight._replace(output=self._message.flat(y))

    return forward

  def _backward(
    self, number: int, op: Op, versions: Sequence[PyTree], key_of: KeyOf
  ) -> Branch:
    last = number + 1 == self.grid.num_stages
    to_input = number > 0 and op != Op.BACKWARD_WEIGHT
    to_params = op != Op.BACKWARD_INPUT
    # The input part of the first stage has no gradient to compute, but its
    # forward pass may be due; differentiating in the parameters runs it.
    by_params = to_params or not to_input

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
      # The pass runs the forward pass again from its saved input and needs the
      # state that the forward pass had seen.
      own = jax.tree.map(lambda x: x[chunk, slot], flight.states)
      if last:
        # Here this is the first run, on the newest state, which the weight part
        # of the same micro-batch will need again.
        now = jax.tree.map(lambda x: x[chunk], state)
        own = own if op == Op.BACKWARD_WEIGHT else now
        if op == Op.BACKWARD_INPUT:
          flight = self._keep_state(flight, now, chunk, slot)
      before = self.states.to_tree(own, number)
      key = key_of(iteration, microbatch)
      x = self._input(flight, number, chunk, slot)
      params = self._params(versions, number, offset)

      def run(params: PyTree, x: Any) -> tuple[Any, tuple[PyTree, PyTree]]:
        return self._model.run(number, params, x, before, batch, key)

      if by_params and to_input:
        y, pull, (new, metrics) = jax.vjp(run, params, x, has_aux=True)
      elif by_params:
        y, pull, (new, metrics) = jax.vjp(
          lambda params: run(params, x), params, has_aux=True
        )
      else:
        y, pull, (new, metrics) = jax.vjp(
          lambda x: run(params, x), x, has_aux=True
        )
      if last:
        weight = self._weight(flight, microbatch, turn)
        cotangent = jnp.ones_like(y) * weight.astype(y.dtype)
        if op != Op.BACKWARD_WEIGHT:
          state = self._with_state(state, new, number, chunk)
          names = self._model.metric_names
          found = jnp.stack(
            [
              *(metrics[name].astype(jnp.float32) for name in names),
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
    self, versions: Sequence[PyTree], number: int, offset: jax.Array
  ) -> PyTree:
    """Returns a stage's parameters in the version that an iteration reads.

    An iteration that began `offset` steps ago reads `delay - behind + offset`
    versions before the newest; at first all of them are the initial one.
    """
    first = self.grid.delay - self.grid.behind

    def own(version: PyTree) -> PyTree:
      return self.params.chunk(version, number)

    read = versions[first : first + self.grid.behind + 1]
    if len(read) == 1:
      found = own(read[0])
    else:
      # A switch copies one version; indexing into a stack would copy all.
      found = jax.lax.switch(offset, [lambda x=x: own(x) for x in read])
    return self.params.to_tree(found, number)

  def _keep_state(
    self, flight: TicksState, own: PyTree, chunk: jax.Array, slot: jax.Array
  ) -> TicksState:
    return flight._replace(
      states=jax.tree.map(
        lambda ring, x: ring.at[chunk, slot].set(x), flight.states, own
      )
    )

  def _with_state(
    self, state: PyTree, new: PyTree, number: int, chunk: jax.Array
  ) -> PyTree:
    own = self.states.to_own(new, number)
    return jax.tree.map(lambda x, y: x.at[chunk].set(y), state, own)

  def _input(
    self, flight: TicksState, number: int, chunk: jax.Array, slot: jax.Array
  ) -> Any:
    if not number:  # It reads the batch.
      return None
    return self._message.unflat(flight.inputs[chunk, slot], number - 1)

  def _batch(
    self, flight: TicksState, microbatch: jax.Array, iteration: jax.Array
  ) -> PyTree:
    turn = iteration % (self.grid.behind + 1)
    return jax.tree.map(lambda x: x[turn, microbatch], flight.batches)

  def _weight(
    self, flight: TicksState, microbatch: jax.Array, turn: jax.Array
  ) -> jax.Array:
    batches = jax.tree.map(lambda x: x[turn], flight.batches)
    return jnp.asarray(_traced_model.sample_weights(batches, microbatch))
