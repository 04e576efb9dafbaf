"""One stage's compiled programs: forward, backward and its parts."""

from collections.abc import Callable
from typing import Any, get_args, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jdist import checks
from jdist.pipeline.runtime import (
  apply_layer,
  LayerLike,
  OutputLoss,
  recompute_layers,
  split_backward,
  SplitBackward,
)

PyTree = Any
Recompute = Literal["none", "layers", "stage"]
_RECOMPUTE = get_args(Recompute)


class Forward(NamedTuple):
  """Results of a forward pass.

  Attributes:
    output: for the next stage; of the last one its loss.
    state: of the stage, with the micro-batch's statistics.
    metrics: of the last stage.
    kept: arrays for the backward pass.
  """

  output: Any
  state: PyTree
  metrics: dict[str, jax.Array]
  kept: list[jax.Array]


class StageProgram:
  """The programs of one stage, each compiled once.

  A stage's backward pass either has what its forward pass saved, or runs it
  again: the whole of it from its input, or each layer from that layer's input.
  Where it is split, what runs again runs in the input part alone.
  """

  def __init__(
    self,
    stage: LayerLike,
    *,
    first: bool,
    loss: OutputLoss | None,
    inputs: Callable[[PyTree, jax.Array | None], Any],
    recompute: Recompute,
  ):
    """Makes the programs; they compile when they are first run.

    Args:
      stage: of the model.
      first: whether it reads micro-batches and passes no gradient on.
      loss: of the last stage, of its outputs and a micro-batch; None of others.
      inputs: of the first stage, of a micro-batch and its key.
      recompute: what a backward pass runs again.
    """
    checks.check_choice("recompute", recompute, _RECOMPUTE)
    if recompute == "layers":
      (stage,) = recompute_layers([stage])
    self.stage, self.recompute = stage, recompute
    self._first, self._loss, self._inputs = first, loss, inputs
    self._structure: Any = None
    self._parts: SplitBackward | None = None
    # Where among what a forward pass keeps which of the parameters stands.
    self._passed: list[tuple[int, int]] = []
    self._forward_program = jax.jit(self._forward)
    self.backward = jax.jit(self._backward, donate_argnums=0)
    self._input_program = jax.jit(self._input_part)
    self.weight_part = jax.jit(self._weight_part, donate_argnums=0)

  def run(
    self, params: PyTree, x: Any, state: PyTree, batch: PyTree, key: jax.Array
  ) -> tuple[Any, tuple[PyTree, dict[str, jax.Array]]]:
    """Runs the stage, and the loss if it is the last."""
    if self._first:
      x = self._inputs(batch, key)
    y, new = apply_layer(self.stage, params, state, x, batch, key)
    if self._loss is None:
      return y, (new, {})
    loss, metrics = self._loss(y, batch)
    return loss, (new, {"loss": loss, **metrics})

  def shapes(self, x: Any, batch: PyTree) -> Any:
    """Returns the shapes of `run`'s outputs."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(
      self.run, self.stage.params, x, self.stage.state, batch, key
    )

  def split(self, x: Any, batch: PyTree) -> None:
    """Splits the backward pass, for `input_part` and `weight_part`.

    Args:
      x: shapes of the input.
      batch: of a micro-batch.

    Raises:
      ValueError: when it cannot be split.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    output, kept, _ = jax.eval_shape(
      self._saving, self.stage.params, x, self.stage.state, batch, key
    )
    self._parts = split_backward(self._pull, kept, output)

  def input_part(
    self, cotangent: Any, kept: list[jax.Array], given: Any
  ) -> tuple[Any, Any]:
    """Returns the gradient of the input and what the weight part reads.

    Args:
      cotangent: of the output.
      kept: of the forward pass.
      given: its arguments where it is run again, else None.
    """
    assert self._parts is not None, "call `split` first"
    gradient, again, stash = self._input_program(cotangent, kept, given)
    kept = kept if given is None else again
    return gradient, (*self._parts.prune(kept, cotangent), stash)

  def forward(
    self, params: PyTree, x: Any, state: PyTree, batch: PyTree, key: jax.Array
  ) -> Forward:
    """Runs the stage and keeps what its backward pass needs.

    Parameters among that are kept as they are: what a program passes on it
    copies, which would be once for each micro-batch.
    """
    found = self._forward_program(params, x, state, batch, key)
    leaves = jax.tree.leaves(params)
    for place, number in self._passed:
      found.kept.insert(place, leaves[number])
    return found

  def _forward(
    self, params: PyTree, x: Any, state: PyTree, batch: PyTree, key: jax.Array
  ) -> Forward:
    if self.recompute == "stage":
      output, (new, metrics) = self.run(params, x, state, batch, key)
      return Forward(output, new, metrics, [])
    output, kept, (new, metrics) = self._saving(params, x, state, batch, key)
    own = {id(x): i for i, x in enumerate(jax.tree.leaves(params))}
    self._passed = [(i, own[id(x)]) for i, x in enumerate(kept) if id(x) in own]
    kept = [x for x in kept if id(x) not in own]
    return Forward(output, new, metrics, kept)

  def _saving(
    self, params: PyTree, x: Any, state: PyTree, batch: PyTree, key: jax.Array
  ) -> tuple[Any, list[jax.Array], Any]:
    """Runs the stage and returns what `_pull` needs, too."""

    def run(params: PyTree, x: Any) -> Any:
      return self.run(params, x, state, batch, key)

    if self._first:
      output, pull, aux = jax.vjp(lambda p: run(p, None), params, has_aux=True)
    else:
      output, pull, aux = jax.vjp(run, params, x, has_aux=True)
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
    # A program copies what it passes on: only what it has made.
    again = None if given is None else self._parts.prune(kept, cotangent)[0]
    return gradient, again, stash

  def _weight_part(self, total: PyTree, saved: Any) -> PyTree:
    assert self._parts is not None, "call `split` first"
    return _add(total, self._parts.weight_part(*saved))


@jax.jit
def zero_total(params: PyTree) -> PyTree:
  """Makes a sum of gradients, in float32 where parameters have fewer bits."""
  return jax.tree.map(lambda x: jnp.zeros(x.shape, wide(x.dtype)), params)


def wide(dtype: Any) -> Any:
  """Returns the dtype in which gradients of another one are added up."""
  dtype = jnp.dtype(dtype)
  small = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
  return jnp.dtype(jnp.float32) if small else dtype


def _add(total: PyTree, grads: PyTree) -> PyTree:
  return jax.tree.map(lambda a, g: a + g.astype(a.dtype), total, grads)
