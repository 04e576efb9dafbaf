"""One run of a table on one device, from a complete state to the next."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist import cluster
from jdist.pipeline.processes import (
  _device_part,
  _peers,
  _stage_program,
  _stage_updates,
)
from jdist.pipeline.runtime import _traced_model
from jdist.pipeline.schedule._table import Action, Op
from jdist.states import PyTree

_OUTPUT, _GRADIENT = _peers.Kind.OUTPUT, _peers.Kind.GRADIENT
# Compiled once: the fold-ins of every micro-batch would else be dispatched one
# by one.
_microbatch_key = jax.jit(_traced_model.microbatch_key, static_argnums=4)


class Segment:
  """Runs a device's actions in order.

  All work in progress is kept here.  At the end of a table none is left, so a
  checkpoint between two segments holds nothing of it.
  """

  def __init__(
    self,
    part: _device_part.DevicePart,
    updates: _stage_updates.UpdateProgram,
    state: _device_part.ProcessState,
    batches: Sequence[PyTree],
    timeline: list[tuple[int, float, float]] | None,
  ):
    """Begins at a state, with batches [micro-batches, samples, ...], or
    [micro-batches, workers, samples, ...].

    The place and the seconds of each action are added to `timeline`.
    """
    self._part, self._state = part, state
    self._updates = _stage_updates.StageUpdates(part, updates, state)
    self._table = part.table
    self._batches, self._timeline = batches, timeline
    self._order = self._table.devices[part.device]
    # The parameters as passes read them, by stage and version.
    self._params = {s: {0: self._updates.read(s)} for s in part.own}
    self._newest = dict.fromkeys(part.own, 0)
    self._model_state = dict(state.model_state)
    self._totals: dict[tuple[int, int], PyTree] = {}
    # The arrays that a forward pass kept; and if the stage is run again, its
    # input, and its state before the pass.
    self._saved: dict[tuple[int, int, int], tuple[list[Any], Any]] = {}
    self._stashed: dict[tuple[int, int, int], Any] = {}
    self._local: dict[_peers.Tag, Any] = {}
    self._edges = {s: dict(x) for s, x in state.edges.items()}
    self._metrics: dict[tuple[int, int], dict[str, jax.Array]] = {}
    self._last_read = self._last_reads()
    leading = 1 + len(part.front)
    weights = functools.partial(_traced_model.sample_weights, leading=leading)
    self._weights = list(map(weights, batches))
    self._workers = np.arange(*part.front) if part.front else 0
    self._key = jax.random.wrap_key_data(jnp.asarray(state.key))

  def run(self) -> tuple[_device_part.ProcessState, list[dict[str, float]]]:
    """Runs all actions and returns the state and each iteration's metrics."""
    act: dict[Op, Callable[[Action, Any], Any]] = {
      Op.FORWARD: self._forward,
      Op.BACKWARD: self._backward,
      Op.BACKWARD_INPUT: self._input_part,
      Op.BACKWARD_WEIGHT: self._weight_part,
      Op.UPDATE: self._update,
    }
    for place, action in enumerate(self._order):
      received = self._wait_for(action)
      start = time.monotonic()
      result = act[action.op](action, received)
      # JAX would dispatch actions far ahead of the device.  Then memory would
      # exceed the table's, and an action's seconds would say nothing.
      jax.block_until_ready(result)
      if self._timeline is not None:
        self._timeline.append((place, start, time.monotonic()))
      self._drop(place)
    metrics = self._all_metrics()
    state = self._state._replace(
      step=self._state.step + len(self._batches),
      params=self._updates.params,
      opt_state=self._updates.opt_state,
      model_state=self._model_state,
      edges=self._edges,
    )
    return state, metrics

  def _forward(self, action: Action, x: Any) -> Any:
    stage = action.stage
    program, given = self._part.programs[stage], (x, self._model_state[stage])
    found = program.forward(*self._arguments(action, *given))
    again = given if program.recompute == "stage" else None
    self._saved[action[1:]] = found.kept, again
    self._model_state[stage] = found.state
    if found.metrics:
      self._metrics[action.iteration, action.microbatch] = found.metrics
    else:
      self._give(_OUTPUT, stage + 1, action, found.output)
    return found.output

  def _backward(self, action: Action, cotangent: Any) -> Any:
    gradient, total = self._part.programs[action.stage].backward(
      self._total(action), cotangent, *self._take_saved(action)
    )
    self._totals[action.stage, action.iteration] = total
    self._give(_GRADIENT, action.stage - 1, action, gradient)
    return total

  def _input_part(self, action: Action, cotangent: Any) -> Any:
    gradient, stash = self._part.programs[action.stage].input_part(
      cotangent, *self._take_saved(action)
    )
    self._stashed[action[1:]] = stash
    self._give(_GRADIENT, action.stage - 1, action, gradient)
    return gradient, stash

  def _weight_part(self, action: Action, _: None) -> Any:
    total = self._part.programs[action.stage].weight_part(
      self._total(action), self._stashed.pop(action[1:])
    )
    self._totals[action.stage, action.iteration] = total
    return total

  def _update(self, action: Action, _: None) -> Any:
    stages = self._updates.ready(action.stage, action.iteration)
    if not stages:
      return None
    self._updates.update(
      {s: self._totals.pop((s, action.iteration)) for s in stages},
      action.iteration,
      self._model_state,
    )
    for s in stages:
      self._newest[s] += 1
      self._params[s][self._newest[s]] = self._updates.read(s)
    return [self._params[s][self._newest[s]] for s in stages]

  def _wait_for(self, action: Action) -> Any:
    """Waits for the message that an action needs from another stage."""
    op, stage, microbatch, iteration = action
    if op == Op.FORWARD and stage:
      like = self._part.like(self._part.model.between[stage - 1])
      return self._take(_OUTPUT, stage - 1, action, like)
    if op in (Op.BACKWARD, Op.BACKWARD_INPUT):
      if stage + 1 == self._table.num_stages:
        weight = self._weights[iteration][microbatch]
        return weight.astype(self._part.model.loss_dtype)
      like = self._part.like(self._part.model.between[stage])
      return self._take(_GRADIENT, stage + 1, action, like)
    return None

  def _give(
    self, kind: _peers.Kind, stage: int, action: Action, value: Any
  ) -> None:
    # The first stage has no other to send a gradient to.
    if stage < 0:
      return
    tag = self._tag(kind, stage, action)
    device = self._table.device_of[stage]
    # A message between two stages of one device stays where it is.
    if device == self._part.device:
      self._local[tag] = value
      return
    edge = self._part.edges.get((kind, stage))
    if edge is not None:
      state, batch = self._edges[action.stage], self._microbatch(action)
      value = edge.encode(kind.name, value, state, batch)
    self._part.peers.send(device, tag, value)

  def _take(
    self, kind: _peers.Kind, source: int, action: Action, like: Any
  ) -> Any:
    tag = self._tag(kind, action.stage, action)
    device = self._table.device_of[source]
    if device == self._part.device:
      return self._local.pop(tag)
    edge = self._part.edges.get((kind, action.stage))
    if edge is None:
      return self._part.peers.receive(device, tag, like)
    found = self._part.peers.receive(device, tag, self._part.like(edge.kinds))
    state, batch = self._edges[action.stage], self._microbatch(action)
    # An edge's state belongs to what a process sends there in return.
    sends = _GRADIENT if kind == _OUTPUT else _OUTPUT
    return edge.decode(sends.name, found, state, batch)

  def _microbatch(self, action: Action) -> PyTree:
    batch = self._batches[action.iteration]
    return jax.tree.map(lambda x: x[action.microbatch], batch)

  def _tag(self, kind: _peers.Kind, stage: int, action: Action) -> _peers.Tag:
    iteration = self._state.step + action.iteration
    return _peers.Tag(kind, stage, action.microbatch, iteration)

  def _take_saved(self, action: Action) -> tuple[list[jax.Array], Any]:
    """Returns what a forward pass kept, and its arguments if it runs again."""
    kept, again = self._saved.pop(action[1:])
    return kept, None if again is None else self._arguments(action, *again)

  def _arguments(self, action: Action, x: Any, state: PyTree) -> Any:
    """Returns the arguments of an action's forward pass."""
    _, stage, microbatch, iteration = action
    version = self._part.versions.read[action]
    step, count = self._state.step + iteration, self._table.num_microbatches
    key = _microbatch_key(self._key, step, self._workers, microbatch, count)
    batch = self._microbatch(action)
    return self._params[stage][version], x, state, batch, key

  def _total(self, action: Action) -> PyTree:
    key = action.stage, action.iteration
    # The backward program donates the sum, so it must not stay here.
    if key in self._totals:
      return self._totals.pop(key)
    return _stage_program.zero_total(self._state.params[action.stage])

  def _last_reads(self) -> dict[tuple[int, int], int]:
    """Returns the place in the order of the last read of each version."""
    found: dict[tuple[int, int], int] = {}
    for place, action in enumerate(self._order):
      # The weight part has all it needs from the input part.
      if action.op in (Op.BACKWARD_WEIGHT, Op.UPDATE):
        continue
      again = self._part.programs[action.stage].recompute == "stage"
      if action.op == Op.FORWARD or again:
        found[action.stage, self._part.versions.read[action]] = place
    return found

  def _drop(self, place: int) -> None:
    """Frees the versions of the parameters that no later pass reads."""
    for s, versions in self._params.items():
      for version in [x for x in versions if x < self._newest[s]]:
        if self._last_read.get((s, version), -1) <= place:
          del versions[version]

  def _all_metrics(self) -> list[dict[str, float]]:
    """Returns each iteration's means, which the last stage has computed."""
    names = self._part.model.metric_names
    last = self._table.device_of[-1]
    count = self._table.num_microbatches
    # One message for all iterations, as nothing waits for metrics.
    shape = len(self._batches), len(names)
    tag = _peers.Tag(_peers.Kind.METRICS, iteration=self._state.step)
    own = None
    if last == self._part.device:
      rows = np.zeros((shape[0], count, shape[1]))
      for (k, m), metrics in self._metrics.items():
        weight = self._weights[k][m]
        rows[k, m] = [
          np.mean(np.asarray(metrics[name], np.float64) * weight)
          for name in names
        ]
      own = rows.mean(1)
    means = self._part.share(last, tag, own, np.zeros(shape))
    return [dict(zip(names, map(float, row), strict=True)) for row in means]


def make_trace(
  orders: Sequence[Sequence[Action]], seconds: Sequence[np.ndarray]
) -> cluster.Trace:
  """Makes a timeline of each device's starts and ends, [turns, actions, 2]."""
  begin = min(x.min() for x in seconds if x.size)
  trace = cluster.Trace()
  for device, order in enumerate(orders):
    for turn in seconds[device]:
      for action, (start, end) in zip(order, turn, strict=True):
        span = float(start - begin), float(end - begin)
        trace.add(f"device {device}", str(action), *span, action.op.kind)
  return trace
