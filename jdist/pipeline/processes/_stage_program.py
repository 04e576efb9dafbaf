"""The compiled programs of a stage: forward pass, backward pass, its parts."""

import dataclasses
from collections.abc import Callable
from typing import Any, get_args, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jdist import checks, collectives, reducers, states
from jdist.pipeline.processes import _device_part, _edges, _peers
from jdist.pipeline.runtime import _stages, _traced_model
from jdist.pipeline.runtime._split_backward import split_backward, SplitBackward
from jdist.pipeline.schedule._checker import check_table
from jdist.pipeline.schedule._table import Op, Table
from jdist.states import PyTree

Recompute = Literal["none", "layers", "stage"]


class Forward(NamedTuple):
  """Results of a forward pass; the output of the last stage is the loss."""

  output: Any
  state: PyTree
  metrics: dict[str, jax.Array]
  kept: list[jax.Array]


class StageProgram:
  """The programs of one stage, each compiled once.

  A stage's backward pass uses what its forward pass saved, or runs the stage
  again from its input, or each layer from that layer's input.  If it is split,
  only the input part runs anything again.
  """

  def __init__(
    self,
    model: _traced_model.TracedModel,
    number: int,
    recompute: Recompute,
    jit: Callable[..., Any] = jax.jit,
  ):
    """Makes the programs of stage `number`; they compile when first run."""
    checks.check_choice("recompute", recompute, get_args(Recompute))
    if recompute == "layers":
      stages = list(model.stages)
      stages[number] = _stages.recompute_layers(stages[number])
      model = dataclasses.replace(model, stages=tuple(stages))
    self.recompute = recompute
    self._model, self._number = model, number
    # The first stage reads micro-batches and passes no gradient on.
    self._first = number == 0
    self._structure: Any = None
    self._parts: SplitBackward | None = None
    # Where parameters stand among the arrays that a forward pass keeps.
    self._passed: list[tuple[int, int]] = []
    # What a program donates is used up.  Totals are donated, as each is read by
    # the next addition alone.
    self._forward_program = jit(self._forward)
    self.backward = jit(self._backward, donate_argnums=0)
    # The input part donates nothing, as the weight part reads the same arrays.
    self._input_program = jit(self._input_part)
    self.weight_part = jit(self._weight_part, donate_argnums=0)

  def split(self) -> None:
    """Splits the backward pass, for `input_part` and `weight_part`."""
    model, number = self._model, self._number
    stage = model.stages[number]
    output, kept, _ = jax.eval_shape(
      self._saving,
      stage.params,
      None if self._first else model.between[number - 1],
      stage.state,
      model.microbatch,
      jax.eval_shape(lambda: jax.random.key(0)),
    )
    self._parts = split_backward(self._pull, kept, output)

  def input_part(
    self, cotangent: Any, kept: list[jax.Array], given: Any
  ) -> tuple[Any, Any]:
    """Returns the gradient of the input and what the weight part reads.

    `given` are the forward pass's arguments if it is run again, else None.
    """
    assert self._parts is not None, "call `split` first"
    gradient, again, stash = self._input_program(cotangent, kept, given)
    kept = kept if given is None else again
    return gradient, (*self._parts.prune(kept, cotangent), stash)

  def forward(
    self, params: PyTree, x: Any, state: PyTree, batch: PyTree, key: jax.Array
  ) -> Forward:
    """Runs the stage and keeps what its backward pass needs."""
    found = self._forward_program(params, x, state, batch, key)
    # A program copies an argument that it returns, which would copy parameters
    # once for each micro-batch; so they are put back here.
    leaves = jax.tree.leaves(params)
    for place, number in self._passed:
      found.kept.insert(place, leaves[number])
    return found

  def _run(self, params: PyTree, x: Any, *given: Any) -> Any:
    return self._model.run(self._number, params, x, *given)

  def _forward(
    self, params: PyTree, x: Any, state: PyTree, batch: PyTree, key: jax.Array
  ) -> Forward:
    if self.recompute == "stage":
      output, (new, metrics) = self._run(params, x, state, batch, key)
      return Forward(output, new, metrics, [])
    output, kept, (new, metrics) = self._saving(params, x, state, batch, key)
    own = {id(x): i for i, x in enumerate(jax.tree.leaves(params))}
    self._passed = [(i, own[id(x)]) for i, x in enumerate(kept) if id(x) in own]
    kept = [x for x in kept if id(x) not in own]
    return Forward(output, new, metrics, kept)

  def _saving(
    self, params: PyTree, x: Any, state: PyTree, batch: PyTree, key: jax.Array
  ) -> tuple[Any, list[jax.Array], Any]:
    """Runs the stage and also returns what `_pull` needs."""

    def run(params: PyTree, x: Any = None) -> Any:
      return self._run(params, x, state, batch, key)

    given = (params,) if self._first else (params, x)
    output, pull, aux = jax.vjp(run, *given, has_aux=True)
    kept, self._structure = jax.tree.flatten(pull)
    return output, kept, aux

  def _pull(self, kept: list[jax.Array], cotangent: Any) -> tuple[PyTree, Any]:
    found = jax.tree.unflatten(self._structure, kept)(cotangent)
    return found[0], None if self._first else found[1]

  def _backward(
    self, total: PyTree, cotangent: Any, kept: list[jax.Array], given: Any
  ) -> tuple[Any, PyTree]:
    """Returns the gradient of the input, and adds that of the parameters."""
    kept = kept if given is None else self._saving(*given)[1]
    grads, gradient = self._pull(kept, cotangent)
    return gradient, _add(total, grads)

  def _input_part(
    self, cotangent: Any, kept: list[jax.Array], given: Any
  ) -> tuple[Any, Any, list[Any]]:
    assert self._parts is not None, "call `split` first"
    kept = kept if given is None else self._saving(*given)[1]
    gradient, stash = self._parts.input_part(kept, cotangent)
    # Only new arrays are returned, as the program would copy its arguments.
    again = None if given is None else self._parts.prune(kept, cotangent)[0]
    return gradient, again, stash

  def _weight_part(self, total: PyTree, saved: Any) -> PyTree:
    assert self._parts is not None, "call `split` first"
    return _add(total, self._parts.weight_part(*saved))


@jax.jit
def zero_total(params: PyTree) -> PyTree:
  """Makes a sum of gradients, in float32 for parameters of fewer bits."""
  return jax.tree.map(
    lambda x: jnp.zeros(x.shape, states.wide_dtype(x.dtype)), params
  )


def _add(total: PyTree, grads: PyTree) -> PyTree:
  return jax.tree.map(lambda a, g: a + g.astype(a.dtype), total, grads)


def make_part(
  model: _traced_model.TracedModel,
  table: Table,
  peers: _peers.Peers,
  recompute: Recompute,
  team: collectives.Workers | None,
  message: reducers.MessageCodec | None = None,
  samples: tuple[str, int] | None = None,
) -> _device_part.DevicePart:
  """Checks a table and makes the programs of a process's stages."""
  check_table(table)
  device = peers.device
  own = tuple(s for s, x in enumerate(table.device_of) if x == device)
  tied = _stages.shared_paths(model.stages)
  if model.clip_norm is not None:
    _device_part.check_barriers(table, len(own), "`clip_norm`")
  if tied:
    _device_part.check_barriers(table, len(own), "tied parameters")
  # If the passes of a micro-batch read different versions, the backward pass
  # cannot use what the forward pass saved.
  if table.weights == "newest":
    recompute = "stage"
  halves = {x.stage for x in table.devices[device] if x.op == Op.BACKWARD_INPUT}
  jit = jax.jit if team is None else team.jit
  programs = {s: StageProgram(model, s, recompute, jit) for s in own}
  for s in halves:
    programs[s].split()
  edges: dict[tuple[_peers.Kind, int], _edges.Edge] = {}
  for s, like in enumerate(model.between):
    # Messages between two stages of one device stay where they are.
    if message is not None and table.device_of[s] != table.device_of[s + 1]:
      edge = _edges.Edge(message, samples, like, model.microbatch, jit)
      edges[_peers.Kind.OUTPUT, s + 1] = edges[_peers.Kind.GRADIENT, s] = edge
  return _device_part.DevicePart(
    model, table, own, programs, tied, peers, team, edges
  )
