"""A tick's actions: the passes of each stage, as branches of a conditional."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist.pipeline.runtime import _grid, _stage_arrays, _traced_model
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


class Place(NamedTuple):
  """The work of a device in a tick, int32 scalars.

  Attributes:
    chunk: Which of the device's stages acts.
    microbatch: The number of the micro-batch in its iteration.
    iteration: The iteration of the micro-batch.
    offset: The number of iterations since that one.
  """

  chunk: jax.Array
  microbatch: jax.Array
  iteration: jax.Array
  offset: jax.Array


Branch = Callable[[PyTree, TicksState, Place], tuple[PyTree, TicksState]]


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
    message: _stage_arrays.Message,
  ):
    self.grid, self.params, self.states = grid, params, states
    self._model, self._message = model, message

  def branches(
    self, versions: Sequence[PyTree], key_of: KeyOf
  ) -> dict[int, list[Branch]]:
    """Returns the branches of both lanes, the first of which is idle."""

    def idle(
      state: PyTree, flight: TicksState, at: Place
    ) -> tuple[PyTree, TicksState]:
      del at
      return state, flight

    given, stages = (versions, key_of), range(self.grid.num_stages)
    lanes: dict[int, list[Branch]] = {
      _grid.FORWARD: [idle], _grid.BACKWARD: [idle]
    }  # fmt: skip
    for s in stages[:-1]:
      run = functools.partial(self._forward, s, *given)
      lanes[_grid.FORWARD].append(run)
    # The last stage's backward pass follows at once and runs it anyway.
    lanes[_grid.FORWARD].append(idle)
    used = self.grid.backward_actions
    for op, s in itertools.product(self.grid.backward_ops, stages):
      run = functools.partial(self._backward, s, op, *given)
      # XLA compiles every branch, so one that no row takes is left empty.
      lanes[_grid.BACKWARD].append(run if (op, s) in used else idle)
    return lanes

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

  def slot(self, at: Place, slots: int) -> tuple[jax.Array, jax.Array]:
    """Returns the chunk of a micro-batch and its place in the chunk's ring."""
    number = at.iteration * self.grid.num_microbatches + at.microbatch
    return at.chunk, number % slots

  def _forward(
    self,
    number: int,
    versions: Sequence[PyTree],
    key_of: KeyOf,
    state: PyTree,
    flight: TicksState,
    at: Place,
  ) -> tuple[PyTree, TicksState]:
    own = jax.tree.map(lambda x: x[at.chunk], state)
    flight = self._keep_state(flight, own, at)
    y, (new, _) = self._model.run(
      number,
      self._params(versions, number, at.offset),
      self._input(flight, number, at),
      self.states.to_tree(own, number),
      self._batch(flight, at),
      key_of(at.iteration, at.microbatch),
    )
    state = self._with_state(state, new, number, at.chunk)
    return state, flight._replace(output=self._message.flat(y, number))

  def _backward(
    self,
    number: int,
    op: Op,
    versions: Sequence[PyTree],
    key_of: KeyOf,
    state: PyTree,
    flight: TicksState,
    at: Place,
  ) -> tuple[PyTree, TicksState]:
    last = number + 1 == self.grid.num_stages
    to_input = number > 0 and op != Op.BACKWARD_WEIGHT
    to_params = op != Op.BACKWARD_INPUT
    # The input part of the first stage has no gradient to compute, but its
    # forward pass may be due; differentiating in the parameters runs it.
    by_params = to_params or not to_input
    # The pass runs the forward pass again from its saved input and needs the
    # state that the forward pass had seen.
    slot = self.slot(at, self.grid.slots)
    own = jax.tree.map(lambda x: x[slot], flight.states)
    if last:
      # Here this is the first run, on the newest state, which the weight part
      # of the same micro-batch will need again.
      now = jax.tree.map(lambda x: x[at.chunk], state)
      own = own if op == Op.BACKWARD_WEIGHT else now
      if op == Op.BACKWARD_INPUT:
        flight = self._keep_state(flight, now, at)
    batch = self._batch(flight, at)
    before = self.states.to_tree(own, number)
    key = key_of(at.iteration, at.microbatch)
    x = self._input(flight, number, at)
    params = self._params(versions, number, at.offset)

    # `given` has the parameters, the input, or both.
    def run(*given: Any) -> tuple[Any, tuple[PyTree, PyTree]]:
      read = given[0] if by_params else params
      into = given[-1] if to_input else x
      return self._model.run(number, read, into, before, batch, key)

    given = [params] * by_params + [x] * to_input
    y, pull, (new, metrics) = jax.vjp(run, *given, has_aux=True)
    turn = at.iteration % (self.grid.behind + 1)
    if last:
      batches = jax.tree.map(lambda x: x[turn], flight.batches)
      weight = jnp.asarray(_traced_model.sample_weights(batches, at.microbatch))
      cotangent = jnp.ones_like(y) * weight.astype(y.dtype)
      if op != Op.BACKWARD_WEIGHT:
        state = self._with_state(state, new, number, at.chunk)
        # The last entry counts the weights.
        found = [metrics[name] for name in self._model.metric_names]
        found = [x.astype(jnp.float32) for x in (*found, jnp.ones(()))]
        totals = flight.totals.at[turn].add(weight * jnp.stack(found))
        flight = flight._replace(totals=totals)
    else:
      waiting = self.slot(at, self.grid.gradient_slots)
      cotangent = self._message.unflat(flight.gradients[waiting], number)
    pulled = list(pull(cotangent))
    if to_params:
      grads = jax.tree.map(
        lambda total, g: total.at[turn, at.chunk].add(g.astype(total.dtype)),
        flight.grads,
        self.params.to_own(pulled.pop(0), number),
      )
      flight = flight._replace(grads=grads)
    if to_input:
      gradient = self._message.flat(pulled.pop(0), number - 1)
      flight = flight._replace(gradient=gradient)
    return state, flight

  def _params(
    self, versions: Sequence[PyTree], number: int, offset: jax.Array
  ) -> PyTree:
    """Returns a stage's parameters in the version that an iteration reads.

    An iteration that began `offset` steps ago reads `delay - behind + offset`
    versions before the newest; at first all of them are the initial one.
    """
    first = self.grid.delay - self.grid.behind
    read = [
      functools.partial(self.params.chunk, x, number)
      for x in versions[first : first + self.grid.behind + 1]
    ]
    # A switch copies one version; indexing into a stack would copy all.
    found = read[0]() if len(read) == 1 else jax.lax.switch(offset, read)
    return self.params.to_tree(found, number)

  def _keep_state(
    self, flight: TicksState, own: PyTree, at: Place
  ) -> TicksState:
    slot = self.slot(at, self.grid.slots)
    states = jax.tree.map(
      lambda ring, x: ring.at[slot].set(x), flight.states, own
    )
    return flight._replace(states=states)

  def _with_state(
    self, state: PyTree, new: PyTree, number: int, chunk: jax.Array
  ) -> PyTree:
    own = self.states.to_own(new, number)
    return jax.tree.map(lambda x, y: x.at[chunk].set(y), state, own)

  def _input(self, flight: TicksState, number: int, at: Place) -> Any:
    if not number:  # It reads the batch.
      return None
    sent = flight.inputs[self.slot(at, self.grid.slots)]
    return self._message.unflat(sent, number - 1)

  def _batch(self, flight: TicksState, at: Place) -> PyTree:
    turn = at.iteration % (self.grid.behind + 1)
    return jax.tree.map(lambda x: x[turn, at.microbatch], flight.batches)
