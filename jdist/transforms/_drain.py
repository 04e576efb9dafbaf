"""Draining: everything that was begun is brought into the anchor."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist import checks, reducers
from jdist.transforms import _control, _mean_loss, _state
from jdist.transforms.local import _anchor

PyTree = Any
_drains_itself = _anchor.declares("drains")


def drain(
  optimizer: optax.GradientTransformation | optax.MultiSteps,
  state: PyTree,
  params: optax.Params,
  *,
  residuals: bool = False,
  **extra_args: Any,
) -> tuple[optax.Params, PyTree]:
  r"""Brings in what is under way, so that nothing that was done is missing.

  A method with a delay holds the progress, or the gradients, of its last
  steps; local steps hold an unfinished round.  At the end of training these
  would be lost, and an evaluation on the anchor does not see them.  This is
  what one worker does to bring them in: a collective operation, to be run by
  all workers, in a program of its own.  Afterwards all stand on the anchor;
  training may go on from there, and to drain again changes nothing (but a
  momentum that stands behind `delay_gradients`, and not in it, moves on).

  - `local_steps`, `fed_prox`, `slow_mo`, `scaffold`: the round ends where it
    is, as a shorter one would: control variates divide by its steps' rates.
  - `local_steps` with a delay, `cocod`, `msdpu`: the late mean arrives, then
    that of the present round's progress.
  - `easgd`: the springs relax, and all workers move to the mean of the N and
    the anchor, :math:`(a + \sum_i w_i) / (N + 1)`.
  - `overlap_local_sgd`: the late mean arrives, then that of where the workers
    are now, with the same momentum, and pulls them all the way.
  - `lead_step`, `od_sgd`: the late mean gradient arrives, and nobody leads.
  - `fragment_steps`, `streaming_diloco`: the late mean of each fragment
    arrives, then that of its progress since it was sent, unmixed.
  - `predict_rest`, `mp2`: what the front's transformation holds arrives, then
    that of the rest's own, if it has one, and the rest is predicted.
  - `delay_gradients`, `update_first`: the pending gradients are applied, the
    oldest first.
  - `optax.MultiSteps` around one of them: what it has in it is drained, and the
    gradients that it has accumulated wait for the others of their step.

  An outer optimizer takes each of these means as it does any other.

  Args:
    optimizer: any chain.  What stands before the transformation that holds
      something, or beside it, for other leaves, stays as it is; what stands
      behind it takes what arrives as one update.
    state: its state.
    params: this worker's parameters.
    residuals: whether, for what follows without them, the residuals in
      reducers come out of there: of local steps also between two rounds, by an
      outer step of its own; of gradients, which no update has had yet, into the
      feedback of all workers.  They stay where a feedback has no place for
      them, or is missing.
    **extra_args: what the optimizer needs to apply pending gradients, as
      `value=` of `optax.contrib.reduce_on_plateau`: the present loss.

  Returns:
    The parameters, equal on all workers, and the state; of a method that
    holds nothing, what was given.

  Raises:
    ValueError: when `optimizer` is no optimizer, or has an `optax.MultiSteps`
      around what drains and is not that itself.

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
        steps.inner_opt,
        state.inner_opt_state,
        params,
        residuals=residuals,
        **extra_args,
      )
      return params, state._replace(inner_opt_state=inner)
  _check_accumulates(state)
  optimizer = checks.check_optimizer("optimizer", optimizer)
  optimizer = optax.with_extra_args_support(optimizer)
  nothing = jax.tree.map(jnp.zeros_like, params)
  bare = _control.Control(drain=True)
  full = _control.Control(drain="residuals")
  if _state.drains(state):

    def bring_in(state: PyTree) -> tuple[optax.Updates, PyTree]:
      control = full if residuals else bare
      return optimizer.update(
        nothing, state, params, control=control, **extra_args
      )

    updates, new = bring_in(state)
    there = _anchor.apply_updates(params, updates, new)
    if _drains_itself(state):
      params, state = there, new
    else:
      params, state = _reached(bring_in, state, params, there, new)
  if residuals and _anchor.contains(state, _is_one):
    # Of this only residuals are taken, so that any loss will do.
    given = dict.fromkeys(_mean_loss.LOSSES, jnp.zeros(())) | extra_args
    _, asked = optimizer.update(nothing, state, params, control=full, **given)
    state = _absorbed(state, asked)
  return params, state


def _multi_steps(optimizer: Any) -> optax.MultiSteps | None:
  """Returns the `optax.MultiSteps` that an optimizer is, in any form of it."""
  if not isinstance(optimizer, optax.MultiSteps):
    optimizer = getattr(getattr(optimizer, "update", None), "__self__", None)
  return optimizer if isinstance(optimizer, optax.MultiSteps) else None


def _check_accumulates(state: PyTree) -> None:
  """Raises a ValueError where accumulated gradients stand in the way."""

  def around(x: Any) -> bool:
    return isinstance(x, optax.MultiStepsState) and _state.drains(x)

  # What drains itself may accumulate inside.
  parts = jax.tree.leaves(
    state, is_leaf=lambda x: _drains_itself(x) or around(x)
  )
  if any(map(around, parts)):
    raise ValueError(
      "`optimizer` must be `optax.MultiSteps` itself where it stands around a "
      "method that drains, for it passes on to it only every so many steps, "
      "got one within another transformation. Put that into it, as in "
      "`optax.MultiSteps(optax.chain(..., method), 4)`."
    )


def _reached(
  bring_in: Callable[[PyTree], PyTree],
  state: PyTree,
  params: optax.Params,
  there: optax.Params,
  new: PyTree,
) -> tuple[optax.Params, PyTree]:
  """Takes the new of what is brought in, and the old of what stands beside.

  That has taken a gradient of zero, by which a momentum moves and a step is
  counted.  Which leaf depends on what has been held is read from the program.
  """
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
  """Returns whether a state is a compression's, or holds its own."""
  return isinstance(state, reducers.CompressionState) or _drains_itself(state)


def _absorbed(state: PyTree, asked: PyTree) -> PyTree:
  """Returns the state with those residuals that feedbacks have absorbed.

  What else has changed in `asked` is the work of transformations that know
  nothing of a drain and have taken a gradient of zero.
  """

  def one(old: Any, new: Any) -> Any:
    if not isinstance(old, reducers.CompressionState):
      return old
    # Behind one that does not pass `control` on it has taken a mean.
    alone = new.step == old.step
    return jax.tree.map(lambda o, n: jnp.where(alone, n, o), old, new)

  return jax.tree.map(one, state, asked, is_leaf=_is_one)
