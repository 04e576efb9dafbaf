"""Draining: everything that was begun is brought into the anchor."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist import checks, reducers
from jdist.states import PyTree
from jdist.transforms import _averaging, _control, _state
from jdist.transforms.local import _anchor

_drains_itself = _anchor.declares("drains")


def drain(
  optimizer: optax.GradientTransformation | optax.MultiSteps,
  state: PyTree,
  params: optax.Params,
  *,
  residuals: bool = False,
  **extra_args: Any,
) -> tuple[optax.Params, PyTree]:
  r"""Applies everything that was begun, so that no progress is lost.

  A method with a delay holds the progress, or the gradients, of its last
  steps; local steps hold an unfinished round.  At the end of training these
  would be lost, and an evaluation on the anchor does not see them.  This is a
  collective operation for all workers, in a program of its own.  Afterwards all
  workers are on the anchor.  Training may continue from there, and a second
  drain changes nothing (but a momentum behind `delay_gradients`, instead of
  inside it, takes a step).

  - `local_steps`, `fed_prox`, `slow_mo`, `scaffold`: the round ends early, as a
    shorter one would: control variates divide by the rates of its steps.
  - `local_steps` with a delay, `cocod`, `msdpu`: the late mean is applied, then
    the mean of the present round's progress.
  - `easgd`: the springs relax, and all workers move to the mean of the N and
    the anchor, :math:`(a + \sum_i w_i) / (N + 1)`.
  - `overlap_local_sgd`: the late mean is applied, then the mean of the present
    parameters, with the same momentum and a pull of 1.
  - `fragment_steps`, `streaming_diloco`: the late mean of each fragment is
    applied, then the mean of its progress since it was sent, unmixed.
  - `predict_rest`, `mp2`: the front's transformation is drained, then the
    rest's own, if it has one, and the rest is predicted.
  - `delay_gradients`, `update_first`: the pending gradients are applied, the
    oldest first.
  - `optax.MultiSteps` around one of them: its inner transformation is drained,
    and the accumulated gradients wait for the others of their step.

  An outer optimizer takes each of these means as it does any other.

  Args:
    optimizer: Any chain.  A transformation in front of the drained one, or next
      to it for other leaves, keeps its state; one behind it takes one update.
    state: The optimizer's state.
    params: This worker's parameters.
    residuals: Whether to bring in the residuals of reducers, too: for local
      steps also between two rounds, by an outer step of its own; for gradients
      by adding them to the feedback of all workers.  Residuals stay where the
      feedback has no place for them, or is missing.
    **extra_args: Arguments that the optimizer needs for pending gradients, as
      `value=` of `optax.contrib.reduce_on_plateau`: the present loss.

  Returns:
    The parameters, equal on all workers, and the state; unchanged for a method
    that holds nothing.

  Raises:
    ValueError: If `optimizer` is not an optimizer, or wraps an
      `optax.MultiSteps` around a method that drains.

  >>> from jdist import transforms
  >>> optimizer = transforms.delay_gradients(optax.sgd(1.0), steps=1)
  >>> w = jnp.array(0.0)
  >>> updates, state = optimizer.update(jnp.array(3.0), optimizer.init(w), w)
  >>> w = optax.apply_updates(w, updates)
  >>> w.item(), drain(optimizer, state, w)[0].item()
  (0.0, -3.0)
  """
  if isinstance(state, optax.MultiStepsState):
    steps = _multi_steps(optimizer)
    if steps is not None:
      params, inner = drain(
        steps.inner_opt, state.inner_opt_state, params, residuals=residuals,
        **extra_args,
      )  # fmt: skip
      return params, state._replace(inner_opt_state=inner)
  _check_accumulates(state)
  optimizer = checks.check_optimizer("optimizer", optimizer)
  optimizer = optax.with_extra_args_support(optimizer)
  nothing = jax.tree.map(jnp.zeros_like, params)
  control = _control.Control(drain="residuals" if residuals else True)
  if _state.drains(state):

    def bring_in(state: PyTree) -> tuple[optax.Updates, PyTree]:
      return optimizer.update(
        nothing, state, params, control=control, **extra_args
      )

    updates, new = bring_in(state)
    there = _anchor.apply_updates(params, updates, new)
    # Only a chain with other transformations has states to be kept apart.
    if _drains_itself(state):
      params, state = there, new
    else:
      params, state = _reached(bring_in, state, params, there, new)
  if residuals and _anchor.contains(state, _is_one):
    # Only the residuals of this update are kept, so that any loss will do.
    given = dict.fromkeys(_averaging.LOSSES, jnp.zeros(())) | extra_args
    _, asked = optimizer.update(
      nothing, state, params, control=control, **given
    )
    state = _absorbed(state, asked)
  return params, state


def _multi_steps(optimizer: Any) -> optax.MultiSteps | None:
  """Returns the `optax.MultiSteps` behind an optimizer, None without one."""
  if not isinstance(optimizer, optax.MultiSteps):
    # `gradient_transformation()` returns the bound methods of the object.
    optimizer = getattr(getattr(optimizer, "update", None), "__self__", None)
  return optimizer if isinstance(optimizer, optax.MultiSteps) else None


def _check_accumulates(state: PyTree) -> None:
  """Raises a ValueError if `optax.MultiSteps` hides a method that drains."""

  def around(x: Any) -> bool:
    return isinstance(x, optax.MultiStepsState) and _state.drains(x)

  # A method that drains may accumulate in its own inner chain.
  parts = _anchor.parts(state, lambda x: _drains_itself(x) or around(x))
  if any(map(around, parts)):
    raise ValueError(
      "`optimizer` must be `optax.MultiSteps` itself if it accumulates for a "
      "method that drains, which it calls in some steps only, got one within "
      "another transformation. Put that into it, as in "
      "`optax.MultiSteps(optax.chain(..., method), 4)`."
    )


def _reached(
  bring_in: Callable[[PyTree], PyTree],
  state: PyTree,
  params: optax.Params,
  there: optax.Params,
  new: PyTree,
) -> tuple[optax.Params, PyTree]:
  """Returns the new values that depend on drained states, else the old ones.

  The rest of the chain has taken a gradient of zero, which moves momenta and
  counts a step.
  """
  # Every leaf of the result depends either on a drained state or not; the
  # traced program shows which, whatever the transformations are.
  traced = jax.make_jaxpr(bring_in)(state).jaxpr
  held = jax.tree.map(
    lambda x: jax.tree.map(lambda _: _drains_itself(x), x),
    state,
    is_leaf=_drains_itself,
  )
  found = {
    id(variable)
    for variable, is_held in zip(
      traced.invars, jax.tree.leaves(held), strict=True
    )
    if is_held
  }
  # Equations are in the order of execution: one pass finds all dependents.
  for equation in traced.eqns:
    if not found.isdisjoint(map(id, equation.invars)):
      found |= set(map(id, equation.outvars))
  moved, touched = jax.tree.unflatten(
    jax.tree.structure((params, new)), [id(x) in found for x in traced.outvars]
  )

  def apart(x: Any) -> bool:
    return _drains_itself(x) or not _state.drains(x)

  def one(old: Any, new: Any, touched: Any) -> Any:
    taken = _drains_itself(old) or any(jax.tree.leaves(touched))
    return new if taken else old

  return (
    jax.tree.map(lambda m, n, o: n if m else o, moved, there, params),
    jax.tree.map(one, state, new, touched, is_leaf=apart),
  )


def _is_one(state: Any) -> bool:
  """Returns whether a state is a compression's, or drains its own one."""
  return isinstance(state, reducers.CompressionState) or _drains_itself(state)


def _absorbed(state: PyTree, asked: PyTree) -> PyTree:
  """Returns the state with the residuals that feedbacks have absorbed.

  Other changes in `asked` are made by transformations that ignore a drain and
  have taken a gradient of zero.
  """

  def one(old: Any, new: Any) -> Any:
    if not isinstance(old, reducers.CompressionState):
      return old
    # A wrapper dropped `control` if the step was counted: the compression has
    # then taken a mean instead of absorbing.
    alone = new.step == old.step
    return jax.tree.map(lambda o, n: jnp.where(alone, n, o), old, new)

  return jax.tree.map(one, state, asked, is_leaf=_is_one)
