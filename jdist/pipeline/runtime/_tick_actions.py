"""A tick's actions: the passes of each stage, as branches of a conditional."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist.pipeline.runtime import (
  _grid,
  _split_backward,
  _stage_arrays,
  _stages,
  _traced_model,
)
from jdist.pipeline.schedule._table import Op
from jdist.states import PyTree

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
    stash: What the weight parts of split backward passes read of the input
      parts, by dtype, [chunks, slots, size].
    stashed: That of the last input part, [size].
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
  stash: dict[str, jax.Array]
  stashed: dict[str, jax.Array]
  output: jax.Array
  gradient: jax.Array
  grads: PyTree
  totals: jax.Array


class Place(NamedTuple):
  """The work of a device in a tick, int32 scalars.

  The offset is the number of iterations since that of the micro-batch.
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
    self.stash = _stage_arrays.StageArrays(
      [self._stash_shapes(s) for s in range(grid.num_stages)],
      grid.num_devices,
      pack=True,
    )

  def _stash_shapes(self, number: int) -> list[jax.ShapeDtypeStruct]:
    """Returns what waits between the two parts of a stage's backward pass."""
    if (Op.BACKWARD_INPUT, number) not in self.grid.backward_actions:
      return []
    model, last = self._model, number + 1 == self.grid.num_stages
    stage = model.stages[number]
    key = jax.eval_shape(lambda: jax.random.key(0))
    x = model.between[number - 1] if number else None
    given = stage.params, x, stage.state, model.microbatch, key
    loss = jax.ShapeDtypeStruct((), model.loss_dtype)
    cotangent = loss if last else model.between[number]
    given, cotangent = _stages.shapes_of((given, cotangent))
    parts = self._split(number, given, cotangent)
    found: list[Any] = jax.eval_shape(parts.input_part, given, cotangent)[1]
    return found

  def _split(
    self, number: int, given: Any, cotangent: Any
  ) -> _split_backward.SplitBackward:
    """Splits a backward pass together with the forward pass that it repeats.

    Then the input part runs the forward pass, and the weight part reads its
    values from the stash.
    """
    pull = functools.partial(self._pull, number)
    return _split_backward.split_backward(pull, given, cotangent)

  def _pull(self, number: int, given: Any, cotangent: Any) -> tuple[Any, Any]:
    """Returns a stage's gradients, and the last one's state and metrics."""
    params, x, *others = given

    def run(params: PyTree, x: Any) -> Any:
      return self._model.run(number, params, x, *others)

    _, pull, aux = jax.vjp(run, params, x, has_aux=True)
    grads, gradient = pull(cotangent)
    last = number + 1 == self.grid.num_stages
    return grads, (gradient, aux if last else ())

  def branches(
    self, versions: Sequence[PyTree], key_of: KeyOf
  ) -> dict[int, list[Branch]]:
    """Returns the branches of both lanes, the first of which is idle."""
    given, stages = (versions, key_of), range(self.grid.num_stages)

    def idle(state: PyTree, flight: TicksState, _: Place) -> Any:
      return state, flight

    lanes: dict[int, list[Branch]] = {
      _grid.FORWARD: [idle], _grid.BACKWARD: [idle]
    }  # fmt: skip
    for s in stages[:-1]:
      lanes[_grid.FORWARD].append(functools.partial(self._forward, s, *given))
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
    given = (
      self._params(versions, number, at.offset),
      self._input(flight, number, at),
      self.states.to_tree(own, number),
      self._batch(flight, at),
      key_of(at.iteration, at.microbatch),
    )
    turn = at.iteration % (self.grid.behind + 1)
    if last:
      batches = jax.tree.map(lambda x: x[turn], flight.batches)
      weight = jnp.asarray(_traced_model.sample_weights(batches, at.microbatch))
      cotangent = weight.astype(self._model.loss_dtype)
    else:
      waiting = self.slot(at, self.grid.gradient_slots)
      cotangent = self._message.unflat(flight.gradients[waiting], number)
    grads, gradient, aux = None, None, ()
    if op == Op.BACKWARD:
      grads, (gradient, aux) = self._pull(number, given, cotangent)
    elif op == Op.BACKWARD_INPUT:
      # The split is traced here, too, for the types of this device's values.
      parts = self._split(number, given, cotangent)
      (gradient, aux), stash = parts.input_part(given, cotangent)
      if stash:
        flight = flight._replace(stashed=self.stash.to_own(stash, number))
    else:
      place = self.slot(at, self.grid.stash_slots)
      kept = jax.tree.map(lambda ring: ring[place], flight.stash)
      parts = self._split(number, given, cotangent)
      stash = self.stash.to_tree(kept, number)
      grads = parts.weight_part(given, cotangent, stash)
    if aux:
      new, metrics = aux
      state = self._with_state(state, new, number, at.chunk)
      # The last entry counts the weights.
      found = [metrics[name] for name in self._model.metric_names]
      found = [x.astype(jnp.float32) for x in (*found, jnp.ones(()))]
      totals = flight.totals.at[turn].add(weight * jnp.stack(found))
      flight = flight._replace(totals=totals)
    if grads is not None:
      sums = jax.tree.map(
        lambda total, g: total.at[turn, at.chunk].add(g.astype(total.dtype)),
        flight.grads,
        self.params.to_own(grads, number),
      )
      flight = flight._replace(grads=sums)
    if number and op != Op.BACKWARD_WEIGHT:
      sent = self._message.flat(gradient, number - 1)
      flight = flight._replace(gradient=sent)
    return state, flight

  def stored(
    self, flight: TicksState, op: jax.Array, at: Place
  ) -> dict[str, jax.Array]:
    """Stores what an input part has stashed, at the end of its tick."""
    place = self.slot(at, self.grid.stash_slots)
    # This updates the rings in place, where a conditional would copy them, and
    # costs nothing in the ticks of other actions.
    turns = (op == int(Op.BACKWARD_INPUT)).astype(jnp.int32)
    return jax.lax.fori_loop(
      0,
      turns,
      lambda _, rings: jax.tree.map(
        lambda x, y: x.at[place].set(y), rings, flight.stashed
      ),
      flight.stash,
    )

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
