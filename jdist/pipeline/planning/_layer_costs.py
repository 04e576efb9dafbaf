"""Costs of a model's layers, from compiled programs or measured."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jdist import checks, signatures, states
from jdist.pipeline.planning._costs import LayerCost
from jdist.pipeline.runtime._stages import apply_layer, Layers, make_inputs
from jdist.states import PyTree

CostSource = Literal["compiled", "lowered", "timed"]


# The seconds of a program, and its bytes without arguments and results.
_Cost = tuple[float, float]


class _Passes(NamedTuple):
  """A layer's lowered programs.

  Attributes:
    forward: `(params, state, x, batch, key) -> (y, kept, state)`.
    backward: `(kept, dy) -> (gradients, dx)`; the first layer has no dx.
    towards_input: `(kept, dy) -> dx`; None for the first layer.
    output: The shapes of y.
    kept_bytes: The bytes that the forward pass saves, its input included.
  """

  forward: Any
  backward: Any
  towards_input: Any
  output: PyTree
  kept_bytes: float


@signatures.checked
def layer_costs(
  layers: Layers,
  microbatch: PyTree,
  *,
  inputs: str | Callable[..., Any] = "image",
  source: CostSource = "compiled",
  flops_per_s: float = 1e12,
  bytes_per_s: float = math.inf,
  repeats: signatures.PositiveInt = 5,
) -> list[LayerCost]:
  r"""Finds the cost of each layer of a model for a micro-batch.

  Each layer's forward pass and its vector-Jacobian product are compiled
  separately.  With `"compiled"` a program is not run and takes

  .. math:: \max(F / f, B / b)

  seconds for its floating-point operations F and the bytes B that it reads and
  writes, as the compiler counts them.  `"lowered"` counts operations before the
  compiler changes anything: it takes a second for a large model and gives the
  same costs on every device.  `"timed"` takes the median of runs on this
  machine, alternating between layers.

  Saved bytes are those that the forward pass passes to the backward pass,
  without parameters; an array that two layers save counts in both.  Working
  bytes are the compiler's temporaries, 0 for `"lowered"`.  The loss and the
  optimizer's step are not included.

  Args:
    layers: The layers of the model, in order, such as `Model.layers`.
    microbatch: Arrays, or their shapes unless timed.
    inputs: The inputs of the first layer: a key of the micro-batch, or a
      function of it.
    source: The source of the seconds.
    flops_per_s: The operations f per second of a device of speed 1.
    bytes_per_s: The bytes b per second of its memory; by default reading and
      writing costs nothing.
    repeats: The number of timed runs after a warm-up run.

  >>> import jax
  >>> from jdist import models
  >>> mlp = models.build(
  ...   "mlp", input_shape=(8, 8, 1), num_classes=10, abstract=True
  ... )
  >>> image = jax.ShapeDtypeStruct((16, 8, 8, 1), "float32")
  >>> found = layer_costs(mlp.layers, {"image": image}, source="lowered")
  >>> [x.name for x in found], found[0].parameter_bytes
  (['dense1', 'dense2'], 33280)
  """
  # Lowered programs hold no layer's name, so equal layers have equal texts.
  checks.check_continuous("flops_per_s", flops_per_s, open_low=True)
  checks.check_continuous("bytes_per_s", bytes_per_s, open_low=True)
  key = jax.random.key(0)
  first = make_inputs(inputs, microbatch)
  x = jax.eval_shape(first, microbatch, key)
  shapes = jax.eval_shape(lambda: (microbatch, key))
  passes = []
  for i, layer in enumerate(layers):
    passes.append(_passes(layer, x, *shapes, first=not i))
    x = passes[-1].output
  if source == "timed":
    for leaf in jax.tree.leaves(microbatch):
      if isinstance(leaf, jax.ShapeDtypeStruct):
        raise ValueError(
          "`microbatch` must be of arrays to be timed, got the shape "
          f"{leaf.shape}. Take numbers, or source 'compiled'."
        )
    start = first(microbatch, key)
    seconds = _timed(layers, passes, start, microbatch, key, repeats)
  rates, costs = (flops_per_s, bytes_per_s), dict[str, _Cost]()
  found = []
  for i, (layer, each) in enumerate(zip(layers, passes, strict=True)):
    programs = each.forward, each.backward, each.towards_input
    count = [
      (0.0, 0.0) if x is None else _count(x, costs, rates, source != "lowered")
      for x in programs
    ]
    forward_s, backward_s, back_s = (
      seconds[i] if source == "timed" else (x for x, _ in count)
    )
    found.append(
      LayerCost(
        layer.name,
        forward_s=forward_s,
        backward_s=backward_s,
        # A measured part may take longer than the whole.
        weight_s=max(backward_s - back_s, 0.0),
        parameter_bytes=states.num_bytes(layer.params),
        output_bytes=states.num_bytes(each.output),
        saved_bytes=each.kept_bytes,
        working_bytes=max(count[0][1], count[1][1]),
      )
    )
  return found


def _passes(
  layer: Any, x: PyTree, batch: PyTree, key: PyTree, *, first: bool
) -> _Passes:
  """Lowers a layer's passes; the first layer's input has no gradient."""
  structure: Any = None

  def forward(
    params: PyTree, state: PyTree, x: PyTree, batch: PyTree, key: PyTree
  ) -> Any:
    nonlocal structure

    def run(params: PyTree, x: PyTree = x) -> Any:
      return apply_layer(layer, params, state, x, batch, key)

    # A batch's gradient is never needed, and integers have none.
    given = (params,) if first else (params, x)
    y, pull, new = jax.vjp(run, *given, has_aux=True)
    kept, structure = jax.tree.flatten(pull)
    return y, kept, new

  def backward(kept: list[jax.Array], cotangent: PyTree) -> Any:
    return jax.tree.unflatten(structure, kept)(cotangent)

  def towards_input(kept: list[jax.Array], cotangent: PyTree) -> Any:
    return backward(kept, cotangent)[1]

  given = layer.params, layer.state, x, batch, key
  lowered = jax.jit(forward).lower(*given)
  output, kept, _ = jax.eval_shape(forward, *given)
  return _Passes(
    lowered,
    jax.jit(backward).lower(kept, output),
    None if first else jax.jit(towards_input).lower(kept, output),
    output,
    _kept_bytes(forward, given, output, len(kept)),
  )


def _kept_bytes(
  forward: Callable[..., Any],
  given: tuple[Any, ...],
  output: PyTree,
  number: int,
) -> float:
  """Returns the bytes that a forward pass saves for a micro-batch."""
  jaxpr = jax.make_jaxpr(forward)(*given).jaxpr
  params, state, x = (len(jax.tree.leaves(tree)) for tree in given[:3])
  # Parameters, the state and the micro-batch exist anyway.  JAX returns such an
  # argument as the same variable, so a set of variables leaves it out.
  front = params + state
  there = {*jaxpr.invars[:front], *jaxpr.invars[front + x :]}
  first = len(jax.tree.leaves(output))
  kept = {
    var
    for var in jaxpr.outvars[first : first + number]
    if not isinstance(var, jex.Literal)
  }
  return states.num_bytes([var.aval for var in kept - there])


def _count(
  program: Any, costs: dict[str, _Cost], rates: _Cost, compiled: bool
) -> _Cost:
  """Returns the cost of a lowered program; `costs` has those of equal ones."""
  # Deep models repeat layers; compiling each of them would take minutes.
  text = program.as_text()
  if text not in costs:
    working = 0.0
    if compiled:
      program = program.compile()
      working = program.memory_analysis().temp_size_in_bytes
    counted = program.cost_analysis() or {}
    # Some versions of JAX return an entry for each device.
    if isinstance(counted, list):
      counted = counted[0]
    parts = counted.get("flops", 0.0), counted.get("bytes accessed", 0.0)
    costs[text] = max(x / y for x, y in zip(parts, rates, strict=True)), working
  return costs[text]


def _timed(
  layers: Layers,
  passes: Sequence[_Passes],
  x: PyTree,
  batch: PyTree,
  key: jax.Array,
  repeats: int,
) -> list[tuple[float, float, float]]:
  """Returns the seconds of each layer's programs."""
  runs: list[list[Callable[[], Any]]] = []
  for layer, each in zip(layers, passes, strict=True):
    forward = functools.partial(
      each.forward.compile(), layer.params, layer.state, x, batch, key
    )
    x, kept, _ = forward()
    runs.append([forward])
    for back in (each.backward, each.towards_input):
      if back is not None:
        cotangent = jax.tree.map(jnp.ones_like, x)
        runs[-1].append(functools.partial(back.compile(), kept, cotangent))
  seconds = np.zeros((repeats + 1, len(runs), 3))
  # Layers take turns, so that a slow phase of the machine hits all alike.
  for times in seconds:
    for i, parts in enumerate(runs):
      for j, run in enumerate(parts):
        started_s = time.perf_counter()
        jax.block_until_ready(run())
        times[i, j] = time.perf_counter() - started_s
  # The first turn warms up.
  found: list[tuple[float, float, float]] = np.median(seconds[1:], 0).tolist()
  return found
